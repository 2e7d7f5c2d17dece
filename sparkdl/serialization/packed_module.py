"""A module on its way from the driver to the executors.

Tensors travel as safetensors; the rest of the module is pickled by value, in memory only, so that
a class from a notebook works. The three ways to get the bytes are the three functions at the end.
"""

from __future__ import annotations

import copy
import hashlib
import io
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cloudpickle
import torch
from torch import nn

from sparkdl.errors import CheckpointError, ConfigError
from sparkdl.storage import tensor_tree
from sparkdl.storage.checkpoint_format import decode, encode
from sparkdl.storage.tensor_file import TensorFile


@dataclass(frozen=True, kw_only=True)
class PackedModule:
    """A module as bytes."""

    digest: str
    skeleton: bytes
    """The module without its tensors, pickled."""
    tensors: bytes
    """The tensors by their numbers in the skeleton, as `checkpoint_format.encode` writes them."""

    @property
    def num_bytes(self) -> int:
        """Size of both parts."""
        return len(self.skeleton) + len(self.tensors)


class _TensorPickler(cloudpickle.Pickler):  # type: ignore[misc] # cloudpickle has no types
    """Pickles by value, but collects tensors instead of pickling them."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.tensors: list[torch.Tensor] = []
        self._numbers: dict[int, int] = {}

    def persistent_id(self, value: Any) -> tuple[int, bool, bool] | None:
        """Number the tensor, by identity, so that tied weights stay tied."""
        if not isinstance(value, torch.Tensor):
            return None
        number = self._numbers.setdefault(id(value), len(self.tensors))
        if number == len(self.tensors):
            self.tensors.append(value)
        return number, isinstance(value, nn.Parameter), value.requires_grad


class _TensorUnpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, tensors: list[torch.Tensor]) -> None:
        super().__init__(file)
        self._tensors = tensors
        self.parameters: dict[int, nn.Parameter] = {}

    def persistent_load(self, pid: tuple[int, bool, bool]) -> torch.Tensor:
        number, is_parameter, requires_grad = pid
        if is_parameter and number in self.parameters:
            return self.parameters[number]
        tensor = self._tensor(number, is_parameter)
        if is_parameter:
            return self.parameters.setdefault(number, nn.Parameter(tensor, requires_grad))
        return tensor

    def _tensor(self, number: int, is_parameter: bool) -> torch.Tensor:
        return self._tensors[number]


class _BlankUnpickler(_TensorUnpickler):
    """Leaves parameters on the meta device; asks for other tensors when it meets them."""

    def __init__(
        self, file: io.BytesIO, contents: TensorFile, read: Callable[[str], torch.Tensor]
    ) -> None:
        super().__init__(file, [])
        self._contents, self._read = contents, read
        self._known: dict[int, torch.Tensor] = {}

    def name(self, number: int) -> str:
        """That which a tensor has in the file."""
        (name,) = self._contents.tree[number].values()
        return str(name)

    def values(self, number: int) -> torch.Tensor:
        """A tensor as it was packed."""
        name = self.name(number)
        found: torch.Tensor = tensor_tree.unpack(
            self._contents.tree[number], {name: self._read(name)}
        )
        return found

    def _tensor(self, number: int, is_parameter: bool) -> torch.Tensor:
        if is_parameter and "tensor" in self._contents.tree[number]:
            return self._contents.empty(self.name(number), "meta")
        if number not in self._known:
            self._known[number] = self.values(number)
        return self._known[number]


def pack(module: nn.Module) -> PackedModule:
    """Turn a module into bytes, on the driver; ConfigError if it holds what cannot be sent."""
    file = io.BytesIO()
    pickler = _TensorPickler(file)
    try:
        pickler.dump(module)
        plain = [t.detach().as_subclass(torch.Tensor).cpu() for t in pickler.tensors]
        tensors = b"".join(encode(tensor_tree.Snapshot(*tensor_tree.pack(plain))))
    except (pickle.PicklingError, TypeError, AttributeError, CheckpointError) as error:
        raise ConfigError(f"the module cannot be sent to executors: {error}") from error
    skeleton = file.getvalue()
    digest = hashlib.sha256(skeleton + hashlib.sha256(tensors).digest()).hexdigest()
    return PackedModule(digest=digest, skeleton=skeleton, tensors=tensors)


def unpack(skeleton: bytes, tensors: bytes) -> nn.Module:
    """Rebuild the module of a `PackedModule`'s parts; its tensors are on the CPU."""
    unpickler = _TensorUnpickler(io.BytesIO(skeleton), decode(tensors, "the module"))
    module: nn.Module = unpickler.load()
    return module


def unpack_blank(
    skeleton: bytes, contents: TensorFile, read: Callable[[str], torch.Tensor]
) -> tuple[nn.Module, dict[str, list[str]]]:
    """Rebuild the module without the values of its parameters, which are on the meta device.

    Args:
        skeleton: see `PackedModule`.
        contents: of its ``tensors``.
        read: gets one of them; asked in the same order wherever the skeleton is the same.

    Returns:
        The module, whose buffers and other tensors have their values, and the names of the
        parameters that lack them, by the tensors' names in the file.
    """
    unpickler = _BlankUnpickler(io.BytesIO(skeleton), contents, read)
    module: nn.Module = unpickler.load()
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    blank: dict[str, list[str]] = {}
    for number, parameter in unpickler.parameters.items():
        if not parameter.is_meta:
            continue
        if id(parameter) in names:
            blank.setdefault(unpickler.name(number), []).append(names[id(parameter)])
        else:  # one that the module does not know of
            known = nn.Parameter(unpickler.values(number), parameter.requires_grad)
            torch.utils.swap_tensors(parameter, known)  # type: ignore[no-untyped-call]
    return module, blank


def pack_blank(module: nn.Module) -> PackedModule:
    """The module with zeros for its weights and buffers, where these are brought along anyway."""
    blank = copy.deepcopy(module)
    for tensor in blank.state_dict().values():
        if isinstance(tensor, torch.Tensor):
            tensor.detach().zero_()
    return pack(blank)


def given(packed: PackedModule) -> PackedModule:
    """The module itself, for one that travels inside the closure."""
    return packed


def from_broadcast(broadcast: Any) -> PackedModule:
    """The module in a broadcast variable of classic Spark."""
    packed: PackedModule = broadcast.value
    return packed


def from_artifact(file_name: str) -> PackedModule:
    """The module in a file that Spark Connect has brought to this executor: a pickled one."""
    from pyspark import SparkFiles

    packed: PackedModule = pickle.loads(Path(SparkFiles.get(file_name)).read_bytes())
    return packed
