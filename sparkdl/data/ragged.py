"""Rows that need different amounts of memory, and how some of them are picked.

As in Arrow: the values of all rows one after the other, and where each row begins and ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

_COPIED_BYTES = 512
"""Rows of more bytes are copied one by one, smaller ones by an index of all their values."""


@dataclass(frozen=True)
class Ragged:
    """Rows of values; several arrays of values if each row has several of equal length."""

    parts: tuple[Array, ...]
    """Each ``(values, *inner)``."""
    offsets: Array
    """int64 ``(rows + 1,)``: row ``i`` is ``parts[offsets[i]:offsets[i + 1]]``."""
    shape: tuple[int, ...] | None
    """Shape of one sample as the plan knows it; None while there is no value to tell it by."""

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, rows: slice) -> Ragged:
        """Neighbouring rows, as views."""
        start, stop, _ = rows.indices(len(self))
        return Ragged(self.parts, self.offsets[start : max(start, stop) + 1], self.shape)

    @property
    def lengths(self) -> Array:
        """int64 ``(rows,)``."""
        return np.diff(self.offsets)

    @property
    def num_bytes(self) -> int:
        """Memory of the rows' values."""
        count = int(self.offsets[-1] - self.offsets[0])
        return sum(count * _value_bytes(part) for part in self.parts)

    def own(self) -> tuple[Array, ...]:
        """The values of these rows alone, as views."""
        return tuple(part[self.offsets[0] : self.offsets[-1]] for part in self.parts)

    def where(self, mask: Array) -> Ragged:
        """The rows at which ``mask``, bool ``(rows,)``, is True; a copy."""
        lengths = self.lengths
        chosen = np.repeat(mask, lengths)
        parts = tuple(part[chosen] for part in self.own())
        return Ragged(parts, offsets_of(lengths[mask]), self.shape)


def offsets_of(lengths: Array) -> Array:
    """int64 ``(rows + 1,)``: where rows of these lengths begin and end, from 0."""
    offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def gather(sources: Sequence[Ragged], positions: Array) -> Ragged:
    """The rows at ``positions`` of the concatenation of ``sources``, in that order; a copy."""
    owners, starts, lengths = _find(sources, positions)
    offsets = offsets_of(lengths)
    parts = tuple(
        _gather_values([s.parts[i] for s in sources], owners, starts, offsets)
        for i in range(len(sources[0].parts))
    )
    return Ragged(parts, offsets, sources[0].shape)


def lengths_at(sources: Sequence[Ragged], positions: Array) -> Array:
    """Lengths of the rows at ``positions`` of the concatenation of ``sources``."""
    return _find(sources, positions)[2]


def _find(sources: Sequence[Ragged], positions: Array) -> tuple[Array, Array, Array]:
    """For the row at each position: which source it is in, its first value there, its length."""
    ends = np.cumsum([len(source) for source in sources])
    owners = np.searchsorted(ends, positions, side="right")
    starts = np.empty(len(positions), dtype=np.int64)
    lengths = np.empty(len(positions), dtype=np.int64)
    for number, (source, end) in enumerate(zip(sources, ends.tolist(), strict=True)):
        mine = owners == number
        rows = positions[mine].astype(np.int64) - (end - len(source))
        starts[mine] = source.offsets[rows]
        lengths[mine] = source.offsets[rows + 1] - starts[mine]
    return owners, starts, lengths


def _gather_values(arrays: list[Array], owners: Array, starts: Array, offsets: Array) -> Array:
    out = np.empty((int(offsets[-1]), *arrays[0].shape[1:]), dtype=arrays[0].dtype)
    if len(out) * _value_bytes(out) > _COPIED_BYTES * max(1, len(owners)):
        bounds = offsets.tolist()
        for row, (owner, start) in enumerate(zip(owners.tolist(), starts.tolist(), strict=True)):
            low, high = bounds[row], bounds[row + 1]
            out[low:high] = arrays[owner][start : start + high - low]
        return out
    lengths = np.diff(offsets)
    index = np.repeat(starts - offsets[:-1], lengths) + np.arange(len(out))
    if len(arrays) == 1:
        return np.take(arrays[0], index, axis=0, out=out, mode="clip")
    owner_of_value = np.repeat(owners, lengths)
    for number, array in enumerate(arrays):
        mine = owner_of_value == number
        out[mine] = array[index[mine]]
    return out


def _value_bytes(array: Array) -> int:
    return int(np.prod(array.shape[1:], dtype=np.int64)) * array.dtype.itemsize
