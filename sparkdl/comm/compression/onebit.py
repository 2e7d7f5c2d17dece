"""The 1-bit compression: signs of a gradient, two means per column, and a residual.

Seide et al., "1-Bit Stochastic Gradient Descent and its Application to Data-Parallel Distributed
Training of Speech DNNs", Interspeech 2014; CNTK's ``gradientBits=1``. A value that is not negative
is read as the mean of those of its column, a negative one as the mean of the negative ones. Both
stages of the exchange are quantized, and keep what that loses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sparkdl.comm.compression.bit_packing import pack, unpack
from sparkdl.comm.compression.column_scales import ColumnCodec, Scratch
from sparkdl.comm.compression.compression import Codec, Shapes
from sparkdl.comm.compression.dense_reduce_scatter import ScatterCompression
from sparkdl.config import require


@dataclass(frozen=True, kw_only=True)
class OneBitCompression(ScatterCompression):
    """Send one bit per value: 32 times less than float32, and two numbers per row.

    Needs a warm start, and likes momentum or another optimizer that smooths gradients.
    """

    warmup_steps: int = 100
    """First exchanges, in which values travel as they are; CNTK's default is one epoch."""

    def __post_init__(self) -> None:
        require(self.warmup_steps >= 0, "warmup_steps must not be negative", self.warmup_steps)

    def codecs(
        self, shapes: Shapes, world_size: int, dtype: torch.dtype
    ) -> tuple[Sequence[Codec], Sequence[Codec]]:
        codecs = OneBitCodec.of_slices(shapes, world_size, dtype)
        return codecs, codecs


class OneBitCodec(ColumnCodec):
    """Per column the mean of the negative values, and how much more that of the others is."""

    bits = 1
    num_numbers = 2

    def _measure(self, block: torch.Tensor, scratch: Scratch) -> torch.Tensor:
        """Number of values that are not negative, their sum, number and sum of all."""
        measured = block.new_empty(4, len(block))
        torch.sum(torch.clamp_min(block, 0, out=scratch.like(block)), 1, out=measured[1])
        torch.sum(_is_high(block, scratch), 1, out=measured[0])
        measured[2] = block.shape[1]
        torch.sum(block, 1, out=measured[3])
        return measured

    def _join(self, measured: torch.Tensor, more: torch.Tensor) -> torch.Tensor:
        return measured.add_(more)

    def _fit(self, measured: torch.Tensor) -> torch.Tensor:
        high_count, high_sum, all_count, all_sum = measured
        # A side without values has the mean 0, unless the other side is not a number.
        high = high_sum / high_count.clamp(min=1)
        low = (all_sum - high_sum) / (all_count - high_count).clamp(min=1)
        return torch.stack([low, high - low])

    def _take(
        self, block: torch.Tensor, numbers: torch.Tensor, scratch: Scratch, codes: torch.Tensor
    ) -> None:
        low, step = numbers
        is_high = _is_high(block, scratch)
        scratch.codes(block).copy_(is_high.flatten())
        block.sub_(low).addcmul_(is_high, step, value=-1)
        pack(scratch.full_codes(block, self.bits), self.bits, codes)

    def _put(
        self, block: torch.Tensor, numbers: torch.Tensor, scratch: Scratch, codes: torch.Tensor
    ) -> None:
        low, step = numbers
        unpack(codes, self.bits, scratch.full_codes(block, self.bits))
        is_high = scratch.like(block)
        is_high.copy_(scratch.codes(block).view(block.shape))
        block.add_(low).addcmul_(is_high, step)


def _is_high(block: torch.Tensor, scratch: Scratch) -> torch.Tensor:
    """One where a value is not negative, else zero; in the values' dtype, to be multiplied."""
    found = scratch.like(block)
    if scratch.holds is not block:
        torch.ge(block, 0, out=found)
        scratch.holds = block
    return found
