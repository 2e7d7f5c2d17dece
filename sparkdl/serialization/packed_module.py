"""How does a module travel from the driver to the executors?

Tensors travel as safetensors; the rest of the module is pickled by value, in memory only, so that
a class from a notebook works. The three ways to send the bytes are the three callables at the end.
"""

from __future__ import annotations

import copy
import hashlib
import io
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cloudpickle
import safetensors.torch
import torch
from torch import nn

from sparkdl.errors import ConfigError
from sparkdl.storage.checkpoint_format import encode
from sparkdl.storage.tensor_tree import DTYPES, Snapshot


@dataclass(frozen=True, kw_only=True)
class PackedModule:
    """A module as bytes."""

    digest: str
    skeleton: bytes
    """The module without its tensors, pickled."""
    tensors: bytes
    """The tensors as safetensors, named by their number in the skeleton."""

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
    def __init__(self, file: io.BytesIO, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__(file)
        self._tensors = tensors
        self._parameters: dict[int, nn.Parameter] = {}

    def persistent_load(self, pid: tuple[int, bool, bool]) -> torch.Tensor:
        number, is_parameter, requires_grad = pid
        tensor = self._tensors[str(number)]
        if not is_parameter:
            return tensor
        return self._parameters.setdefault(number, nn.Parameter(tensor, requires_grad))


def pack(module: nn.Module) -> PackedModule:
    """Turn a module into bytes; called on the driver.

    Raises:
        ConfigError: the module holds something that cannot be sent to another process.
    """
    file = io.BytesIO()
    pickler = _TensorPickler(file)
    try:
        pickler.dump(module)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise ConfigError(f"the module cannot be sent to executors: {error}") from error
    tensors = {str(n): tensor.detach().cpu() for n, tensor in enumerate(pickler.tensors)}
    weights = _joined(_without_sharing(tensors))
    skeleton = file.getvalue()
    digest = hashlib.sha256(skeleton + hashlib.sha256(weights).digest()).hexdigest()
    return PackedModule(digest=digest, skeleton=skeleton, tensors=weights)


def unpack(packed: PackedModule) -> nn.Module:
    """Rebuild the module; its tensors are on the CPU."""
    tensors = safetensors.torch.load(packed.tensors)
    module: nn.Module = _TensorUnpickler(io.BytesIO(packed.skeleton), tensors).load()
    return module


def _joined(tensors: dict[str, torch.Tensor]) -> bytes:
    """The tensors as safetensors, with one copy of them rather than the library's two."""
    if any(tensor.dtype not in DTYPES for tensor in tensors.values()):
        return safetensors.torch.save(tensors)
    return b"".join(encode(Snapshot(None, tensors)))


def _without_sharing(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copy tensors that are views of a storage seen before: safetensors refuses those."""
    seen: set[int] = set()
    separate = {}
    for name, tensor in tensors.items():
        start = tensor.untyped_storage().data_ptr()
        separate[name] = tensor.clone() if start in seen else tensor.contiguous()
        seen.add(start)
    return separate


@dataclass(frozen=True)
class SentByValue:
    """A packed module inside the closure."""

    packed: PackedModule

    def __call__(self) -> PackedModule:
        return self.packed


@dataclass(frozen=True)
class SentByBroadcast:
    """A packed module in a broadcast variable of classic Spark."""

    broadcast: Any

    def __call__(self) -> PackedModule:
        packed: PackedModule = self.broadcast.value
        return packed


@dataclass(frozen=True)
class SentAsArtifact:
    """A packed module in a file that Spark Connect brings to every executor."""

    file_name: str

    def __call__(self) -> PackedModule:
        from pyspark import SparkFiles

        return read_packed(Path(SparkFiles.get(self.file_name)))


def write_packed(packed: PackedModule, path: Path) -> None:
    """Write a packed module for `SentAsArtifact`."""
    with path.open("wb") as file:
        pickle.dump(packed, file, protocol=5)


def read_packed(path: Path) -> PackedModule:
    """Inverse of `write_packed`; for files of one's own session only."""
    with path.open("rb") as file:
        packed: PackedModule = pickle.load(file)
    return packed


def pack_blank(module: nn.Module) -> PackedModule:
    """The module with zeros for its weights and buffers, where these are brought along anyway."""
    blank = copy.deepcopy(module)
    for tensor in blank.state_dict().values():
        if isinstance(tensor, torch.Tensor):
            tensor.detach().zero_()
    return pack(blank)
