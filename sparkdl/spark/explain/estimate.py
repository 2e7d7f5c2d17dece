"""A request that was checked, with the plan that a fit would make, from a sample and a count."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

from sparkdl.config import ExplainOptions
from sparkdl.data.plan import Column, Shard, TrainPlan, assign_shards
from sparkdl.explain.calibrate import shard_rows, shared_rows
from sparkdl.spark.fit.check_request import CheckedRequest, check_request
from sparkdl.spark.fit.check_rows import check_rows
from sparkdl.spark.frames.example_rows import UserRows
from sparkdl.spark.frames.frame_sample import Sample, count_rows
from sparkdl.spark.frames.row_table import RowTable
from sparkdl.spark.frames.shard_table import ShardTable
from sparkdl.spark.frames.user_data import UserData
from sparkdl.spark.run.run import FitRequest

Counted = tuple[tuple[int, int], tuple[str, ...]]
"""Rows for training and for validation, and notes on where these numbers come from."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """A request that was checked, and what is known of its rows."""

    checked: CheckedRequest
    columns: tuple[Column, ...]
    plan: TrainPlan
    sample: Sample | None
    """None: a source told it all."""
    notes: tuple[str, ...]
    num_rows: int
    """Rows for training, before the strategy sets some of them aside."""
    may_validate: bool
    """True if there are rows for validation, or if that is not known."""
    counted: Counted

    def largest_rows(self, num_workers: int) -> int:
        """Training rows of the fullest of so many workers, without those that are set aside."""
        if self.checked.fixed_shards is not None:
            rows = [shard.num_rows for shard in self.plan.shards]
            return max(sum(rows[n] for n in own) for own in assign_shards(len(rows), num_workers))
        if num_workers == self.plan.world_size:
            return max(self.plan.rows_of(rank) for rank in range(num_workers))
        hashes = () if self.sample is None else self.sample.hashes
        largest = max(shard_rows(hashes, self.num_rows, num_workers))
        return -(-largest * self.plan.num_rows // self.num_rows)


def look(
    rows: UserData,
    request: FitRequest,
    options: ExplainOptions,
    stack: ExitStack,
    earlier: Found | None = None,
) -> Found:
    """Check a request as a fit does, with its errors, look at some rows, and count them.

    The ``stack`` removes the spool. The rows of what was found ``earlier``, with other workers or
    batches, are not read again.
    """
    checked = check_request(rows, request)
    if earlier is None:
        sample, counted = rows.sample(checked.table_spec, options.count_seconds), None
    else:
        sample, counted = earlier.sample, earlier.counted
    # Now that jobs have run, executors are there whose number was not known before.
    checked = replace(checked, slots=checked.slots.asked_again(checked.spark))
    spec, run_id = checked.table_spec, uuid.uuid4().hex[:12]
    table: RowTable
    if sample is None:
        table = checked.data.table(spec, run_id)
    else:
        shown = UserRows(checked.data.frame, spec.columns, spec.validation)
        spec = replace(spec, num_shards=1, num_places=1, at_once=False, profile=None)
        spec = replace(spec, columns=sample.prepared, validation=sample.validation)
        table = ShardTable(sample.df, spec, run_id=run_id, shown=shown)
    stack.callback(table.close)
    spooled = table.collect()
    columns = check_rows(checked, table, spooled).columns
    shards, may_validate = [part.shard for part in spooled], False
    if sample is None:
        name = type(checked.data.source).__name__
        notes = [f"the rows are those that {name} tells of; nothing was read", *_near(shards)]
        training = sum(shard.num_rows for shard in shards)
        counted = (training, sum(shard.num_validation_rows for shard in shards)), ()
    else:
        counted = counted or _count(checked, sample, shards[0], options)
        numbers, notes = counted[0], list(counted[1])
        if num_skipped := table.skipped(spooled)[0]:
            notes.append(
                f"{num_skipped} of the {sample.num_rows:,} rows of the sample would be left out; "
                "they are counted here all the same"
            )
        shards = _shards(checked, sample, shards[0], *numbers)
        is_given = options.num_rows is not None and not sample.is_all
        may_validate = is_given and sample.validation is not None
    if (wished := checked.strategy.work_shares) is not None:
        speeds = ", ".join(f"{pattern}: {speed:g}" for pattern, speed in wished.items())
        notes.append(
            f"workers get shards by work_shares ({speeds}) and by what is measured in the fit; "
            "what is told here is of shards that are dealt evenly"
        )
    plan = checked.make_plan(columns, shards)
    as_spooled = [replace(spooled[0], shard=shard) for shard in shards]
    window_bytes = checked.config.shuffle_window_bytes
    windows = table.windows(plan, as_spooled, checked.slots.cluster, window_bytes)
    return Found(
        checked=checked,
        columns=columns,
        plan=replace(plan, windows=windows),
        sample=sample,
        notes=tuple(notes),
        num_rows=sum(shard.num_rows for shard in shards),
        may_validate=may_validate or plan.num_validation_rows > 0,
        counted=counted,
    )


def _near(shards: Sequence[Shard]) -> Iterator[str]:
    """Yield a sentence on the hosts that have the rows of a source, if they are known."""
    best = {shard.hosts[0] for shard in shards if shard.hosts}
    if best:
        number = sum(bool(shard.hosts) for shard in shards)
        yield (
            f"{number} of {len(shards)} shards lie mostly on one host each "
            f"({', '.join(sorted(best))}); a worker there reads them without the network"
        )


def _count(
    checked: CheckedRequest, sample: Sample, spooled: Shard, options: ExplainOptions
) -> Counted:
    """Count the rows, or take their number as it was given."""
    if sample.is_all:
        return (spooled.num_rows, spooled.num_validation_rows), ()
    of_sample = (
        f"shapes, sizes and skew are those of the first {sample.num_rows:,} rows that Spark "
        "found; all rows are checked by fit"
    )
    if options.num_rows is None:
        frame = checked.data.frame
        return count_rows(frame, checked.validation, options.count_seconds), (of_sample,)
    num_validation = round(options.num_rows * spooled.num_validation_rows / spooled.num_all_rows)
    note = "the number of rows is the one that was given"
    if sample.validation is not None:
        note += ", divided into rows for training and for validation as the sample's are"
    return (options.num_rows - num_validation, num_validation), (note, of_sample)


def _shards(
    checked: CheckedRequest, sample: Sample, spooled: Shard, num_rows: int, num_validation: int
) -> list[Shard]:
    """The shards of a fit, of so many rows of the sample's size."""
    num_shards, executors = checked.num_shards, checked.slots.cluster.num_executors or 1
    rows = shard_rows(sample.hashes, num_rows, num_shards)
    validation = shared_rows(num_validation, [1 / num_shards] * num_shards)
    row_bytes = spooled.num_bytes / max(1, spooled.num_all_rows)
    return [
        replace(
            spooled,
            shard_id=number,
            path="",
            host=f"{spooled.host}-{number % executors}",
            num_rows=rows[number],
            num_validation_rows=validation[number],
            num_bytes=int(row_bytes * (rows[number] + validation[number])),
        )
        for number in range(num_shards)
    ]
