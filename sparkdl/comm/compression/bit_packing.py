"""Small whole numbers as bits, several to a byte, and back.

The codes are int8. The eight (four, two) codes that share a byte are read as one int64 (int32,
int16) and multiplied by a number that moves each code's low bits to its place in the highest
byte. All steps are torch's own vector operations, on any device that is little-endian.
"""

from __future__ import annotations

import functools

import torch

from sparkdl.comm.compression.dense_reduce_scatter import BLOCK, blocks_of

_WORDS = {1: torch.int64, 2: torch.int32, 4: torch.int16}
"""Bits per code -> a number as wide as the codes of one byte."""
BITS = 2
"""Bits of a code of `Ternary`."""


def packed_size(num_codes: int, bits: int) -> int:
    """Bytes that ``num_codes`` codes of ``bits`` bits take."""
    return -(-num_codes * bits // 8)


def pack(codes: torch.Tensor, bits: int, out: torch.Tensor) -> None:
    """Write the low ``bits`` (1, 2 or 4) bits of each code; single bits must be 0 or 1.

    ``codes`` are int8, ``(num_codes,)``, a multiple of ``8 / bits`` of them, contiguous, at an
    address that is a multiple of 8; they are overwritten. ``out`` is uint8, as `packed_size` says.
    """
    mask, factor, top = _numbers(bits)
    words = codes.view(_WORDS[bits])
    if bits > 1:
        words.bitwise_and_(mask)
    words.mul_(factor).bitwise_right_shift_(top)
    out.copy_(words)  # keeps the lowest byte of each word


def unpack(packed: torch.Tensor, bits: int, out: torch.Tensor) -> None:
    """Read what `pack` wrote: codes as numbers with a sign, but single bits as 0 and 1."""
    table = _table(bits, packed.device)
    torch.index_select(table, 0, packed.to(torch.int32), out=out.view(_WORDS[bits]))


@functools.cache
def _numbers(bits: int) -> tuple[int, int, int]:
    """Return the mask and the factor of words in `pack`, and where the highest byte begins."""
    word, places = _WORDS[bits], range(8 // bits)
    top = 8 * (len(places) - 1)
    mask = sum(((1 << bits) - 1) << 8 * i for i in places)
    factor = sum(1 << top - (8 - bits) * i for i in places)
    return _signed(mask, word), _signed(factor, word), top


@functools.cache
def _table(bits: int, device: torch.device) -> torch.Tensor:
    """For each byte its codes, as one word."""
    shifts = torch.arange(0, 8, bits)
    codes = (torch.arange(256).unsqueeze(1) >> shifts) & ((1 << bits) - 1)
    if bits > 1:
        codes = torch.where(codes >= 1 << bits - 1, codes - (1 << bits), codes)
    return codes.to(torch.int8).contiguous().view(_WORDS[bits]).flatten().to(device)


def _signed(number: int, word: torch.dtype) -> int:
    """The number of the same bits that fits into ``word``."""
    size = torch.iinfo(word).bits
    return number - (1 << size) if number >> size - 1 & 1 else number


class Ternary:
    """Sees block by block which of ``numel`` values have reached a threshold, and on which side."""

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
        """Write a block's codes, subtract what they say, and return the number of those not 0."""
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
    """Return the slice of a block's codes among the packed ones."""
    return slice(packed_size(start, BITS), packed_size(stop, BITS))


def nonzero(codes: torch.Tensor, limit: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Places and values of the codes (int8, a multiple of 8) that are not zero; quick if few.

    Of more than ``limit`` some are left out, but at least ``limit`` remain.
    """
    words = codes.view(torch.int64)
    eights = words.nonzero().squeeze(1)[:limit]
    near = words.index_select(0, eights).view(torch.int8)
    hits = near.nonzero().squeeze(1)
    places = eights.index_select(0, hits >> 3).mul_(8).add_(hits & 7)
    return places, near.index_select(0, hits)
