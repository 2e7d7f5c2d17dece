"""Compressions to fp16 and bf16 numbers, in which values travel and are summed.

Shares are already parts of a mean, so that sums overflow only where the mean does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from sparkdl.comm.communicator import Communicator, Pending
from sparkdl.comm.compression.compression import (
    After,
    Compression,
    Compressor,
    Shapes,
    all_reduce_bytes,
    count,
)


@dataclass(frozen=True, kw_only=True)
class Cast(Compression):
    """All-reduce in a smaller type; base of the two below."""

    keeps_residual: ClassVar[bool] = False
    dtype: ClassVar[torch.dtype]

    def make(self, views: Sequence[torch.Tensor], comm: Communicator) -> Compressor:
        return CastCompressor(self.dtype, comm)

    def wire_bytes(self, shapes: Shapes, element_size: int, world_size: int) -> int:
        return all_reduce_bytes(count(shapes) * self.dtype.itemsize, world_size)


@dataclass(frozen=True, kw_only=True)
class FP16Compression(Cast):
    """Send fp16: 11 bits of precision, but infinite from 65520 and coarse below 6e-5."""

    dtype: ClassVar[torch.dtype] = torch.float16


@dataclass(frozen=True, kw_only=True)
class BF16Compression(Cast):
    """Send bf16: 8 bits of precision, and the range of float32."""

    dtype: ClassVar[torch.dtype] = torch.bfloat16


class CastCompressor(Compressor):
    """See `Cast`."""

    def __init__(self, dtype: torch.dtype, comm: Communicator) -> None:
        self._dtype = dtype
        self._comm = comm

    def start(self, flat: torch.Tensor) -> Pending:
        small = flat.to(self._dtype, copy=True)
        pending = [self._comm.all_reduce_async(small)] if len(flat) else []
        return After(pending, lambda: flat.copy_(small))
