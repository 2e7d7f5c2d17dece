"""Sums inside each node first, then between nodes, then out again.

The topology-aware sums of IBM's DDL (Cho et al., "PowerAI DDL", 2017): every byte crosses the slow
network as seldom as possible. Where all nodes have ``L`` ranks, each of these takes an ``L``-th of
the tensor between the nodes; otherwise the node's first rank takes all of it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sparkdl.comm.communicator import Communicator, Pending
from sparkdl.comm.topology.shared_sum import Shared, SharedSum, is_summable
from sparkdl.comm.topology.topology import DeferredTopology
from sparkdl.comm.topology.tree import spread_from_first, sum_at_first


def ranks_by_node(nodes: Sequence[int]) -> list[list[int]]:
    """The ranks of each node, given the node of each rank."""
    return [[r for r, n in enumerate(nodes) if n == node] for node in sorted(set(nodes))]


def groups_of(nodes: Sequence[int]) -> tuple[list[list[int]], list[list[int]]]:
    """Who sums with whom: inside nodes, and between them.

    Returns:
        The ranks of each node; and groups of ranks on different nodes. Of these, if nodes have
        unequal numbers of ranks, the first holds each node's first rank, and the second those
        that have nobody to talk to.
    """
    inside = ranks_by_node(nodes)
    if is_even(nodes):
        return inside, [list(group) for group in zip(*inside, strict=True)]
    rest = sorted(rank for group in inside for rank in group[1:])
    return inside, [[group[0] for group in inside], rest]


def is_even(nodes: Sequence[int]) -> bool:
    """Whether all nodes have the same number of ranks."""
    return len({list(nodes).count(node) for node in nodes}) == 1


class HierarchicalShared(Shared):
    """Sums inside the nodes in shared memory.

    Of a tensor of ``n`` bytes, ``M`` nodes of ``L`` ranks each, a rank sends
    ``2 n / L (M - 1) / M``; with unequal nodes, the first of a node ``2 n (M - 1) / M``.
    """

    def __init__(self, comm: Communicator, node: SharedSum, across: Communicator) -> None:
        """``across`` holds this rank's peers on the other nodes, see `groups_of`."""
        super().__init__(comm, node)
        self._across = across

    def all_reduce_async(self, tensor: torch.Tensor) -> Pending:
        if not is_summable(tensor):
            return super().all_reduce_async(tensor)
        return self._node.start(tensor, self._sum_across)

    def _sum_across(self, share: torch.Tensor) -> Pending:
        with self._counted(self._across):
            return self._across.all_reduce_async(share)


class HierarchicalMessages(DeferredTopology):
    """Sums inside the nodes by messages, where memory cannot be shared.

    Of a tensor of ``n`` bytes, ``M`` nodes of ``L`` ranks each, a rank sends
    ``2 n (L - 1) / L`` inside its node and ``2 n / L (M - 1) / M`` between nodes. With unequal
    nodes they are summed along trees, and the first of a node sends ``2 n (M - 1) / M`` to others.
    """

    def __init__(self, comm: Communicator, local: Communicator, across: Communicator) -> None:
        """``local`` holds the ranks of this node, ``across`` is as `groups_of` says."""
        super().__init__(comm)
        self._local = local
        self._across = across
        self._is_even = is_even(comm.nodes)

    def sum_now(self, tensor: torch.Tensor) -> None:
        with self._counted(self._local), self._counted(self._across):
            if self._is_even:
                self._sum_by_shares(tensor)
            else:
                sum_at_first(self._local, tensor)
                if self._local.rank == 0:
                    self._across.all_reduce(tensor)
                spread_from_first(self._local, tensor)

    def _sum_by_shares(self, tensor: torch.Tensor) -> None:
        size, numel = self._local.world_size, tensor.numel()
        mine = tensor.new_zeros(-(-numel // size) * size)
        mine[:numel] = tensor.view(-1)
        theirs = torch.empty_like(mine).view(size, -1)
        self._local.all_to_all_async(mine.view(size, -1), theirs).wait()
        share = theirs[0]
        for other in theirs[1:]:
            share += other
        self._across.all_reduce(share)
        tensor.copy_(self._local.all_gather(share).view(-1)[:numel].view(tensor.shape))
