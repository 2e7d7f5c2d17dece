"""The base of topologies: a communicator that sums in its own way, and passes all else on."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator, Sequence

import torch

from sparkdl.comm.communicator import Communicator, Pending


class Topology(Communicator):
    """A `Communicator` that sums as the wrapped one does; subclasses sum in their own way.

    ``bytes_sent`` counts from zero what passes through this object. The wrapped communicator stays
    open when this one is closed.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self.rank = comm.rank
        self.world_size = comm.world_size
        self.nodes = comm.nodes
        self.timeout_seconds = comm.timeout_seconds
        self.address = comm.address
        self.certificate = comm.certificate
        self.bytes_sent = 0

    @property
    def waited_seconds(self) -> float:
        return self._comm.waited_seconds

    def close(self) -> None:
        """Give back what was taken for the sums, also after a failure; waits for nobody."""

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return self._comm.allocate(numel, dtype, device)

    def all_reduce_async(self, tensor: torch.Tensor) -> Pending:
        with self._counted(self._comm):
            return self._comm.all_reduce_async(tensor)

    def all_gather_async(self, tensor: torch.Tensor, out: torch.Tensor) -> Pending:
        with self._counted(self._comm):
            return self._comm.all_gather_async(tensor, out)

    def all_to_all_async(self, tensor: torch.Tensor, out: torch.Tensor) -> Pending:
        with self._counted(self._comm):
            return self._comm.all_to_all_async(tensor, out)

    def exchange(self, tensor: torch.Tensor, peer: int) -> torch.Tensor:
        with self._counted(self._comm):
            return self._comm.exchange(tensor, peer)

    def send(self, tensor: torch.Tensor, to: int) -> None:
        with self._counted(self._comm):
            self._comm.send(tensor, to)

    def receive(self, tensor: torch.Tensor, source: int) -> None:
        self._comm.receive(tensor, source)

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> None:
        with self._counted(self._comm):
            self._comm.broadcast(tensor, source)

    def broadcast_bytes(self, data: bytes | None, source: int = 0) -> bytes:
        with self._counted(self._comm):
            return self._comm.broadcast_bytes(data, source)

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        with self._counted(self._comm):
            return self._comm.all_gather_bytes(data)

    def barrier(self) -> None:
        with self._counted(self._comm):
            self._comm.barrier()

    def split(self, groups: Sequence[Sequence[int]]) -> Communicator:
        """See `Communicator.split`; the parts sum as the wrapped communicator's do."""
        return self._comm.split(groups)

    @contextlib.contextmanager
    def _counted(self, comm: Communicator) -> Iterator[None]:
        """Count what ``comm`` sends in the block."""
        before = comm.bytes_sent
        try:
            yield
        finally:
            self.bytes_sent += comm.bytes_sent - before


class DeferredTopology(Topology):
    """Sums that take several messages, one after the other: they are made in ``wait()``.

    Sums are made in the order in which they were started. Ranks must also wait in equal order
    among their other calls.
    """

    def __init__(self, comm: Communicator) -> None:
        super().__init__(comm)
        self.waiting: deque[_DeferredSum] = deque()
        """Those that were started and not made yet."""

    def all_reduce_async(self, tensor: torch.Tensor) -> Pending:
        started = _DeferredSum(self, tensor)
        self.waiting.append(started)
        return started

    def sum_now(self, tensor: torch.Tensor) -> None:
        """Sum the contiguous ``tensor`` over all ranks, in place."""
        raise NotImplementedError


class _DeferredSum:
    def __init__(self, topology: DeferredTopology, tensor: torch.Tensor) -> None:
        self._topology = topology
        self._tensor = tensor.detach()
        self.is_done = False

    def wait(self) -> None:
        while not self.is_done:
            self._topology.waiting.popleft().run()

    def run(self) -> None:
        dense = self._tensor.contiguous()
        self._topology.sum_now(dense)
        if dense is not self._tensor:
            self._tensor.copy_(dense)
        self.is_done = True
