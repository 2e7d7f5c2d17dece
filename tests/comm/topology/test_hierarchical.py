from __future__ import annotations

import contextlib
from typing import Any
from unittest import mock

import pytest
import torch

from sparkdl.comm.topology.hierarchical import (
    HierarchicalMessages,
    HierarchicalShared,
    groups_of,
    is_even,
)
from tests.comm.topology.placing import CPU, arranged
from tests.gang import Gang

NUMEL = 100_003


def test_who_sums_with_whom() -> None:
    assert groups_of((0, 0, 1, 1)) == ([[0, 1], [2, 3]], [[0, 2], [1, 3]])
    assert groups_of((0, 1, 0, 1)) == ([[0, 2], [1, 3]], [[0, 1], [2, 3]])
    assert groups_of((0, 0, 0, 1)) == ([[0, 1, 2], [3]], [[0, 3], [1, 2]])
    assert groups_of((0, 0)) == ([[0, 1]], [[0], [1]])
    assert is_even((0, 1, 0, 1)) and not is_even((0, 0, 1))


@pytest.mark.slow
@pytest.mark.gang
@pytest.mark.parametrize("shares_memory", [True, False])
@pytest.mark.parametrize("nodes", [(0, 0, 1, 1), (0, 1, 0, 1), (0, 0, 0, 1), (0, 0, 0, 0)])
def test_sums(gang4: Gang, nodes: tuple[int, ...], shares_memory: bool) -> None:
    results = gang4.run(sum_over_nodes, nodes, shares_memory)
    for rank, (total, sent) in enumerate(results):
        assert torch.equal(total, results[0][0])
        assert sent == expected_bytes(rank, nodes, shares_memory)


def expected_bytes(rank: int, nodes: tuple[int, ...], shares_memory: bool) -> list[int]:
    """Of a tensor of one number and one of NUMEL, both float32."""
    num_nodes, num_local = len(set(nodes)), nodes.count(nodes[rank])
    local_rank = nodes[:rank].count(nodes[rank])
    sent = []
    for numel in (1, NUMEL):
        if not is_even(nodes):
            across = 2 * (num_nodes - 1) * 4 * numel // num_nodes * (local_rank == 0)
            inside = 4 * numel * [2, 1, 1][local_rank] * (num_local > 1)
            sent.append(across + inside * (not shares_memory))
            continue
        if shares_memory:  # whole cache lines
            share = -(-numel // (16 * num_local)) * 16
            first, last = share * local_rank, min(numel, share * (local_rank + 1))
            share = max(0, last - first)
            sent.append(2 * (num_nodes - 1) * 4 * share // num_nodes)
        else:
            share = -(-numel // num_local)
            sent.append(
                2 * (num_local - 1) * 4 * share + 2 * (num_nodes - 1) * 4 * share // num_nodes
            )
    return sent


def sum_over_nodes(
    comm: Any, nodes: tuple[int, ...], shares_memory: bool
) -> tuple[torch.Tensor, list[int]]:
    refusal = contextlib.nullcontext()
    if not shares_memory and comm.rank == nodes.index(nodes[-1]):  # one node is enough
        refusal = mock.patch("os.memfd_create", side_effect=OSError("refused"))
    with refusal:
        topology = arranged(comm, "hierarchical", nodes)
    assert type(topology.topology) is (
        HierarchicalShared if shares_memory else HierarchicalMessages
    )
    mine = torch.randn(NUMEL, generator=torch.Generator().manual_seed(comm.rank))
    expected = mine.clone()
    comm.all_reduce(expected)
    one = torch.tensor(comm.rank + 1.0)
    topology.all_reduce(one)
    assert one.item() == 10
    sent = [topology.bytes_sent]
    inside = topology.allocate(NUMEL, torch.float32, CPU)
    inside += mine
    topology.all_reduce(inside)
    sent.append(topology.bytes_sent - sent[0])
    assert torch.allclose(inside, expected, atol=1e-6)

    # The same as halves of an allocation and staged in pieces, several pending.
    again = topology.allocate(NUMEL, torch.float32, CPU)
    again += mine
    staged = [mine.clone() for _ in range(8)]
    pending = [topology.all_reduce_async(half) for half in again.split(NUMEL // 2 + 1)]
    pending += [topology.all_reduce_async(tensor) for tensor in staged]
    for waiting in pending:
        waiting.wait()
    assert torch.allclose(again, expected, atol=1e-6)
    assert all(torch.equal(tensor, staged[0]) for tensor in staged)
    assert torch.allclose(staged[0], expected, atol=1e-6)
    number = torch.tensor([1.0j])
    topology.all_reduce(number)
    assert number.item() == 4.0j
    topology.close()
    return inside.clone(), sent


@pytest.mark.slow
@pytest.mark.gang
def test_an_allocation_that_one_node_lacks_is_shared_by_none(gang4: Gang) -> None:
    assert gang4.run(lack_memory) == [[4.0] * 100] * 4


def lack_memory(comm: Any) -> list[float]:
    topology = arranged(comm, "auto", (0, 0, 1, 1))
    assert type(topology.topology) is HierarchicalShared
    refusal = mock.patch("os.posix_fallocate", side_effect=OSError(28, "No space left"))
    if comm.rank == 2:
        with refusal:
            tensor = topology.allocate(100, torch.float32, CPU)
    else:
        tensor = topology.allocate(100, torch.float32, CPU)
    tensor += 1
    topology.all_reduce(tensor)
    topology.close()
    return tensor.tolist()
