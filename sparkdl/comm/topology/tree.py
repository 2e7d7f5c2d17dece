"""Sums along a tree, whatever their size; `comm.tree_sums` says how and why.

They are made of several messages, and so not while the rank does something else.
"""

from __future__ import annotations

from collections import deque

import torch

from sparkdl.comm.communicator import Communicator, Pending, Topology
from sparkdl.comm.tree_sums import sum_along_tree


class DeferredTopology(Topology):
    """Sums that take several messages: they are made in ``wait()``, in the order of their starts.

    Ranks must also wait in equal order among their other calls.
    """

    def __init__(self) -> None:
        self.waiting: deque[_DeferredSum] = deque()
        """Sums that were started and not made yet."""

    def start(self, comm: Communicator, tensor: torch.Tensor) -> Pending:
        started = _DeferredSum(self, comm, tensor)
        self.waiting.append(started)
        return started

    def sum_now(self, comm: Communicator, tensor: torch.Tensor) -> None:
        """Sum the contiguous ``tensor`` over all ranks, in place."""
        raise NotImplementedError


class _DeferredSum:
    def __init__(
        self, topology: DeferredTopology, comm: Communicator, tensor: torch.Tensor
    ) -> None:
        self._topology = topology
        self._comm = comm
        self._tensor = tensor.detach()
        self._is_done = False

    def wait(self) -> None:
        while not self._is_done:
            self._topology.waiting.popleft().run()

    def run(self) -> None:
        dense = self._tensor.contiguous()
        self._topology.sum_now(self._comm, dense)
        if dense is not self._tensor:
            self._tensor.copy_(dense)
        self._is_done = True


class Tree(DeferredTopology):
    """Sums up a tree, then the total down: a whole tensor to the parent and to each child."""

    def sum_now(self, comm: Communicator, tensor: torch.Tensor) -> None:
        sum_along_tree(comm, tensor)
