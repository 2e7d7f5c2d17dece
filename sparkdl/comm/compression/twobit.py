"""The 2-bit compression: plus, minus or nothing, by a fixed threshold and a residual.

MXNet's 2-bit compression: a value that, with what was left of it, has reached the threshold, is
sent as the threshold, and that is subtracted. Sums of these are exact: the owner of a slice sends
how often the threshold was meant. Unlike MXNet's, the result is the mean over ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sparkdl.comm.compression.bit_packing import (
    BITS,
    Ternary,
    pack,
    packed_place,
    packed_size,
    unpack,
)
from sparkdl.comm.compression.compression import Codec, Shapes, count
from sparkdl.comm.compression.dense_reduce_scatter import ScatterCompression, blocks_of, cut
from sparkdl.config import require

FLAG_BYTES = 8
"""A float64 in front of the codes: 1, or NaN if some of the values were not finite."""


@dataclass(frozen=True, kw_only=True)
class TwoBitCompression(ScatterCompression):
    """Send 2 bits per value and 4 or 8 per sum: about 10 times less than float32."""

    threshold: float = 0.5
    """Magnitude that a value is sent as; smaller ones wait until they add up.

    In units of what travels: of gradients, or of the changes of weights in a round, which are much
    smaller.
    """

    def __post_init__(self) -> None:
        require(0 < self.threshold < math.inf, "threshold must be positive", self.threshold)

    def codecs(
        self, shapes: Shapes, world_size: int, dtype: torch.dtype
    ) -> tuple[Sequence[Codec], Sequence[Codec]]:
        _, longest = cut(count(shapes), world_size)[0]
        first = TwoBitCodec(longest, self.threshold, world_size)
        second = CountCodec(longest, self.threshold / world_size, world_size)
        return [first] * world_size, [second] * world_size


class TwoBitCodec(Codec):
    """Codes of shares times ``world_size``; they decode to how often the threshold was meant."""

    def __init__(self, longest: int, threshold: float, world_size: int) -> None:
        self._threshold = threshold
        self._world_size = world_size
        self.message_bytes = -(-(FLAG_BYTES + packed_size(longest, BITS)) // 8) * 8

    def encode(self, values: torch.Tensor, residual: torch.Tensor, message: torch.Tensor) -> None:
        """See `Codec.encode`; the residual is that of ``world_size * values``."""
        ternary = Ternary(len(values), values)
        total = values.new_zeros(())
        for start, stop in ternary.blocks:
            block = residual[start:stop].add_(values[start:stop], alpha=self._world_size)
            total += block.sum()
            ternary.take(block, self._threshold, message[FLAG_BYTES:][packed_place(start, stop)])
        _flag(message).copy_(torch.where(total.isfinite(), 1.0, math.nan))

    def decode_add(self, message: torch.Tensor, out: torch.Tensor) -> None:
        ternary = Ternary(len(out), out)
        flag = _flag(message).to(out.dtype)
        for start, stop in ternary.blocks:
            codes = message[FLAG_BYTES:][packed_place(start, stop)]
            out[start:stop].addcmul_(ternary.steps(codes, stop - start), flag)


class CountCodec(Codec):
    """Whole numbers between ``-world_size`` and ``world_size``, which are multiples of ``unit``."""

    def __init__(self, longest: int, unit: float, world_size: int) -> None:
        self._unit = unit
        self._bits = 4 if world_size <= 7 else 8 if world_size <= 127 else 16
        self.message_bytes = -(-(FLAG_BYTES + packed_size(longest, self._bits)) // 8) * 8

    def encode(self, values: torch.Tensor, residual: torch.Tensor, message: torch.Tensor) -> None:
        """See `Codec.encode`; nothing is left out."""
        _flag(message).copy_(torch.where(values.sum().isfinite(), 1.0, math.nan))
        for start, stop in blocks_of(len(values)):
            self._write(values[start:stop], self._place(message, start, stop))

    def decode_add(self, message: torch.Tensor, out: torch.Tensor) -> None:
        unit = _flag(message).to(out.dtype) * self._unit
        for start, stop in blocks_of(len(out)):
            counts = self._read(self._place(message, start, stop), stop - start)
            out[start:stop].addcmul_(counts.to(out.dtype), unit)

    def _place(self, message: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        codes = message[FLAG_BYTES:]
        return codes[packed_size(start, self._bits) : packed_size(stop, self._bits)]

    def _write(self, counts: torch.Tensor, packed: torch.Tensor) -> None:
        if self._bits == 4:
            codes = counts.new_zeros(2 * len(packed), dtype=torch.int8)
            codes[: len(counts)] = counts
            pack(codes, self._bits, packed)
        else:
            whole = packed.view(torch.int8 if self._bits == 8 else torch.int16)
            whole.copy_(counts)

    def _read(self, packed: torch.Tensor, num_counts: int) -> torch.Tensor:
        if self._bits == 4:
            codes = packed.new_empty(2 * len(packed), dtype=torch.int8)
            unpack(packed, self._bits, codes)
            return codes[:num_counts]
        return packed.view(torch.int8 if self._bits == 8 else torch.int16)


def _flag(message: torch.Tensor) -> torch.Tensor:
    return message[:FLAG_BYTES].view(torch.float64)[0]
