"""All-reduce on two ranks equals one process that is fed the ranks' united batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from sparkdl.config import Task, TrainConfig
from sparkdl.data.batches import Batches
from sparkdl.data.spool.mapped import MappedRows
from sparkdl.inference.classification import CLASSIFICATION
from sparkdl.inference.regression import REGRESSION
from sparkdl.sync.gradients.allreduce import AllReduce
from tests.gang import Gang
from tests.train.runs import NUM_FEATURES, make_data, plan_for, run, seeded, weights

pytestmark = pytest.mark.gang

ADAM = {"optimizer": "adamw", "learning_rate": 0.01, "optimizer_params": {"weight_decay": 0.1}}
MOMENTUM = {"optimizer": "sgd", "learning_rate": 0.05, "optimizer_params": {"momentum": 0.9}}


class Net(nn.Module):
    """Two layers, one that takes no part, one that is frozen."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.first = nn.Linear(NUM_FEATURES, 5, dtype=torch.float64)
        self.unused = nn.Linear(3, 3, dtype=torch.float64)
        self.frozen = nn.Linear(5, 5, dtype=torch.float64).requires_grad_(False)
        self.last = nn.Linear(5, outputs, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.frozen(torch.tanh(self.first(x))))


def make_net(outputs: int) -> nn.Module:
    return seeded(lambda: Net(outputs))


def train_on_rank(
    comm: Any, options: dict[str, Any], rows: list[int], task: Task, weighted: bool
) -> tuple[torch.Tensor, float]:
    config = TrainConfig(**options, task=task)  # type: ignore[arg-type]
    net = make_net(1 if task == REGRESSION else 3)
    outcome = run(net, config, make_data(rows, task=task), comm=comm, weighted=weighted)
    return weights(net), outcome.history[-1]["loss"]


def united_reference(
    options: dict[str, Any], rows: list[int], task: Task, weighted: bool, class_weight: Any
) -> tuple[torch.Tensor, float]:
    """A plain loop over the two ranks' batches, joined."""
    config = TrainConfig(**options, task=task)  # type: ignore[arg-type]
    shards = make_data(rows, task=task)
    plan = plan_for(shards, config, world_size=2, weighted=True)
    net = make_net(1 if task == REGRESSION else 3)
    kind = torch.optim.AdamW if config.optimizer == "adamw" else torch.optim.SGD
    trained = [p for p in net.parameters() if p.requires_grad]
    optimizer = kind(trained, lr=config.learning_rate, **config.optimizer_params)
    for epoch in range(config.epochs):
        ranks = [
            Batches([MappedRows(shards[r], plan)], plan, r, seed=config.seed, epoch=epoch)
            for r in (0, 1)
        ]
        loss_sum = weight_sum = 0.0
        for parts in zip(*ranks, strict=True):
            x = torch.cat([part.inputs[0] for part in parts])
            y = torch.cat([part.target for part in parts])
            w = torch.cat([part.weight for part in parts])
            w = w if weighted else torch.ones_like(w)
            output = net(x)
            if task == REGRESSION:
                losses = (output.squeeze(1) - y) ** 2
            else:
                losses = nn.functional.cross_entropy(output, y, class_weight, reduction="none")
                w = w if class_weight is None else w * class_weight[y]
                losses = losses * (1.0 if class_weight is None else 1 / class_weight[y])
            optimizer.zero_grad()
            loss = (losses * w).sum() / w.sum()
            loss.backward()
            if config.gradient_clip_norm is not None:
                nn.utils.clip_grad_norm_(trained, config.gradient_clip_norm)
            optimizer.step()
            loss_sum += (losses * w).sum().item()
            weight_sum += w.sum().item()
    return weights(net), loss_sum / weight_sum


CASES: dict[str, tuple[dict[str, Any], list[int], str, bool, Any]] = {
    "even": ({**ADAM, "epochs": 3, "batch_size": 4}, [12, 12], REGRESSION, False, None),
    "uneven weighted": ({**ADAM, "epochs": 3, "batch_size": 4}, [23, 7], REGRESSION, True, None),
    "one row": ({**MOMENTUM, "epochs": 3, "batch_size": 5}, [11, 1], REGRESSION, False, None),
    "empty first": ({**MOMENTUM, "epochs": 2, "batch_size": 4}, [0, 9], REGRESSION, True, None),
    "one row alone": ({**ADAM, "epochs": 2, "batch_size": 4}, [0, 1], REGRESSION, False, None),
    "accumulated": (
        {**ADAM, "epochs": 2, "batch_size": 6, "gradient_accumulation_steps": 4},
        [14, 9],
        REGRESSION,
        True,
        None,
    ),
    "clipped": (
        {**MOMENTUM, "epochs": 2, "batch_size": 4, "gradient_clip_norm": 0.2},
        [9, 6],
        REGRESSION,
        False,
        None,
    ),
    "many buckets": (
        {**ADAM, "epochs": 2, "batch_size": 4, "sync_strategy": AllReduce(bucket_bytes=64)},
        [10, 3],
        REGRESSION,
        False,
        None,
    ),
    "class weights": (
        {
            **ADAM,
            "epochs": 2,
            "batch_size": 4,
            "loss": nn.CrossEntropyLoss(torch.tensor([0.2, 1.0, 3.0], dtype=torch.float64)),
        },
        [10, 5],
        CLASSIFICATION,
        True,
        torch.tensor([0.2, 1.0, 3.0], dtype=torch.float64),
    ),
    "cross entropy": (
        {**MOMENTUM, "epochs": 2, "batch_size": 4, "loss": "cross_entropy"},
        [10, 5],
        CLASSIFICATION,
        False,
        None,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_equals_one_process(gang: Gang, name: str) -> None:
    options, rows, task, weighted, class_weight = CASES[name]
    (first, first_loss), (second, second_loss) = gang.run(
        train_on_rank, options, rows, task, weighted
    )
    expected, expected_loss = united_reference(options, rows, task, weighted, class_weight)

    assert torch.equal(first, second)
    assert first_loss == second_loss
    torch.testing.assert_close(first, expected, rtol=0, atol=1e-12)
    assert first_loss == pytest.approx(expected_loss, abs=1e-12)
    assert not torch.equal(expected, weights(make_net(1 if task == REGRESSION else 3)))


def test_same_seed_gives_the_same_bits(gang: Gang) -> None:
    options = {**ADAM, "epochs": 2, "batch_size": 4}
    arguments = (options, [13, 6], REGRESSION, True)
    once = gang.run(train_on_rank, *arguments)
    again = gang.run(train_on_rank, *arguments)
    other = gang.run(train_on_rank, {**options, "seed": 1}, *arguments[1:])

    assert torch.equal(once[0][0], again[0][0])
    assert once[0][1] == again[0][1]
    assert not torch.equal(once[0][0], other[0][0])


def test_sums_keep_float64(gang: Gang) -> None:
    assert gang.run(sum_of_large_numbers) == [[2.0**40 + 3.0], [2.0**40 + 3.0]]


def sum_of_large_numbers(comm: Any) -> list[float]:
    net = nn.Linear(2, 1)
    synchronizer = AllReduce().setup(net, lambda p: torch.optim.SGD(p, lr=0.1), comm)
    mine = torch.tensor([2.0**40 if comm.rank == 0 else 3.0], dtype=torch.float64)
    return synchronizer.reduce_gradients(mine, 1.0).sums.tolist()
