from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from sparkdl.comm.communicator import LocalCommunicator
from sparkdl.comm.topology import TOPOLOGIES, arrange, choose
from sparkdl.errors import ConfigError
from tests.comm.topology.placing import CPU, arranged
from tests.gang import Gang, started_gang


@pytest.mark.parametrize(
    ("nodes", "device", "chosen"),
    [
        ((0, 0), "cpu", "shared"),
        ((0, 0, 0), "cpu", "shared"),
        ((0, 0), "cuda", "ring"),
        ((0, 1), "cpu", "ring"),
        ((0, 0, 1), "cpu", "ring"),
        ((0, 0, 1, 1), "cpu", "hierarchical"),
        ((0, 0, 1, 1, 1), "cpu", "hierarchical"),
        ((0, 0, 1, 1), "cuda", "ring"),
        ((0,), "cpu", "ring"),
    ],
)
def test_auto(nodes: tuple[int, ...], device: str, chosen: str) -> None:
    assert choose("auto", nodes, device) == chosen


def test_what_is_asked_for_by_name_is_given() -> None:
    for name in ("ring", "tree", "hierarchical"):
        for nodes in ((0, 0), (0, 1), (0, 0, 1)):
            assert choose(name, nodes, "cuda") == choose(name, nodes, "cpu") == name


def test_refusals() -> None:
    with pytest.raises(ConfigError, match=r"unknown topology 'star'; known: auto, hier"):
        choose("star", (0, 0), "cpu")
    with pytest.raises(ConfigError, match=r"workers on one node, and they are on 2"):
        choose("shared", (0, 1), "cpu")
    with pytest.raises(ConfigError, match=r"the workers use cuda"):
        choose("shared", (0, 0), "cuda")


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_alone(name: str) -> None:
    topology = arrange(LocalCommunicator(), name, device=CPU)
    tensor = topology.allocate(3, torch.float32, CPU)
    tensor += 1
    topology.all_reduce(tensor)
    assert tensor.tolist() == [1.0] * 3
    assert topology.bytes_sent == 0
    topology.close()


@pytest.mark.gang
@pytest.mark.parametrize("name", ["ring", "tree"])
def test_copies_count_for_themselves(gang: Gang, name: str) -> None:
    assert gang.run(count_apart, name) == [(8, 0)] * 2


def count_apart(comm: Any, name: str) -> tuple[int, int]:
    topology = arranged(comm, name)
    twin = copy.copy(topology)
    twin.all_reduce(torch.ones(2))
    return twin.bytes_sent, topology.bytes_sent


@pytest.mark.gang
@pytest.mark.slow
@pytest.mark.parametrize("world_size", [5, 8])
def test_more_ranks(tmp_path_factory: pytest.TempPathFactory, world_size: int) -> None:
    with started_gang(tmp_path_factory.mktemp("gang"), world_size) as gang:
        for name in TOPOLOGIES:
            gang.run(sum_by, name)


def sum_by(comm: Any, name: str) -> None:
    topology = arranged(comm, name)
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64):
        for numel in (1, 7, 1000, 300_001):
            inside = topology.allocate(numel, dtype, CPU)
            inside += (torch.arange(numel) % 7 * (comm.rank + 1)).to(dtype)
            outside = inside.clone()
            topology.all_reduce(inside)
            topology.all_reduce(outside)
            total = sum(range(1, comm.world_size + 1))
            expected = (torch.arange(numel) % 7 * total).to(dtype)
            assert torch.equal(inside, expected), (name, dtype, numel)
            assert torch.equal(outside, expected), (name, dtype, numel)
    topology.close()
