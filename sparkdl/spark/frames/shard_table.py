"""The table of a DataFrame's shards, which lie on the executors' disks and can be made anew.

Each task of the table writes its partition once and yields where it lies. For a gang of fixed
workers (`TableSpec.at_once`) the spooling stage is a barrier stage too, so that shards are spread
over the executors the way the gang will be; otherwise it is a plain one.
"""

from __future__ import annotations

import json
import logging
import math
import socket
import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F

from sparkdl import errors
from sparkdl.data.column_stats import SpooledShard, merge_stats, no_rows, skipped_rows
from sparkdl.data.plan import Column, Shard, TrainPlan, assign_shards
from sparkdl.data.shuffle_windows import HostLoad, Windows, choose_windows
from sparkdl.data.spool.head import rows_of_head
from sparkdl.data.spool.kept_spools import Keep
from sparkdl.data.spool.local_disk import remove_spool
from sparkdl.data.spool.spool_source import SpoolSource
from sparkdl.data.spool.writer import SpoolWriter
from sparkdl.errors import DataError
from sparkdl.spark.cluster.cluster_info import ClusterInfo, Get, parse_bytes, registered_executors
from sparkdl.spark.frames.columns import quoted
from sparkdl.spark.frames.deal_rows import ShardsByPlace, spread
from sparkdl.spark.frames.example_rows import UserRows, in_words
from sparkdl.spark.frames.row_table import (
    Origin,
    ShownRows,
    TableSpec,
    payloads_of,
    require_same,
    slots_for,
    spool_columns,
)
from sparkdl.spark.frames.spool_task import (
    TABLE_SCHEMA,
    CleanTask,
    FindTask,
    FirstShards,
    KeptTask,
    SpoolTask,
)
from sparkdl.spark.frames.unstable_rows import unstable_operator
from sparkdl.spark.session.background_job import BackgroundJob
from sparkdl.spark.session.compat import conf, described, has_ended, is_connect, num_slots
from sparkdl.spark.session.interrupts import is_hurried

if TYPE_CHECKING:
    from sparkdl.data.collate import Rows

logger = logging.getLogger(__name__)

_PASSES = 4
"""Tasks per shard that look for spools which a first round of tasks has not met."""
_WAIT_SECONDS = 10.0
"""Longest time that a result is kept waiting for the cleaning up."""
_LIMIT_SECONDS = 600.0
"""Longest time that the cleaning up may wait for slots."""
_KILL_SECONDS = 3.0
"""A task that Spark has given up is dead by then (`spark.python.task.killTimeout` is 2 s)."""


Dealt = Callable[[ShardsByPlace | None], DataFrame]
"""Gives rows in the partitions of all shards, or of some; see `spread`."""
_left: dict[str, set[str]] = {}
"""Runs whose spools could not be removed, with what the driver knows of them: the next run of this
process that meets their host removes them, or Spark, when the session ends."""


