"""Sums inside each node first, then between nodes, then out again.

The topology-aware sums of IBM's DDL (Cho et al., "PowerAI DDL", 2017): every byte crosses the slow
network as seldom as possible. Where all nodes have ``L`` ranks, each of these takes an ``L``-th of
the tensor between the nodes; otherwise the node's first rank takes all of it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from sparkdl.comm.communicator import Communicator, Pending, ProcessGroupCommunicator, counting_anew
from sparkdl.comm.topology.shared_sum import Shared, SharedSum, is_summable
from sparkdl.comm.topology.tree import DeferredTopology
from sparkdl.comm.tree_sums import spread_from_first, sum_at_first


def ranks_by_node(nodes: Sequence[int]) -> list[list[int]]:
    """The ranks of each node, given the node of each rank."""
    return [[r for r, n in enumerate(nodes) if n == node] for node in sorted(set(nodes))]


def groups_of(nodes: Sequence[int]) -> tuple[list[list[int]], list[list[int]]]:
    """Return the groups of ranks that sum together: inside nodes, and between them.

    Between nodes with unequal numbers of ranks, the first group holds each node's first rank, and
    the second those that have nobody to talk to.
    """
    inside = ranks_by_node(nodes)
    if is_even(nodes):
        return inside, [list(group) for group in zip(*inside, strict=True)]
    rest = sorted(rank for group in inside for rank in group[1:])
    return inside, [[group[0] for group in inside], rest]


def is_even(nodes: Sequence[int]) -> bool:
    """Return True if all nodes have the same number of ranks."""
    return len({list(nodes).count(node) for node in nodes}) == 1


class HierarchicalShared(Shared):
    """Sums inside the nodes in shared memory; between ``M`` nodes as `HierarchicalMessages`."""

    def __init__(self, node: SharedSum, across: ProcessGroupCommunicator) -> None:
        """``across`` holds this rank's peers on the other nodes, see `groups_of`."""
        super().__init__(node)
        self._across = across

    def start(self, comm: ProcessGroupCommunicator, tensor: torch.Tensor) -> Pending:
        if not is_summable(tensor):
            return super().start(comm, tensor)
        return self._node.start(tensor, functools.partial(self._sum_across, comm))

    def _sum_across(self, comm: Communicator, share: torch.Tensor) -> Pending:
        across = counting_anew(self._across)
        if self._across.sums_along_tree(share):
            return _LaterSum(comm, across, share)
        pending = across.all_reduce_async(share)
        comm.bytes_sent += across.bytes_sent
        return pending


class _LaterSum:
    """A small sum between nodes, which is made in ``wait()``; `SharedSum` waits in order."""

    def __init__(self, comm: Communicator, across: Communicator, share: torch.Tensor) -> None:
        self._comm = comm
        self._across = across
        self._share = share

    def wait(self) -> None:
        self._across.all_reduce(self._share)
        self._comm.bytes_sent += self._across.bytes_sent


class HierarchicalMessages(DeferredTopology):
    """Sums inside the nodes by messages, where memory cannot be shared.

    Of a tensor of ``n`` bytes, ``M`` nodes of ``L`` ranks each, a rank sends
    ``2 n (L - 1) / L`` inside its node and ``2 n / L (M - 1) / M`` between nodes. With unequal
    nodes they are summed along trees, and the first of a node sends ``2 n (M - 1) / M`` to others.
    """

    def __init__(self, local: Communicator, across: Communicator, *, is_even: bool) -> None:
        """``local`` holds the ranks of this node, ``across`` is as `groups_of` says."""
        super().__init__()
        self._local = local
        self._across = across
        self._is_even = is_even

    def sum_now(self, comm: Communicator, tensor: torch.Tensor) -> None:
        local, across = counting_anew(self._local), counting_anew(self._across)
        if self._is_even:
            sum_by_shares(tensor, local, across)
        else:
            sum_at_first(local, tensor)
            if local.rank == 0:
                across.all_reduce(tensor)
            spread_from_first(local, tensor)
        comm.bytes_sent += local.bytes_sent + across.bytes_sent


def sum_by_shares(tensor: torch.Tensor, local: Communicator, across: Communicator) -> None:
    """Sum ``tensor``, of which each rank of the node takes an equal share between nodes."""
    size, numel = local.world_size, tensor.numel()
    mine = tensor.new_zeros(-(-numel // size) * size)
    mine[:numel] = tensor.view(-1)
    theirs = torch.empty_like(mine).view(size, -1)
    local.all_to_all_async(mine.view(size, -1), theirs).wait()
    share = theirs[0]
    for other in theirs[1:]:
        share += other
    across.all_reduce(share)
    tensor.copy_(local.all_gather(share).view(-1)[:numel].view(tensor.shape))
