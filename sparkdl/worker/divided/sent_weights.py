"""The initial weights of a module that is divided before it has them.

They come tensor by tensor: from the driver's file, which rank 0 has on its disk, or made by each
rank as the factory on the driver would have made them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from sparkdl.comm.channel import ChannelStorage
from sparkdl.comm.communicator import Communicator
from sparkdl.data.spool.local_disk import ScratchFile
from sparkdl.runtime.process import cpu_model, torch_threads
from sparkdl.serialization.recorded.recipe import Recipe, RecordedWeights, TensorPlace, give_memory
from sparkdl.serialization.travel.packed_module import unpack_blank, unpack_unmade
from sparkdl.storage.retried import OUTAGE_SECONDS, again
from sparkdl.storage.tensor_file import TensorFile, read_header
from sparkdl.sync.regions import Region


class Unfilled(ABC):
    """A module without its parameters' values, and where these come from."""

    module: nn.Module

    def fill(self, module: nn.Module, regions: Mapping[str, Region], device: torch.device) -> None:
        """Give the module, which has been divided, its weights on a device; collective.

        Args:
            module: this one's.
            regions: which part of each parameter is here.
            device: where it computes.
        """
        from sparkdl.sync.divided.dividing import local  # brings torch's compiler

        give_memory(module, device)
        parts = {name: local(parameter) for name, parameter in module.named_parameters()}

        def copy(values: torch.Tensor, names: list[str]) -> None:
            for name in regions.keys() & set(names):
                whole = Region.whole(values.shape)
                regions[name].copy_from(whole, values, parts[name].detach())

        with torch.no_grad():
            self._give(copy)

    @abstractmethod
    def _give(self, copy: Callable[[torch.Tensor, list[str]], None]) -> None:
        """Call ``copy`` with one whole tensor after the other, and the names of its parameters."""

    @abstractmethod
    def close(self) -> None:
        """Let go of what is left."""


class _Maker:
    """Makes tensors by a recipe, with equal bits on all ranks."""

    def __init__(self, recipe: Recipe, comm: Communicator) -> None:
        self._recipe, self._comm = recipe, comm
        self._are_alike = len(set(comm.all_gather_bytes(cpu_model().encode()))) == 1
        """True if the ranks' CPUs give the same bits; else rank 0 makes all tensors."""

    def give(
        self,
        parameters: Sequence[tuple[TensorPlace, list[str]]],
        copy: Callable[[torch.Tensor, list[str]], None],
    ) -> None:
        """Call ``copy`` with one whole tensor after the other, and the names of its parameters."""
        with torch_threads(self._recipe.num_threads):
            for place, names in parameters:
                copy(self._values(place), names)

    def _values(self, place: TensorPlace) -> torch.Tensor:
        if self._are_alike:
            return self._recipe.make([place])[0]
        if self._comm.rank == 0:
            values = self._recipe.make([place])[0].contiguous()
        else:
            values = torch.empty(place.size, dtype=place.dtype)
        if values.numel():
            self._comm.broadcast(values)
        return values


class MadeWeights(Unfilled):
    """Weights that each rank makes, one whole tensor at a time."""

    def __init__(self, skeleton: bytes, tensors: bytes, recipe: bytes, comm: Communicator) -> None:
        """Rebuild the module; collective.

        Args:
            skeleton: see `PackedModule`.
            tensors: those of the module that are not made.
            recipe: how parameters are made.
            comm: the gang.
        """
        self.module, made, self._parameters = unpack_unmade(skeleton, tensors, recipe)
        self._maker = _Maker(made, comm)

    def _give(self, copy: Callable[[torch.Tensor, list[str]], None]) -> None:
        self._maker.give(self._parameters, copy)

    def close(self) -> None:
        """Nothing is left."""


class SentWeights(Unfilled):
    """Weights in a file of the driver's, and those that are made besides."""

    def __init__(
        self,
        skeleton: bytes,
        name: str,
        files: ChannelStorage,
        comm: Communicator,
        recipe: bytes = b"",
    ) -> None:
        """Rebuild the module; collective.

        Args:
            skeleton: see `PackedModule`.
            name: of the driver's file with the tensors.
            files: the driver's.
            comm: the gang.
            recipe: how parameters are made that are not in the file; empty: all are.

        Raises:
            StorageError: the file cannot be read, or the disk of rank 0 cannot be written.
            CommunicationError: the driver or a peer was lost.
        """
        self._name, self._comm = name, comm
        self._scratch: ScratchFile | None = None
        header = None
        if comm.rank == 0:
            scratch = self._scratch = ScratchFile()
            again(lambda: scratch.write(files.read_pieces(name)), OUTAGE_SECONDS)
            header = read_header(scratch.file, name)
        self._contents = TensorFile.of(comm.broadcast_bytes(header))
        numbers: Mapping[int, int] = {}
        made: Recipe | None = None
        self._maker: _Maker | None = None
        if recipe:
            numbers, made = RecordedWeights.unpacked(recipe)
            self._maker = _Maker(made, comm)
        self.module, self._parameters, self._made = unpack_blank(
            skeleton, self._contents, self._next, numbers, made
        )

    def _give(self, copy: Callable[[torch.Tensor, list[str]], None]) -> None:
        for memory, places in self._parameters.items():
            storage = self._next(memory).untyped_storage()
            for place, names in places:
                copy(place.in_storage(storage), names)
        if self._maker is not None:
            self._maker.give(self._made, copy)

    def _next(self, tensor: str) -> torch.Tensor:
        """A tensor of the file, for which all ranks ask."""
        if self._scratch is not None:
            values = self._contents.read(self._scratch.file, tensor, self._name)
        else:
            values = self._contents.empty(tensor)
        if values.numel():
            self._comm.broadcast(values)
        return values

    def close(self) -> None:
        """Let go of the file."""
        if self._scratch is not None:
            self._scratch.close()
