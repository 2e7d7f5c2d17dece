from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from sparkdl.comm.tree_sums import children, parent
from tests.comm.topology.placing import arranged
from tests.gang import Gang, started_gang


def sent_bytes(num_bytes: int, rank: int, world_size: int) -> int:
    """To the children and to the parent, which rank 0 has not."""
    return num_bytes * (len(children(rank, world_size)) + (rank > 0))


@pytest.mark.parametrize("world_size", range(1, 18))
def test_the_tree_has_all_ranks_and_is_not_deep(world_size: int) -> None:
    reached, level, depth = {0}, [0], 0
    while level := [child for rank in level for child in children(rank, world_size)]:
        assert not reached & set(level)
        assert all(rank in children(parent(rank), world_size) for rank in level)
        reached |= set(level)
        depth += 1
    assert reached == set(range(world_size))
    assert depth <= (world_size - 1).bit_length()
    sent = [sent_bytes(10, rank, world_size) for rank in range(world_size)]
    assert sum(sent) == 2 * 10 * (world_size - 1)  # up once and down once along each edge


def test_children_of_eight() -> None:
    assert [children(rank, 8) for rank in range(4)] == [[1, 2, 4], [], [3], []]
    assert [children(rank, 6) for rank in range(6)] == [[1, 2, 4], [], [3], [], [5], []]


@pytest.mark.gang
def test_sums_of_two(gang: Gang) -> None:
    check(gang.run(sum_some), [(1,), (1,)])


@pytest.mark.gang
def test_sums_of_three(gang3: Gang) -> None:
    check(gang3.run(sum_some), [(1, 1), (1,), (1,)])


@pytest.mark.gang
def test_sums_of_four(gang4: Gang) -> None:
    check(gang4.run(sum_some), [(1, 1), (1,), (1, 1), (1,)])


def check(results: list[Any], messages: list[tuple[int, ...]]) -> None:
    """Sums are right, their bits the same everywhere and every time, the bytes as expected."""
    for (totals, close, sent, num_bytes), rank_messages in zip(results, messages, strict=True):
        assert close
        assert all(torch.equal(total, results[0][0][0]) for total in totals)
        assert sent == num_bytes * len(rank_messages)


def sum_some(comm: Any) -> tuple[list[torch.Tensor], bool, int, int]:
    topology = arranged(comm, "tree")
    mine = torch.randn(1001, generator=torch.Generator().manual_seed(comm.rank))
    expected = mine.clone()
    comm.all_reduce(expected)
    totals = [mine.clone() for _ in range(3)]
    topology.all_reduce(totals[0])
    sent = topology.bytes_sent
    pending = [topology.all_reduce_async(total) for total in totals[1:]]
    for one in reversed(pending):
        one.wait()
    assert topology.bytes_sent == 3 * sent == 3 * sent_bytes(4004, comm.rank, comm.world_size)
    whole = torch.full((2, 3), comm.rank + 1).t()
    topology.all_reduce(whole)
    assert whole.eq(sum(range(1, comm.world_size + 1))).all()
    topology.close()
    return totals, torch.allclose(totals[0], expected, atol=1e-6), sent, 4004


@pytest.mark.gang
def test_many_ranks_sum_little_along_a_tree(tmp_path: Path) -> None:
    """Also the first ranks of nodes among each other; what is large goes along a ring."""
    with started_gang(tmp_path, 8) as gang:
        results = gang.run(sum_small_and_large)
    for rank, (totals, small, later, large) in enumerate(results):
        assert all(torch.equal(total, results[0][0][0]) for total in totals)
        assert small == sent_bytes(4004, rank, 8)
        assert later == 2 * 7 * 4004 // 8
        assert large == 2 * 7 * 400_000 // 8


def sum_small_and_large(comm: Any) -> tuple[list[torch.Tensor], int, int, int]:
    mine = torch.randn(1001, generator=torch.Generator().manual_seed(comm.rank))
    nodes = arranged(comm, "hierarchical", range(8))
    totals = [mine.clone() for _ in range(3)]
    for one, total in zip((comm, comm, nodes), totals, strict=True):
        one.bytes_sent = 0
        one.all_reduce(total)
    small = nodes.bytes_sent
    assert comm.bytes_sent == small
    comm.bytes_sent = 0
    comm.all_reduce_async(mine).wait()
    later, comm.bytes_sent = comm.bytes_sent, 0
    assert torch.allclose(mine, totals[0], atol=1e-5)
    comm.all_reduce(torch.ones(100_000))
    nodes.close()
    return totals, small, later, comm.bytes_sent