class SpoolTable:
    """The spools of one run. ``close`` removes them from the executors."""

    df: DataFrame
    """Columns of `spool_task.TABLE_SCHEMA`; persisted."""

    def __init__(
        self, spark: SparkSession, *, run_id: str, num_places: int, keep: Keep | None = None
    ) -> None:
        """Prepare a table that the class itself describes in ``df``, with so many partitions."""
        self._spark = spark
        self._keep = keep
        self._run_id = run_id
        self.num_places = num_places
        self._seen: set[str] = set()
        self._spooling = threading.RLock()
        self._stragglers = False
        self._queue_timeout_seconds = math.inf
        self._for_others: dict[int, DataFrame] = {}
        """The same shards in other numbers of places; persisted."""
        self._first_shards = FirstShards(spark)
        self._begun: BackgroundJob[list[Row]] | None = None
        """The job that `begin` has begun, and nobody waits for yet."""
        self._running: BackgroundJob[list[Row]] | None = None
        """The job that `_spooled` waits for, or has waited for."""
        self._is_followed = False
        """True if the gang that began again last runs where the table's rows are."""

    def _describe(self, dealt: Dealt, task: SpoolTask, spec: TableSpec) -> None:
        """Have Spark keep what the task yields of each partition of the rows."""
        self._dealt, self._task, self._profile = dealt, task, spec.profile
        table = dealt(None).mapInArrow(
            task, TABLE_SCHEMA, barrier=spec.at_once, profile=spec.profile
        )
        self.df = table.persist()
        self._queue_timeout_seconds = spec.queue_timeout_seconds

    def begin(self) -> None:
        """See `RowTable.begin`. Of several runs that share a table the first begins."""
        if self._spooling.acquire(blocking=False):
            if self._keep is None and self._begun is None and not self._seen:
                self._begun = self._job(self.df)
                self._begun.begin()
            self._spooling.release()

    def _made_anew(self, missing: Collection[int]) -> list[tuple[SpooledShard, ...]]:
        """Have a plain stage read all rows, and write those of some shards of every data set."""
        num_places = min(len(missing), num_slots(self._spark) or len(missing))
        return self._spooled(len(self._task.sets), self._written(sorted(missing), num_places))

    def _written(self, numbers: Sequence[int], num_places: int) -> DataFrame:
        """A plain stage that writes some shards of every data set, in so many places."""
        places = assign_shards(len(numbers), num_places)
        ids = tuple(tuple(numbers[index] for index in own) for own in places)
        task = replace(self._task, shards_by_place=ids)
        return self._dealt(ids).mapInArrow(task, TABLE_SCHEMA, profile=self._profile)

    def _to_follow(self, num_workers: int, num_shards: int) -> DataFrame | None:
        """The table for so many workers, if they must run where it has written the shards.

        They must if there are more executors than workers: wherever Spark ran them, it would
        hardly be where the shards are.
        """
        self._is_followed = self._has_spare(num_workers)
        if not self._is_followed:
            return None
        if num_workers == self.num_places and self._task.pieces is None:
            return self.df
        if num_workers not in self._for_others:
            table = self._written(range(num_shards), num_workers).persist()
            self._for_others[num_workers] = table
        return self._for_others[num_workers]

    def _has_spare(self, num_workers: int) -> bool:
        """Return True if there are more executors than workers, as far as Spark tells."""
        spark = self._spark
        return not is_connect(spark) and registered_executors(spark) > num_workers

    def _nowhere(self, shards: Sequence[Shard], num_workers: int, *, is_barrier: bool) -> list[int]:
        """Numbers of shards, of any data set, that a stage of as many tasks cannot open."""
        silence = self._task.heartbeat_timeout_seconds
        task = FindTask(
            run_id=self._run_id, shards=tuple(shards), heartbeat_timeout_seconds=silence
        )
        slots = self._spark.range(0, num_workers, 1, num_workers)
        rows = slots.mapInArrow(task, "place int", barrier=is_barrier, profile=self._profile)
        job = BackgroundJob(
            self._spark,
            rows.collect,  # at once: before a shuffle Spark would wait for as many slots again
            tag=f"sparkdl-{self._run_id}-find-{uuid.uuid4().hex[:4]}",
            name=f"sparkdl {self._run_id}: look for shards",
        )
        found = job.watched(math.inf, queue_seconds=self._queue_timeout_seconds)
        here = {row["place"] for row in found}
        missing = {shard.shard_id for place, shard in enumerate(shards) if place not in here}
        if missing:
            logger.info("the shards %s are written anew", sorted(missing))
        return sorted(missing)

    def _spooled(
        self, num_sets: int = 1, table: DataFrame | None = None
    ) -> list[tuple[SpooledShard, ...]]:
        """Spool what is not there, and give of each data set its shards in their order.

        ``table`` is None for the run's own.

        One thread at a time: two jobs would both write what they find missing.
        """
        with self._spooling:
            job = self._begun if table is None else None
            self._begun = None if table is None else self._begun
            self._running = job = job or self._job(table or self.df)
            try:
                rows = job.watched(
                    math.inf,
                    queue_seconds=self._queue_timeout_seconds,
                    meanwhile=self._first_shards.look,
                )
            except BaseException:
                self._stragglers = True
                raise
        payloads = [json.loads(row["payload"]) for row in sorted(rows)]
        self._seen.update(payload["path"] for payload in payloads if "path" in payload)
        # Spark runs no task at all if it finds that there is nothing to do.
        found = [shard for payload in payloads for shard in parse_shards(payload)]
        return [tuple(found[number::num_sets]) for number in range(num_sets)]

    def _end_spooling(self) -> None:
        """Free the slots for a look at the rows."""
        if self._running is not None:
            self._running.end()

    def _job(self, table: DataFrame) -> BackgroundJob[list[Row]]:
        return BackgroundJob(
            self._spark,
            # A new query each time: one that has failed gives its failure again, from memory.
            lambda: table.select("shard_id", "payload").collect(),
            tag=f"sparkdl-{self._run_id}-spool-{uuid.uuid4().hex[:4]}",
            name=f"sparkdl {self._run_id}: spool",
        )

    def forget(self) -> None:
        """Forget all shards, so that they are made anew."""
        for table in (self.df, *self._for_others.values()):
            table.unpersist()
            table.persist()

    def remake(self, missing: Collection[int]) -> None:
        """Write some shards anew, wherever there are slots; empty: all."""
        if self._is_followed:
            self.forget()
        else:
            self._remake(missing)

    def _remake(self, missing: Collection[int]) -> None:
        """Do so for a gang that finds them."""
        raise NotImplementedError

    def note(self, paths: set[str]) -> None:
        """Take note of where tasks found their shards; what was lost, Spark has written anew."""
        if self._keep is not None:  # those stay
            paths = {path for path in paths if Path(path).parent != self._keep.folder}
        self._stragglers |= not paths <= self._seen
        self._seen |= paths

    def close(self) -> None:
        """Delete all spools of the run on all executors that are there, and forget the table.

        While other jobs hold all slots, the job that does so waits in the background. Raises
        nothing: it must not hide what went wrong before, nor spoil what went well.
        """
        if self._begun is not None:
            self._begun.end()
            self._begun, self._stragglers = None, True
        # What is here needs no job, but for what the driver has not heard of.
        self._seen -= {path for path in self._seen if remove_spool(Path(path))}
        if has_ended(self._spark):
            return  # which has removed its own directories
        try:
            for table in (self.df, *self._for_others.values()):
                table.unpersist()
        except Exception as error:
            self._warn(error)
        job = BackgroundJob(
            self._spark,
            self._remove_spools,
            tag=f"sparkdl-{self._run_id}-clean-{uuid.uuid4().hex[:4]}",
            name=f"sparkdl {self._run_id}: clean up",
            cleans_up=True,
        )
        job.begin()
        if job.wait(_WAIT_SECONDS, until=is_hurried):
            return
        logger.log(
            logging.WARNING if self._seen else logging.INFO,
            "the job that removes the spools of run %s has not ended yet, mostly because other "
            "jobs hold the slots; it goes on in the background, for at most %.0f s: %s",
            *(self._run_id, _LIMIT_SECONDS, self._places()),
        )
        job.leave(0.0 if is_hurried() else _LIMIT_SECONDS, self._give_up)

    def _give_up(self) -> None:
        _left[self._run_id] = set(self._seen)

    def _remove_spools(self) -> None:
        """Remove what executors have; of earlier runs too, where that could not be done then."""
        _left.pop(self._run_id, None)
        try:
            # As many tasks as partitions usually meet the executors that spooled; else all slots,
            # or, where Spark does not tell how many there are, several times as many tasks.
            self._clean(self.num_places)
            if self._seen or self._stragglers:
                # Something was lost or cancelled, so tasks that Spark has given up may go on
                # writing for a moment, and keep the slots from which they would be met.
                time.sleep(_KILL_SECONDS)
                self._clean(max(num_slots(self._spark), _PASSES * self.num_places))
        except Exception as error:
            if has_ended(self._spark):
                return
            self._warn(error)
        if self._seen:
            _left[self._run_id] = set(self._seen)  # a lost host may come back, with its disk
            logger.warning(
                "spools remain where no executor could be asked to remove them, until a later fit "
                "of this session meets one, or Spark removes its own directories: %s",
                self._places(),
            )

    def _warn(self, error: Exception) -> None:
        logger.warning("could not clean up after run %s: %s", self._run_id, error)

    def _places(self) -> str:
        return ", ".join(sorted(self._seen.copy())) or "what the driver knows of is gone"

    def _clean(self, num_tasks: int) -> None:
        left = dict(_left)
        run_ids = tuple(sorted({self._run_id, *left}))
        known = tuple(sorted(self._seen.union(*left.values())))
        task = CleanTask(run_ids=run_ids, paths=known, keep=self._keep)
        tasks = self._spark.range(0, num_tasks, 1, num_tasks)
        rows = tasks.mapInArrow(task, "path string").collect()
        removed = {row["path"] for row in rows}
        self._seen -= removed
        for run_id, paths in left.items():
            if paths <= removed:
                _left.pop(run_id, None)
            else:
                _left[run_id] = paths - removed


