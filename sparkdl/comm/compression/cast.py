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
    Codec,
    Compression,
    Compressor,
    Shapes,
    all_reduce_bytes,
    count,
)
from sparkdl.comm.compression.dense_reduce_scatter import cut


@dataclass(frozen=True, kw_only=True)
class Cast(Compression):
    """All-reduce in a smaller type; base of the two below."""

    keeps_residual: ClassVar[bool] = False
    dtype: ClassVar[torch.dtype]

    def make(self, views: Sequence[torch.Tensor], comm: Communicator) -> Compressor:
        return CastCompressor(self.dtype, comm)

    def wire_bytes(self, shapes: Shapes, element_size: int, world_size: int) -> int:
        return all_reduce_bytes(count(shapes) * self.dtype.itemsize, world_size)

    def codecs_of(
        self, shape: tuple[int, ...], num_slices: int, dtype: torch.dtype
    ) -> Sequence[Codec]:
        lengths = [stop - start for start, stop in cut(count([shape]), num_slices)]
        return [CastCodec(self.dtype, length) for length in lengths]


@dataclass(frozen=True, kw_only=True)
class FP16Compression(Cast):
    """Send fp16: 11 bits of precision, but infinite from 65520 and coarse below 6e-5."""

    dtype: ClassVar[torch.dtype] = torch.float16


@dataclass(frozen=True, kw_only=True)
class BF16Compression(Cast):
    """Send bf16: 8 bits of precision, and the range of float32."""

    dtype: ClassVar[torch.dtype] = torch.bfloat16


class CastCodec(Codec):
    """The numbers of one slice in a smaller type; what that loses is not kept."""

    def __init__(self, dtype: torch.dtype, length: int) -> None:
        self._dtype = dtype
        self.message_bytes = length * dtype.itemsize

    def encode(self, values: torch.Tensor, residual: torch.Tensor, message: torch.Tensor) -> None:
        message.view(self._dtype).copy_(values)

    def decode_add(self, message: torch.Tensor, out: torch.Tensor) -> None:
        out.add_(message.view(self._dtype))


class CastCompressor(Compressor):
    """See `Cast`."""

    def __init__(self, dtype: torch.dtype, comm: Communicator) -> None:
        self._dtype = dtype
        self._comm = comm

    def start(self, flat: torch.Tensor) -> Pending:
        small = flat.to(self._dtype, copy=True)
        pending = [self._comm.all_reduce_async(small)] if len(flat) else []
        return After(pending, lambda: flat.copy_(small))
