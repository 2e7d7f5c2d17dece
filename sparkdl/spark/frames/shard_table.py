"""How does a DataFrame become shards on the executors' disks, and stay recoverable?

Each task of the shard table writes its partition once and yields where it lies. The spooling stage
is a barrier stage like the gang's, so that shards are spread over the executors the way the gang
will be.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from sparkdl import errors
from sparkdl.data.column_stats import (
    ColumnStats,
    SpoolSummary,
    bad_values_message,
    merge_stats,
    no_rows,
)
from sparkdl.data.plan import Column, Shard, SpoolColumn
from sparkdl.data.spool.spool_source import SpoolSource
from sparkdl.errors import DataError
from sparkdl.spark.frames.columns import Prepared
from sparkdl.spark.frames.spool_task import TABLE_SCHEMA, CleanTask, SpoolTask
from sparkdl.spark.session.compat import described, num_slots

if TYPE_CHECKING:
    from pyspark.resource import ResourceProfile
    from pyspark.sql import Column as SparkColumn


logger = logging.getLogger(__name__)

_PASSES = 4
"""Tasks per shard that look for spools which a first round of tasks has not met."""
_KILL_SECONDS = 3.0
"""A task that Spark has given up is dead by then (`spark.python.task.killTimeout` is 2 s)."""


class SpoolTable:
    """The spools of one run. ``close`` removes them from the executors."""

    df: DataFrame
    """Columns of `spooltask.TABLE_SCHEMA`; persisted."""

    def __init__(self, spark: SparkSession, *, run_id: str, num_shards: int) -> None:
        """Of a table that the class itself describes in ``df``."""
        self._spark = spark
        self._run_id = run_id
        self.num_shards = num_shards
        self._seen: set[str] = set()
        self._spooling = threading.RLock()
        self._stragglers = False

    def _payloads(self) -> dict[int, dict[str, Any]]:
        """Spool what is not there (everything at first, then what was lost); rows by shard id.

        One thread at a time: two jobs would both write what they find missing.
        """
        with self._spooling, described(self._spark, f"sparkdl {self._run_id}: spool"):
            try:
                # A new query each time: one that has failed gives its failure again, from memory.
                rows = self.df.select("shard_id", "payload").collect()
            except BaseException:
                self._stragglers = True
                raise
        payloads = {row["shard_id"]: json.loads(row["payload"]) for row in rows}
        self._seen.update(values["path"] for values in payloads.values() if "path" in values)
        return dict(sorted(payloads.items()))

    def rebuild(self) -> None:
        """Forget all spools, so that the next job writes them anew."""
        self.df.unpersist()
        self.df.persist()

    def note(self, paths: set[str]) -> None:
        """Take note of where tasks found their shards; what was lost, Spark has written anew."""
        self._stragglers |= not paths <= self._seen
        self._seen |= paths

    def close(self) -> None:
        """Delete all spools of the run on all executors that are there, and forget the table.

        Raises nothing: it must not hide what went wrong before, nor spoil what went well.
        """
        for action in (self._remove_spools, self.df.unpersist):
            try:
                action()
            except Exception as error:
                logger.warning("could not clean up after run %s: %s", self._run_id, error)
        if self._seen:
            logger.warning(
                "spools remain where no executor could be asked to remove them, until Spark "
                "removes its own directories: %s",
                ", ".join(sorted(self._seen)),
            )

    def _remove_spools(self) -> None:
        with described(self._spark, f"sparkdl {self._run_id}: clean up"):
            # As many tasks as shards usually meet the executors that spooled; else all slots,
            # or, where Spark does not tell how many there are, several times as many tasks.
            self._clean(self.num_shards)
            if self._seen or self._stragglers:
                # Something was lost or cancelled, so tasks that Spark has given up may go on
                # writing for a moment, and keep the slots from which they would be met.
                time.sleep(_KILL_SECONDS)
                self._clean(max(num_slots(self._spark), _PASSES * self.num_shards))

    def _clean(self, num_tasks: int) -> None:
        task = CleanTask(run_id=self._run_id, paths=tuple(sorted(self._seen)))
        tasks = self._spark.range(0, num_tasks, 1, num_tasks)
        removed = tasks.mapInArrow(task, "path string").collect()
        self._seen.difference_update(row["path"] for row in removed)


@dataclass(frozen=True, kw_only=True)
class SpooledShard:
    """A row of the shard table."""

    shard: Shard
    summary: SpoolSummary
    memory_bytes: int
    """Memory of the host or container that holds the shard, as its task has found it."""


class ShardTable(SpoolTable):
    """The shards of one run's DataFrame."""

    reader = SpoolSource()
    """Opens the shards on workers."""

    def __init__(
        self,
        df: DataFrame,
        prepared: Sequence[Prepared],
        validation: SparkColumn | None,
        *,
        num_shards: int,
        run_id: str,
        profile: ResourceProfile | None = None,
        barrier: bool = True,
        shares: Sequence[float] | None = None,
    ) -> None:
        """Describe the table; nothing runs yet.

        Args:
            df: where the rows come from.
            prepared: the columns to spool.
            validation: says which rows are for validation; None: none.
            num_shards: number of shards.
            run_id: names the folders.
            profile: resources of a task.
            barrier: whether all shards are spooled at once, as a gang will hold them; otherwise
                one after the other where slots are few.
            shares: each shard's part of the rows, adding up to 1; None: equal parts.
        """
        self._barrier = barrier
        super().__init__(df.sparkSession, run_id=run_id, num_shards=num_shards)
        self._profile = profile
        self._prepared = tuple(prepared)
        self._has_validation = validation is not None
        self._shares = shares
        self._first: tuple[SpooledShard, ...] | None = None
        self.df = self._build(df, validation)

    def _build(self, df: DataFrame, validation: SparkColumn | None) -> DataFrame:
        columns = [p.expression.alias(f"c{i}") for i, p in enumerate(self._prepared)]
        if validation is not None:
            columns.append(validation.alias("validation"))
        selected = df.select(*columns)
        row_hash = F.xxhash64(*[F.col(name) for name in selected.columns])
        # The canonical order: equal data gives equal shards in equal order, run after run and
        # after the loss of an executor, which round-robin repartitioning does not.
        hashed = selected.withColumn("hash", row_hash)
        if self._shares is None:
            spread = hashed.repartition(self.num_shards, "hash")
        else:
            shard = shard_of_hash(F.col("hash"), self._shares)
            spread = hashed.repartitionById(self.num_shards, shard)
        # Rows that differ only in where nulls or ends of arrays are have equal hashes.
        ordered = spread.sortWithinPartitions("hash", *selected.columns)
        task = SpoolTask(
            run_id=self._run_id,
            columns=spool_columns(self._prepared),
            has_validation=self._has_validation,
        )
        table = ordered.mapInArrow(task, TABLE_SCHEMA, barrier=self._barrier, profile=self._profile)
        return table.persist()

    def collect(self) -> tuple[SpooledShard, ...]:
        """Spool what is not there (everything at first, then what was lost), and list it.

        Raises:
            SparkDLError: a task could not spool.
            DataError: rows cannot be used, or the source has changed since the first call.
        """
        with self._spooling:
            return self._collected(self._payloads())

    def _collected(self, payloads: dict[int, dict[str, Any]]) -> tuple[SpooledShard, ...]:
        shards = tuple(_parse(shard_id, values) for shard_id, values in payloads.items())
        # Spark runs no task at all if it finds that there is nothing to do.
        if not any(part.shard.num_rows + part.shard.num_validation_rows for part in shards):
            raise DataError(no_rows([part.summary for part in shards]))
        if self._first is None:
            self._first = shards
        else:
            require_same(self._first, shards)
        return shards

    def columns(self, shards: Sequence[SpooledShard]) -> tuple[Column, ...]:
        """The spool's columns, after checking that all rows of all shards can be used.

        Raises:
            DataError: with column, count, and an example row, for all columns that have bad rows.
        """
        return columns_of(self._prepared, shards)

    def check_indicator(self, name: str, shards: Sequence[SpooledShard]) -> None:
        """Refuse nulls in the column that marks validation rows."""
        found = ColumnStats().nulls_and_shapes
        for spooled in shards:
            found.merge(spooled.summary.columns[-1].nulls_and_shapes)
        if found.nulls:
            raise DataError(found.message(name))


