"""The communicator: the collective operations of a gang.

The communicator is the only door to ``torch.distributed``'s collectives.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from sparkdl.comm.certificates import Certificate
from sparkdl.comm.process_group import peer_errors
from sparkdl.comm.tree_sums import sum_along_tree
from sparkdl.comm.worker_environment import numbered

_SMALL_BYTES = 16 << 10
_MANY_RANKS = 8
"""From so many ranks on, sums of up to `_SMALL_BYTES` that are waited for go along a tree.

A tree is faster than a ring up to ``a / b (W - 1 - L) / (L - (W - 1) / W)`` bytes, where
``L = log2 W``, ``a`` is what a message takes and ``b`` what a byte takes. That is 1.9 ``a / b`` for
8 ranks and more for more, and ``a / b`` is 20 KB and more on usual networks.
"""


class Communicator(Protocol):
    """Collective calls among the gang. All ranks must make the same calls in the same order.

    ``bytes_sent`` counts what this rank has sent so far, as the algorithms have it that serve the
    calls: of a tensor of ``n`` bytes an all-reduce sends ``2 n (W - 1) / W`` (a ring; along a tree
    ``n`` to the parent and to each child), an
    all-gather ``n (W - 1)``, an all-to-all ``n (W - 1) / W``, a broadcast ``n (W - 1)`` from its
    source, an exchange or a send ``n``.
    """

    rank: int
    world_size: int
    nodes: tuple[int, ...]
    """Number of each rank's node, from 0 in the order of the nodes' first ranks."""
    bytes_sent: int
    timeout_seconds: float
    """Longest wait for the peers in one collective."""
    address: str
    """Address of this rank's host that the peers can reach."""
    certificate: Certificate | None
    """Certificate that ranks show each other on connections of their own; None in a gang of one."""

    @property
    def waited_seconds(self) -> float:
        """Seconds that this rank was seen to wait for peers that had not come yet.

        0 where it is not known what of a collective is waiting.
        """
        return 0.0

    def close(self) -> None:
        """Give back what was taken for the sums, also after a failure; waits for nobody."""
        return None

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Zeros, ``(numel,)``, for what will be summed often.

        Collective, as a topology may put the tensor where the peers see it too. The memory is kept
        as long as the communicator.
        """
        return torch.zeros(numel, dtype=dtype, device=device)

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Sum ``tensor`` over all ranks, in place."""
        self.all_reduce_async(tensor).wait()

    def all_reduce_async(self, tensor: torch.Tensor) -> Pending:
        """Start a sum over all ranks; the result is there after ``wait()``."""

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensors of all ranks, which have equal shapes: ``(world_size, *shape)``."""
        out = tensor.new_empty((self.world_size, *tensor.shape))
        self.all_gather_async(tensor, out).wait()
        return out

    def all_gather_async(self, tensor: torch.Tensor, out: torch.Tensor) -> Pending:
        """Start to fill ``out``, ``(world_size, *shape)``, with the tensors of all ranks."""

    def all_to_all_async(self, tensor: torch.Tensor, out: torch.Tensor) -> Pending:
        """Start to send row ``r`` of ``tensor`` to rank ``r``; row ``r`` of ``out`` comes from it.

        Both are contiguous, ``(world_size, *shape)``.
        """

    def exchange(self, tensor: torch.Tensor, peer: int) -> torch.Tensor:
        """Swap tensors of equal shape with ``peer``, which must call as well; returns its own."""

    def send(self, tensor: torch.Tensor, to: int) -> None:
        """Send to one rank, which must `receive`; may wait for it."""

    def receive(self, tensor: torch.Tensor, source: int) -> None:
        """Overwrite ``tensor`` with what ``source`` sends."""

    def send_bytes(self, data: bytes, to: int) -> None:
        """Send to one rank, which must call `receive_bytes`."""

    def receive_bytes(self, source: int) -> bytes:
        """Receive what ``source`` sends by `send_bytes`."""

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> None:
        """Overwrite ``tensor`` on all ranks with that of ``source``."""

    def broadcast_bytes(self, data: bytes | None, source: int = 0) -> bytes:
        """Give ``data`` of ``source`` to all ranks; the others pass None."""

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        """Every rank's ``data``, in rank order, on every rank."""

    def barrier(self) -> None:
        """Return when all ranks have called."""

    def split(self, groups: Sequence[Sequence[int]]) -> Communicator:
        """A communicator among the ranks of this rank's group, numbered from 0 in rank order.

        Collective over all ranks, which pass the same ``groups``: each rank is in exactly one.
        """


