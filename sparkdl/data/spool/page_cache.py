"""The parts of a shard's mapped files that the kernel keeps in memory.

Rows that do not fit into memory are read in row groups: the kernel is told which it shall read
ahead, in large pieces, and which it may forget, so that a worker takes no more memory than it
needs even where nobody else asks for it.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sparkdl.data.spool.local_disk import disk_errors

Array = npt.NDArray[Any]

_READ_BYTES = 128 << 10
"""Read ahead at once; the kernel cuts off what exceeds its own largest request."""


class MappedFile:
    """A file mapped into memory. What is written to the mapping stays in this process.

    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(self, path: Path, num_bytes: int) -> None:
        self.path = path
        self._num_bytes = num_bytes
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._descriptor)
        self._map = mmap.mmap(
            self._descriptor,
            num_bytes,
            flags=mmap.MAP_PRIVATE,
            prot=mmap.PROT_READ | mmap.PROT_WRITE,
        )

    def values(self, dtype: str) -> Array:
        """The file's content; keeps the mapping alive."""
        return np.frombuffer(self._map, dtype=dtype)

    def begin(self) -> None:
        """Have nothing read but what is touched or prefetched, and forget what writing has left.

        What was written stays in the page cache in pieces of up to 2 MiB, which a kernel may map
        as a whole at one touch; what is read anew comes in small ones, of which up to 64 KiB are.
        """
        if hasattr(mmap, "MADV_RANDOM"):
            self._map.madvise(mmap.MADV_RANDOM)
        os.fsync(self._descriptor)
        self.drop(0, self._num_bytes)

    def prefetch(self, start: int, stop: int) -> None:
        """Have these bytes read in the background."""
        start, stop = self._pages(start, stop)
        if hasattr(os, "posix_fadvise"):  # not on macOS, where touching them reads them
            for first in range(start, stop, _READ_BYTES):
                size = min(_READ_BYTES, stop - first)
                os.posix_fadvise(self._descriptor, first, size, os.POSIX_FADV_WILLNEED)

    def release(self) -> None:
        """Take all pages out of this process; the page cache keeps them."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)

    def drop(self, start: int, stop: int) -> None:
        """Take these bytes out of the page cache, unless a process has them mapped."""
        start, stop = self._pages(start, stop)
        if start < stop and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._descriptor, start, stop - start, os.POSIX_FADV_DONTNEED)

    @staticmethod
    def _pages(start: int, stop: int) -> tuple[int, int]:
        """Whole pages: those at the edges too, which are read again if a neighbour needs them."""
        size = mmap.PAGESIZE
        return start // size * size, -(-stop // size) * size


@dataclass(frozen=True)
class FilePart:
    """A file of a column."""

    file: MappedFile
    value_bytes: int
    """Of a row, or of one of its values where rows may differ."""
    offsets: Array | None = None
    """Where rows of different lengths end; None: all rows have one size."""

    def span(self, start: int, stop: int) -> tuple[int, int]:
        """The bytes of rows ``start`` to ``stop``."""
        if self.offsets is not None:
            start, stop = int(self.offsets[start]), int(self.offsets[stop])
        return start * self.value_bytes, stop * self.value_bytes


class Pages:
    """The pages of one shard, by rows.

    Args:
        parts: the files of all columns, those of offsets last.
        first_row: number, in the files, of the shard's first row.
    """

    def __init__(self, parts: Sequence[FilePart], first_row: int = 0) -> None:
        self._parts = tuple(parts)
        self._first_row = first_row

    def after(self, num_rows: int) -> Pages:
        """The same files without the first rows."""
        return Pages(self._parts, self._first_row + num_rows)

    def begin(self) -> None:
        """Make ready for windows, once: nothing is read but what is touched or prefetched.

        Raises:
            StorageError: what was written does not reach the disk.
        """
        for part in self._parts:
            with disk_errors(part.file.path):
                part.file.begin()

    def prefetch(self, start: int, stop: int) -> None:
        """Have rows ``start`` to ``stop`` read in the background."""
        for part in self._parts:
            part.file.prefetch(*part.span(self._first_row + start, self._first_row + stop))

    def release(self) -> None:
        """Take all pages out of this process; the page cache keeps them.

        All, because the kernel maps pages around those that are touched too.
        """
        for part in self._parts:
            part.file.release()

    def drop(self, start: int, stop: int) -> None:
        """Take rows ``start`` to ``stop`` out of the page cache; `leave` must come before."""
        for part in self._parts:
            part.file.drop(*part.span(self._first_row + start, self._first_row + stop))
