"""The table of a run's shards: one row per shard, whatever the rows of the run come from.

`RowTable` is the seam. `shard_table.ShardTable` spools a DataFrame; `source_table.SourceTable`
describes what workers read by themselves.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from pyspark.sql import DataFrame

from sparkdl.data.column_stats import SpooledShard
from sparkdl.data.plan import Column, SpoolColumn, TrainPlan
from sparkdl.data.shuffle_windows import Windows
from sparkdl.data.source import ShardSource
from sparkdl.errors import DataError
from sparkdl.spark.cluster.cluster_info import ClusterInfo

if TYPE_CHECKING:
    from pyspark.resource import ResourceProfile
    from pyspark.sql import Column as SparkColumn


@dataclass(frozen=True, kw_only=True)
class TableSpec:
    """What the shards of a run shall hold, and how many there are."""

    columns: tuple[SpoolColumn, ...]
    num_shards: int
    validation: SparkColumn | None = None
    """True for rows for validation; None: there are none."""
    validation_col: str | None = None
    """The name of that column in the user's data."""
    shares: tuple[float, ...] | None = None
    """Each shard's part of the rows, adding up to 1; None: equal parts."""
    is_gang: bool = True
    """True if all shards are spooled at once, as a gang will hold them; otherwise one after the
    other where slots are few."""
    profile: ResourceProfile | None = None
    """Resources of a task."""
    heartbeat_timeout_seconds: float = 60.0
    """How long a task that spools may neither run Python nor use the CPU."""
    queue_timeout_seconds: float = math.inf
    """Longest wait for the first task that spools, while other jobs hold the slots."""


class RowTable(Protocol):
    """The shards of one run. What has a default is for shards that lie on executors' disks."""

    @property
    def df(self) -> DataFrame:
        """One row per shard, each in a partition of its own; where a worker is to read it."""

    @property
    def reader(self) -> ShardSource:
        """Opens the shards on workers."""

    def collect(self) -> tuple[SpooledShard, ...]:
        """Make what is not there (everything at first, then what was lost), and list it.

        Raises:
            SparkDLError: a task could not spool.
            DataError: rows cannot be used, or have changed since the first call.
            StorageError: a source cannot be read.
        """

    def columns(self, shards: Sequence[SpooledShard]) -> tuple[Column, ...]:
        """The columns as workers will find them.

        Raises:
            DataError: with column, count, and an example row, for all columns with bad rows.
        """

    def skipped(self, shards: Sequence[SpooledShard]) -> tuple[int, str]:
        """How many rows are left out because an input asks for it, and why, in words."""
        return 0, ""

    def labels_outside(
        self, label_col: str, num_classes: int, index: int, shards: Sequence[SpooledShard]
    ) -> tuple[int, str] | None:
        """How many labels are outside the classes, as far as that is known, and an example.

        Args:
            label_col: the label column.
            num_classes: classes of the module's output.
            index: number of the label among the columns.
            shards: what `collect` gave.
        """

    def windows(
        self,
        plan: TrainPlan,
        shards: Sequence[SpooledShard],
        cluster: ClusterInfo,
        window_bytes: int | None,
    ) -> Windows | None:
        """In which windows a run that begins mixes its rows; None: as a whole."""
        return None

    def rebuild(self) -> None:
        """Forget all shards, so that they are made anew."""
        return

    def note(self, paths: set[str]) -> None:
        """Remember where tasks have found shards that Spark has made anew."""
        return

    def close(self) -> None:
        """Remove what the table has left on executors. Raises nothing."""
        return


def spool_columns(columns: Sequence[SpoolColumn]) -> tuple[SpoolColumn, ...]:
    """What tasks need to know of the columns; Spark's expressions stay on the driver."""
    return tuple(replace(column, expression=None) for column in columns)


def content_of(shards: Sequence[SpooledShard]) -> str:
    """Fingerprint of the rows of all shards, whatever their order and number."""
    total = sum(spooled.content for spooled in shards) % 2**64
    rows = sum(spooled.shard.num_all_rows for spooled in shards)
    return f"{total:016x}-{rows}"


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