class Pending(Protocol):
    """A collective under way."""

    def wait(self) -> None:
        """Return when the result is there."""


class Done:
    """A collective whose result is there."""

    def wait(self) -> None:
        return None


class LocalCommunicator(Communicator):
    """A gang of one: every collective is the identity."""

    rank = 0
    world_size = 1
    nodes: tuple[int, ...] = (0,)
    bytes_sent = 0
    timeout_seconds = math.inf
    address = "127.0.0.1"
    certificate = None

    def all_reduce_async(self, tensor: torch.Tensor) -> Pending:
        return Done()

    def all_gather_async(self, tensor: torch.Tensor, out: torch.Tensor) -> Pending:
        out[0].copy_(tensor)
        return Done()

    def all_to_all_async(self, tensor: torch.Tensor, out: torch.Tensor) -> Pending:
        out.copy_(tensor)
        return Done()

    def exchange(self, tensor: torch.Tensor, peer: int) -> torch.Tensor:
        return tensor.clone()

    def send(self, tensor: torch.Tensor, to: int) -> None:
        raise AssertionError("a gang of one has no peer")

    def receive(self, tensor: torch.Tensor, source: int) -> None:
        raise AssertionError("a gang of one has no peer")

    def send_bytes(self, data: bytes, to: int) -> None:
        raise AssertionError("a gang of one has no peer")

    def receive_bytes(self, source: int) -> bytes:
        raise AssertionError("a gang of one has no peer")

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> None:
        return None

    def broadcast_bytes(self, data: bytes | None, source: int = 0) -> bytes:
        assert data is not None
        return data

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        return [data]

    def barrier(self) -> None:
        return None

    def split(self, groups: Sequence[Sequence[int]]) -> Communicator:
        return self


def counting_anew(comm: Communicator) -> Communicator:
    """The same communicator with a count of its own of the bytes that it sends."""
    counting = copy.copy(comm)
    counting.bytes_sent = 0
    return counting


class Topology:
    """The ways along which a sum over all ranks is formed; this one is torch's, mostly a ring."""

    @property
    def waited_seconds(self) -> float:
        return 0.0

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.zeros(numel, dtype=dtype, device=device)

    def start(self, comm: ProcessGroupCommunicator, tensor: torch.Tensor) -> Pending:
        """Start to sum ``tensor``; what is sent for it is counted by ``comm``."""
        return comm.all_reduce_by_torch(tensor)

    def close(self) -> None:
        return None


