"""The table of a run's shards: one row per shard, whatever the rows of the run come from.

`RowTable` is the seam. `shard_table.ShardTable` spools a DataFrame; `SourceTable` describes what
workers read by themselves.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, Protocol

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from sparkdl.data.column_stats import SpooledShard
from sparkdl.data.plan import Column, Split, SpoolColumn, TrainPlan, assign_shards, make_plan
from sparkdl.data.shuffle_windows import Windows
from sparkdl.data.source import Contents, ShardSource, Source, Wanted
from sparkdl.data.spool.head import Head
from sparkdl.data.spool.kept_spools import Keep
from sparkdl.errors import DataError
from sparkdl.serialization.identity import identity
from sparkdl.spark.cluster.cluster_info import ClusterInfo
from sparkdl.spark.frames.executor_calls import ExecutorCalls
from sparkdl.storage.blocks import locate_blocks

if TYPE_CHECKING:
    from pyspark.resource import ResourceProfile
    from pyspark.sql import Column as SparkColumn

    from sparkdl.data.collate import Rows


logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class TableSpec:
    """The contents that the shards of a run shall have, and the number of shards."""

    columns: tuple[SpoolColumn, ...]
    num_shards: int
    num_places: int | None = None
    """Partitions of the table, each with neighbouring shards; None: one for each shard."""
    validation: SparkColumn | None = None
    """True for rows for validation; None: there are none."""
    validation_col: str | None = None
    """The name of that column in the user's data."""
    pieces: int | None = None
    """Shards of each of the DataFrame's own partitions, which are not moved; ``num_places`` is
    their number, or what they are packed to. None: all rows are dealt to shards anew."""
    keep: Keep | None = None
    """Place where later fits find the shards; None: they are removed when the run ends."""
    seed: int = 0
    """The estimator's, for a source that draws; of a DataFrame 0: fits share its spools."""
    at_once: bool = True
    """True if all shards are spooled at once, as a gang will hold them; otherwise one after the
    other where slots are few."""
    is_barrier: bool = True
    """True if barrier stages are to be had, for what looks for shards."""
    profile: ResourceProfile | None = None
    """Resources of a task."""
    heartbeat_timeout_seconds: float = 60.0
    """Longest time that a task that spools may neither run Python nor use the CPU."""
    queue_timeout_seconds: float = math.inf
    """Longest wait for the first task that spools, while other jobs hold the slots."""

    @property
    def num_partitions(self) -> int:
        """The number of partitions of the table."""
        return self.num_places or self.num_shards

    @property
    def shards_by_place(self) -> tuple[tuple[int, ...], ...] | None:
        """The shards of each partition of the table; None: one each."""
        if self.num_partitions == self.num_shards or self.pieces is not None:
            return None
        return assign_shards(self.num_shards, self.num_partitions)


Origin = Literal["dealt", "partitions", "kept", "source"]
"""How shards come to where they lie: dealt there by this run, written where Spark has read the
partitions that they are of, kept by an earlier run, or not at all, as workers read a source."""


class ShownRows(Protocol):
    """The facts that rows have shown, of a shard or of all of them."""

    def columns(self, shards: Sequence[SpooledShard]) -> tuple[Column, ...]:
        """The columns as workers will find them; raises DataError for all that have bad rows."""

    def labels_outside(
        self, label_col: str, num_classes: int, index: int, shards: Sequence[SpooledShard]
    ) -> tuple[int | None, str] | None:
        """Return how many labels are outside the classes, if that was counted, and an example.

        None: none are, as far as is known.
        """

    def rows_at_hand(
        self, columns: Sequence[Column], shards: Sequence[SpooledShard]
    ) -> Mapping[str, Rows] | None:
        """Some rows that have come with the shards: key of a column -> rows; None: none have."""
        return None

    def read_rows(self, columns: Sequence[Column]) -> Mapping[str, Rows] | None:
        """Read some rows in this process; None if it cannot."""
        return None


