"""A module on its way from the driver to the executors.

Tensors travel as safetensors; the rest of the module is pickled by value, in memory only, so that
a class from a notebook works. The three ways to get the bytes are the three functions at the end.
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
import torch
from torch import nn

from sparkdl.errors import CheckpointError, ConfigError
from sparkdl.storage import tensor_tree
from sparkdl.storage.checkpoint_format import decode, encode


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
        self._parameters: dict[int, nn.Parameter] = {}

    def persistent_load(self, pid: tuple[int, bool, bool]) -> torch.Tensor:
        number, is_parameter, requires_grad = pid
        tensor = self._tensors[number]
        if not is_parameter:
            return tensor
        return self._parameters.setdefault(number, nn.Parameter(tensor, requires_grad))


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