def spool_columns(prepared: Sequence[Prepared]) -> tuple[SpoolColumn, ...]:
    """What a task that spools needs to know of the columns."""
    return tuple(
        SpoolColumn(
            name=p.name,
            role=p.role,
            dtype=p.dtype,
            as_classes=p.as_classes,
            specification=p.specification,
        )
        for p in prepared
    )


def columns_of(prepared: Sequence[Prepared], shards: Sequence[SpooledShard]) -> tuple[Column, ...]:
    """What was spooled of each column, after checking that all rows of all shards can be used.

    Raises:
        DataError: with column, count, and an example row, for all columns that have bad rows.
    """
    found = [
        merge_stats([part.summary.columns[index] for part in shards])
        for index in range(len(prepared))
    ]
    pairs = list(zip(prepared, found, strict=True))
    problems = [problem for pair in pairs if (problem := _problem(*pair)) is not None]
    if problems:
        raise DataError("; ".join(problems))
    return tuple(
        Column(
            name=p.name,
            role=p.role,
            dtype=stats.dtype or p.dtype,
            shape=stats.shape or (),
            argument=p.argument,
            specification=p.specification,
            longest=stats.longest,
        )
        for p, stats in pairs
    )


def shard_of_hash(row_hash: SparkColumn, shares: Sequence[float]) -> SparkColumn:
    """Number of the shard that gets a row: hashes are spread evenly, so cut their range by shares.

    Args:
        row_hash: a long.
        shares: each shard's part, adding up to 1.
    """
    bounds = [round(upto * 2**64) - 2**63 for upto in accumulate(shares[:-1])]
    shard = F.lit(0)
    for bound in bounds:
        shard += (row_hash >= F.lit(min(bound, 2**63 - 1))).cast("int")
    return shard