class RowTable(ShownRows, Protocol):
    """The shards of one run. What has a default is for shards that lie on executors' disks.

    After a loss `forget` has Spark make all anew with the next `collect`; `remake` writes some at
    once, in a plain stage; `restore` does so with those that no slot can open.
    """

    @property
    def df(self) -> DataFrame:
        """A row for each place that holds shards, in a partition of its own."""

    @property
    def reader(self) -> ShardSource:
        """Opens the shards on workers."""

    @property
    def origin(self) -> Origin:
        """Says how the shards came to where they are."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What is to be said of the shards besides their number."""
        return ()

    def begin(self) -> None:
        """Have Spark begin to make the shards, if it needs a job; `collect` waits for that."""
        return

    def on_first(self, call: Callable[[ShownRows, Sequence[SpooledShard]], None]) -> None:
        """Have `collect` call with the first shards as soon as they are there, if it can tell."""
        return

    def collect(self) -> tuple[SpooledShard, ...]:
        """Make what is not there (everything at first, then what was lost), and list it.

        Raises DataError about the rows, StorageError about a source, or what a task has raised.
        """

    def skipped(self, shards: Sequence[SpooledShard]) -> tuple[int, str]:
        """Return how many rows are left out because an input asks for it, and why, in words."""
        return 0, ""

    def windows(
        self,
        plan: TrainPlan,
        shards: Sequence[SpooledShard],
        cluster: ClusterInfo,
        window_bytes: int | None,
    ) -> Windows | None:
        """In which windows a run that begins mixes its rows; None: as a whole."""
        return None

    def forget(self) -> None:
        """Forget all shards, so that they are made anew."""
        return

    def is_scattered(self, num_workers: int) -> bool:
        """Return True if shards may lie where none of so many workers is; `restore` mends that."""
        return False

    def restore(self, num_workers: int) -> tuple[tuple[SpooledShard, ...], DataFrame]:
        """Write those shards anew that none of so many executors' slots can open; list all.

        Where they lie is no matter, as a gang of any size finds them (`worker.held_shards`), unless
        there are more executors than workers. The gang runs on the rows that are given with them.
        """
        return self.known, slots_for(self.df.sparkSession, num_workers)

    def remake(self, missing: Collection[int]) -> None:
        """Write some shards anew, wherever there are slots; `known` tells where. Empty: all."""
        return

    @property
    def known(self) -> tuple[SpooledShard, ...]:
        """The shards as they were seen last, without looking whether they are still there."""

    def note(self, paths: set[str]) -> None:
        """Remember where tasks have found shards that Spark has made anew."""
        return

    def close(self) -> None:
        """Remove what the table has left on executors. Raises nothing."""
        return


def slots_for(spark: SparkSession, num_workers: int) -> DataFrame:
    """Rows for so many workers, wherever Spark runs them."""
    return spark.range(0, num_workers, 1, num_workers)


def spool_columns(columns: Sequence[SpoolColumn]) -> tuple[SpoolColumn, ...]:
    """Return what tasks need to know of the columns; Spark's expressions stay on the driver."""
    return tuple(replace(column, expression=None) for column in columns)


def content_of(shards: Sequence[SpooledShard]) -> str:
    """Fingerprint of the rows of all shards, whatever their order and number."""
    total = sum(spooled.content for spooled in shards) % 2**64
    rows = sum(spooled.shard.num_all_rows for spooled in shards)
    return f"{total:016x}-{rows}"


