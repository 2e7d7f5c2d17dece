"""How does a source that workers read by themselves stand in for the shard table of a DataFrame?

`SourceTable` has the methods of `shards.ShardTable`, but nothing to spool: its rows are
descriptions, which Spark computes anew wherever it needs them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa
from pyspark.errors import PySparkRuntimeError
from pyspark.ml.linalg import VectorUDT
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql import types as T
from pyspark.sql.pandas.types import from_arrow_type

from sparkdl.data.column_stats import SpoolSummary
from sparkdl.data.plan import Column
from sparkdl.data.source import Contents, ShardSource, Source, Wanted
from sparkdl.errors import ClusterError, ConfigError, DataError
from sparkdl.spark.frames.columns import Prepared
from sparkdl.spark.frames.shard_table import SpooledShard, require_same, spool_columns
from sparkdl.spark.run.run_key import identity

_ROW_METADATA = b"org.apache.spark.sql.parquet.row.metadata"
"""Where Spark notes the types of the columns that it writes."""
_NOWHERE = {"host": "", "path": "", "memory_bytes": 0}
_VECTOR = "pyspark.ml.linalg.VectorUDT"


def require_source(data: Any) -> Source:
    """What is no DataFrame must be a source.

    Raises:
        ConfigError: it is none.
    """
    if not isinstance(data, Source):
        raise ConfigError(
            "fit takes a DataFrame or a source, such as sparkdl.ParquetSource; received "
            f"{type(data).__name__}"
        )
    return data


def active_session() -> SparkSession:
    """The session for a fit that gets no DataFrame.

    Raises:
        ClusterError: there is none.
    """
    try:
        return SparkSession.active()  # or the default one: each thread has its own active session
    except PySparkRuntimeError as error:
        raise ClusterError(
            "there is no active Spark session to train with; make one by "
            "SparkSession.builder.getOrCreate() before fit"
        ) from error


def empty_frame(spark: SparkSession, source: Source) -> DataFrame:
    """A DataFrame without rows that has the source's columns, by which Params are checked."""
    schema = source.schema()
    metadata = json.loads((schema.metadata or {}).get(_ROW_METADATA, b"{}"))
    noted = {field["name"]: field["type"] for field in metadata.get("fields", [])}
    fields = [T.StructField(f.name, _spark_type(f.type, noted.get(f.name))) for f in schema]
    return spark.createDataFrame([], T.StructType(fields))


def _spark_type(kind: pa.DataType, noted: Any) -> T.DataType:
    """The Spark type of a column, of which Spark has ``noted`` what Parquet cannot tell."""
    if isinstance(noted, dict) and noted.get("pyClass") == _VECTOR:
        return VectorUDT()
    if pa.types.is_struct(kind):
        inner = noted.get("fields", []) if isinstance(noted, dict) else []
        types = {field["name"]: field["type"] for field in inner}
        fields = [kind.field(i) for i in range(kind.num_fields)]
        return T.StructType(
            [T.StructField(f.name, _spark_type(f.type, types.get(f.name))) for f in fields]
        )
    if pa.types.is_list(kind):
        return T.ArrayType(_spark_type(kind.value_type, None))
    try:
        return from_arrow_type(kind)
    except Exception:  # pyspark's own, for types that Spark has not; only a wanted column matters
        return T.NullType()


class SourceTable:
    """The shards of a source; see `shards.ShardTable` for what the methods are for."""

    def __init__(
        self,
        spark: SparkSession,
        source: Source,
        prepared: Sequence[Prepared],
        validation: str | None,
        *,
        num_shards: int,
        shares: Sequence[float] | None,
    ) -> None:
        """Describe the table; nothing is read yet."""
        self._spark = spark
        self._source = source
        self._prepared = tuple(prepared)
        self._wanted = Wanted(
            columns=spool_columns(prepared),
            validation=validation,
            num_shards=num_shards,
            shares=None if shares is None else tuple(shares),
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
            for column, p in zip(self._contents.columns, self._prepared, strict=True)
        )

    def check_indicator(self, name: str, shards: Sequence[SpooledShard]) -> None:
        """The source has refused rows that do not say whether they are for validation."""

    def check_labels(self, label_col: str, num_classes: int, index: int) -> None:
        """Refuse labels outside the classes, as far as they are known before training.

        Raises:
            DataError: with count and place.
        """
        assert self._contents is not None, "collect comes first"
        found = self._contents.labels_outside(index, num_classes)
        if found is not None:
            raise DataError(
                f'column "{label_col}" has {found[0]} label(s) outside the {num_classes} classes '
                f"of the module's output, 0 to {num_classes - 1} (first: {found[1]}); mend the "
                "labels or widen the module's output"
            )

    def rebuild(self) -> None:
        """Nothing is kept that could be lost."""

    def note(self, paths: set[str]) -> None:
        """Nothing lies anywhere."""

    def close(self) -> None:
        """Nothing is left behind."""


def _spooled(contents: Contents) -> tuple[SpooledShard, ...]:
    content = contents.content
    if contents.transform is not None:
        text = json.dumps([content, identity(contents.transform)])
        content = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")
    return tuple(
        SpooledShard(
            shard=shard,
            summary=SpoolSummary(
                num_rows=shard.num_rows,
                num_validation_rows=shard.num_validation_rows,
                fingerprint=shard.fingerprint,
                content=content if shard.shard_id == 0 else 0,  # their sum is the whole's
                num_bytes=shard.num_bytes,
                columns=(),
            ),
            memory_bytes=0,  # nothing lies there that could fill it
        )
        for shard in contents.shards
    )


def _frame(spark: SparkSession, shards: Sequence[SpooledShard]) -> DataFrame:
    """The rows that `shards.parse_shard` reads."""
    payloads = [
        F.lit(json.dumps({**_NOWHERE, "summary": part.summary.to_dict()})) for part in shards
    ]
    return spark.range(0, len(shards), 1, len(shards)).select(
        F.col("id").cast("int").alias("shard_id"),
        F.element_at(F.array(*payloads), F.col("id").cast("int") + 1).alias("payload"),
    )
