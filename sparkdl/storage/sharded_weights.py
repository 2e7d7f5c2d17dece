"""Weights as several safetensors files and an index, in the layout of Hugging Face's libraries.

``model-00001-of-00003.safetensors`` and so on hold whole tensors by the names of the state dict,
and ``model.safetensors.index.json``, written last, says which file has which. Of tensors that are
one in the module the first name is there; the metadata of its file has the others, as
``safetensors.torch.save_model`` writes it.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from sparkdl.errors import StorageError
from sparkdl.storage.checkpoint_format import safetensors_of
from sparkdl.storage.storage import Buffer, Folder, without_password
from sparkdl.storage.tensor_tree import DTYPES

INDEX = "model.safetensors.index.json"
MOST_BYTES = 2 << 30
"""Most bytes of a file, unless one tensor is larger."""
PIECE_BYTES = 64 << 20
_TORCH = {name: dtype for dtype, name in DTYPES.items()}
_MOST_HEADER = 100 << 20
_DAMAGES = (
    *(ValueError, KeyError, TypeError, AttributeError, struct.error),
    *(RecursionError, OverflowError),
)
"""Bytes of a header, by the definition of the format."""


def plan_files(
    sizes: Mapping[str, int], num_writers: int, most_bytes: int = MOST_BYTES
) -> dict[str, list[str]]:
    """Plan which tensors each file holds, so that ``num_writers`` write about equally much.

    Args:
        sizes: bytes of each tensor, in the order of the state dict.
        num_writers: of the files; file ``i`` is that of writer ``i % num_writers``.
        most_bytes: of a file, unless one tensor is larger.

    Returns:
        Names of the tensors by that of the file.
    """
    each = min(most_bytes, max(1, -(-sum(sizes.values()) // num_writers)))
    groups: list[list[str]] = [[]]
    used = 0
    for name, size in sizes.items():
        if groups[-1] and used + size > each:
            groups.append([])
            used = 0
        groups[-1].append(name)
        used += size
    count = len(groups)
    return {
        f"model-{number:05d}-of-{count:05d}.safetensors": names
        for number, names in enumerate(groups, 1)
    }


def index_text(files: Mapping[str, Sequence[str]], sizes: Mapping[str, int]) -> bytes:
    """The index of files that `plan_files` has planned."""
    by_name = {name: file for file, names in files.items() for name in names}
    index = {
        "metadata": {"total_size": sum(sizes.values())},
        "weight_map": dict(sorted(by_name.items())),
    }
    return json.dumps(index, indent=2).encode() + b"\n"


def file_pieces(
    tensors: Mapping[str, torch.Tensor],
    ties: Mapping[str, str],
    whole: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.detach,
) -> Iterator[bytes | memoryview]:
    """One of the files in pieces, see `encode`; ``ties`` has other names of tensors and theirs."""
    own = {name: kept for name, kept in ties.items() if kept in tensors}
    yield from safetensors_of(tensors, {"format": "pt", **own}, whole)


class SafetensorsFiles:
    """Files of which one tensor, or some rows of one, are read at a time; of any program."""

    def __init__(self, folder: Folder, path: str, files: Sequence[str]) -> None:
        """Read the header of each file.

        Args:
            folder: the storage.
            path: in it; empty: itself.
            files: in that folder.

        Raises:
            StorageError: something is missing or damaged.
        """
        self.folder, self.path, self.files = folder, path, tuple(files)
        self.ties: dict[str, str] = {}
        """Other names of tensors, and those by which the files have them."""
        self._entries: dict[str, tuple[str, int, Mapping[str, Any]]] = {}
        """Name of each tensor -> its file, where the file's tensors begin, and its entry."""
        for file in self.files:
            with self._damage(file):
                begin, entries, metadata = self._header(self._place(file))
                for name, entry in entries.items():
                    _check_entry(entry)
                    self._entries[name] = file, begin, entry
                self.ties |= {name: kept for name, kept in metadata.items() if kept in entries}
                end = max((entry["data_offsets"][1] for entry in entries.values()), default=0)
                folder.part(self._place(file), begin + end - min(end, 1), begin + end)

    def _place(self, file: str) -> str:
        return f"{self.path}/{file}".lstrip("/")

    @contextmanager
    def _damage(self, file: str) -> Iterator[None]:
        try:
            yield
        except _DAMAGES as error:
            shown = without_password(f"{self.folder}/{self._place(file)}")
            raise StorageError(
                f"{shown} is damaged: {error!r}; write it again, or take an intact copy"
            ) from error

    def _header(self, place: str) -> tuple[int, dict[str, Any], dict[str, str]]:
        (size,) = struct.unpack("<Q", self.folder.part(place, 0, 8))
        if size > _MOST_HEADER:
            raise ValueError(f"a header of {size} bytes")
        entries = json.loads(bytes(self.folder.part(place, 8, 8 + size)))
        return 8 + size, entries, entries.pop("__metadata__", {})

    @property
    def names(self) -> list[str]:
        """Names of all tensors in the files."""
        return list(self._entries)

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        ends = (entry["data_offsets"] for _, _, entry in self._entries.values())
        return sum(end - begin for begin, end in ends)

    def blank(self, name: str) -> torch.Tensor:
        """A tensor of the shape and dtype of that one, on the meta device; KeyError if absent."""
        _, _, entry = self._entries[self.ties.get(name, name)]
        return torch.empty(entry["shape"], dtype=_TORCH[entry["dtype"]], device="meta")

    def __contains__(self, name: str) -> bool:
        return name in self._entries or name in self.ties

    def read(self, name: str) -> torch.Tensor:
        """A tensor. Of a local file it is the file's pages until it is written to."""
        shape = self.blank(name).shape
        return self._tensor(name, 0, shape.numel(), tuple(shape))

    def rows(self, name: str, first: int, last: int) -> torch.Tensor:
        """The part of a tensor from ``first`` to ``last`` along its first dimension."""
        shape = tuple(self.blank(name).shape)
        each = torch.Size(shape[1:]).numel()
        return self._tensor(name, first * each, last * each, (last - first, *shape[1:]))

    def _tensor(self, name: str, first: int, last: int, shape: tuple[int, ...]) -> torch.Tensor:
        """The numbers of a tensor from ``first`` to ``last``, in its own order."""
        file, begin, entry = self._entries[self.ties.get(name, name)]
        dtype = _TORCH[entry["dtype"]]
        if first == last:
            return torch.empty(shape, dtype=dtype)
        begin += entry["data_offsets"][0]
        size = dtype.itemsize
        data = self.folder.part(self._place(file), begin + first * size, begin + last * size)
        if isinstance(data, bytes):
            data = memoryview(bytearray(data))
        if (begin + first * size) % size:  # another writer may not have aligned it
            data = memoryview(bytearray(data))
        return torch.frombuffer(data, dtype=dtype).reshape(shape)

    def size(self, file: str) -> int:
        """Bytes of a file, as its header says."""
        own = [(begin, entry) for name, begin, entry in self._entries.values() if name == file]
        return max(begin + int(entry["data_offsets"][1]) for begin, entry in own)

    def pieces(self, file: str) -> Iterator[Buffer]:
        """The bytes of a file, as it is."""
        size = self.size(file)
        for start in range(0, size, PIECE_BYTES):
            yield self.folder.part(self._place(file), start, min(start + PIECE_BYTES, size))


class ShardedWeights(SafetensorsFiles):
    """The files that an index names."""

    def __init__(self, folder: Folder, path: str) -> None:
        """Read the index in ``path``, and the header of each file.

        Raises:
            StorageError: something is missing or damaged.
        """
        self.folder, self.path = folder, path
        self.index = folder.read(self._place(INDEX))
        """The index, as it is."""
        with self._damage(INDEX):
            wanted: dict[str, str] = dict(json.loads(self.index)["weight_map"])
            files = sorted(set(wanted.values()))
        super().__init__(folder, path, files)
        with self._damage(INDEX):
            if {name: entry[0] for name, entry in self._entries.items()} != wanted:
                raise ValueError("it names other tensors than the files have")


def _check_entry(entry: Mapping[str, Any]) -> None:
    begin, end = entry["data_offsets"]
    wanted = torch.Size(entry["shape"]).numel() * _TORCH[entry["dtype"]].itemsize
    if not 0 <= begin <= end or end - begin != wanted:
        raise ValueError(f"a tensor {entry}")