def require_same(
    before: Sequence[SpooledShard],
    now: Sequence[SpooledShard],
    cause: Callable[[], str | None] = lambda: None,
) -> None:
    """Refuse shards that hold other rows than before; raises DataError.

    ``cause`` names what in a DataFrame may be the reason, if anything is known.
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
            f"{cause() or 'rand() and current_timestamp()'} in a DataFrame that is made again"
        )


class SourceTable(RowTable):
    """The shards of a source; see `RowTable` for what the methods are for."""

    origin: Origin = "source"

    def __init__(
        self, spark: SparkSession, source: Source, spec: TableSpec, homes: str | None = None
    ) -> None:
        """Describe the table; nothing is read yet."""
        self._spark = spark
        self._source = source
        self._spec = spec
        self._wanted = Wanted(
            columns=spool_columns(spec.columns),
            validation=spec.validation_col,
            num_shards=spec.num_shards,
            spread=ExecutorCalls(
                spark, spec.profile, spec.queue_timeout_seconds, spec.heartbeat_timeout_seconds
            ),
            # Asked once: blocks that are copied during a fit do not change what its shards hold.
            locate=functools.cache(functools.partial(locate_blocks, spark)),
            homes=homes,
            seed=spec.seed,
        )
        self._contents: Contents | None = None
        self._df: DataFrame | None = None

    @property
    def df(self) -> DataFrame:
        assert self._df is not None, "collect comes first"
        return self._df

    @property
    def reader(self) -> ShardSource:
        return self._known.reader

    @property
    def _known(self) -> Contents:
        assert self._contents is not None, "collect comes first"
        return self._contents

    def collect(self) -> tuple[SpooledShard, ...]:
        contents = self._source.contents(self._wanted)
        shards = _spooled(contents)
        if self._contents is None:
            self._contents, self._df = contents, frame_of(self._spark, shards, self._spec)
        else:
            require_same(_spooled(self._contents), shards)
        return shards

    @property
    def known(self) -> tuple[SpooledShard, ...]:
        return _spooled(self._known)

    @property
    def homes(self) -> str | None:
        """The facts that the shards follow from besides the rows; see `Contents.homes`."""
        return self._known.homes

    def dealt_by(self, homes: str) -> SourceTable:
        """A table of the same rows, with the shards that follow from ``homes``."""
        table = SourceTable(self._spark, self._source, self._spec, homes)
        table.collect()
        return table

    def columns(self, shards: Sequence[SpooledShard]) -> tuple[Column, ...]:
        return tuple(
            replace(column, argument=p.argument)
            for column, p in zip(self._known.columns, self._spec.columns, strict=True)
        )

    def read_rows(self, columns: Sequence[Column]) -> Mapping[str, Rows] | None:
        """See `RowTable.read_rows`: workers may see files that the driver does not."""
        split: Split = "train"
        shard = next((one for one in self._known.shards if one.num_rows), None)
        if shard is None:
            return None
        plan = make_plan(
            columns=columns, shards=[shard], world_size=1, batch_size=Head.ROWS, epochs=1
        )
        try:
            return next(self.reader.open(plan, shard, split).in_order(Head.ROWS), None)
        except Exception as error:  # whatever the user's dataset raises
            logger.info("the driver cannot read rows of %s: %s", self._source, error)
            return None

    def labels_outside(
        self, label_col: str, num_classes: int, index: int, shards: Sequence[SpooledShard]
    ) -> tuple[int, str] | None:
        found = self._known.labels_outside(index, num_classes)
        return None if found is None else (found[0], f"first: {found[1]}")


def _spooled(contents: Contents) -> tuple[SpooledShard, ...]:
    content = contents.content
    if contents.transform is not None:
        text = json.dumps([content, identity(contents.transform)])
        content = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")
    return tuple(  # the contents' sum is the whole's
        SpooledShard(shard=shard, content=0 if shard.shard_id else content, columns=())
        for shard in contents.shards
    )


def payloads_of(shards: Sequence[SpooledShard], spec: TableSpec) -> list[str]:
    """Return the text of the row of each place."""
    parts = [part.to_dict() for part in shards]
    places = spec.shards_by_place or [[number] for number in range(len(parts))]
    return [json.dumps({"shards": [parts[n] for n in own]}) for own in places]


def frame_of(spark: SparkSession, shards: Sequence[SpooledShard], spec: TableSpec) -> DataFrame:
    """The rows that `shard_table.parse_shards` reads."""
    payloads = [F.lit(text) for text in payloads_of(shards, spec)]
    return spark.range(0, len(payloads), 1, len(payloads)).select(
        F.col("id").cast("int").alias("shard_id"),
        F.element_at(F.array(*payloads), F.col("id").cast("int") + 1).alias("payload"),
    )
