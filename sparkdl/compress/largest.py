"""Which values of a row are the largest in absolute terms? Exactly, without sorting them all.

The row is cut into runs. The ``k`` runs with the largest peaks hold the ``k`` largest values:
whatever is elsewhere is exceeded by ``k`` peaks. So only these runs are searched, and only for
values that reach the smallest of the ``k`` peaks.
"""

from __future__ import annotations

import torch

NARROW, WIDE = 32, 64
"""Lengths of runs. The peaks of shorter ones take torch several times longer to find."""


def num_largest(numel: int, density: float) -> int:
    """How many values of a tensor are sent."""
    return max(1, round(density * numel))


class Peaks:
    """The largest absolute values of the runs of a row, for whoever walks over it in blocks.

    Args:
        values: the row, ``(numel,)``; read by `largest`.
        num_largest: how many of its values will be asked for; at least 1, at most all.
        scratch: room for one block.
    """

    def __init__(self, values: torch.Tensor, num_largest: int, scratch: torch.Tensor) -> None:
        self._values = values
        self._num_largest = num_largest
        self._scratch = scratch
        self._width = WIDE if num_largest * WIDE * 8 <= len(values) else NARROW
        self._peaks = values.new_empty(len(values) // self._width)

    def add(self, start: int, stop: int) -> None:
        """Look at a block, which begins at a multiple of `WIDE`."""
        first, last = start // self._width, stop // self._width
        block = self._values[first * self._width : last * self._width]
        sizes = torch.abs(block, out=self._scratch[: len(block)]).view(-1, self._width)
        torch.amax(sizes, 1, out=self._peaks[first:last])

    def largest(self) -> torch.Tensor:
        """Places of the largest absolute values, int64, in no order; NaN counts as largest."""
        values, k = self._values, self._num_largest
        if len(self._peaks) <= k:
            return torch.topk(values.abs(), k, sorted=False).indices
        peaks, runs = torch.topk(self._peaks, k, sorted=False)
        end = len(self._peaks) * self._width
        sizes = values[:end].view(-1, self._width).index_select(0, runs).abs_()
        # Not "at least the smallest": if that is NaN, all are to be looked at.
        row, column = (sizes < peaks.min().item()).logical_not_().nonzero(as_tuple=True)
        rest = torch.arange(end, len(values), device=values.device)
        places = torch.cat([runs[row] * self._width + column, rest])
        found = torch.cat([sizes[row, column], values[end:].abs()])
        return places[torch.topk(found, k, sorted=False).indices]
