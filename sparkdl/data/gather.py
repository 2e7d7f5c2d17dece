"""Rows picked from several places into memory that is used again and again.

Fresh memory costs page faults, and one large gather costs less than many small ones.
"""

from __future__ import annotations

import mmap
import sys
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

from sparkdl.data import collate
from sparkdl.data.collate import Rows
from sparkdl.data.plan import Column
from sparkdl.data.ragged import Array, Ragged, gather, lengths_at
from sparkdl.data.shuffle import Order

_UNUSED = 2
"""References to an array that no tensor shows: the buffer's own, and that of who counts them."""
_MAPPED_BYTES = 128 << 10
"""Smaller arrays are not worth a mapping, of which a process has some ten thousand."""


def empty(shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
    """An array in memory of its own, which goes back to the system with it.

    Mapped by itself if it is large: the allocator of a worker keeps what it has got.
    """
    array: Array = np.empty(0, dtype)
    num_bytes = int(np.prod(shape)) * array.itemsize
    if num_bytes < _MAPPED_BYTES:
        return np.empty(shape, dtype)
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)  # fewer page faults while it is filled
    return np.frombuffer(memory, dtype).reshape(shape)


class Buffer:
    """Memory for the dense columns of up to ``capacity`` rows.

    It is used again unless somebody still has a tensor in it, as a module that keeps a batch does.
    """

    def __init__(self, capacity: int, *, pin_memory: bool = False) -> None:
        self._capacity = capacity
        self._pin_memory = pin_memory
        self._columns: dict[str, Array] = {}

    def rows(self, key: str, like: torch.Tensor, num_rows: int) -> torch.Tensor:
        """Room for ``num_rows`` rows of column ``key``, shaped and typed as those of ``like``."""
        shape = (self._capacity, *like.shape[1:])
        if self._pin_memory:  # used once
            return torch.empty(shape, dtype=like.dtype, pin_memory=True)[:num_rows]
        if key not in self._columns or sys.getrefcount(self._columns[key]) > _UNUSED:
            self._columns[key] = torch.empty(shape, dtype=like.dtype).numpy()
        return torch.from_numpy(self._columns[key])[:num_rows]


def gather_column(
    column: Column, sources: Sequence[Rows], positions: Order, buffer: Buffer
) -> Rows:
    """The rows of one column at ``positions`` of the concatenation of ``sources``, in order."""
    if not sources:
        return collate.no_rows(column)
    if column.kind.num_parts:
        return gather([rows for rows in sources if isinstance(rows, Ragged)], positions)
    tensors = [rows for rows in sources if isinstance(rows, torch.Tensor)]
    rows = buffer.rows(column.key, tensors[0], len(positions))
    gather_rows(tensors, positions, rows)
    return rows


def gather_rows(sources: Sequence[torch.Tensor], positions: Order, out: torch.Tensor) -> None:
    """Write the rows at ``positions`` of the concatenation of ``sources`` to ``out``, in order."""
    if len(sources) == 1:
        torch.index_select(sources[0], 0, torch.from_numpy(positions), out=out)
        return
    ends = np.cumsum([len(source) for source in sources])
    # Small integers of one type: numpy then sorts by radix and converts nothing.
    owners = np.searchsorted(ends.astype(positions.dtype), positions, side="right")
    by_owner = np.argsort(owners.astype(np.min_scalar_type(len(sources))), kind="stable")
    rows = positions[by_owner]
    # One source after the other, then into order: twice `index_select`, which takes whole rows,
    # costs a fourth of one `index_copy_`, which does not.
    is_in_turn = bool((owners[1:] >= owners[:-1]).all())  # as on the border of two windows
    staged, start = out if is_in_turn else torch.empty_like(out), 0
    for source, end, count in zip(sources, ends, np.bincount(owners).tolist(), strict=False):
        stop = start + count
        local = torch.from_numpy(rows[start:stop] - rows.dtype.type(end - len(source)))
        torch.index_select(source, 0, local, out=staged[start:stop])
        start = stop
    if is_in_turn:
        return
    places = np.empty_like(by_owner)
    places[by_owner] = np.arange(len(by_owner))
    torch.index_select(staged, 0, torch.from_numpy(places), out=out)


def sum_of_lengths(
    columns: Sequence[Column], sources: Sequence[Mapping[str, Rows]], positions: Order
) -> Order:
    """Lengths of the rows at ``positions`` of the sources' concatenation: of all sequences."""
    total = np.zeros(len(positions), dtype=np.int64)
    for column in columns:
        if column.kind.has_length:
            rows = [source[column.key] for source in sources]
            total += lengths_at([one for one in rows if isinstance(one, Ragged)], positions)
    return total
