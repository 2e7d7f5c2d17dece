"""How does a worker talk to its peers?

The communicator is the only door to ``torch.distributed``. Its errors have a type of their own,
so that the supervisor can tell a dead peer from a mistake in the user's code.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from sparkdl.errors import CommunicationError


class Communicator(Protocol):
    """Collective calls among the gang. All ranks must make the same calls in the same order."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Sum ``tensor`` over all ranks, in place."""

    def all_reduce_async(self, tensor: torch.Tensor) -> Pending:
        """Start a sum over all ranks; the result is there after ``wait()``."""

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> None:
        """Overwrite ``tensor`` on all ranks with that of ``source``."""

    def broadcast_bytes(self, data: bytes | None, source: int = 0) -> bytes:
        """Give ``data`` of ``source`` to all ranks; the others pass None."""

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        """Every rank's ``data``, in rank order, on every rank."""

    def barrier(self) -> None:
        """Return when all ranks have called."""


class Pending(Protocol):
    """A collective under way."""

    def wait(self) -> None:
        """Return when the result is there."""


class _Done:
    def wait(self) -> None:
        return None


class LocalCommunicator:
    """A gang of one: every collective is the identity."""

    rank = 0
    world_size = 1
    local_rank = 0
    local_world_size = 1

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Leave ``tensor`` as it is."""

    def all_reduce_async(self, tensor: torch.Tensor) -> Pending:
        """Leave ``tensor`` as it is."""
        return _Done()

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> None:
        """Leave ``tensor`` as it is."""

    def broadcast_bytes(self, data: bytes | None, source: int = 0) -> bytes:
        """Return ``data``."""
        assert data is not None
        return data

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        """Return ``[data]``."""
        return [data]

    def barrier(self) -> None:
        """Return at once."""


class ProcessGroupCommunicator:
    """The gang behind torch's default process group, which must be initialized."""

    def __init__(
        self, *, local_rank: int = 0, local_world_size: int = 1, device: str = "cpu"
    ) -> None:
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.local_rank = local_rank
        self.local_world_size = local_world_size
        self._device = device

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """See `Communicator.all_reduce`."""
        with _peer_errors("all_reduce"):
            dist.all_reduce(tensor)

    def all_reduce_async(self, tensor: torch.Tensor) -> Pending:
        """See `Communicator.all_reduce_async`."""
        with _peer_errors("all_reduce"):
            return _PendingWork(dist.all_reduce(tensor, async_op=True))

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> None:
        """See `Communicator.broadcast`."""
        with _peer_errors("broadcast"):
            dist.broadcast(tensor, source)

    def broadcast_bytes(self, data: bytes | None, source: int = 0) -> bytes:
        """See `Communicator.broadcast_bytes`."""
        size = torch.tensor([len(data or b"")], dtype=torch.int64, device=self._device)
        self.broadcast(size, source)
        if self.rank == source:
            buffer = torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8)
        else:
            buffer = torch.empty(max(1, int(size.item())), dtype=torch.uint8)
        buffer = buffer.to(self._device)
        self.broadcast(buffer, source)
        return data or b"" if self.rank == source else _bytes(buffer, int(size.item()))

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        """See `Communicator.all_gather_bytes`."""
        sizes = torch.zeros(self.world_size, dtype=torch.int64, device=self._device)
        sizes[self.rank] = len(data)
        self.all_reduce(sizes)
        longest = max(1, int(sizes.max().item()))
        mine = torch.zeros(longest, dtype=torch.uint8, device=self._device)
        if data:
            mine[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        parts = [torch.empty_like(mine) for _ in range(self.world_size)]
        with _peer_errors("all_gather"):
            dist.all_gather(parts, mine)
        return [_bytes(part, int(size)) for part, size in zip(parts, sizes.tolist(), strict=True)]

    def barrier(self) -> None:
        """See `Communicator.barrier`."""
        self.all_reduce(torch.zeros(1, device=self._device))


class _PendingWork:
    def __init__(self, work: Any) -> None:
        self._work = work

    def wait(self) -> None:
        with _peer_errors("all_reduce"):
            self._work.wait()


@contextlib.contextmanager
def process_group(
    *,
    backend: str,
    store: Any,
    rank: int,
    world_size: int,
    timeout_seconds: float,
    address: str | None = None,
) -> Iterator[None]:
    """Initialize torch's default process group, and destroy it at the end, also after a failure.

    Args:
        backend: ``gloo`` or ``nccl``.
        store: a ``torch.distributed.Store`` shared by all ranks.
        rank: this worker's rank.
        world_size: number of ranks.
        timeout_seconds: longest wait in one collective.
        address: address of this host that the peers can reach; None lets gloo look it up.

    Raises:
        CommunicationError: the peers did not meet in time.
    """
    options: Any = None
    if backend == "gloo" and address is not None:
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
        options._timeout = timedelta(seconds=timeout_seconds)
    with _peer_errors("rendezvous"):
        dist.init_process_group(
            backend,
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout_seconds),
            pg_options=options,
        )
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def _peer_errors(what: str) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, OSError) as error:  # gloo and NCCL raise plain RuntimeErrors
        raise CommunicationError(f"{what} failed: {error}") from error


def _bytes(buffer: torch.Tensor, size: int) -> bytes:
    return bytes(buffer[:size].cpu().numpy().tobytes())
