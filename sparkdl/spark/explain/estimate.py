"""The plan that a fit would make, from a sample and a count, or from what a source tells."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial

from sparkdl.data.column_stats import SpoolSummary
from sparkdl.data.plan import Column, Shard, TrainPlan, make_plan
from sparkdl.errors import ConfigError
from sparkdl.explain.calibrate import shard_rows, shared_rows
from sparkdl.spark.cluster.cluster_info import inspect_cluster
from sparkdl.spark.fit.checks import check_labels, shaped
from sparkdl.spark.fit.dry_run import dry_run
from sparkdl.spark.fit.intake import Intake
from sparkdl.spark.frames.choose_windows import with_windows
from sparkdl.spark.frames.frame_sample import Sample, count_rows, take_sample
from sparkdl.spark.frames.shard_table import ShardTable, SpooledShard
from sparkdl.spark.frames.source_table import SourceTable
from sparkdl.spark.run.run import FitRequest
from sparkdl.spark.session.compat import conf


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


def from_sample(
    intake: Intake, request: FitRequest, options: ExplainOptions, stack: ExitStack
) -> Found:
    """Columns by a few rows, numbers by a count; ``stack`` removes the sample's spool."""
    sample = take_sample(intake.df, intake.prepared, intake.validation, options.count_seconds)
    table = ShardTable(
        sample.df, sample.prepared, sample.validation, num_shards=1,
        run_id=uuid.uuid4().hex[:12], barrier=False,
    )  # fmt: skip
    stack.callback(table.close)
    spooled = table.collect()
    columns = shaped(table, spooled, request)
    shown = dry_run(intake.module, columns, request)
    if shown.num_classes is not None and request.label_col is not None:
        check_labels(intake.df, request.label_col, shown.num_classes, request.num_inputs, spooled)
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
            * (intake.validation is not None)
        )
    else:
        num_rows, num_validation = count_rows(intake.df, intake.validation, options.count_seconds)
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
    workers = intake.slots.num_workers
    rows = rows_by_shard(sample, num_rows, workers, intake.strategy.row_shares(workers))
    plan = _plan(intake, request, columns, rows, num_validation, spooled[0])
    return Found(
        columns=columns,
        plan=plan,
        sample=sample,
        notes=tuple(notes),
        num_rows=num_rows,
        may_validate=plan.num_validation_rows > 0
        or (is_given and intake.validation is not None),
    )  # fmt: skip


def _divided(num_rows: int, sample: SpoolSummary) -> tuple[int, int]:
    """Rows for training and for validation, as many of each as in the sample."""
    known = sample.num_rows + sample.num_validation_rows
    num_validation = round(num_rows * sample.num_validation_rows / known)
    return num_rows - num_validation, num_validation


def _plan(
    intake: Intake,
    request: FitRequest,
    columns: Sequence[Column],
    rows_by_shard: Sequence[int],
    num_validation: int,
    sample: SpooledShard,
) -> TrainPlan:
    """The plan of a fit whose shards have so many rows of the sample's size."""
    count = len(rows_by_shard)
    in_sample = sample.shard.num_rows + sample.shard.num_validation_rows
    row_bytes = sample.shard.num_bytes / max(1, in_sample)
    info = inspect_cluster(intake.spark)
    executors = info.num_executors or 1
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
    plan = _made(intake, request, columns, shards)
    spooled = [replace(sample, shard=shard) for shard in shards]
    window_bytes = request.config.shuffle_window_bytes
    return with_windows(plan, spooled, info, partial(conf, intake.spark), window_bytes)


def _made(
    intake: Intake, request: FitRequest, columns: Sequence[Column], shards: Sequence[Shard]
) -> TrainPlan:
    config = request.config
    return intake.strategy.hold_out(
        make_plan(
            columns=columns,
            shards=shards,
            world_size=len(shards),
            batch_size=config.batch_size,
            epochs=config.epochs,
            max_steps=config.max_steps,
        )
    )


def from_source(intake: Intake, request: FitRequest) -> Found:
    """All of it by what the source tells without being read."""
    workers = intake.slots.num_workers
    table = source_table(intake, request, workers, intake.strategy.row_shares(workers))
    spooled = table.collect()
    columns = shaped(table, spooled, request)
    shown = dry_run(intake.module, columns, request)
    if shown.num_classes is not None and request.label_col is not None:
        table.check_labels(request.label_col, shown.num_classes, request.num_inputs)
    shards = [part.shard for part in spooled]
    plan = _made(intake, request, columns, shards)
    note = f"the rows are those that {type(intake.source).__name__} tells of; nothing was read"
    return Found(
        columns=columns,
        plan=plan,
        sample=None,
        notes=(note,),
        num_rows=sum(shard.num_rows for shard in shards),
        may_validate=plan.num_validation_rows > 0,
    )


def source_table(
    intake: Intake, request: FitRequest, num_shards: int, shares: Sequence[float] | None
) -> SourceTable:
    """The source's rows in so many shards; nothing is read yet."""
    assert intake.source is not None
    return SourceTable(
        intake.spark, intake.source, intake.prepared, request.validation_col,
        num_shards=num_shards, shares=shares,
    )  # fmt: skip
