"""The columns whose values share a scale: the weights that lead to one output.

In torch these are the rows of a parameter, one per output unit or channel. Tensors of one
dimension, and those of very short rows, are one column each. Where a slice ends within a column,
the parts count as columns.
"""

from __future__ import annotations

import functools
import itertools
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from sparkdl.comm.compression.bit_packing import packed_size
from sparkdl.comm.compression.compression import Codec, Shapes, count
from sparkdl.comm.compression.dense_reduce_scatter import BLOCK, cut

MIN_COLUMN = 16
"""The scales of shorter columns would take more bytes than their values save."""


@dataclass(frozen=True)
class Group:
    """Columns of equal length that are worked on together."""

    first: int
    """Number of the first of its columns in the slice."""
    num_columns: int
    blocks: tuple[tuple[int, int], ...]
    """Places in the slice. Several where one column is longer than a block."""


@dataclass(frozen=True)
class ColumnLayout:
    """The columns of one slice."""

    numel: int
    num_columns: int
    groups: tuple[Group, ...]


def column_shapes(shapes: Shapes, *, per_row: bool) -> list[tuple[int, int]]:
    """Number and length of the columns of each tensor that is not empty."""
    found = []
    for shape in shapes:
        numel = count([shape])
        rows = shape[0] if per_row and len(shape) > 1 and numel >= MIN_COLUMN * shape[0] else 1
        if numel:
            found.append((rows, numel // rows))
    return found


def lay_out(columns: Sequence[tuple[int, int]], start: int, stop: int) -> ColumnLayout:
    """The columns of the slice from ``start`` to ``stop``."""
    groups = []
    first = 0
    for place, rows, length in _pieces(columns, start, stop):
        step = max(1, BLOCK // length)
        for row in range(0, rows, step):
            num_columns = min(step, rows - row)
            begin, end = place + row * length, place + (row + num_columns) * length
            bounds = [*range(begin, end, BLOCK), end] if length > BLOCK else [begin, end]
            blocks = tuple(itertools.pairwise(bounds))
            groups.append(Group(first, num_columns, blocks))
            first += num_columns
    return ColumnLayout(stop - start, first, tuple(groups))


def _pieces(
    columns: Sequence[tuple[int, int]], start: int, stop: int
) -> Iterator[tuple[int, int, int]]:
    """Place in the slice, number and length of columns, with what is left of those that are cut."""
    begin = 0
    for rows, length in columns:
        low, high = max(start, begin), min(stop, begin + rows * length)
        head = min(-(low - begin) % length, high - low)
        body, tail = divmod(max(0, high - low - head), length)
        for num, size in ((1, head), (body, length), (1, tail)):
            if low < high and num and size:
                yield low - start, num, size
                low += num * size
        begin += rows * length


class ColumnCodec(Codec):
    """Codes of a few bits, and some numbers per column that say what the codes mean.

    A message has these numbers, ``(num_numbers, num_columns)`` in the values' dtype, then the codes
    of each block, which begin at a byte. ``num_columns`` and ``code_bytes`` are the most that any
    slice of the bucket has.
    """

    bits: int
    num_numbers: int

    def __init__(
        self, layout: ColumnLayout, num_columns: int, code_bytes: int, dtype: torch.dtype
    ) -> None:
        self._layout = layout
        self._num_columns = num_columns
        self._dtype = dtype
        self._header_bytes = self.num_numbers * num_columns * dtype.itemsize
        self.message_bytes = -(-(self._header_bytes + code_bytes) // 8) * 8

    @classmethod
    def of_slices(
        cls, shapes: Shapes, world_size: int, dtype: torch.dtype, *, per_row: bool = True
    ) -> list[ColumnCodec]:
        """One codec per slice of a bucket."""
        columns = column_shapes(shapes, per_row=per_row)
        layouts = [lay_out(columns, *bounds) for bounds in cut(count(shapes), world_size)]
        num_columns = max(layout.num_columns for layout in layouts)
        code_bytes = max(
            sum(
                packed_size(stop - start, cls.bits)
                for group in layout.groups
                for start, stop in group.blocks
            )
            for layout in layouts
        )
        return [cls(layout, num_columns, code_bytes, dtype) for layout in layouts]

    def encode(self, values: torch.Tensor, residual: torch.Tensor, message: torch.Tensor) -> None:
        numbers = self._numbers(message)
        scratch = self._scratch(values)
        place = self._header_bytes
        for group in self._layout.groups:
            blocks = [residual[a:b].add_(values[a:b]) for a, b in group.blocks]
            blocks = [block.view(group.num_columns, -1) for block in blocks]
            measured = [self._measure(block, scratch) for block in blocks]
            fitted = self._fit(functools.reduce(self._join, measured))
            numbers[:, group.first : group.first + group.num_columns] = fitted
            for block in blocks:
                end = place + packed_size(block.numel(), self.bits)
                self._take(block, fitted.unsqueeze(2), scratch, message[place:end])
                place = end

    def decode_add(self, message: torch.Tensor, out: torch.Tensor) -> None:
        numbers = self._numbers(message)
        scratch = self._scratch(out)
        place = self._header_bytes
        for group in self._layout.groups:
            fitted = numbers[:, group.first : group.first + group.num_columns].unsqueeze(2)
            for start, stop in group.blocks:
                end = place + packed_size(stop - start, self.bits)
                block = out[start:stop].view(group.num_columns, -1)
                self._put(block, fitted, scratch, message[place:end])
                place = end

    def _numbers(self, message: torch.Tensor) -> torch.Tensor:
        header = message[: self._header_bytes].view(self._dtype)
        return header.view(self.num_numbers, self._num_columns)

    def _scratch(self, values: torch.Tensor) -> Scratch:
        longest = max((b - a for g in self._layout.groups for a, b in g.blocks), default=0)
        return Scratch(longest, values)

    @abstractmethod
    def _measure(self, block: torch.Tensor, scratch: Scratch) -> torch.Tensor:
        """Measure what must be known of a block ``(columns, length)``: ``(kinds, columns)``."""

    @abstractmethod
    def _join(self, measured: torch.Tensor, more: torch.Tensor) -> torch.Tensor:
        """Join what was measured of two blocks of the same column."""

    @abstractmethod
    def _fit(self, measured: torch.Tensor) -> torch.Tensor:
        """The columns' numbers ``(num_numbers, columns)``."""

    @abstractmethod
    def _take(
        self, block: torch.Tensor, numbers: torch.Tensor, scratch: Scratch, codes: torch.Tensor
    ) -> None:
        """Write the codes of a block, and subtract from it what they say."""

    @abstractmethod
    def _put(
        self, block: torch.Tensor, numbers: torch.Tensor, scratch: Scratch, codes: torch.Tensor
    ) -> None:
        """Add to a block what the codes say."""


class Scratch:
    """Memory for the passes over one block; its codes have room to fill up the last byte."""

    def __init__(self, longest: int, like: torch.Tensor) -> None:
        self.holds: torch.Tensor | None = None
        """The block of which something is still here."""
        self._values = like.new_empty(longest)
        self._codes = torch.zeros(-(-longest // 8) * 8, dtype=torch.int8, device=like.device)

    def like(self, block: torch.Tensor) -> torch.Tensor:
        """A tensor of the shape of ``block``."""
        return self._values[: block.numel()].view(block.shape)

    def codes(self, block: torch.Tensor) -> torch.Tensor:
        """int8, as many as ``block`` has values, in a row."""
        return self._codes[: block.numel()]

    def full_codes(self, block: torch.Tensor, bits: int) -> torch.Tensor:
        """`codes` up to the end of the last byte, with zeros there."""
        codes = self._codes[: packed_size(block.numel(), bits) * 8 // bits]
        codes[block.numel() :] = 0
        return codes
