"""The table of several DataFrames' shards, of which each worker has one of each data set.

They are spooled in one stage, whose tasks write a shard of every data set: workers of one stage
cannot be where the tasks of several others happened to run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from sparkdl.data.column_stats import no_rows
from sparkdl.errors import DataError
from sparkdl.spark.frames.columns import Prepared
from sparkdl.spark.frames.row_table import SpooledShard, require_same, spool_columns
from sparkdl.spark.frames.shard_table import SpoolTable, as_shard, raise_failure
from sparkdl.spark.frames.spool_task import TABLE_SCHEMA, SpoolSetsTask

if TYPE_CHECKING:
    from pyspark.resource import ResourceProfile

Spooled = dict[str, tuple[SpooledShard, ...]]
"""Name of a data set -> its shards."""


class DatasetTable(SpoolTable):
    """The shards of several DataFrames."""

    def __init__(
        self,
        frames: Mapping[str, DataFrame],
        prepared: Mapping[str, Sequence[Prepared]],
        *,
        num_shards: int,
        run_id: str,
        profile: ResourceProfile | None = None,
    ) -> None:
        """Describe the table; nothing runs yet.

        Args:
            frames: name of each data set, and its rows.
            prepared: the columns to spool of each.
            num_shards: number of shards of each.
            run_id: names the folders.
            profile: resources of a task.
        """
        session = next(iter(frames.values())).sparkSession
        super().__init__(session, run_id=run_id, num_shards=num_shards)
        self._names = tuple(frames)
        self._first: Spooled | None = None
        selected = [
            df.select(*[p.expression.alias(f"c{i}") for i, p in enumerate(prepared[name])])
            for name, df in frames.items()
        ]
        task = SpoolSetsTask(
            run_id=run_id, sets=tuple(spool_columns(prepared[name]) for name in self._names)
        )
        # Ordered by hash, and by the rows where hashes are equal, as in `ShardTable`.
        spread = _united(selected).repartition(num_shards, "hash")
        rows = [f"set{number}" for number in range(len(selected))]
        ordered = spread.sortWithinPartitions("set", "hash", *rows)
        table = ordered.mapInArrow(task, TABLE_SCHEMA, barrier=True, profile=profile)
        self.df = table.persist()

    def collect(self) -> Spooled:
        """Spool what is not there (everything at first, then what was lost), and list it.

        Raises:
            SparkDLError: a task could not spool.
            DataError: a data set has no rows, or has changed since the first call.
        """
        payloads = self._payloads()
        for values in payloads.values():
            raise_failure(values)
        spooled = {
            name: tuple(
                as_shard(
                    shard_id,
                    values,
                    values["summaries"][number],
                    str(PurePosixPath(values["path"]) / str(number)),
                )
                for shard_id, values in payloads.items()
            )
            for number, name in enumerate(self._names)
        }
        for name, shards in spooled.items():
            if not any(part.shard.num_rows for part in shards):
                raise DataError(f"data set {name!r}: {no_rows([p.summary for p in shards])}")
            if self._first is not None:
                require_same(self._first[name], shards)
        self._first = self._first or spooled
        return spooled


def _united(frames: Sequence[DataFrame]) -> DataFrame:
    """All rows in one frame: ``set``, ``set0``, ``set1``, ..., ``hash``."""
    types = [df.select(F.struct(*df.columns).alias("row")).schema["row"].dataType for df in frames]
    parts = []
    for number, df in enumerate(frames):
        structs = [
            (F.struct(*df.columns) if other == number else F.lit(None).cast(data_type)).alias(
                f"set{other}"
            )
            for other, data_type in enumerate(types)
        ]
        row_hash = F.xxhash64(*df.columns).alias("hash")
        parts.append(df.select(F.lit(number).alias("set"), *structs, row_hash))
    return reduce(lambda above, below: above.unionAll(below), parts)
