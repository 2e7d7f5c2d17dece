"""Every strategy learns a real task as well as all-reduce, in as many epochs.

To add one, add a row to `ROWS`. One row of each family of strategies is part of `make test`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn

from sparkdl.config import TrainConfig
from sparkdl.data.spool.mapped import ShardData
from sparkdl.inference.classification import CLASSIFICATION
from sparkdl.sync.asynchronous.async_sgd import AsyncSGD
from sparkdl.sync.asynchronous.hogwild import Hogwild
from sparkdl.sync.averaging.adasum import Adasum
from sparkdl.sync.averaging.block_momentum import BlockMomentum
from sparkdl.sync.averaging.diloco import DiLoCo
from sparkdl.sync.averaging.local_sgd import LocalSGD
from sparkdl.sync.averaging.parameter_averaging import ParameterAveraging
from sparkdl.sync.averaging.slowmo import SlowMo
from sparkdl.sync.gradients.allreduce import AllReduce
from sparkdl.sync.own_weights.elastic_averaging import ElasticAveraging
from sparkdl.sync.own_weights.gossip import Gossip
from sparkdl.sync.population.one_shot_averaging import OneShotAveraging
from sparkdl.sync.strategy import SyncStrategy
from tests.comm.topology.placing import placed
from tests.gang import Gang
from tests.train.runs import but, run, seeded

pytestmark = pytest.mark.gang

TOLERANCE = 0.03
"""Eleven of the 360 held-out digits."""
LATE = 0.05
"""Where it is a matter of time how old gradients are."""
CONFIG = TrainConfig(
    task=CLASSIFICATION,
    loss="cross_entropy",
    optimizer="sgd",
    optimizer_params={"momentum": 0.9},
    learning_rate=0.05,
    batch_size=16,
    epochs=10,
)
"""45 steps an epoch on two ranks."""
ADAMW = {"optimizer": "adamw", "optimizer_params": {}, "learning_rate": 0.003}
"""The inner optimizer of DiLoCo's paper."""


@dataclass(frozen=True)
class Row:
    """A strategy, what it needs of the configuration, and how far from all-reduce it may end."""

    strategy: SyncStrategy
    changes: Mapping[str, Any] = field(default_factory=dict)
    tolerance: float = TOLERANCE
    gang: str = "gang"
    """The fixture."""
    nodes: tuple[int, ...] | None = None
    """Each rank's node; None: as the gang has it, on nodes of their own."""


ROWS = {
    "double buffering": Row(AllReduce(double_buffering=True)),
    "backup workers": Row(AllReduce(num_backup_workers=1), gang="gang3"),
    "adasum": Row(Adasum()),
    "parameter averaging": Row(ParameterAveraging(averaging_period=8)),
    "local sgd": Row(LocalSGD(averaging_period=8)),
    "adaptive local sgd": Row(LocalSGD(averaging_period="adaptive")),
    "block momentum": Row(BlockMomentum(averaging_period=8)),
    "slow momentum": Row(SlowMo(averaging_period=12)),
    "diloco": Row(DiLoCo(averaging_period=15), ADAMW),
    "streaming diloco": Row(DiLoCo(averaging_period=15, num_fragments=2, overlap_steps=3), ADAMW),
    "elastic averaging": Row(ElasticAveraging(averaging_period=4)),
    "gossip": Row(Gossip(probability=0.2)),
    "one shot": Row(OneShotAveraging()),
    "asynchronous": Row(AsyncSGD(), tolerance=LATE),
    "bound 0": Row(AsyncSGD(staleness_bound=0), tolerance=0.003),
    "bound 2": Row(AsyncSGD(staleness_bound=2), tolerance=LATE),
    "delay compensation": Row(AsyncSGD(delay_compensation=0.04), tolerance=LATE),
    "hogwild": Row(Hogwild(), nodes=(0, 0)),
    "hogwild on two nodes": Row(Hogwild(averaging_period=8), gang="gang4", nodes=(0, 0, 1, 1)),
}
"""Name -> what is run; each row takes a second or two."""


QUICK = ("adasum", "local sgd", "gossip", "asynchronous")


@pytest.fixture(scope="module")
def allreduce_accuracy(gangs: Callable[[int], Gang]) -> float:
    accuracies = gangs(2).run(accuracy_of, AllReduce(), {})
    assert accuracies[0] == accuracies[1] > 0.94
    return accuracies[0]


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in ROWS],
)
def test_reaches_allreduce(
    request: pytest.FixtureRequest, allreduce_accuracy: float, name: str
) -> None:
    row = ROWS[name]
    gang = request.getfixturevalue(row.gang)
    accuracies = gang.run(accuracy_of, row.strategy, row.changes, row.nodes)
    assert len(set(accuracies)) == 1, "replicas do not agree"
    assert accuracies[0] >= allreduce_accuracy - row.tolerance


def accuracy_of(
    comm: Any,
    strategy: SyncStrategy,
    changes: Mapping[str, Any],
    nodes: tuple[int, ...] | None = None,
) -> float:
    """Accuracy on held-out digits after training on this gang."""
    shards, held_out, labels = digits(comm.world_size)
    net = seeded(lambda: nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)))
    with placed(comm, nodes or comm.nodes):
        run(net, but(CONFIG, sync_strategy=strategy, **changes), shards, comm=comm)
    with torch.no_grad():
        return (net(held_out).argmax(1) == labels).double().mean().item()


def digits(num_shards: int) -> tuple[list[ShardData], torch.Tensor, torch.Tensor]:
    """Shards for training, and held-out images, ``(360, 64)``, with labels."""
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(5))
    x, y = x[order], y[order]
    shards = [
        ShardData(
            f"shard {number}",
            {"feature x": x[360 + number :: num_shards], "label y": y[360 + number :: num_shards]},
        )
        for number in range(num_shards)
    ]
    return shards, x[:360], y[:360]
