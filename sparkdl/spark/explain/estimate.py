"""The plan that a fit would make, from a sample and a count, or from what a source tells."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

from sparkdl.config import ExplainOptions
from sparkdl.data.column_stats import SpoolSummary
from sparkdl.data.plan import Column, TrainPlan
from sparkdl.explain.calibrate import shard_rows, shared_rows
from sparkdl.spark.fit.check_request import CheckedRequest
from sparkdl.spark.fit.check_rows import check_rows
from sparkdl.spark.frames.frame_sample import Sample, count_rows, take_sample
from sparkdl.spark.frames.row_table import RowTable, SpooledShard, TableSpec
from sparkdl.spark.frames.shard_table import ShardTable


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
    summary = spooled[0].summary
    is_given = options.num_rows is not None and not sample.is_all
    if sample.is_all:
        num_rows, num_validation = summary.num_rows, summary.num_validation_rows
    elif options.num_rows is not None:
        num_rows, num_validation = _divided(options.num_rows, summary)
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
    if summary.num_skipped_rows:
        notes.append(
            f"{summary.num_skipped_rows} of the {sample.num_rows:,} rows of the sample would be "
            "left out; they are counted here all the same"
        )
    rows = rows_by_shard(sample, num_rows, checked.slots.num_workers, checked.shares)
    plan = _plan(checked, table, columns, rows, num_validation, spooled[0])
    return Found(
        columns=columns,
        plan=plan,
        sample=sample,
        notes=tuple(notes),
        num_rows=num_rows,
        may_validate=plan.num_validation_rows > 0
        or (is_given and validation is not None),
    )  # fmt: skip


def _divided(num_rows: int, sample: SpoolSummary) -> tuple[int, int]:
    """Rows for training and for validation, as many of each as in the sample."""
    known = sample.num_rows + sample.num_validation_rows
    num_validation = round(num_rows * sample.num_validation_rows / known)
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
    in_sample = sample.shard.num_rows + sample.shard.num_validation_rows
    row_bytes = sample.shard.num_bytes / max(1, in_sample)
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
