"""``elasticity="bits"``: the very same weights and history, whoever has which shard."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from sparkdl.comm.communicator import LocalCommunicator
from sparkdl.config import EarlyStopping, TrainConfig
from sparkdl.inference.classification import CLASSIFICATION
from sparkdl.inference.regression import REGRESSION
from sparkdl.train.rank_state import ResumePoint, united
from tests.gang import Gang
from tests.train.runs import Keeper, but, make_data, plan_for, run, seeded

pytestmark = pytest.mark.gang

ROWS = [23, 17, 22, 0, 19]
VALIDATION = [3, 0, 4, 2, 9]
EVERYTHING = [list(range(len(ROWS)))]
ASSIGNED: dict[int, list[list[int]]] = {
    2: [[0, 3], [1, 2, 4]],
    3: [[1, 4], [0], [2, 3]],
    4: [[3], [0, 2], [1], [4]],
}


def net(num_outputs: int) -> nn.Module:
    """One that draws random numbers, in evaluation too, and has buffers of two types."""
    return nn.Sequential(
        nn.Linear(4, 7), nn.BatchNorm1d(7), nn.Dropout(0.3), Noise(), nn.Linear(7, num_outputs)
    )


class Noise(nn.Module):
    """Adds what torch, numpy and Python draw."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        import random

        import numpy as np

        drawn = float(np.random.rand()) + random.random()
        return x + 0.1 * torch.rand_like(x) + 0.01 * drawn


CASES: dict[str, dict[str, Any]] = {
    "clipped, with early stopping": {
        "optimizer": "adamw", "learning_rate": 0.03, "gradient_clip_norm": 0.4,
        "early_stopping": EarlyStopping(patience=2), "validation_interval": 3,
    },
    "accumulated, on a plateau": {
        "gradient_accumulation_steps": 2, "learning_rate": 0.1,
        "scheduler": partial(
            torch.optim.lr_scheduler.ReduceLROnPlateau, patience=0, factor=0.5, threshold=0.2
        ),
    },
    "classes": {
        "task": CLASSIFICATION, "loss": "cross_entropy", "optimizer": "adam",
        "learning_rate": 0.02, "training_metrics": True,
    },
    "fp16": {"precision": "fp16", "learning_rate": 0.05, "optimizer": "adam"},
}  # fmt: skip


def config_of(case: str) -> TrainConfig:
    # Batches of shards of one row would end in BatchNorm.
    options = {"task": REGRESSION, **CASES[case]}
    return TrainConfig(epochs=4, batch_size=6, elasticity="bits", seed=5, **options)


def train_on_rank(
    comm: Any,
    config: TrainConfig,
    shards_by_rank: Sequence[Sequence[int]],
    stop: int | None = None,
    before: Sequence[ResumePoint] = (),
) -> tuple[dict[str, torch.Tensor], list[dict[str, float]], ResumePoint | None, int]:
    """Train this rank's shards, from where the ranks of another gang have stopped."""
    task = CLASSIFICATION if config.task == CLASSIFICATION else REGRESSION
    data = make_data(ROWS, task=task, dtype=torch.float32)
    validation = make_data(VALIDATION, task=task, dtype=torch.float32)
    plan = plan_for(data, config, validation=validation, world_size=comm.world_size, weighted=True)
    plan = plan.held_by(shards_by_rank)
    resume = None
    if before:
        resume = replace(before[0], rank_state=united([p.rank_state or {} for p in before]))
    sink = None
    if stop is not None:
        sink, config = Keeper((stop,)), but(config, max_steps=stop + 1)
        plan = replace(plan, max_steps=config.max_steps)
    module = seeded(lambda: net(3 if task == CLASSIFICATION else 1))
    outcome = run(
        module, config, data, validation=validation, comm=comm, plan=plan, sink=sink, resume=resume
    )
    point = None if sink is None or stop is None else sink.points[stop]
    return module.state_dict(), outcome.history, point, outcome.bytes_sent


def assert_same(found: Any, expected: Any) -> None:
    for name, value in expected[0].items():
        assert torch.equal(found[0][name], value), name
    for own, other in zip(found[1], expected[1], strict=True):
        assert {**own, "seconds": 0} == {**other, "seconds": 0}


@pytest.mark.parametrize("case", CASES)
def test_any_number_of_workers_gives_the_same_bits(
    gang: Gang, gang3: Gang, gang4: Gang, case: str
) -> None:
    config = config_of(case)
    expected = train_on_rank(LocalCommunicator(), config, EVERYTHING)
    assert expected[3] == 0
    assert len(expected[1]) > 1
    for world_size, started in ((2, gang), (3, gang3), (4, gang4)):
        for found in started.run(train_on_rank, config, ASSIGNED[world_size]):
            assert_same(found, expected)
            assert found[3] > 0


@pytest.mark.parametrize("case", CASES)
def test_so_do_other_numbers_within_epochs(gang: Gang, gang3: Gang, gang4: Gang, case: str) -> None:
    config = but(config_of(case), early_stopping=None)
    before: list[ResumePoint] = []
    for world_size, started, stop in ((4, gang4, 2), (2, gang, 5), (3, gang3, 6)):
        run_by = started.run(train_on_rank, config, ASSIGNED[world_size], stop, before)
        before = [point for _, _, point, _ in run_by]
    found = train_on_rank(LocalCommunicator(), config, EVERYTHING, None, before)
    assert_same(found, train_on_rank(LocalCommunicator(), config, EVERYTHING))


@pytest.mark.slow  # each process imports torchmetrics
def test_metrics_of_shards_are_put_together_in_their_order(gang: Gang) -> None:
    from torchmetrics import MeanAbsoluteError, R2Score

    metrics = {"mae": MeanAbsoluteError, "r2": R2Score}
    config = but(config_of("fp16"), metrics=metrics, training_metrics=True)
    expected = train_on_rank(LocalCommunicator(), config, EVERYTHING)
    assert {"mae", "r2", "val_mae", "val_r2"} <= expected[1][0].keys()
    for found in gang.run(train_on_rank, config, ASSIGNED[2]):
        assert_same(found, expected)
