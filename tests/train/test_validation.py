from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torchmetrics
from torch import nn

from sparkdl.comm.communicator import LocalCommunicator
from sparkdl.config import Task, TrainConfig
from sparkdl.data.batches import sequential_batches
from sparkdl.data.spool.mapped import MappedRows, ShardData
from sparkdl.inference.classification import CLASSIFICATION
from sparkdl.inference.regression import REGRESSION
from sparkdl.sync.frozen_layers import evaluation_mode
from sparkdl.sync.gradients.allreduce import AllReduce
from sparkdl.train.replica import make_replica
from sparkdl.train.validation import evaluate, in_step
from tests.gang import Gang
from tests.train.runs import NUM_FEATURES, make_data, plan_for, run, seeded

CPU = torch.device("cpu")


def evaluated(net: nn.Module, shards: list[ShardData], batch_size: int, weighted: bool) -> float:
    config = TrainConfig(batch_size=batch_size, loss="mse", task=REGRESSION)
    plan = plan_for(shards, config, weighted=weighted)
    comm = LocalCommunicator()
    replica = make_replica(net, config, plan, CPU, lambda *made: AllReduce().setup(*made, comm))
    values = evaluate(
        replica, sequential_batches([MappedRows(shard, plan) for shard in shards], plan), comm
    )
    assert set(values) == {"val_loss"}
    return values["val_loss"]


@pytest.mark.parametrize("batch_size", [1, 4, 100])
@pytest.mark.parametrize("weighted", [False, True])
def test_any_cut_gives_the_weighted_mean(batch_size: int, weighted: bool) -> None:
    net = seeded(
        lambda: nn.Sequential(nn.Dropout(0.5), nn.Linear(NUM_FEATURES, 1, dtype=torch.float64))
    )
    shards = make_data([7, 0, 4])
    got = evaluated(net, shards, batch_size, weighted)
    keys = ("feature x", "label y", "weight w")
    x, y, w = (torch.cat([shard.columns[key] for shard in shards]) for key in keys)
    losses = (net.eval()(x).squeeze(1) - y) ** 2
    w = w if weighted else torch.ones_like(w)
    assert got == pytest.approx(float((losses * w).sum().detach() / w.sum()), abs=1e-12)


def mean_squared(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """A function of the user's that gives one number."""
    return ((output[:, 0] - target) ** 2).mean()


@pytest.mark.parametrize("task", [CLASSIFICATION, REGRESSION])
@pytest.mark.parametrize("loss", ["of its name", "a function"])
def test_batches_without_rows_change_nothing(task: Task, loss: str) -> None:
    """Along a mesh ranks run as many batches as the one with the most rows."""
    is_class = task == CLASSIFICATION
    named, own = (
        ("cross_entropy", torch.nn.functional.cross_entropy) if is_class else ("mse", mean_squared)
    )
    metrics = {"f1": torchmetrics.F1Score("multiclass", num_classes=3)} if is_class else {}
    config = TrainConfig(
        batch_size=4, loss=named if loss == "of its name" else own, task=task, metrics=metrics,
    )  # fmt: skip
    shards = make_data([7], task=task, dtype=torch.float32)
    plan = plan_for(shards, config, validation=shards)
    net, comm = seeded(lambda: nn.Linear(NUM_FEATURES, 3 if is_class else 1)), LocalCommunicator()
    replica = make_replica(net, config, plan, CPU, lambda *made: AllReduce().setup(*made, comm))

    def measured(*, most: int) -> dict[str, float]:
        longer = replace(plan, shards=(replace(plan.shards[0], num_validation_rows=most),))
        rows = sequential_batches([MappedRows(shards[0], plan)], plan)
        return evaluate(replica, in_step(rows, longer), comm)

    expected = measured(most=7)
    assert all(map(math.isfinite, expected.values()))
    assert measured(most=25) == expected


def test_without_weight_there_is_no_loss() -> None:
    shards = make_data([3])
    shards[0].columns["weight w"].zero_()
    assert math.isnan(evaluated(nn.Linear(NUM_FEATURES, 1, dtype=torch.float64), shards, 2, True))


def test_a_module_that_changes_its_input_does_not_reach_the_data() -> None:
    class InPlace(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x.zero_())

    shards = make_data([3])
    before = shards[0].columns["feature x"].clone()
    evaluated(InPlace(NUM_FEATURES, 1, dtype=torch.float64), shards, 2, False)
    assert torch.equal(shards[0].columns["feature x"], before)


def test_modes_come_back_also_after_a_failure() -> None:
    net = nn.Sequential(nn.Dropout(), nn.Dropout().eval())
    with pytest.raises(ZeroDivisionError), evaluation_mode(net):
        assert not any(part.training for part in net.modules())
        raise ZeroDivisionError
    assert [part.training for part in net.modules()] == [True, True, False]


class Centred(nn.Module):
    """Trains with what its buffer has seen, which is each rank's own until the epoch ends."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(NUM_FEATURES, 1)
        self.register_buffer("mean", torch.zeros(NUM_FEATURES))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.mean.mul_(0.9).add_(0.1 * x.mean(0))
        return self.line(x - self.mean)


def in_gang(comm: Any, interval: int | None) -> dict[str, torch.Tensor]:
    net = seeded(Centred)
    validation = make_data([4, 3], dtype=torch.float32)
    config = TrainConfig(
        epochs=2, batch_size=5, optimizer="adam", learning_rate=0.02, validation_interval=interval
    )
    run(net, config, make_data([17, 12], dtype=torch.float32), validation=validation, comm=comm)
    return net.state_dict()


@pytest.mark.slow
def test_evaluations_within_epochs_leave_ranks_their_buffers(gang: Gang) -> None:
    seldom, often = gang.run(in_gang, None), gang.run(in_gang, 1)
    for name, value in seldom[0].items():
        assert torch.equal(value, often[0][name])
        assert torch.equal(value, often[1][name])
