"""The initial weights of a module that is divided before it has them.

Rank 0 has the driver's file on its disk, and all ranks get one tensor of it after the other.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from sparkdl.comm.channel import ChannelStorage
from sparkdl.comm.communicator import Communicator
from sparkdl.data.spool.local_disk import ScratchFile
from sparkdl.serialization.packed_module import unpack_blank
from sparkdl.storage.retried import OUTAGE_SECONDS, again
from sparkdl.storage.tensor_file import TensorFile, read_header
from sparkdl.sync.divided.dividing import local
from sparkdl.sync.regions import Region


class SentWeights:
    """A module without its parameters' values, and the file in which they are."""

    def __init__(
        self, skeleton: bytes, name: str, files: ChannelStorage, comm: Communicator
    ) -> None:
        """Rebuild the module; collective.

        Args:
            skeleton: see `PackedModule`.
            name: of the driver's file with the tensors.
            files: the driver's.
            comm: the gang.

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
        self.module, self._parameters = unpack_blank(skeleton, self._contents, self._next)

    def fill(self, module: nn.Module, regions: Mapping[str, Region], device: torch.device) -> None:
        """Give the module, which has been divided, its weights on a device; collective.

        Args:
            module: this one's.
            regions: which part of each parameter is here.
            device: where it computes.
        """

        def placed(value: torch.Tensor) -> torch.Tensor:
            if value.is_meta:
                return torch.empty_like(value, device=device)
            return value.to(device)

        module._apply(placed)  # type: ignore[no-untyped-call]
        parts = {name: local(parameter) for name, parameter in module.named_parameters()}
        with torch.no_grad():
            for tensor, names in self._parameters.items():
                values = self._next(tensor)
                whole = Region.whole(values.shape)
                for name in names:
                    regions[name].copy_from(whole, values, parts[name].detach())

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
