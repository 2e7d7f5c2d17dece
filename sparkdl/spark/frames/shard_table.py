"""The table of a DataFrame's shards, which lie on the executors' disks and can be made anew.

Each task of the table writes its partition once and yields where it lies. The spooling stage is a
barrier stage like the gang's, so that shards are spread over the executors the way the gang will
be.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from sparkdl import errors
from sparkdl.data.column_stats import (
    ColumnStats,
    SpoolSummary,
    merge_stats,
    no_rows,
    skipped_rows,
)
from sparkdl.data.plan import Column, Shard, TrainPlan
from sparkdl.data.shuffle_windows import Windows
from sparkdl.data.spool.spool_source import SpoolSource
from sparkdl.errors import DataError
from sparkdl.spark.cluster.cluster_info import ClusterInfo
from sparkdl.spark.frames.choose_windows import windows_of_spool
from sparkdl.spark.frames.columns import Prepared, quoted
from sparkdl.spark.frames.row_table import SpooledShard, TableSpec, require_same, spool_columns
from sparkdl.spark.frames.spool_task import TABLE_SCHEMA, CleanTask, SpoolTask
from sparkdl.spark.session.compat import conf, described, num_slots

if TYPE_CHECKING:
    from pyspark.sql import Column as SparkColumn


logger = logging.getLogger(__name__)

_PASSES = 4
"""Tasks per shard that look for spools which a first round of tasks has not met."""
_KILL_SECONDS = 3.0
"""A task that Spark has given up is dead by then (`spark.python.task.killTimeout` is 2 s)."""


class SpoolTable:
    """The spools of one run. ``close`` removes them from the executors."""

    df: DataFrame
    """Columns of `spool_task.TABLE_SCHEMA`; persisted."""

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


class ShardTable(SpoolTable):
    """The shards of one run's DataFrame."""

    reader = SpoolSource()
    """Opens the shards on workers."""

    def __init__(
        self, df: DataFrame, spec: TableSpec, *, run_id: str, shown: DataFrame | None = None
    ) -> None:
        """Describe the table; nothing runs yet.

        Args:
            df: where the rows come from.
            spec: what the shards shall hold.
            run_id: names the folders.
            shown: the rows that messages show, where those of ``df`` are copies; None: ``df``.
        """
        super().__init__(df.sparkSession, run_id=run_id, num_shards=spec.num_shards)
        self._spec = spec
        self._shown = df if shown is None else shown
        self._first: tuple[SpooledShard, ...] | None = None
        self.df = self._build(df)

    def _build(self, df: DataFrame) -> DataFrame:
        spec = self._spec
        columns = [p.expression.alias(f"c{i}") for i, p in enumerate(spec.columns)]
        if spec.validation is not None:
            columns.append(spec.validation.alias("validation"))
        selected = df.select(*columns)
        row_hash = F.xxhash64(*[F.col(name) for name in selected.columns])
        # The canonical order: equal data gives equal shards in equal order, run after run and
        # after the loss of an executor, which round-robin repartitioning does not.
        hashed = selected.withColumn("hash", row_hash)
        if spec.shares is None:
            spread = hashed.repartition(self.num_shards, "hash")
        else:
            shard = shard_of_hash(F.col("hash"), spec.shares)
            spread = hashed.repartitionById(self.num_shards, shard)
        # Rows that differ only in where nulls or ends of arrays are have equal hashes.
        ordered = spread.sortWithinPartitions("hash", *selected.columns)
        task = SpoolTask(
            run_id=self._run_id,
            columns=spec.spool_columns,
            has_validation=spec.validation is not None,
        )
        table = ordered.mapInArrow(task, TABLE_SCHEMA, barrier=spec.is_gang, profile=spec.profile)
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
        if self._spec.validation_col is not None:
            found = ColumnStats().nulls_and_shapes
            for spooled in shards:
                found.merge(spooled.summary.columns[-1].nulls_and_shapes)
            if found.nulls:
                raise DataError(found.message(self._spec.validation_col))
        return columns_of(self._spec.columns, shards)

    def skipped(self, shards: Sequence[SpooledShard]) -> tuple[int, str]:
        """How many rows were left out because an input asked for it, and why, in words."""
        names = [column.name for column in self._spec.columns]
        return skipped_rows(names, [part.summary for part in shards])

    def check_labels(
        self, label_col: str, num_classes: int, index: int, shards: Sequence[SpooledShard]
    ) -> None:
        """Refuse labels outside the classes; asks Spark for count and example only if there are.

        Raises:
            DataError: with count and an example.
        """
        stats = merge_stats([shard.summary.columns[index] for shard in shards])
        if stats.maximum is None or stats.maximum < num_classes:
            return
        outside = self._shown.where(F.col(quoted(label_col)) >= num_classes)
        with described(self._spark, "sparkdl: look for labels outside the classes"):
            row, number = str(outside.first()), outside.count()
        example = row if len(row) <= 200 else row[:197] + "..."
        raise DataError(
            f'column "{label_col}" has {number} label(s) outside the {num_classes} classes '
            f"of the module's output, 0 to {num_classes - 1} (example row: {example}); "
            "mend the labels or widen the module's output"
        )

    def windows(
        self,
        plan: TrainPlan,
        shards: Sequence[SpooledShard],
        cluster: ClusterInfo,
        window_bytes: int | None,
    ) -> Windows | None:
        """In which windows a run that begins mixes its rows, by the memory of its hosts."""
        return windows_of_spool(plan, shards, cluster, partial(conf, self._spark), window_bytes)


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
    asked = zip(spool_columns(prepared), found, strict=True)
    each = [stats.problem(column) for column, stats in asked]
    problems = [problem for problem in each if problem is not None]
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
