"""What a rank measures, whatever it has of rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from sparkdl.config import TrainConfig
from sparkdl.data.plan import Shard, TrainPlan
from sparkdl.data.spool.mapped import MappedRows
from sparkdl.explain.measure_worker import StepTimer, at_work, for_measuring
from tests.train.runs import NUM_FEATURES, make_data, plan_for


class Kept:
    """A source that opens shards by the numbers under which it knows them."""

    def __init__(self, rows: Sequence[int]) -> None:
        self.data = make_data(rows, dtype=torch.float32)

    def open(self, plan: TrainPlan, shard: Shard, split: str) -> Any:
        found = self.data[shard.shard_id]
        assert found.num_rows == shard.num_rows
        return MappedRows(found, plan)

    def is_here(self, shard: Shard) -> bool:
        return True


def timer(rows: Sequence[int], rank: int = 0, **changes: Any) -> StepTimer:
    source = Kept(rows)
    config = TrainConfig(batch_size=16, optimizer="adam", learning_rate=0.01)
    plan = replace(plan_for(source.data, config, world_size=len(rows)), **changes)
    return StepTimer(
        nn.Linear(NUM_FEATURES, 1), for_measuring(config), plan, plan.shards_of(rank), source,
        torch.device("cpu"), 0.01,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("rows", "batch_size"), [(1, 16), (2, 4), (15, 16), (16, 16), (17, 4), (200, 1), (200, 16)]
)
def test_steps_are_timed_however_few_the_rows(rows: int, batch_size: int) -> None:
    steps = timer([rows])
    found = steps.measure(batch_size, steps.warm_up(batch_size))
    assert len(found["seconds"]) >= 2
    assert all(seconds > 0 for seconds in found["seconds"])
    assert 0.6 * batch_size < found["rows"] <= batch_size


def test_one_row_in_place_of_a_large_batch() -> None:
    steps = timer([1])
    assert steps.measure(4096, steps.warm_up(4096))["rows"] == 16  # 64 rows in four steps


def test_each_rank_reads_its_own_shard() -> None:
    steps = timer([7, 20], rank=1)
    assert steps.measure(4, steps.warm_up(4))["rows"] == 4


def test_those_that_have_rows_work_first() -> None:
    plan = plan_for(make_data([0, 5, 5, 5, 0, 5]), TrainConfig(batch_size=4), world_size=6)
    nodes = (0, 0, 0, 1, 1, 1)
    assert [rank for rank in range(6) if at_work(plan, nodes, rank, 1)] == [1, 3]
    assert [rank for rank in range(6) if at_work(plan, nodes, rank, 2)] == [1, 2, 3, 5]
    assert [rank for rank in range(6) if at_work(plan, nodes, rank, 3)] == [1, 2, 3, 5]
