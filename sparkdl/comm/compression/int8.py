"""The int8 compression: whole numbers of 8 bits, a scale per row or tensor, and a residual.

The scale is such that the largest absolute value becomes 127; values are rounded to the nearest
multiple. Signs are treated alike, zero stays zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from sparkdl.comm.compression.column_scales import ColumnCodec, Scratch
from sparkdl.comm.compression.compression import Codec, Shapes
from sparkdl.comm.compression.dense_reduce_scatter import ScatterCompression
from sparkdl.config import require

LARGEST = 127


@dataclass(frozen=True, kw_only=True)
class Int8Compression(ScatterCompression):
    """Send 8 bits per value, a quarter of float32; what rounding loses is added the next time."""

    scale: Literal["row", "tensor"] = "row"
    """Values that share a scale: those of an output unit or channel, or all of a parameter."""

    def __post_init__(self) -> None:
        require(self.scale in ("row", "tensor"), "scale must be 'row' or 'tensor'", self.scale)

    def codecs(
        self, shapes: Shapes, world_size: int, dtype: torch.dtype
    ) -> tuple[Sequence[Codec], Sequence[Codec]]:
        codecs = Int8Codec.of_slices(shapes, world_size, dtype, per_row=self.scale == "row")
        return codecs, codecs

    def codecs_of(
        self, shape: tuple[int, ...], num_slices: int, dtype: torch.dtype
    ) -> Sequence[Codec]:
        return Int8Codec.of_slices([shape], num_slices, dtype, per_row=self.scale == "row")


class Int8Codec(ColumnCodec):
    """One scale per column."""

    bits = 8
    num_numbers = 1

    def _measure(self, block: torch.Tensor, scratch: Scratch) -> torch.Tensor:
        return torch.maximum(block.amax(1), block.amin(1).neg_()).unsqueeze(0)

    def _join(self, measured: torch.Tensor, more: torch.Tensor) -> torch.Tensor:
        return torch.maximum(measured, more)

    def _fit(self, measured: torch.Tensor) -> torch.Tensor:
        scale = measured / LARGEST
        # Where one over the scale would overflow, nothing is sent. A NaN stays one.
        return scale.masked_fill_(scale < torch.finfo(scale.dtype).tiny, 0)

    def _take(
        self, block: torch.Tensor, numbers: torch.Tensor, scratch: Scratch, codes: torch.Tensor
    ) -> None:
        (scale,) = numbers
        inverse = torch.where(scale > 0, 1 / scale, 0)
        # May round 127 up to 127 and a bit, which rounds back.
        rounded = torch.mul(block, inverse, out=scratch.like(block)).round_()
        codes.view(torch.int8).copy_(rounded.flatten())
        block.addcmul_(rounded, scale, value=-1)

    def _put(
        self, block: torch.Tensor, numbers: torch.Tensor, scratch: Scratch, codes: torch.Tensor
    ) -> None:
        (scale,) = numbers
        steps = scratch.like(block)
        steps.copy_(codes.view(torch.int8).view(block.shape))
        block.addcmul_(steps, scale)