class SpooledRows:
    """The facts that a DataFrame's shards have shown, once they are spooled."""

    reader = SpoolSource()
    """Opens the shards on workers."""

    def unstable(self) -> str | None:
        """Name what may give other rows when they are made again; None: nothing is known."""
        return None

    def __init__(
        self, spec: TableSpec, shown: UserRows | None = None, *, is_all: bool = True
    ) -> None:
        """Store the specification, and the rows that messages show, where they are at hand.

        ``is_all`` is False if there are other rows, of which nobody knows.
        """
        self._spec = spec
        self._shown = shown
        self._is_all = is_all
        self._first: tuple[SpooledShard, ...] | None = None
        self.known: tuple[SpooledShard, ...] = ()
        """The shards as they were seen last."""

    def checked(self, shards: tuple[SpooledShard, ...]) -> tuple[SpooledShard, ...]:
        """The shards, which hold rows, and the same as at the first call; raises DataError."""
        if not any(spooled.shard.num_all_rows for spooled in shards):
            raise DataError(no_rows(shards))
        if self._first is not None:
            require_same(self._first, shards, self.unstable)
        self._first = self._first or shards
        self.known = shards
        return shards

    def checked_with(self, made: tuple[SpooledShard, ...]) -> tuple[SpooledShard, ...]:
        """The same of the known shards, some of which have been made anew."""
        by_id = {part.shard.shard_id: part for part in (*self.known, *made)}
        return self.checked(tuple(by_id[number] for number in sorted(by_id)))

    def columns(self, shards: Sequence[SpooledShard]) -> tuple[Column, ...]:
        """See `RowTable.columns`; of some of the rows, a weight of 0 says nothing of the others."""
        spec = self._spec
        found = [merge_stats(stats) for stats in zip(*(s.columns for s in shards), strict=True)]
        for indicator in found[len(spec.columns) :]:
            if indicator.nulls_and_shapes.nulls:
                name = str(spec.validation_col)
                message = indicator.nulls_and_shapes.message(name)
                raise DataError(self._named(message, shards, name) + self._counted(shards))
        pairs = list(zip(spec.columns, found, strict=False))
        problems = [
            self._named(problem, shards, column.name)
            for column, stats in pairs
            if (problem := stats.problem(column, is_all=self._is_all)) is not None
        ]
        if problems:
            raise DataError("; ".join(problems) + self._counted(shards))
        return tuple(p.found(s.shape or (), s.dtype, s.longest) for p, s in pairs)

    def rows_at_hand(
        self, columns: Sequence[Column], shards: Sequence[SpooledShard]
    ) -> Mapping[str, Rows] | None:
        """See `RowTable.rows_at_hand`."""
        heads = (one.head for one in shards if one.head)
        return next((rows_of_head(head, columns) for head in heads), None)

    def read_rows(self, columns: Sequence[Column]) -> Mapping[str, Rows] | None:
        """See `RowTable.read_rows`: they lie on the executors' disks."""
        return None

    def labels_outside(
        self, label_col: str, num_classes: int, index: int, shards: Sequence[SpooledShard]
    ) -> tuple[int | None, str] | None:
        """See `RowTable.labels_outside`; nobody has counted."""
        stats = merge_stats([shard.columns[index] for shard in shards])
        if stats.maximum is None or stats.maximum < num_classes:
            return None
        return None, f"{stats.maximum:g} is the highest in {self._seen_rows(shards)}"

    def _counted(self, shards: Sequence[SpooledShard]) -> str:
        """Says which rows a message has counted, if there are others."""
        return "" if self._is_all else f" (counted in {self._seen_rows(shards)} alone)"

    def _seen_rows(self, shards: Sequence[SpooledShard]) -> str:
        rows = sum(one.shard.num_all_rows + one.num_skipped_rows for one in shards)
        return f"the first {rows} rows"

    def _named(self, text: str, shards: Sequence[SpooledShard], name: str) -> str:
        """A message about a column, in which rows are named as the user knows them."""
        hashes = {place: value for part in shards for place, value in part.hashes.items()}
        return text if self._shown is None else self._shown.named(text, hashes, name)

    def skipped(self, shards: Sequence[SpooledShard]) -> tuple[int, str]:
        names = [column.name for column in self._spec.columns]
        num_rows, causes = skipped_rows(names, shards)
        return num_rows, self._named(causes, shards, names[0]) if num_rows else causes


