from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from sparkdl.comm.communicator import LocalCommunicator
from sparkdl.config import TrainConfig
from sparkdl.data.batches import Batch
from sparkdl.errors import TrainingDiverged
from sparkdl.sync.gradients.allreduce import AllReduce
from sparkdl.train.replica import make_replica
from sparkdl.train.step import TrainStep
from sparkdl.train.time_spent import Clock
from tests.train.runs import make_data, plan_for

CPU = torch.device("cpu")


def make_step(net: nn.Module, config: TrainConfig) -> TrainStep:
    plan = plan_for(make_data([4]), config)
    replica = make_replica(
        net, config, plan, CPU, lambda *made: AllReduce().setup(*made, LocalCommunicator())
    )
    return TrainStep(replica, clock=Clock())


def make_batch(rows: int, weight: torch.Tensor | None = None) -> Batch:
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, 3, generator=generator, dtype=torch.float64)
    return Batch(inputs=(x,), target=x.sum(1), weight=weight, num_rows=rows)


def linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(3, 1, dtype=torch.float64)


def test_loss_and_gradient_are_weighted_means() -> None:
    net, weight = linear(), torch.tensor([1.0, 3.0, 0.0, 2.0], dtype=torch.float64)
    batch = make_batch(4, weight)
    losses = (net(batch.inputs[0]).squeeze(1) - batch.target) ** 2
    expected = (losses * weight).sum() / weight.sum()
    (gradient,) = torch.autograd.grad(expected, net.weight)
    step = make_step(net, TrainConfig())
    sums = step(batch, 4, 0)

    assert step.loss == pytest.approx(expected.item())
    assert sums.local.tolist() == sums.shared.tolist()
    assert sums.local[1] == 6.0
    torch.testing.assert_close(net.weight.grad, gradient, rtol=0, atol=1e-12)


def test_module_sees_micro_batches_of_nearly_equal_size() -> None:
    sizes = []

    class Counting(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            sizes.append(len(x))
            return super().forward(x)

    step = make_step(
        Counting(3, 1, dtype=torch.float64),
        TrainConfig(batch_size=9, gradient_accumulation_steps=4),
    )
    step(make_batch(9), 9, 0)
    assert sizes == [2, 2, 2, 3]
    sizes.clear()
    step(make_batch(2), 2, 1)
    assert sizes == [1, 1]
    sizes.clear()
    step(make_batch(0), 1, 2)
    assert sizes == []


def test_clip_bounds_the_norm_of_all_gradients() -> None:
    net = linear()
    make_step(net, TrainConfig(gradient_clip_norm=0.01))(make_batch(5), 5, 0)
    norm = math.hypot(*(float(p.grad.norm()) for p in net.parameters()))
    assert norm == pytest.approx(0.01, rel=1e-3)


def test_divergence_names_the_step() -> None:
    net = linear()
    batch = make_batch(2)
    batch.inputs[0][0, 0] = math.inf
    with pytest.raises(TrainingDiverged, match="at step 8"):
        make_step(net, TrainConfig())(batch, 2, 7)
