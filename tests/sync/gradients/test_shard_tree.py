"""The tree over shards: any assignment adds up in the same order, and costs what it says."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from sparkdl.comm.communicator import LocalCommunicator
from sparkdl.data.plan import assign_shards
from sparkdl.sync.exchange_pattern import ModelSize
from sparkdl.sync.gradient_buckets import FlatGradients
from sparkdl.sync.gradients import shard_tree
from sparkdl.sync.gradients.shard_tree import (
    SMALL_BYTES,
    ShardGather,
    ShardTreeSynchronizer,
    folded,
    held_nodes,
    is_small,
    tree_of,
    tree_pattern,
    tree_sum,
)
from tests.gang import Gang

SMALL = [(7, 3), (11,), (5, 5, 5)]
LARGE = [(3,), (301, 200), (5, 5, 5)]
"""Is cut into slices, and one of these has a single number."""


def test_any_assignment_adds_in_the_same_order() -> None:
    for num_shards in range(1, 8):
        tree = tree_of(num_shards)
        leaves = {shard: ((shard, shard + 1), str(shard)) for shard in range(num_shards)}
        whole = folded(tree, leaves.values(), "({}+{})".format)
        for ranks in itertools.product(range(3), repeat=num_shards):
            parts = []
            for rank in range(3):
                own = [shard for shard in range(num_shards) if ranks[shard] == rank]
                nodes = folded(tree, [leaves[shard] for shard in own], "({}+{})".format)
                assert [node for node, _ in nodes] == held_nodes(tree, own)
                parts += nodes
            assert folded(tree, sorted(parts), "({}+{})".format) == whole
    assert whole == [((0, 7), "((0+(1+2))+((3+4)+(5+6)))")]


def test_rows_are_added_along_the_tree() -> None:
    rows = torch.tensor([1e16, 1.0, 1.0, -1e16, 3.0], dtype=torch.float64)[:, None]
    tree = (rows[0] + rows[1]) + (rows[2] + (rows[3] + rows[4]))
    assert torch.equal(tree_sum(rows), tree)
    assert not torch.equal(tree, rows.cumsum(0)[-1])


def size_of(numel: int) -> ModelSize:
    return ModelSize(
        shapes=((numel,),), element_size=4, replica_bytes=0, buffer_bytes=0, optimizer_bytes=0
    )


def test_the_cost_pattern() -> None:
    size = size_of(1_000_000)
    even = tree_pattern(size, assign_shards(4, 2)).sent_bytes_per_step(2)
    assert even == 4e6  # half of the gradients, twice: as along a ring
    assert tree_pattern(size, [[0, 2], [1, 3]]).sent_bytes_per_step(2) == 6e6
    assert tree_pattern(size_of(100), [[0, 2], [1, 3]]).sent_bytes_per_step(2) == 800
    assert tree_pattern(size, assign_shards(4, 1)).sent_bytes_per_step(1) == 0
    assert tree_pattern(size, [[0, 2], [1, 3]]).copies == 3
    assert is_small(SMALL_BYTES / 4, 2, 2) and not is_small(SMALL_BYTES / 4, 3, 2)


def gradients_of(
    comm: Any, shards_by_rank: Sequence[Sequence[int]], sizes: Sequence[tuple[int, ...]]
) -> tuple[Any, ...]:
    """Two steps of this rank, whose passes each give numbers of their shard's own."""
    net = nn.ParameterList([nn.Parameter(torch.zeros(size)) for size in sizes])
    synchronizer = ShardTreeSynchronizer(
        net,
        lambda parameters: torch.optim.SGD(parameters, lr=1.0),
        comm,
        bucket_bytes=100,
        shards_by_rank=shards_by_rank,
    )
    generator = torch.Generator()
    for step in range(2):
        synchronizer.zero_gradients()
        net.zero_grad()  # as a user's callback may do
        sums = []
        for shard in shards_by_rank[comm.rank]:
            generator.manual_seed(10 * step + shard)
            synchronizer.begin_shard()
            for parameter in net:
                drawn = torch.randn(parameter.shape, generator=generator)
                (parameter * drawn).sum().backward()
            synchronizer.end_shard(shard)
            sums.append(torch.rand(2, dtype=torch.float64, generator=generator))
        own = torch.stack(sums) if sums else torch.zeros(0, 2, dtype=torch.float64)
        shared, divisor, _ = synchronizer.reduce_gradients(own, 8.0)
        assert divisor == 8.0
    sent = synchronizer.bytes_sent
    found = [p.grad.clone() for p in net if p.grad is not None]
    synchronizer.close()
    assert all(p.grad is None for p in net)
    return found, shared, sent


@pytest.mark.gang
@pytest.mark.parametrize("sizes", [SMALL, LARGE])
def test_gradients_have_equal_bits_whoever_has_which_shard(
    gang: Gang, gang3: Gang, sizes: Sequence[tuple[int, ...]]
) -> None:
    expected, sums, sent = gradients_of(LocalCommunicator(), [range(5)], sizes)
    assert sent == 0
    numel = sum(gradient.numel() for gradient in expected)
    for started, assigned in (
        (gang, [[0, 1], [2, 3, 4]]),
        (gang, [[0, 3], [1, 2, 4]]),
        (gang3, [[1], [0, 2, 3, 4], []]),
    ):
        for found, shared, sent in started.run(gradients_of, assigned, sizes):
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
            assert torch.equal(shared, sums)
            pattern = tree_pattern(size_of(numel), assigned)
            formula = pattern.sent_bytes_per_step(len(assigned))
            assert formula is not None
            rest = sent / 2 - formula  # slices are rounded up, and there are the losses
            assert 0 < rest < 0.2 * formula + 16 * 5 * (len(assigned) - 1)


def test_no_more_gradients_are_kept_than_the_tree_is_deep(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[FlatGradients] = []

    class Counted(FlatGradients):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            made.append(self)

    monkeypatch.setattr(shard_tree, "FlatGradients", Counted)
    gradients_of(LocalCommunicator(), [range(8)], SMALL)
    assert len(made) == 4  # in two steps
    assert not any(gradients.buckets for gradients in made)  # all are let go in the end


def gathered(comm: Any, shards_by_rank: Sequence[Sequence[int]]) -> tuple[Any, list[bytes]]:
    own = shards_by_rank[comm.rank]
    gather = ShardGather(comm, shards_by_rank)
    rows = torch.tensor([[float(shard), -1.0] for shard in own]).reshape(len(own), 2)
    return gather(rows).tolist(), gather.bytes([b"x" * shard for shard in own])


@pytest.mark.gang
def test_what_shards_have_comes_in_their_order(gang: Gang) -> None:
    for found, data in gang.run(gathered, [[3], [0, 1, 2]]):
        assert found == [[0, -1], [1, -1], [2, -1], [3, -1]]
        assert data == [b"", b"x", b"xx", b"xxx"]
