"""Values as one, minus one or zero: whether each has reached a threshold, and on which side."""

from __future__ import annotations

import torch

from sparkdl.comm.compression.bit_packing import pack, packed_size, unpack
from sparkdl.comm.compression.dense_reduce_scatter import BLOCK, blocks_of

BITS = 2


class Ternary:
    """Memory for looking at a row of values block by block.

    Args:
        numel: number of the values.
        like: a tensor of their dtype and device.
    """

    def __init__(self, numel: int, like: torch.Tensor) -> None:
        size = min(numel, BLOCK)
        self._values = like.new_empty(size)
        self._codes = torch.zeros(-(-size // 8) * 8, dtype=torch.int8, device=like.device)
        self.blocks = blocks_of(numel)
        """Places of the blocks; each begins at a multiple of 8."""

    def codes(self, block: torch.Tensor, threshold: float) -> torch.Tensor:
        """1 where a value is at least ``threshold``, -1 where at most ``-threshold``; int8.

        The result has a multiple of 8 codes, the last ones zero; the next call overwrites it.
        """
        # Division is rounded to the nearest (on a CPU), so a quotient is 1 only where the
        # threshold is reached; conversion to whole numbers cuts off the rest.
        steps = torch.div(block, threshold, out=self._values[: len(block)]).clamp_(-1, 1)
        codes = self._codes[: -(-len(block) // 8) * 8]
        codes[len(block) :] = 0
        codes[: len(block)].copy_(steps)
        return codes

    def take(self, block: torch.Tensor, threshold: float, packed: torch.Tensor) -> torch.Tensor:
        """Write the codes of a block, 2 bits each, and subtract from it what they say.

        Returns:
            The number of codes that are not zero, as a tensor.
        """
        codes = self.codes(block, threshold)
        steps = self._values[: len(block)]
        steps.copy_(codes[: len(block)])
        block.sub_(steps, alpha=threshold)
        pack(codes[: packed_size(len(block), BITS) * 4], BITS, packed)
        return steps.dot(steps)

    def steps(self, packed: torch.Tensor, num_codes: int) -> torch.Tensor:
        """The codes that `take` wrote, in the values' dtype; overwritten by the next call."""
        codes = self._codes[: packed_size(num_codes, BITS) * 4]
        unpack(packed, BITS, codes)
        return self._values[:num_codes].copy_(codes[:num_codes])


def packed_place(start: int, stop: int) -> slice:
    """Where the codes of a block are among the packed ones."""
    return slice(packed_size(start, BITS), packed_size(stop, BITS))


def nonzero(codes: torch.Tensor, limit: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Places and values of the codes that are not zero; quick where these are few.

    Args:
        codes: int8, a multiple of 8 of them.
        limit: number from which on nobody needs them; then some are left out, but not so many
            that fewer than ``limit`` remain.
    """
    words = codes.view(torch.int64)
    eights = words.nonzero().squeeze(1)[:limit]
    near = words.index_select(0, eights).view(torch.int8)
    hits = near.nonzero().squeeze(1)
    places = eights.index_select(0, hits >> 3).mul_(8).add_(hits & 7)
    return places, near.index_select(0, hits)
