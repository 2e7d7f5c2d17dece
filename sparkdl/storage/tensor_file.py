"""A file of `checkpoint_format.encode`, of which one tensor at a time is in memory."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO

import torch

from sparkdl.errors import CheckpointError
from sparkdl.storage.tensor_tree import DTYPES

_TORCH = {name: dtype for dtype, name in DTYPES.items()}


def read_header(file: BinaryIO, place: str) -> bytes:
    """The JSON with which a safetensors file begins; CheckpointError, with ``place``, without."""
    file.seek(0)
    start = file.read(8)
    size = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
    header = file.read(size)
    if not size or len(header) < size:
        raise CheckpointError(f"{place} is damaged: it has no header; use an older one")
    return header


@dataclass(frozen=True)
class TensorFile:
    """The contents of a safetensors file, by its header."""

    tree: Any
    """The JSON value that `tensor_tree.pack` has made."""
    entries: Mapping[str, Mapping[str, Any]]
    begin: int
    """Position at which the tensors' bytes begin."""

    @classmethod
    def of(cls, header: bytes) -> TensorFile:
        """As `read_header` gave it."""
        entries = json.loads(header)
        tree = json.loads(entries.pop("__metadata__")["tree"])
        return cls(tree, entries, 8 + len(header))

    def empty(self, name: str, device: str = "cpu") -> torch.Tensor:
        """A tensor of the shape and dtype of that one, with any values."""
        entry = self.entries[name]
        return torch.empty(entry["shape"], dtype=_TORCH[entry["dtype"]], device=device)

    def read(self, file: BinaryIO, name: str, place: str) -> torch.Tensor:
        """One of the tensors; CheckpointError, with ``place``, if the file ends before."""
        tensor = self.empty(name)
        begin, end = self.entries[name]["data_offsets"]
        if end - begin != tensor.nbytes:  # what is not read is memory that others have written
            raise CheckpointError(f"{place} is damaged: {name} has other bytes; use an older one")
        if begin < end:
            file.seek(self.begin + begin)
            target = tensor.reshape(-1).view(torch.uint8).numpy().data
            # A file without a buffer reads as much as it likes.
            while target and (count := file.readinto(target)):  # type: ignore[attr-defined]
                target = target[count:]
            if target:
                raise CheckpointError(f"{place} is damaged: it lacks its end; use an older one")
        return tensor