class ShardTable(SpoolTable, SpooledRows):
    """The shards of one run's DataFrame."""

    def __init__(
        self, df: DataFrame, spec: TableSpec, *, run_id: str, shown: UserRows | None = None
    ) -> None:
        """Describe the table; messages show ``shown`` where the rows of ``df`` are copies."""
        SpoolTable.__init__(
            self, df.sparkSession, run_id=run_id, num_places=spec.num_partitions, keep=spec.keep
        )
        self._rows = shown or UserRows(df, spec.columns, spec.validation)
        self._frame = df
        SpooledRows.__init__(self, spec, self._rows)
        task = SpoolTask(
            run_id=run_id,
            sets=(spool_columns(spec.columns),),
            shards_by_place=spec.shards_by_place,
            pieces=spec.pieces,
            has_validation=spec.validation is not None,
            keep=spec.keep,
            heartbeat_timeout_seconds=spec.heartbeat_timeout_seconds,
            told=self._first_shards.told,
        )
        self._describe_by = partial(self._describe, partial(spread, df, spec), spec=spec)
        self._describe_by(task=task)
        self._is_kept = False
        """True if the shards are those of an earlier run, of which Spark knows nothing."""
        self._unreachable: set[str] = set()
        """Spools of own partitions that no worker could read, though Spark knows their hosts."""
        self._moved: dict[int, SpooledShard] = {}
        """Shards that were written anew elsewhere for that."""

    @property
    def origin(self) -> Origin:
        """See `RowTable.origin`."""
        if self._spec.pieces is not None:
            return "partitions"
        return "kept" if self._is_kept else "dealt"

    @property
    def notes(self) -> tuple[str, ...]:
        """See `RowTable.notes`."""
        own, kept = self._spec.pieces is not None, self._is_kept
        return ("own partitions",) * own + ("with those of an earlier fit",) * kept

    def unstable(self) -> str | None:
        return unstable_operator(self._frame)

    def on_first(self, call: Callable[[ShownRows, Sequence[SpooledShard]], None]) -> None:
        """See `RowTable.on_first`; rows are looked for once the job that writes them has ended."""
        shown = replace(self._rows, is_of_first=True, before=self._end_spooling)

        def told(shards: Sequence[SpooledShard]) -> None:
            is_all = len(shards) == self._spec.num_shards
            call(SpooledRows(self._spec, shown, is_all=is_all), shards)

        self._first_shards.call = told

    def collect(self) -> tuple[SpooledShard, ...]:
        with self._spooling:
            if self._keep is not None and not self.known and (kept := self._with_kept(self._keep)):
                return kept
            (shards,) = self._spooled()
            moved = self._moved
            if self._keep is not None and not self.known:
                _log_kept(self._keep, shards)
            return self.checked(tuple(moved.get(one.shard.shard_id, one) for one in shards))

    def _with_kept(self, keep: Keep) -> tuple[SpooledShard, ...]:
        """The shards that earlier runs have kept, and the missing ones, which are written now.

        Empty where all must be written: partitions that are packed together elsewhere need not be
        the same ones.
        """
        spec = self._spec
        found = find_kept(self._spark, spec, keep)
        missing = set(range(spec.num_shards)) - found.keys()
        if not found or (missing and spec.pieces is not None):
            return ()
        made = self._made_anew(missing)[0] if missing else ()
        found.update({part.shard.shard_id: part for part in made})
        logger.info(
            "%d of %d shards are kept from an earlier fit in %s: %s",
            *(spec.num_shards - len(missing), spec.num_shards, keep.folder),
            "the DataFrame is not read" if not missing else "the others are written",
        )
        shards = self.checked(tuple(found[number] for number in range(spec.num_shards)))
        self.df.unpersist()
        self.df, self._is_kept = placed_near(self._spark, shards, spec), True
        return shards

    def forget(self) -> None:
        """See `RowTable.forget`: what was kept is looked for no more."""
        if self._keep is None:
            super().forget()
            return
        self._keep_no_more()
        self._is_kept = False
        for table in (self.df, *self._for_others.values()):
            table.unpersist()
        self._for_others.clear()
        self._describe_by(task=self._task)

    def _keep_no_more(self) -> None:
        """Have what is written from now on go with the run: others may remove what is kept."""
        self._task = replace(self._task, keep=None)

    def is_scattered(self, num_workers: int) -> bool:
        """See `RowTable.is_scattered`."""
        if self._spec.pieces is not None:
            return self._has_spare(num_workers)
        hosts = {part.shard.host for part in self.known if part.shard.num_all_rows}
        return self._is_kept and len(hosts) > num_workers

    def restore(self, num_workers: int) -> tuple[tuple[SpooledShard, ...], DataFrame]:
        """See `RowTable.restore`."""
        shards = [part.shard for part in self.known]
        if self._is_kept and self._has_spare(num_workers):
            self.forget()
        if table := self._to_follow(num_workers, len(shards)):
            (made,) = self._spooled(table=table)
            self._require_same_partitions(made, [s.shard_id for s in shards if s.num_all_rows])
            return self.checked_with(made), table
        if missing := self._nowhere(shards, num_workers, is_barrier=self._spec.is_barrier):
            self.remake(missing)
        if not self._is_kept or num_workers != self.num_places:
            return self.known, slots_for(self._spark, num_workers)
        self.df = placed_near(self._spark, self.known, self._spec)
        return self.known, self.df

    def _remake(self, missing: Collection[int]) -> None:
        missing = missing or range(self._spec.num_shards)
        self._keep_no_more()
        if self._spec.pieces is not None:
            self._remake_partitions(missing)
            return
        with self._spooling:
            (made,) = self._made_anew(missing)
            self.checked_with(made)

    def _written(self, numbers: Sequence[int], num_places: int) -> DataFrame:
        """See `SpoolTable._written`: own partitions go over a shuffle, in their order.

        Spark would refuse a barrier stage of places into which they were packed.
        """
        pieces = self._spec.pieces
        if pieces is None:
            return super()._written(numbers, num_places)
        rows = self._dealt(None)
        names, number = rows.columns, F.shiftright("row", 33)  # of the row's partition
        rows = rows.withColumn("row", F.monotonically_increasing_id())
        rows = rows.where(number.isin(sorted({shard // pieces for shard in numbers})))
        rows = rows.repartitionById(num_places, F.pmod(number, F.lit(num_places)).cast("int"))
        rows = rows.sortWithinPartitions("row").select(number.alias("number"), *names)
        task = replace(self._task, is_numbered=True)
        return rows.mapInArrow(task, TABLE_SCHEMA, profile=self._spec.profile)

    def _require_same_partitions(
        self, made: Collection[SpooledShard], wanted: Collection[int]
    ) -> None:
        """Refuse partitions with other rows than those that they replace; raises DataError."""
        if self._spec.pieces is None:
            return
        before, now = (
            {part.shard.shard_id: part.shard.fingerprint for part in parts}
            for parts in (self.known, made)
        )
        if any(now.get(number) != before[number] for number in wanted):
            raise DataError(
                f"the shards {sorted(wanted)} had to be written anew, and Spark reads other rows "
                "as those partitions of the DataFrame now: the data has changed, or its files are "
                "cut otherwise since there are fewer executors, or more; set "
                "spark.sql.files.minPartitionNum, or use shards='rows'"
            )

    def _remake_partitions(self, missing: Collection[int]) -> None:
        """Have Spark spool anew what it knows to be lost, and write anew what is out of reach."""
        with self._spooling:
            before = {part.shard.shard_id: part.shard for part in self.known}
            self._unreachable |= {before[number].path for number in missing}
            for number in missing:
                self._moved.pop(number, None)
            wanted = set(missing)  # of kept ones Spark knows nothing
            if not self._is_kept:
                wanted = {
                    part.shard.shard_id
                    for part in self.collect()
                    if part.shard.shard_id in missing and part.shard.path in self._unreachable
                }
            if not wanted:
                return
            (made,) = self._made_anew(wanted)
            self._require_same_partitions(made, wanted)
            moved = {part.shard.shard_id: part for part in made if part.shard.shard_id in wanted}
            if self._is_kept:
                self.checked_with(tuple(moved.values()))
                return
            self._moved.update(moved)
            self.collect()

    def labels_outside(
        self, label_col: str, num_classes: int, index: int, shards: Sequence[SpooledShard]
    ) -> tuple[int | None, str] | None:
        stats = merge_stats([shard.columns[index] for shard in shards])
        if stats.maximum is None or stats.maximum < num_classes:
            return None
        label, ignored = F.col(quoted(label_col)), self._spec.columns[index].ignored
        outside = self._rows.df.where(label >= num_classes)
        outside = outside if ignored is None else outside.where(label != ignored)
        with described(self._spark, "sparkdl: look for labels outside the classes"):
            row, number = outside.first(), outside.count()
        return number, "" if row is None else f"such as the row with {in_words(row, label_col)}"

    def windows(
        self,
        plan: TrainPlan,
        shards: Sequence[SpooledShard],
        cluster: ClusterInfo,
        window_bytes: int | None,
    ) -> Windows | None:
        return windows_of_spool(plan, shards, cluster, partial(conf, self._spark), window_bytes)


def find_kept(spark: SparkSession, spec: TableSpec, keep: Keep) -> dict[int, SpooledShard]:
    """The shards of a key on the hosts of all slots that are free now, by their numbers."""
    num_tasks = max(spec.num_partitions, num_slots(spark, spec.profile))
    slots = spark.range(0, num_tasks, 1, num_tasks)
    task = KeptTask(keep=keep, heartbeat_timeout_seconds=spec.heartbeat_timeout_seconds)
    rows = slots.mapInArrow(task, TABLE_SCHEMA, profile=spec.profile)
    job = BackgroundJob(
        spark,
        lambda: rows.distinct().collect(),
        tag=f"sparkdl-kept-{uuid.uuid4().hex[:8]}",
        name="sparkdl: look for kept spools",
    )
    found: dict[int, SpooledShard] = {}
    for row in sorted(job.watched(math.inf, queue_seconds=spec.queue_timeout_seconds)):
        (spooled,) = parse_shards(json.loads(row["payload"]))
        found.setdefault(spooled.shard.shard_id, spooled)
    return found


def placed_near(
    session: SparkSession, shards: Sequence[SpooledShard], spec: TableSpec
) -> DataFrame:
    """A table of these shards, each row in a partition that Spark computes near them if it can."""
    spark: Any = session
    jvm, gateway = spark.sparkContext._jvm, spark.sparkContext._gateway
    pairs = []
    for place, payload in enumerate(payloads_of(shards, spec)):
        values = gateway.new_array(jvm.java.lang.Object, 2)
        values[0], values[1] = place, payload
        hosts = {one["shard"]["host"] for one in json.loads(payload)["shards"]}
        names = sorted(hosts | {socket.getfqdn(name) for name in hosts})
        row = jvm.org.apache.spark.sql.RowFactory.create(values)
        pairs.append(jvm.scala.Tuple2(row, jvm.PythonUtils.toSeq(names)))
    kind = jvm.java.lang.Class.forName("org.apache.spark.sql.Row")
    rows = spark.sparkContext._jsc.sc().makeRDD(
        jvm.PythonUtils.toSeq(pairs), jvm.scala.reflect.ClassTag.apply(kind)
    )
    schema = jvm.org.apache.spark.sql.types.StructType.fromDDL(TABLE_SCHEMA)
    return DataFrame(spark._jsparkSession.createDataFrame(rows.toJavaRDD(), schema), spark)


def _log_kept(keep: Keep, shards: Sequence[SpooledShard]) -> None:
    """Say how many of the shards that were written a later fit will find."""
    kept = sum(Path(part.shard.path).parent == keep.folder for part in shards)
    if kept == len(shards):
        logger.info("the %d shards are kept in %s", kept, keep.folder)
        return
    logger.warning(
        "%d of %d shards are kept in %s; the others are more than a host may keep (raise "
        "spark.sparkdl.cacheBytes, or free space there), or hold other rows than those that are "
        "kept under this key",
        *(kept, len(shards), keep.folder),
    )


class LocalTable(SpooledRows):
    """All rows of a DataFrame in one shard, which this process writes, as if it were a worker."""

    def __init__(self, df: DataFrame, spec: TableSpec, directory: Path) -> None:
        super().__init__(spec, UserRows(df, spec.columns))
        self._df = df
        self._directory = directory

    def collect(self) -> tuple[SpooledShard, ...]:
        rows = spread(self._df, self._spec).toArrow()
        with SpoolWriter(self._directory, self._spec.columns, has_validation=False) as writer:
            for batch in rows.to_batches():
                writer.write(batch)
        return self.checked((writer.summary(),))


def parse_shards(payload: dict[str, Any]) -> list[SpooledShard]:
    """The shards that a row of the table describes: of one data set, or one of each.

    Raises:
        SparkDLError: what the task has met.
    """
    if "error" in payload:
        raise getattr(errors, payload["error"])(payload["message"])
    return [SpooledShard.from_dict(values) for values in payload["shards"]]


def windows_of_spool(
    plan: TrainPlan,
    spooled: Sequence[SpooledShard],
    info: ClusterInfo,
    get: Get,
    window_bytes: int | None,
) -> Windows | None:
    """The windows of a run that begins; None: rows are mixed as a whole."""
    num_bytes = sum(part.shard.num_bytes for part in spooled)
    num_rows = sum(part.shard.num_all_rows for part in spooled)
    by_shard = [shard.num_bytes for shard in plan.shards]
    windows = choose_windows(
        host_loads(spooled, info, get),
        bytes_by_shard=by_shard,
        row_bytes=max(1, -(-num_bytes // num_rows)),
        window_bytes=window_bytes,
    )
    if windows is not None:
        logger.info(
            "up to %d MiB of rows per shard are not mixed as a whole: %d row groups of %d rows "
            "at a time",
            max(by_shard) >> 20,
            windows.groups_together,
            windows.group_rows,
        )
    return windows


def host_loads(spooled: Sequence[SpooledShard], info: ClusterInfo, get: Get) -> list[HostLoad]:
    """Return what each host has to hold, and the memory that the executors' heaps leave for it."""
    by_host: dict[str, list[SpooledShard]] = defaultdict(list)
    for part in spooled:
        by_host[part.shard.host].append(part)
    heap = get("spark.driver.memory" if info.is_one_process else "spark.executor.memory") or "1g"
    executors = -(-(info.num_executors or len(by_host)) // len(by_host))
    heaps = executors * parse_bytes(heap, unit=2**20)
    return [
        HostLoad(
            num_shards=len(parts),
            num_bytes=sum(part.shard.num_bytes for part in parts),
            memory_bytes=max(0, min(part.memory_bytes for part in parts) - heaps),
        )
        for parts in by_host.values()
    ]
