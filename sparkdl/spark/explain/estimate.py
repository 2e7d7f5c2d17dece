"""The plan that a fit would make, from a sample and a count, or from what a source tells."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

from sparkdl.data.column_stats import SpooledShard
from sparkdl.data.plan import Column, Shard, TrainPlan
from sparkdl.errors import ConfigError
from sparkdl.explain.calibrate import shard_rows, shared_rows
from sparkdl.spark.fit.check_request import CheckedRequest
from sparkdl.spark.fit.check_rows import check_rows
from sparkdl.spark.frames.frame_sample import Sample, count_rows, take_sample
from sparkdl.spark.frames.row_table import RowTable, TableSpec
from sparkdl.spark.frames.shard_table import ShardTable


@dataclass(frozen=True, kw_only=True)
class ExplainOptions:
    """How much is measured."""

    calibrate: bool = True
    """Whether steps and exchanges are measured on the cluster; else there are no times."""
    num_rows: int | None = None
    """Rows, those for validation included, where counting them is too slow."""
    num_workers: tuple[int, ...] = ()
    """Numbers of workers to predict besides those that the cluster has room for."""
    count_seconds: float = 60.0
    """Longest that Spark may look at some rows of a DataFrame, and that it may count them all."""
    measure_seconds: float = 0.6
    """About how long each of the measurements may take, of which there are about ten."""

    def __post_init__(self) -> None:
        if self.num_rows is not None and self.num_rows < 1:
            raise ConfigError(f"num_rows must be at least 1; received {self.num_rows}")
        if any(number < 1 for number in self.num_workers):
            raise ConfigError(f"num_workers must be at least 1; received {self.num_workers}")
        for name in ("count_seconds", "measure_seconds"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be positive; received {getattr(self, name)}")


@dataclass(frozen=True, kw_only=True)
class Found:
    """What is known of the data."""

    columns: tuple[Column, ...]
    plan: TrainPlan
    sample: Sample | None
    """None: a source's footers told it all."""
    notes: tuple[str, ...]
    num_rows: int
    """Rows for training, before the strategy sets some of them aside."""
    may_validate: bool
    """Whether there are rows for validation, or whether that is not known."""

    def largest_rows(self, num_shards: int) -> int:
        """Training rows of the fullest of so many shards, without those that are set aside."""
        largest = max(rows_by_shard(self.sample, self.num_rows, num_shards))
        return -(-largest * self.plan.num_rows // self.num_rows)


def rows_by_shard(
    sample: Sample | None,
    num_rows: int,
    num_shards: int,
    shares: Sequence[float] | None = None,
) -> list[int]:
    """Rows of each of so many shards.

    Args:
        sample: some of the rows, if there are any.
        num_rows: all rows, those included that a strategy sets aside.
        num_shards: among which they are divided.
        shares: each shard's part of the rows, adding up to 1; None: equal parts.
    """
    if shares is not None:
        return shared_rows(num_rows, shares)
    if sample is None:
        return shard_rows((), num_rows, num_shards)
    is_all = sample.is_all and len(sample.hashes) == num_rows
    return shard_rows(sample.hashes, num_rows, num_shards, is_all=is_all)


def from_sample(checked: CheckedRequest, options: ExplainOptions, stack: ExitStack) -> Found:
    """Columns by a few rows, numbers by a count; ``stack`` removes the sample's spool."""
    frame, validation = checked.data.frame, checked.validation
    sample = take_sample(frame, checked.columns, validation, options.count_seconds)
    spec = TableSpec(
        columns=sample.prepared,
        num_shards=1,
        validation=sample.validation,
        validation_col=checked.request.validation_col,
        is_gang=False,
    )
    table = ShardTable(sample.df, spec, run_id=uuid.uuid4().hex[:12], shown=frame)
    stack.callback(table.close)
    spooled = table.collect()
    columns = check_rows(checked, table, spooled).columns
    notes = []
    first = spooled[0]
    is_given = options.num_rows is not None and not sample.is_all
    if sample.is_all:
        num_rows, num_validation = first.shard.num_rows, first.shard.num_validation_rows
    elif options.num_rows is not None:
        num_rows, num_validation = _divided(options.num_rows, first.shard)
        notes.append(
            "the number of rows is the one that was given"
            + ", divided into rows for training and for validation as the sample's are"
            * (validation is not None)
        )
    else:
        num_rows, num_validation = count_rows(frame, validation, options.count_seconds)
    if not sample.is_all:
        notes.append(
            f"shapes, sizes and skew are those of the first {sample.num_rows:,} rows that Spark "
            "found; all rows are checked by fit"
        )
    if first.num_skipped_rows:
        notes.append(
            f"{first.num_skipped_rows} of the {sample.num_rows:,} rows of the sample would be "
            "left out; they are counted here all the same"
        )
    rows = rows_by_shard(sample, num_rows, checked.slots.num_workers, checked.shares)
    plan = _plan(checked, table, columns, rows, num_validation, first)
    return Found(
        columns=columns,
        plan=plan,
        sample=sample,
        notes=tuple(notes),
        num_rows=num_rows,
        may_validate=plan.num_validation_rows > 0
        or (is_given and validation is not None),
    )  # fmt: skip


def _divided(num_rows: int, sample: Shard) -> tuple[int, int]:
    """Rows for training and for validation, as many of each as in the sample."""
    num_validation = round(num_rows * sample.num_validation_rows / sample.num_all_rows)
    return num_rows - num_validation, num_validation


def _plan(
    checked: CheckedRequest,
    table: RowTable,
    columns: Sequence[Column],
    rows_by_shard: Sequence[int],
    num_validation: int,
    sample: SpooledShard,
) -> TrainPlan:
    """The plan of a fit whose shards have so many rows of the sample's size."""
    count = len(rows_by_shard)
    row_bytes = sample.shard.num_bytes / max(1, sample.shard.num_all_rows)
    # Now that jobs have run, executors are there whose number was not known before.
    cluster = checked.slots.asked_again(checked.spark).cluster
    executors = cluster.num_executors or 1
    shards = []
    for number, num_rows in enumerate(rows_by_shard):
        validation = num_validation * (number + 1) // count - num_validation * number // count
        shards.append(
            replace(
                sample.shard,
                shard_id=number,
                path="",
                host=f"{sample.shard.host}-{number % executors}",
                num_rows=num_rows,
                num_validation_rows=validation,
                num_bytes=int(row_bytes * (num_rows + validation)),
            )
        )
    plan = checked.make_plan(columns, shards)
    spooled = [replace(sample, shard=shard) for shard in shards]
    window_bytes = checked.config.shuffle_window_bytes
    return replace(plan, windows=table.windows(plan, spooled, cluster, window_bytes))


def from_source(checked: CheckedRequest) -> Found:
    """All of it by what the source tells without being read."""
    table = checked.data.table(checked.table_spec, uuid.uuid4().hex[:12])
    spooled = table.collect()
    columns = check_rows(checked, table, spooled).columns
    shards = [part.shard for part in spooled]
    plan = checked.make_plan(columns, shards)
    note = (
        f"the rows are those that {type(checked.data.source).__name__} tells of; nothing was read"
    )
    return Found(
        columns=columns,
        plan=plan,
        sample=None,
        notes=(note,),
        num_rows=sum(shard.num_rows for shard in shards),
        may_validate=plan.num_validation_rows > 0,
    )
