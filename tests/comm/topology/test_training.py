from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from sparkdl.config import TrainConfig
from sparkdl.errors import ConfigError
from sparkdl.sync.averaging.parameter_averaging import ParameterAveraging
from sparkdl.sync.gradients.allreduce import AllReduce
from tests.comm.topology.placing import placed
from tests.gang import Gang
from tests.train.runs import make_data, run, seeded, weights

ROWS = [37, 20, 33, 41]
NODES = {"ring": (0, 1, 2, 3), "tree": (0, 1, 2, 3), "hierarchical": (0, 0, 1, 1)}


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 50), nn.Tanh(), nn.Linear(50, 1)).double()


def config(strategy: Any) -> TrainConfig:
    return TrainConfig(
        optimizer="adam", learning_rate=0.01, epochs=2, batch_size=8, sync_strategy=strategy
    )


def train_on(comm: Any, strategy: Any) -> tuple[torch.Tensor, float, int]:
    """On as many shards as there are ranks."""
    module = seeded(net)
    with placed(comm, NODES.get(strategy.topology, ())[: comm.world_size]):
        outcome = run(module, config(strategy), make_data(ROWS[: comm.world_size]), comm=comm)
    return weights(module), outcome.history[-1]["loss"], outcome.bytes_sent


@pytest.mark.slow
@pytest.mark.gang
@pytest.mark.parametrize("topology", ["tree", "hierarchical", "shared", "auto"])
def test_training_is_the_same_along_all_topologies(gang4: Gang, topology: str) -> None:
    ring = gang4.run(train_on, AllReduce(topology="ring", bucket_bytes=500))
    found = gang4.run(train_on, AllReduce(topology=topology, bucket_bytes=500))
    again = gang4.run(train_on, AllReduce(topology=topology, bucket_bytes=500))
    for rank in range(4):
        assert torch.equal(found[rank][0], found[0][0])
        assert torch.equal(again[rank][0], found[0][0])
        assert torch.allclose(found[rank][0], ring[rank][0], rtol=0, atol=1e-12)
        assert abs(found[rank][1] - ring[rank][1]) < 1e-12
    sent = [result[2] for result in found]
    if topology in ("shared", "auto"):
        assert sent == [0] * 4
    elif topology == "tree":  # as much as a ring, unevenly
        assert sum(sent) == pytest.approx(sum(result[2] for result in ring), rel=0.01)
    else:
        assert 0 < sum(sent) < sum(result[2] for result in ring)


@pytest.mark.slow
@pytest.mark.gang
def test_averaging_along_topologies(gang: Gang) -> None:
    ring = gang.run(train_on, ParameterAveraging(averaging_period=3, topology="ring"))
    shared = gang.run(train_on, ParameterAveraging(averaging_period=3, topology="shared"))
    for before, after in zip(ring, shared, strict=True):
        assert torch.allclose(after[0], before[0], rtol=0, atol=1e-12)
        assert after[2] < before[2]


@pytest.mark.gang
def test_nothing_is_left_of_the_memory(gang: Gang) -> None:
    assert gang.run(count_mappings) == [0, 0]


def count_mappings(comm: Any) -> int:
    train_on(comm, AllReduce(topology="shared"))  # what torch imports first keeps some frames
    gc.collect()
    gc.disable()
    try:
        train_on(comm, AllReduce(topology="shared"))
        return Path("/proc/self/maps").read_text().count("memfd:sparkdl")
    finally:
        gc.enable()


def test_unknown_topologies_are_refused_on_the_driver() -> None:
    with pytest.raises(ConfigError, match="unknown topology 'star'"):
        strategy = AllReduce(topology="star")
        strategy.check(config(strategy), 2)