class ProcessGroupCommunicator(Communicator):
    """The gang behind torch's default process group, which must be initialized, or a part of it.

    Sums are formed along ``topology``, which `comm.topology.arrange` chooses.
    """

    def __init__(
        self,
        *,
        nodes: Sequence[int] | None = None,
        device: str = "cpu",
        timeout_seconds: float = 600.0,
        address: str = "127.0.0.1",
        certificate: Certificate | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """Wrap ``group``, or the default one.

        ``nodes`` are the ranks' (None: all are on one), ``device`` is where their tensors are. The
        rest is as the class names it, and equal to what `process_group` was given.
        """
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        self.nodes = tuple(nodes) if nodes is not None else (0,) * self.world_size
        assert len(self.nodes) == self.world_size
        self.bytes_sent = 0
        self.timeout_seconds = timeout_seconds
        self.address = address
        self.certificate = certificate
        self.topology = Topology()
        self._device = device
        self._group = group

    @property
    def group(self) -> dist.ProcessGroup:
        """Torch's group of these ranks."""
        world = dist.group.WORLD if self._group is None else self._group
        assert world is not None
        return world

    @property
    def waited_seconds(self) -> float:
        return self.topology.waited_seconds

    def close(self) -> None:
        self.topology.close()

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return self.topology.allocate(numel, dtype, device)

    def all_reduce(self, tensor: torch.Tensor) -> None:
        if self.sums_along_tree(tensor):
            sum_along_tree(self, tensor.detach())
        else:
            super().all_reduce(tensor)

    def sums_along_tree(self, tensor: torch.Tensor) -> bool:
        """Return True if `all_reduce` sends ``tensor`` along a tree, as gloo has rings only."""
        is_small = tensor.nbytes <= _SMALL_BYTES and self.world_size >= _MANY_RANKS
        is_plain = type(self.topology) is Topology and tensor.device.type == "cpu"
        return is_small and is_plain and tensor.is_contiguous()

    def all_reduce_async(self, tensor: torch.Tensor) -> Pending:
        return self.topology.start(self, tensor)

    def all_reduce_by_torch(self, tensor: torch.Tensor) -> Pending:
        """Start a sum as torch forms it."""
        self.bytes_sent += 2 * (self.world_size - 1) * tensor.nbytes // self.world_size
        with peer_errors("all_reduce"):
            return _PendingWork(
                "all_reduce", dist.all_reduce(tensor, group=self._group, async_op=True)
            )

    def all_gather_async(self, tensor: torch.Tensor, out: torch.Tensor) -> Pending:
        self.bytes_sent += (self.world_size - 1) * tensor.nbytes
        with peer_errors("all_gather"):
            work = dist.all_gather(list(out.unbind(0)), tensor, group=self._group, async_op=True)
            return _PendingWork("all_gather", work)

    def all_to_all_async(self, tensor: torch.Tensor, out: torch.Tensor) -> Pending:
        self.bytes_sent += (self.world_size - 1) * tensor[0].nbytes
        with peer_errors("all_to_all"):
            work = dist.all_to_all_single(out, tensor, group=self._group, async_op=True)
            return _PendingWork("all_to_all", work)

    def exchange(self, tensor: torch.Tensor, peer: int) -> torch.Tensor:
        theirs = torch.empty_like(tensor)
        self.bytes_sent += tensor.nbytes
        with peer_errors("exchange"):
            sending = dist.isend(tensor, group=self._group, group_dst=peer)
            receiving = dist.irecv(theirs, group=self._group, group_src=peer)
            assert sending is not None and receiving is not None
            sending.wait()
            receiving.wait()
        return theirs

    def send(self, tensor: torch.Tensor, to: int) -> None:
        self.bytes_sent += tensor.nbytes
        with peer_errors("send"):
            dist.send(tensor, group=self._group, group_dst=to)

    def receive(self, tensor: torch.Tensor, source: int) -> None:
        with peer_errors("receive"):
            dist.recv(tensor, group=self._group, group_src=source)

    def send_bytes(self, data: bytes, to: int) -> None:
        self.send(torch.tensor([len(data)], dtype=torch.int64, device=self._device), to)
        if data:
            self.send(torch.frombuffer(bytearray(data), dtype=torch.uint8).to(self._device), to)

    def receive_bytes(self, source: int) -> bytes:
        size = torch.empty(1, dtype=torch.int64, device=self._device)
        self.receive(size, source)
        data = torch.empty(int(size.item()), dtype=torch.uint8, device=self._device)
        if len(data):
            self.receive(data, source)
        return _bytes(data, len(data))

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> None:
        if self.rank == source:
            self.bytes_sent += (self.world_size - 1) * tensor.nbytes
        with peer_errors("broadcast"):
            dist.broadcast(tensor, group=self._group, group_src=source)

    def broadcast_bytes(self, data: bytes | None, source: int = 0) -> bytes:
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
        sizes = torch.zeros(self.world_size, dtype=torch.int64, device=self._device)
        sizes[self.rank] = len(data)
        self.all_reduce(sizes)
        longest = max(1, int(sizes.max().item()))
        mine = torch.zeros(longest, dtype=torch.uint8, device=self._device)
        if data:
            mine[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        parts = self.all_gather(mine)
        return [_bytes(part, int(size)) for part, size in zip(parts, sizes.tolist(), strict=True)]

    def barrier(self) -> None:
        self.all_reduce(torch.zeros(1, device=self._device))

    def split(self, groups: Sequence[Sequence[int]]) -> ProcessGroupCommunicator:
        assert self._group is None, "parts cannot be split again"
        assert sorted(rank for group in groups for rank in group) == list(range(self.world_size))
        mine = next(group for group in groups if self.rank in group)
        with peer_errors("split"):
            seconds = timedelta(seconds=self.timeout_seconds)
            parts = [dist.new_group(sorted(group), timeout=seconds) for group in groups]
        return ProcessGroupCommunicator(
            nodes=numbered([self.nodes[rank] for rank in sorted(mine)]),
            device=self._device,
            timeout_seconds=self.timeout_seconds,
            address=self.address,
            certificate=self.certificate,
            group=parts[groups.index(mine)],
        )


class _PendingWork:
    def __init__(self, what: str, work: Any) -> None:
        self._what = what
        self._work = work

    def wait(self) -> None:
        with peer_errors(self._what):
            self._work.wait()


def _bytes(buffer: torch.Tensor, size: int) -> bytes:
    return bytes(buffer[:size].cpu().numpy().tobytes())
