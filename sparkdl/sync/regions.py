"""The part of a parameter that lies on a rank, and parameters put together of such parts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Region:
    """A box of a tensor: of each dimension the numbers from ``start`` on, ``size`` many."""

    start: tuple[int, ...]
    size: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Region:
        """All of a tensor."""
        return cls((0,) * len(shape), tuple(shape))

    def cut(self, dimension: int, num_parts: int, part: int) -> Region:
        """One of ``num_parts`` parts along a dimension, as ``torch.chunk`` cuts.

        The last ones may be smaller, or empty.
        """
        length = self.size[dimension]
        each = -(-length // num_parts)
        first, last = min(part * each, length), min((part + 1) * each, length)
        start, size = list(self.start), list(self.size)
        start[dimension] += first
        size[dimension] = last - first
        return Region(tuple(start), tuple(size))

    def of(self, values: torch.Tensor) -> torch.Tensor:
        """The part of a whole tensor, as a view."""
        for dimension, (first, length) in enumerate(zip(self.start, self.size, strict=True)):
            values = values.narrow(dimension, first, length)
        return values

    def copy_from(self, other: Region, source: torch.Tensor, target: torch.Tensor) -> int:
        """Copy what ``source``, which is ``other``, has of this region to ``target``, which is it.

        Returns:
            How many numbers that are; none if they do not overlap.
        """
        first = [max(pair) for pair in zip(self.start, other.start, strict=True)]
        ends = [
            min(a + m, b + n)
            for a, m, b, n in zip(self.start, self.size, other.start, other.size, strict=True)
        ]
        size = tuple(end - begin for begin, end in zip(first, ends, strict=True))
        if any(length <= 0 for length in size):
            return 0
        inside, outside = (
            Region(tuple(begin - zero for begin, zero in zip(first, box.start, strict=True)), size)
            for box in (self, other)
        )
        inside.of(target).copy_(outside.of(source))
        return math.prod(size)
