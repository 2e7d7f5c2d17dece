"""Sums over shards along a fixed tree: equal bits, whoever has which shard.

A sum of floating numbers depends on its order. Here the order is that of a binary tree over the
numbers of the shards: the range of all is halved, and its halves, down to single shards. A rank
adds up what of the tree it has whole. These partial sums are cut into a slice for each rank, which
finishes the tree on its slice and sends the result to all; small ones go to all ranks as they are,
which saves a message. EasyScale (Li et al., SC 2023) keeps an
order of its logical workers for the same end; a tree can be computed in any pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TypeVar

import torch

from sparkdl.comm.communicator import Communicator, Done, Pending, counting_anew
from sparkdl.sync.exchange_pattern import ModelSize, Pattern
from sparkdl.sync.gradient_buckets import Bucket, FlatGradients, zeros
from sparkdl.sync.strategy import (
    MakeOptimizer,
    Reduced,
    SetupArguments,
    Synchronizer,
    parameters_for,
)

T = TypeVar("T")
Node = tuple[int, int]
"""The shards from the first number to that before the second: one, or what a halving gave."""


SMALL_BYTES = 256 << 10
"""Partial sums that are fewer bytes over all ranks are not cut into slices."""


def is_small(num_bytes: float, num_nodes: int, world_size: int) -> bool:
    """True if gradients of so many bytes go to all ranks as they are."""
    return num_bytes * num_nodes * world_size <= SMALL_BYTES


def tree_of(num_shards: int) -> frozenset[Node]:
    """All nodes of the tree over so many shards."""
    nodes: set[Node] = set()
    left = [(0, num_shards)]
    while left:
        start, stop = left.pop()
        nodes.add((start, stop))
        if stop - start > 1:
            middle = (start + stop) // 2
            left += [(start, middle), (middle, stop)]
    return frozenset(nodes)


def folded(
    tree: frozenset[Node], parts: Iterable[tuple[Node, T]], add: Callable[[T, T], T]
) -> list[tuple[Node, T]]:
    """Join parts of a tree, in the order of the shards, as far as they make whole nodes.

    ``parts`` may be made one after the other: no more of them are kept than the tree is deep.
    """
    kept: list[tuple[Node, T]] = []
    for part in parts:
        kept.append(part)
        while len(kept) > 1:
            ((start, end), left), ((begin, stop), right) = kept[-2:]
            if end != begin or (start, stop) not in tree:
                break
            kept[-2:] = [((start, stop), add(left, right))]
    return kept


def held_nodes(tree: frozenset[Node], shards: Sequence[int]) -> list[Node]:
    """The largest nodes of which a rank has all shards, given their numbers in order."""
    alone = [((shard, shard + 1), None) for shard in shards]
    return [node for node, _ in folded(tree, alone, lambda left, right: None)]


def tree_pattern(size: ModelSize, shards_by_rank: Sequence[Sequence[int]]) -> Pattern:
    """Return what ranks exchange per step; see `SyncStrategy.pattern`.

    A rank sends all slices but its own of each of its nodes, then its slice of the sum: with one
    node as much as along a ring. All ranks send as many nodes as the one that has the most.
    """
    tree, world_size = tree_of(sum(map(len, shards_by_rank))), len(shards_by_rank)
    most = max(len(held_nodes(tree, shards)) for shards in shards_by_rank)
    num_bytes = size.gradient_bytes
    ratio = most * world_size if is_small(num_bytes, most, world_size) else most + 1
    return Pattern(num_bytes=num_bytes, topology="ring", wire_ratio=ratio / 2, copies=most + 1)


def tree_sum(rows: torch.Tensor) -> torch.Tensor:
    """The sum of ``(shards, ...)`` over all shards along the tree."""
    parts = [((shard, shard + 1), row) for shard, row in enumerate(rows)]
    total: torch.Tensor
    ((_, total),) = folded(tree_of(len(rows)), parts, torch.add)
    return total


class ShardGather:
    """Brings what each rank has of its shards to all ranks, in the order of the shards."""

    def __init__(self, comm: Communicator, shards_by_rank: Sequence[Sequence[int]]) -> None:
        self._comm = comm
        self._own = len(shards_by_rank[comm.rank])
        self._most = max(map(len, shards_by_rank))
        places = {
            shard: rank * self._most + place
            for rank, shards in enumerate(shards_by_rank)
            for place, shard in enumerate(shards)
        }
        self._order = [places[shard] for shard in range(len(places))]

    def bytes(self, own: Sequence[bytes]) -> list[bytes]:
        """Gather what ranks have for their shards, as one list over all shards; collective."""
        padded = [*own, *[b""] * (self._most - self._own)]
        found = [self._comm.all_gather_bytes(data) for data in padded]
        return [found[place % self._most][place // self._most] for place in self._order]

    def start(self, rows: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Send ``(own shards, n)``; what is returned waits for ``(shards, n)``. Collective."""
        sent = rows.new_zeros((self._most, *rows.shape[1:]))
        sent[: self._own] = rows
        out = rows.new_empty((self._comm.world_size, *sent.shape))
        pending = self._comm.all_gather_async(sent, out)

        def finish() -> torch.Tensor:
            pending.wait()
            return out.flatten(0, 1)[self._order]

        return finish

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """``(own shards, n)`` of every rank as ``(shards, n)``. Collective."""
        return self.start(rows)()


