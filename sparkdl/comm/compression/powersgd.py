"""PowerSGD: a gradient as two thin matrices, by one step of power iteration and a residual.

Vogels et al., "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization",
NeurIPS 2019, with warm start and error feedback. M is a rank's share with its residual, as a
matrix of one row per output: ``P = sum of M Q``; ``P`` is made orthonormal; ``Q = sum of M' P``;
all ranks get ``P Q'``, and each keeps ``M - P (M' P)'``. Tensors that would not become smaller,
among them all of one dimension, travel as they are in the message of the Ps.

torch's ``powerSGD_hook`` has the same rule, but starts its collectives from threads, in an order
that differs between ranks when several buckets are under way.
"""

from __future__ import annotations

import functools
import math
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
    shapes_of,
)
from sparkdl.config import require


@dataclass(frozen=True, kw_only=True)
class PowerSGD(Compression):
    """Send a low-rank approximation: ``rank (n + m)`` values of a matrix of ``n m``."""

    rank: int = 2
    """Rank of the approximation; more is closer to the gradient, and costs as much more."""
    warmup_steps: int = 0
    """First exchanges, in which values travel as they are; a tenth of all helps some models."""
    min_compression: float = 2.0
    """Tensors that would become less than this many times smaller travel as they are."""
    seed: int = 0
    """For the first Q."""

    def __post_init__(self) -> None:
        least = self.min_compression
        require(self.rank >= 1, "rank must be at least 1", self.rank)
        require(self.warmup_steps >= 0, "warmup_steps must not be negative", self.warmup_steps)
        require(1 <= least < math.inf, "min_compression must be at least 1", least)

    def make(self, views: Sequence[torch.Tensor], comm: Communicator) -> Compressor:
        return PowerSGDCompressor(self, shapes_of(views), comm, views[0])

    def wire_bytes(self, shapes: Shapes, element_size: int, world_size: int) -> int:
        plan = Plan(shapes, self.rank, self.min_compression)
        sizes = (plan.first_numel, plan.second_numel)
        return sum(all_reduce_bytes(size * element_size, world_size) for size in sizes)


class Plan:
    """The tensors of a bucket that are compressed, and the sizes of the messages."""

    def __init__(self, shapes: Shapes, rank: int, min_compression: float) -> None:
        self.rank = rank
        self.matrices: list[tuple[int, int, int]] = []
        """First place, rows and columns."""
        self.others: list[tuple[int, int]] = []
        """First and last place + 1."""
        place = 0
        for shape in shapes:
            numel = count([shape])
            rows = shape[0] if shape else 1
            columns = numel // rows if rows else 0
            if (rows + columns) * rank * min_compression < numel:
                self.matrices.append((place, rows, columns))
            elif numel:
                self.others.append((place, place + numel))
            place += numel
        self.first_numel = rank * sum(rows for _, rows, _ in self.matrices)
        self.first_numel += sum(stop - start for start, stop in self.others)
        self.second_numel = rank * sum(columns for _, _, columns in self.matrices)

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """The matrices in a bucket."""
        return [flat[a : a + n * m].view(n, m) for a, n, m in self.matrices]

    def ps(self, first: torch.Tensor) -> list[torch.Tensor]:
        """The Ps, ``(rows, rank)``, in the first message."""
        return [piece.view(-1, self.rank) for piece in self._split(first, 1)]

    def qs(self, second: torch.Tensor) -> list[torch.Tensor]:
        """The Qs, ``(rank, columns)``, in the second message; so they are multiplied faster."""
        return [piece.view(self.rank, -1) for piece in self._split(second, 2)]

    def _split(self, message: torch.Tensor, side: int) -> list[torch.Tensor]:
        sizes = [self.rank * matrix[side] for matrix in self.matrices]
        return list(torch.split(message[: sum(sizes)], sizes))


class PowerSGDCompressor(Compressor):
    """See `PowerSGD`."""

    shared_state: ClassVar = ("step", "q")
    rank_state: ClassVar = ("residual",)

    def __init__(
        self, options: PowerSGD, shapes: Shapes, comm: Communicator, like: torch.Tensor
    ) -> None:
        self._comm = comm
        self._warmup_steps = options.warmup_steps
        self._step = 0
        self._plan = plan = Plan(shapes, options.rank, options.min_compression)
        self._residual = like.new_zeros(count(shapes))
        self._first = like.new_empty(plan.first_numel)
        generator = torch.Generator().manual_seed(options.seed)
        start = torch.randn(plan.second_numel, generator=generator, dtype=torch.float64)
        self._q = start.to(like)

    def start(self, flat: torch.Tensor) -> Pending:
        self._step += 1
        if self._step <= self._warmup_steps or not self._plan.matrices:
            return self._comm.all_reduce_async(flat) if len(flat) else After([], lambda: None)
        ps, qs = self._plan.ps(self._first), self._plan.qs(self._q)
        kept = self._plan.views(self._residual)
        for share, m, p, q in zip(self._plan.views(flat), kept, ps, qs, strict=True):
            torch.mm(m.add_(share), q.T, out=p)
        for (start, stop), part in self._others():
            part.copy_(flat[start:stop])
        pending = self._comm.all_reduce_async(self._first)
        return After([pending], functools.partial(self._finish, flat))

    def _finish(self, flat: torch.Tensor) -> None:
        ps = [orthonormal(p) for p in self._plan.ps(self._first)]
        qs = self._plan.qs(self._q)
        kept = self._plan.views(self._residual)
        for m, p, q in zip(kept, ps, qs, strict=True):
            torch.mm(p.T, m, out=q)
            m.addmm_(p, q, alpha=-1)
        self._comm.all_reduce(self._q)
        for m, p, q in zip(self._plan.views(flat), ps, qs, strict=True):
            torch.mm(p, q, out=m)
        for (start, stop), part in self._others():
            flat[start:stop] = part

    def _others(self) -> list[tuple[tuple[int, int], torch.Tensor]]:
        """The places of the tensors that travel as they are, and their parts of the message."""
        sizes = [stop - start for start, stop in self._plan.others]
        parts = torch.split(self._first[len(self._first) - sum(sizes) :], sizes) if sizes else ()
        return list(zip(self._plan.others, parts, strict=True))


def orthonormal(p: torch.Tensor) -> torch.Tensor:
    """Columns of length 1, at right angles, that span those of ``p``, also if these vanish."""
    q: torch.Tensor = torch.linalg.qr(p).Q
    return q
