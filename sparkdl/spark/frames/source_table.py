"""The table of a source's shards, which workers read by themselves.

There is nothing to spool: its rows are descriptions, which Spark computes anew wherever it needs
them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from sparkdl.data.column_stats import SpooledShard
from sparkdl.data.plan import Column
from sparkdl.data.source import Contents, ShardSource, Source, Wanted
from sparkdl.serialization.identity import identity
from sparkdl.spark.frames.row_table import RowTable, TableSpec, require_same, spool_columns


class SourceTable(RowTable):
    """The shards of a source; see `RowTable` for what the methods are for."""

    def __init__(self, spark: SparkSession, source: Source, spec: TableSpec) -> None:
        """Describe the table; nothing is read yet."""
        self._spark = spark
        self._source = source
        self._spec = spec
        self._wanted = Wanted(
            columns=spool_columns(spec.columns),
            validation=spec.validation_col,
            num_shards=spec.num_shards,
            shares=spec.shares,
        )
        self._contents: Contents | None = None
        self._df: DataFrame | None = None

    @property
    def df(self) -> DataFrame:
        """One row per shard, each in a partition of its own."""
        assert self._df is not None, "collect comes first"
        return self._df

    @property
    def reader(self) -> ShardSource:
        """Opens the shards on workers."""
        assert self._contents is not None, "collect comes first"
        return self._contents.reader

    def collect(self) -> tuple[SpooledShard, ...]:
        """List the shards; each time anew, to see that the source is what it was.

        Raises:
            DataError: rows cannot be used, or the source has changed since the first call.
            StorageError: it cannot be read.
        """
        contents = self._source.contents(self._wanted)
        shards = _spooled(contents)
        if self._contents is None:
            self._contents, self._df = contents, _frame(self._spark, shards)
        else:
            require_same(_spooled(self._contents), shards)
        return shards

    def columns(self, shards: Sequence[SpooledShard]) -> tuple[Column, ...]:
        """The columns as the source has found them, with the arguments that they go to."""
        assert self._contents is not None, "collect comes first"
        return tuple(
            replace(column, argument=p.argument)
            for column, p in zip(self._contents.columns, self._spec.columns, strict=True)
        )

    def labels_outside(
        self, label_col: str, num_classes: int, index: int, shards: Sequence[SpooledShard]
    ) -> tuple[int, str] | None:
        """Labels outside the classes, as far as the source knows them."""
        assert self._contents is not None, "collect comes first"
        found = self._contents.labels_outside(index, num_classes)
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


def _frame(spark: SparkSession, shards: Sequence[SpooledShard]) -> DataFrame:
    """The rows that `shard_table.parse_shards` reads."""
    payloads = [F.lit(json.dumps({"shards": [part.to_dict()]})) for part in shards]
    return spark.range(0, len(shards), 1, len(shards)).select(
        F.col("id").cast("int").alias("shard_id"),
        F.element_at(F.array(*payloads), F.col("id").cast("int") + 1).alias("payload"),
    )