class ShardTreeSynchronizer(Synchronizer):
    """Sums the gradients of every step along the tree of the shards.

    In place of one pass over the rank's batch there is one for each of its shards: `begin_shard`,
    forward and backward, `end_shard`. At most as many copies of the gradients are kept as the tree
    is deep, and one. Nothing is sent before the last pass has ended.
    """

    def __init__(
        self, *setup: *SetupArguments, bucket_bytes: int, shards_by_rank: Sequence[Sequence[int]]
    ) -> None:
        make_optimizer: MakeOptimizer
        self.model, make_optimizer, comm = setup
        self._comm = counting_anew(comm)
        self._gather = ShardGather(self._comm, shards_by_rank)
        self.optimizer = make_optimizer(parameters_for(make_optimizer, self.model))
        self._bucket_bytes = bucket_bytes
        self._tree = tree_of(sum(map(len, shards_by_rank)))
        held = [held_nodes(self._tree, shards) for shards in shards_by_rank]
        self._most_nodes = max(map(len, held))
        self._places = sorted(
            (node, rank, place) for rank, own in enumerate(held) for place, node in enumerate(own)
        )
        """Every node that a rank sends, the rank, and its place there."""
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._group()

    def _group(self) -> None:
        """Lay out the gradients of the parameters that train at present."""
        self._parameters = [p for p in self.model.parameters() if p.requires_grad]
        self._gradients = self._new_set()
        self._free: list[FlatGradients] = []
        """Sets of gradients that hold nothing of use."""
        self._kept: list[tuple[Node, FlatGradients]] = []
        """Gradients that this rank has added up in this step."""
        self._are_all_used = False
        """True if some shard of this rank has used all parameters in this step."""
        for place, parameter in enumerate(self._parameters):
            hook = partial(self._gradient_is_ready, place)
            handle = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
            self._hooks.append(handle)
        self._exchanges: list[_SliceExchange] = []
        most, world_size = self._most_nodes, self._comm.world_size
        if world_size > 1:
            num_bytes = sum(parameter.nbytes for parameter in self._parameters)
            num_slices = 1 if is_small(num_bytes, most, world_size) else world_size
            self._exchanges = [
                _SliceExchange(bucket, self._comm, most, num_slices, self._sum_slice)
                for bucket in self._gradients.buckets
            ]

    def follow_freezing(self) -> None:
        now = [id(p) for p in self.model.parameters() if p.requires_grad]
        if now != [id(p) for p in self._parameters]:
            self.close()
            self._group()

    def _gradient_is_ready(self, place: int, parameter: torch.Tensor) -> None:
        self._gradients.used[place] = 1

    @property
    def bytes_sent(self) -> int:
        return self._comm.bytes_sent

    def zero_gradients(self) -> None:
        self._free += [gradients for _, gradients in self._kept]
        self._kept = []
        self._are_all_used = False

    def begin_shard(self) -> None:
        """The gradients of another shard follow: of the rank's next, in the order of numbers."""
        if self._free:
            self._gradients = self._free.pop()
        elif any(gradients is self._gradients for _, gradients in self._kept):
            self._gradients = self._new_set()
        self._gradients.zero()

    def end_shard(self, shard: int) -> None:
        """The gradients are those of ``shard``, a number of the plan's."""
        self._gradients.settle()
        self._gradients.write_marks()
        self._are_all_used |= self._gradients.are_all_used
        parts = [*self._kept, ((shard, shard + 1), self._gradients)]
        self._kept = folded(self._tree, parts, self._added)

    def reduce_gradients(self, sums: torch.Tensor, divisor: float) -> Reduced:
        """See `Synchronizer.reduce_gradients`; ``sums`` is ``(own shards, n)``."""
        if not self._exchanges:
            ((_, self._gradients),) = self._kept
            self._gradients.attach()
            self._drop_unused()
            return Reduced(tree_sum(sums), divisor)
        gathered = self._gather.start(sums)
        for number, exchange in enumerate(self._exchanges):
            exchange.start([kept.buckets[number].flat for _, kept in self._kept])
        self._gradients.attach()
        for exchange in self._exchanges:
            exchange.finish_slice()
        for exchange, bucket in zip(self._exchanges, self._gradients.buckets, strict=True):
            exchange.finish(bucket.flat)
        self._drop_unused()
        return Reduced(tree_sum(gathered()), divisor)

    def _drop_unused(self) -> None:
        if not self._are_all_used:
            self._gradients.drop_unused(self._gradients.marks)

    def after_step(self, step: int) -> bool:
        """Replicas are equal after every step."""
        return True

    def close_round(self) -> None:
        """Nothing to do: every step closes its round."""

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        for gradients in (self._gradients, *self._free, *(kept for _, kept in self._kept)):
            gradients.release()

    def _new_set(self) -> FlatGradients:
        return FlatGradients(self._parameters, self._bucket_bytes, zeros)

    def _added(self, left: FlatGradients, right: FlatGradients) -> FlatGradients:
        for into, bucket in zip(left.buckets, right.buckets, strict=True):
            into.flat.add_(bucket.flat)
        self._free.append(right)
        return left

    def _sum_slice(self, received: torch.Tensor) -> torch.Tensor:
        """The sum over all shards, of ``(ranks, nodes, slice)``."""
        parts = [(node, received[rank, place]) for node, rank, place in self._places]
        ((_, total),) = folded(self._tree, parts, torch.Tensor.add_)
        return total


