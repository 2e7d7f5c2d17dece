"""On which rows does `gauge` measure? A spool of a repeated sample, or the source itself."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from sparkdl.data.plan import Column, TrainPlan, make_plan
from sparkdl.explain.cost_model import Fixed
from sparkdl.spark.estimated import source_table
from sparkdl.spark.intake import Intake
from sparkdl.spark.preflight import ClusterInfo
from sparkdl.spark.request import FitRequest
from sparkdl.spark.sample import Sample
from sparkdl.spark.shards import ShardTable, SpooledShard
from sparkdl.spark.slots import Slots
from sparkdl.spark.sourcetable import SourceTable

if TYPE_CHECKING:
    from torch import nn

_STEPS_OF_A_RANK = 6
"""Batches that each rank shall have in the repeated sample."""
_MOST_ROWS, _MOST_BYTES = 400_000, 128 << 20
"""Of the repeated sample."""


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Where measurements are made."""

    intake: Intake
    request: FitRequest
    info: ClusterInfo
    module: nn.Module
    """As the driver has tried it: lazy parameters have shapes."""
    columns: Sequence[Column]
    slots: Slots
    """Of the gang that measures."""
    seconds: float
    no_gang: str | None
    """Why no gang is measured, as a sentence; None: one is."""

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """Three sizes of batches, the one that was asked for first."""
        size = self.request.config.batch_size
        return tuple(dict.fromkeys((size, max(1, size // 2), max(1, size // 4))))


def table_of_ranks(
    bench: Bench, sample: Sample | None, run_id: str, stack: contextlib.ExitStack
) -> tuple[ShardTable | SourceTable, Fixed]:
    """A shard for every rank, what a spool takes, and what each row adds to it."""
    ranks = bench.slots.num_workers
    if sample is None:
        return source_table(bench.intake, bench.request, ranks, None), Fixed()
    most = _most_rows(sample)
    wanted = min(max(_wanted_rows(bench, ranks), most // 2), most)
    times = max(1, -(-wanted // sample.num_rows))
    _, few_seconds = _spool(bench, sample, 1, ranks, f"{run_id}-1", stack)
    table, seconds = _spool(bench, sample, times, ranks, f"{run_id}-2", stack)
    rows = (times - 1) * sample.num_rows
    slot_seconds = max(0.0, seconds - few_seconds) * ranks / rows if rows else 0.0
    return table, Fixed(
        spool_seconds=few_seconds, spool_row_seconds=slot_seconds + sample.read_row_seconds
    )


def table_of_one(
    bench: Bench, sample: Sample | None, run_id: str, stack: contextlib.ExitStack
) -> ShardTable | SourceTable:
    """A single shard, with rows for the steps of a round."""
    if sample is None:
        return source_table(bench.intake, bench.request, 1, None)
    wanted = min(_wanted_rows(bench, 1), _most_rows(sample))
    times = max(1, -(-wanted // sample.num_rows))
    return _spool(bench, sample, times, 1, run_id, stack)[0]


def _wanted_rows(bench: Bench, ranks: int) -> int:
    return ranks * _STEPS_OF_A_RANK * bench.request.config.batch_size


def _most_rows(sample: Sample) -> int:
    return min(_MOST_ROWS, int(_MOST_BYTES / max(1.0, sample.row_bytes)))


def _spool(
    bench: Bench,
    sample: Sample,
    times: int,
    num_shards: int,
    run_id: str,
    stack: contextlib.ExitStack,
) -> tuple[ShardTable, float]:
    """The sample's rows, so many times over, in shards; and the seconds that it took."""
    table = ShardTable(
        sample.repeated(times),
        sample.prepared,
        None,
        num_shards=num_shards,
        run_id=run_id,
        profile=bench.slots.profile,
        barrier=bench.no_gang is None,
    )
    stack.callback(table.close)
    began = time.perf_counter()
    table.collect()
    return table, time.perf_counter() - began


def plan_of(bench: Bench, shards: Sequence[SpooledShard]) -> TrainPlan:
    """The plan of what is measured on; validation rows are left aside."""
    return make_plan(
        columns=bench.columns,
        shards=[replace(part.shard, num_validation_rows=0) for part in shards],
        world_size=len(shards),
        batch_size=bench.request.config.batch_size,
        epochs=1,
    )