def parse_shard(shard_id: int, values: dict[str, Any]) -> Shard:
    """The shard that a row of the table describes.

    Raises:
        SparkDLError: its task could not spool.
    """
    return _parse(shard_id, values).shard


def _parse(shard_id: int, values: dict[str, Any]) -> SpooledShard:
    raise_failure(values)
    return as_shard(shard_id, values, values["summary"], values["path"])


def raise_failure(values: dict[str, Any]) -> None:
    """Raise what a task could not do.

    Raises:
        SparkDLError: of the type that the task had.
    """
    if "error" in values:
        raise getattr(errors, values["error"])(values["message"])


def as_shard(
    shard_id: int, values: dict[str, Any], written: dict[str, Any], path: str
) -> SpooledShard:
    """The shard of which a row of the table says ``values``, and its spool ``written``."""
    summary = SpoolSummary.from_dict(written)
    shard = Shard(
        shard_id=shard_id,
        host=values["host"],
        path=path,
        num_rows=summary.num_rows,
        num_validation_rows=summary.num_validation_rows,
        fingerprint=summary.fingerprint,
        num_bytes=summary.num_bytes,
    )
    return SpooledShard(shard=shard, summary=summary, memory_bytes=values["memory_bytes"])


def require_same(before: Sequence[SpooledShard], now: Sequence[SpooledShard]) -> None:
    """Refuse shards that hold other rows than before.

    Raises:
        DataError: names them.
    """
    changed = [
        new.shard.shard_id
        for old, new in zip(before, now, strict=True)
        if old.shard.fingerprint != new.shard.fingerprint
    ]
    if changed:
        raise DataError(
            f"the data has changed during training: shard(s) {changed} hold other rows than when "
            "it began; train from data that stays as it is, such as written Parquet, and avoid "
            "rand() and current_timestamp() in a DataFrame without a cache"
        )


def content_of(shards: Sequence[SpooledShard]) -> str:
    """Fingerprint of the rows of all shards, whatever their order and number."""
    total = sum(spooled.summary.content for spooled in shards) % 2**64
    rows = sum(s.shard.num_rows + s.shard.num_validation_rows for s in shards)
    return f"{total:016x}-{rows}"


def _problem(prepared: Prepared, stats: ColumnStats) -> str | None:
    """Why rows of a column cannot be used, or None."""
    findings = stats.nulls_and_shapes
    if findings:
        return findings.message(prepared.name)
    if not stats.bad_values:
        return None
    return bad_values_message(
        prepared.name,
        as_classes=prepared.as_classes,
        role=prepared.role,
        count=stats.bad_values,
        first=str(stats.first_bad),
    )