class _SliceExchange:
    """Brings the ranks' partial sums of one bucket together: each rank finishes a slice, or all."""

    def __init__(
        self,
        bucket: Bucket,
        comm: Communicator,
        num_nodes: int,
        num_slices: int,
        sum_slice: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        flat = bucket.flat
        length = max(1, -(-len(flat) // num_slices))
        self._comm = comm
        self._sum_slice = sum_slice
        self._sent = flat.new_zeros((num_slices, num_nodes, length))
        self._received = flat.new_empty((comm.world_size, num_nodes, length))
        self._total = flat.new_empty((num_slices, length))
        self._pending: Pending

    def start(self, nodes: Sequence[torch.Tensor]) -> None:
        """Send this rank's nodes, in their order. Collective, as are the others."""
        length = self._sent.shape[2]
        for place, flat in enumerate(nodes):
            whole = len(flat) // length
            self._sent[:whole, place] = flat[: whole * length].view(whole, length)
            if rest := len(flat) - whole * length:
                self._sent[whole, place, :rest] = flat[whole * length :]
        if len(self._sent) == 1:
            self._pending = self._comm.all_gather_async(self._sent[0], self._received)
        else:
            self._pending = self._comm.all_to_all_async(self._sent, self._received)

    def finish_slice(self) -> None:
        """Finish the tree on this rank's slice, and send it; or on all."""
        self._pending.wait()
        total = self._sum_slice(self._received)
        if len(self._sent) == 1:
            self._total[0], self._pending = total, Done()
        else:
            self._pending = self._comm.all_gather_async(total, self._total)

    def finish(self, flat: torch.Tensor) -> None:
        """Write the sums to ``flat``."""
        self._pending.wait()
        flat.copy_(self._total.view(-1)[: len(flat)])
