"""How is summed along a tree? Up to the first rank, level by level, and down again.

Reduction trees replaced the parameter server in FireCaffe (Iandola et al., CVPR 2016): the longest
way is ``2 log2 W`` messages of the whole tensor, where a ring has ``2 (W - 1)`` messages of a
``W``-th. So trees are for small tensors on many ranks.

The tree is binomial: the parent of a rank is the rank without its lowest bit. It fits any number
of ranks, and sums are formed in an order that depends on that number only.
"""

from __future__ import annotations

import torch

from sparkdl.comm.communicator import Communicator
from sparkdl.comm.topology.topology import DeferredTopology


class Tree(DeferredTopology):
    """Sums up a tree, then the total down the same tree.

    Of a tensor of ``n`` bytes a rank sends ``n`` to its parent, if it has one, and ``n`` to each
    of its children: see `sent_bytes`.
    """

    def sum_now(self, tensor: torch.Tensor) -> None:
        with self._counted(self._comm):
            sum_at_first(self._comm, tensor)
            spread_from_first(self._comm, tensor)


def children(rank: int, world_size: int) -> list[int]:
    """The ranks that send their sums to ``rank``, those of the smallest subtrees in front."""
    found, distance = [], 1
    while not rank & distance and rank + distance < world_size:
        found.append(rank + distance)
        distance *= 2
    return found


def parent(rank: int) -> int:
    """The rank to which ``rank``, which is not 0, sends its sum."""
    return rank & (rank - 1)


def sent_bytes(num_bytes: int, rank: int, world_size: int) -> int:
    """What ``rank`` sends for one sum of a tensor of ``num_bytes``."""
    return num_bytes * (len(children(rank, world_size)) + (rank > 0))


def sum_at_first(comm: Communicator, tensor: torch.Tensor) -> None:
    """Leave the sum of all ranks' ``tensor`` on rank 0, and parts of it on the others."""
    incoming = torch.empty_like(tensor)
    for child in children(comm.rank, comm.world_size):
        comm.receive(incoming, child)
        tensor += incoming
    if comm.rank:
        comm.send(tensor, parent(comm.rank))


def spread_from_first(comm: Communicator, tensor: torch.Tensor) -> None:
    """Overwrite ``tensor`` on all ranks with that of rank 0."""
    if comm.rank:
        comm.receive(tensor, parent(comm.rank))
    for child in reversed(children(comm.rank, comm.world_size)):
        comm.send(tensor, child)
