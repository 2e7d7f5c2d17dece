"""Ranks that are threads, and exchanges of compressions to run on them.

`Threads.run` is for any number of ranks in this process; its functions run on a `Gang` as well.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from sparkdl.comm.communicator import LocalCommunicator, Pending
from sparkdl.comm.compression.compression import Compression, Compressor
from sparkdl.comm.compression.int8 import Int8Compression
from sparkdl.comm.compression.onebit import OneBitCompression
from sparkdl.comm.compression.powersgd import PowerSGD
from sparkdl.comm.compression.threshold import ThresholdCompression
from sparkdl.comm.compression.topk import TopKCompression
from sparkdl.comm.compression.twobit import TwoBitCompression
from sparkdl.storage.tensor_tree import snapshot, unpack

Shapes = Sequence[tuple[int, ...]]

SHAPES: Shapes = [(7, 5), (13,), (3, 2, 20), (), (0, 4), (40, 33), (1, 1)]
"""No size is divisible by 2, 3, 8 or 16, but for accident."""

KEEPING: dict[str, Compression] = {
    "int8": Int8Compression(),
    "int8 by tensor": Int8Compression(scale="tensor"),
    "onebit": OneBitCompression(warmup_steps=0),
    "twobit": TwoBitCompression(threshold=0.7),
    "threshold": ThresholdCompression(threshold=2.5, max_sparsity=0.03, residual_clip=None),
    "threshold, dense": ThresholdCompression(threshold=0.3, residual_clip=None),
    "threshold, found": ThresholdCompression(max_sparsity=0.1, residual_clip=None),
    "topk": TopKCompression(density=0.05),
    "powersgd": PowerSGD(rank=1),
}
"""Compressions that keep what they have not sent, with options that suit normal random values."""


class ThreadComm(LocalCommunicator):
    """One of several ranks of a process; every collective is done when it is called."""

    def __init__(self, rank: int, world_size: int, shared: list[Any], meet: threading.Barrier):
        self.rank = rank
        self.world_size = world_size
        self._shared = shared
        self._meet = meet

    def _swap(self, tensor: torch.Tensor, parts: float) -> list[torch.Tensor]:
        """The tensors of all ranks; ``parts`` of this one's are sent, see `Communicator`."""
        self.bytes_sent += int(tensor.nbytes * parts)
        self._shared[self.rank] = tensor.clone()
        self._meet.wait(20)
        tensors = list(self._shared)
        self._meet.wait(20)
        return tensors

    def all_reduce_async(self, tensor: torch.Tensor) -> Pending:
        parts = 2 * (self.world_size - 1) / self.world_size
        tensor.copy_(torch.stack(self._swap(tensor, parts)).sum(0, dtype=tensor.dtype))
        return super().all_reduce_async(tensor)

    def all_reduce(self, tensor: torch.Tensor) -> None:
        self.all_reduce_async(tensor)

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.stack(self._swap(tensor, self.world_size - 1))

    def all_gather_async(self, tensor: torch.Tensor, out: torch.Tensor) -> Pending:
        out.copy_(self.all_gather(tensor))
        return super().all_reduce_async(tensor)

    def all_to_all_async(self, tensor: torch.Tensor, out: torch.Tensor) -> Pending:
        parts = (self.world_size - 1) / self.world_size
        out.copy_(torch.stack([rows[self.rank] for rows in self._swap(tensor, parts)]))
        return super().all_reduce_async(tensor)


class Threads:
    """As `tests.gang.Gang`, but in this process."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        meet = threading.Barrier(self.world_size)
        shared: list[Any] = [None] * self.world_size

        def work(rank: int) -> Any:
            try:
                return function(ThreadComm(rank, self.world_size, shared, meet), *arguments)
            except BaseException:
                meet.abort()
                raise

        with ThreadPoolExecutor(self.world_size) as pool:
            return list(pool.map(work, range(self.world_size)))


@dataclass
class Exchanged:
    """What one rank has seen of some exchanges."""

    estimates: list[torch.Tensor]
    shares: torch.Tensor
    """Sum over the exchanges of what this rank had to send."""
    state: dict[str, Any]
    rank_state: dict[str, Any]
    bytes_sent: int
    """By the last exchange."""


def random_share(comm: Any, step: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + comm.rank)
    return torch.randn(numel, generator=generator, dtype=dtype) / comm.world_size


def make(
    comm: Any, compression: Compression, shapes: Shapes, dtype: torch.dtype
) -> tuple[Compressor, int]:
    """A compressor, and the number of values of its bucket."""
    views = [torch.zeros(shape, dtype=dtype) for shape in shapes]
    return compression.make(views, comm), sum(view.numel() for view in views)


def exchange(
    comm: Any,
    compression: Compression,
    shapes: Shapes = SHAPES,
    dtype: torch.dtype = torch.float64,
    steps: int = 3,
    fill: float | None = None,
) -> Exchanged:
    """Some exchanges of random shares, or of shares that are all ``fill``."""
    compressor, numel = make(comm, compression, shapes, dtype)
    estimates = []
    shares = torch.zeros(numel, dtype=dtype)
    for step in range(steps):
        flat = random_share(comm, step, numel, dtype)
        if fill is not None:
            flat.fill_(fill)
        shares += flat
        before = comm.bytes_sent
        compressor.start(flat).wait()
        estimates.append(flat)
    return Exchanged(
        estimates,
        shares,
        compressor.state_dict(),
        compressor.rank_state_dict(),
        comm.bytes_sent - before,
    )


def unsent(found: Sequence[Exchanged], compression: Compression) -> torch.Tensor:
    """What all ranks together keep back, in units of shares."""
    kept = torch.stack([one.rank_state["residual"] for one in found]).sum(0)
    if isinstance(compression, TwoBitCompression | ThresholdCompression):
        kept /= len(found)  # kept in units of a rank's own estimate
    if "sums_residual" in found[0].rank_state:
        sums = torch.cat([one.rank_state["sums_residual"] for one in found])
        if not isinstance(compression, TwoBitCompression):
            kept += sums
    return kept


def stored(tree: Any) -> Any:
    """A state after it was in a checkpoint."""
    shot = snapshot(tree)
    return unpack(shot.value, shot.tensors)
