"""How do values travel as whole numbers of 8 bits? By a scale per row or tensor, and a residual.

The scale is such that the largest absolute value becomes 127; values are rounded to the nearest
multiple. Signs are treated alike, zero stays zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from sparkdl.comm.communicator import Communicator
from sparkdl.comm.compression.column_scales import ColumnCodec, Scratch
from sparkdl.comm.compression.compression import Compression, Compressor, Shapes, count, shapes_of
from sparkdl.comm.compression.dense_reduce_scatter import ScatterCompressor, scatter_bytes
from sparkdl.errors import ConfigError

LARGEST = 127


@dataclass(frozen=True, kw_only=True)
class Int8Compression(Compression):
    """Send 8 bits per value, a quarter of float32; what rounding loses is added the next time."""

    scale: Literal["row", "tensor"] = "row"
    """Which values share a scale: those of an output unit or channel, or all of a parameter."""

    def __post_init__(self) -> None:
        if self.scale not in ("row", "tensor"):
            raise ConfigError(f"scale must be 'row' or 'tensor'; received {self.scale!r}")

    def make(self, views: Sequence[torch.Tensor], comm: Communicator) -> Compressor:
        shapes = shapes_of(views)
        codecs = self._codecs(shapes, comm.world_size, views[0].dtype)
        return ScatterCompressor(comm, codecs, codecs, count(shapes), views[0])

    def wire_bytes(self, shapes: Shapes, element_size: int, world_size: int) -> int:
        dtype = torch.float64 if element_size == 8 else torch.float32
        codec = self._codecs(shapes, world_size, dtype)[0]
        return scatter_bytes(codec, codec, count(shapes), world_size)

    def _codecs(self, shapes: Shapes, world_size: int, dtype: torch.dtype) -> list[ColumnCodec]:
        return Int8Codec.of_slices(shapes, world_size, dtype, per_row=self.scale == "row")


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
