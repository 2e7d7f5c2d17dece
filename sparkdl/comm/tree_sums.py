"""Sums along a tree: up to the first rank, level by level, and down again.

As in FireCaffe (Iandola et al., CVPR 2016): the longest way is ``2 log2 W`` messages of the whole
tensor, where a ring has ``2 (W - 1)`` messages of a ``W``-th. So trees are for small tensors on
many ranks. The tree is binomial: the parent of a rank is the rank without its lowest bit. Sums are
formed in an order that depends on the number of ranks only.
"""

from __future__ import annotations

from typing import Protocol

import torch


class TreeMessages(Protocol):
    """The part of a communicator that a tree needs."""

    rank: int
    world_size: int

    def send(self, tensor: torch.Tensor, to: int) -> None: ...

    def receive(self, tensor: torch.Tensor, source: int) -> None: ...


def sum_along_tree(comm: TreeMessages, tensor: torch.Tensor) -> None:
    """Sum the contiguous ``tensor`` over all ranks, in place."""
    sum_at_first(comm, tensor)
    spread_from_first(comm, tensor)


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


def sum_at_first(comm: TreeMessages, tensor: torch.Tensor) -> None:
    """Leave the sum of all ranks' ``tensor`` on rank 0, and parts of it on the others."""
    incoming = torch.empty_like(tensor)
    for child in children(comm.rank, comm.world_size):
        comm.receive(incoming, child)
        tensor += incoming
    if comm.rank:
        comm.send(tensor, parent(comm.rank))


def spread_from_first(comm: TreeMessages, tensor: torch.Tensor) -> None:
    """Overwrite ``tensor`` on all ranks with that of rank 0."""
    if comm.rank:
        comm.receive(tensor, parent(comm.rank))
    for child in reversed(children(comm.rank, comm.world_size)):
        comm.send(tensor, child)
