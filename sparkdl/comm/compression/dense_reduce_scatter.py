"""The sum of dense messages in two stages, with an owner for each slice.

A bucket is cut into one slice per rank. Every rank encodes all slices of its share and sends
each to its owner (an all-to-all); the owners decode, sum, encode the sums and send them to all (an
all-gather). What either encoding leaves out is kept and added the next time (Seide et al.,
"1-Bit Stochastic Gradient Descent and its Application to Data-Parallel Distributed Training of
Speech DNNs", Interspeech 2014).
"""

from __future__ import annotations

import functools
from abc import abstractmethod
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
    count,
    shapes_of,
)

BLOCK = 1 << 20
"""Values that are worked on at a time. All passes but the first meet them in the cache; in fewer,
the time that torch takes to begin a pass would count."""


def cut(numel: int, world_size: int) -> list[tuple[int, int]]:
    """First and last place + 1 of each rank's slice; the last slices may be short or empty."""
    length = -(-numel // (16 * world_size)) * 16
    return [
        (min(rank * length, numel), min((rank + 1) * length, numel)) for rank in range(world_size)
    ]


def blocks_of(numel: int) -> list[tuple[int, int]]:
    """First and last place + 1 of each block of a row of values."""
    return [(start, min(start + BLOCK, numel)) for start in range(0, numel, BLOCK)]


@dataclass(frozen=True, kw_only=True)
class ScatterCompression(Compression):
    """Base of compressions whose sums are formed in two stages."""

    warmup_steps = 0
    """First exchanges, in which values travel as they are."""

    @abstractmethod
    def codecs(
        self, shapes: Shapes, world_size: int, dtype: torch.dtype
    ) -> tuple[Sequence[Codec], Sequence[Codec]]:
        """Return the codecs of the shares and those of the sums, one for each slice of a bucket."""

    def make(self, views: Sequence[torch.Tensor], comm: Communicator) -> Compressor:
        shapes = shapes_of(views)
        first, second = self.codecs(shapes, comm.world_size, views[0].dtype)
        numel, steps = count(shapes), self.warmup_steps
        return ScatterCompressor(comm, first, second, numel, views[0], steps)

    def wire_bytes(self, shapes: Shapes, element_size: int, world_size: int) -> int:
        dtype = torch.float64 if element_size == 8 else torch.float32
        stages = self.codecs(shapes, world_size, dtype)
        sent = sum(codecs[0].message_bytes for codecs in stages)
        return (world_size - 1) * sent if count(shapes) else 0


class ScatterCompressor(Compressor):
    """Exchanges one bucket of ``numel`` values in two stages; see `ScatterCompression`.

    ``like`` is a tensor of the bucket's dtype and device.
    """

    shared_state: ClassVar = ("step",)
    rank_state: ClassVar = ("residual", "sums_residual")

    def __init__(
        self,
        comm: Communicator,
        first: Sequence[Codec],
        second: Sequence[Codec],
        numel: int,
        like: torch.Tensor,
        warmup_steps: int = 0,
    ) -> None:
        self._comm = comm
        self._first = first
        self._second = second
        self._bounds = cut(numel, comm.world_size)
        self._warmup_steps = warmup_steps
        self._step = 0
        start, stop = self._bounds[comm.rank]
        self._residual = like.new_zeros(numel)
        self._sums_residual = like.new_zeros(stop - start)
        self._sums = like.new_empty(stop - start)
        self._sent = _messages(first, like)
        self._received = _messages(first, like)
        self._gathered = _messages(second, like)
        self._message = torch.zeros_like(self._gathered[0])

    def start(self, flat: torch.Tensor) -> Pending:
        self._step += 1
        if self._step <= self._warmup_steps or not len(flat):
            return self._comm.all_reduce_async(flat) if len(flat) else After([], lambda: None)
        for codec, (start, stop), message in zip(
            self._first, self._bounds, self._sent, strict=True
        ):
            codec.encode(flat[start:stop], self._residual[start:stop], message)
        pending = self._comm.all_to_all_async(self._sent, self._received)
        return After([pending], functools.partial(self._finish, flat))

    def _finish(self, flat: torch.Tensor) -> None:
        rank = self._comm.rank
        self._sums.zero_()
        for message in self._received:
            self._first[rank].decode_add(message, self._sums)
        self._second[rank].encode(self._sums, self._sums_residual, self._message)
        self._comm.all_gather_async(self._message, self._gathered).wait()
        flat.zero_()
        for codec, (start, stop), message in zip(
            self._second, self._bounds, self._gathered, strict=True
        ):
            codec.decode_add(message, flat[start:stop])


def _messages(codecs: Sequence[Codec], like: torch.Tensor) -> torch.Tensor:
    size = codecs[0].message_bytes
    return torch.zeros(len(codecs), size, dtype=torch.uint8, device=like.device)
