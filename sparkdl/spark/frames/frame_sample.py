"""Some rows of a DataFrame, and their number, before it is spooled.

The rows come to the driver, a few megabytes at most, so that no job that follows reads the source.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from sparkdl.data.plan import SpoolColumn
from sparkdl.errors import DataError
from sparkdl.runtime.activity import doing
from sparkdl.spark.frames.deal_rows import selected
from sparkdl.spark.session.background_job import bounded
from sparkdl.spark.session.compat import is_connect

if TYPE_CHECKING:
    from pyspark.sql import Column as SparkColumn

logger = logging.getLogger(__name__)

_GROWTH = 64
"""Rows of one look for each row of the look before: 1, 64, 4,096."""
_MOST_ROWS = 4096
_MOST_BYTES = 8 << 20
"""Largest size of the sample on the driver."""
_LOOK_SECONDS = 0.2
_LOOKING = "sparkdl explain: look at some rows"


def option_text(name: str) -> str:
    """An option of `explain`, as it is given in Python and to a job."""
    return f"explain(df, {name}=...), or --set explain.{name}=... of a job"


_MORE_TIME = f"give it more time by {option_text('count_seconds')}"


@dataclass(frozen=True, kw_only=True)
class Look:
    """The first rows of a DataFrame, as one of their own."""

    df: DataFrame
    rows: pa.Table
    """The same rows."""
    is_all: bool
    """True if the DataFrame has no more rows."""
    row_bytes: float
    """Mean size of a row in memory."""
    seconds: float
    """Seconds that reading them took."""

    @property
    def num_rows(self) -> int:
        """The number of rows."""
        return int(self.rows.num_rows)

    @property
    def more(self) -> int:
        """Rows of the next look; no more than these if they are enough."""
        by_bytes = int(_MOST_BYTES / max(1.0, self.row_bytes))
        return self.num_rows if self.is_all else min(
            _MOST_ROWS, by_bytes, _GROWTH * self.num_rows
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Sample(Look):
    """Some rows of a DataFrame, prepared as they would be spooled."""

    prepared: tuple[SpoolColumn, ...]
    """The columns, to be taken from ``df``."""
    validation: SparkColumn | None
    read_row_seconds: float
    """About what one task takes to read one row of the source, without its start."""
    hashes: tuple[int, ...]
    """Hash of each training row, by which Spark spreads rows over shards."""

    def repeated(self, times: int) -> DataFrame:
        """A DataFrame of ``times`` as many rows, made by Spark's tasks."""
        spark = self.df.sparkSession
        copies = spark.range(times).crossJoin(F.broadcast(self.df))
        return copies.select(*self.df.columns)


def take_sample(
    df: DataFrame,
    prepared: Sequence[SpoolColumn],
    validation: SparkColumn | None,
    seconds: float,
) -> Sample:
    """Take the first rows that Spark finds, as they would be spooled.

    After ``seconds`` what was found until then is the sample.

    Raises:
        DataError: not even the first row was found in time, or other jobs hold the slots.
    """
    look, read_row_seconds = _looked(selected(df, prepared, validation), seconds)
    hashes = bounded(df.sparkSession, partial(_hashes, look.df), seconds, _LOOKING)
    if hashes is None:
        raise DataError(f"the first rows were not hashed within {seconds:g} s; {_MORE_TIME}")
    return Sample(
        **vars(look),
        prepared=tuple(
            replace(column, expression=F.col(f"c{index}")) for index, column in enumerate(prepared)
        ),
        validation=None if validation is None else F.col("validation"),
        read_row_seconds=read_row_seconds,
        hashes=hashes,
    )


def _looked(selected: DataFrame, seconds: float) -> tuple[Look, float]:
    """The last of some looks, each larger than the one before, and the seconds of a row."""
    spark = selected.sparkSession
    ends = time.monotonic() + seconds
    doing("looking at some rows")
    look = bounded(spark, partial(take_look, selected, 1), seconds, _LOOKING)
    if look is None:
        raise DataError(
            f"Spark has not found the first row within {seconds:g} s; {_MORE_TIME}, or write the "
            "rows to files first"
        )
    row_seconds = 0.0
    while (wanted := look.more) > look.num_rows:
        left = max(_LOOK_SECONDS, ends - time.monotonic())
        larger = bounded(spark, partial(take_look, selected, wanted), left, _LOOKING)
        if larger is None:
            logger.info("%d rows took too long; the sample is of %d", wanted, look.num_rows)
            break
        more_rows = larger.num_rows - look.num_rows
        if more_rows > 0:
            row_seconds = max(0.0, larger.seconds - look.seconds) / more_rows
        look = larger
    return look, row_seconds


def take_look(selected: DataFrame, wanted: int) -> Look:
    """Take the first rows; Spark reads as few partitions as it needs for them."""
    spark = selected.sparkSession
    began = time.perf_counter()
    if is_connect(spark):
        rows = selected.limit(wanted).toArrow()
        seconds = time.perf_counter() - began
        table = spark.createDataFrame(rows, schema=selected.schema)
    else:
        # A limit that is collected as Arrow would read `wanted` rows of every partition. The rows
        # stay in the JVM, so that no type changes.
        of_java: Any = selected
        first = of_java._jdf.takeAsList(wanted)
        seconds = time.perf_counter() - began
        java = of_java.sparkSession._jsparkSession
        table = DataFrame(java.createDataFrame(first, of_java._jdf.schema()), spark)
        rows = table.toArrow()
    return Look(
        df=table,
        rows=rows,
        is_all=rows.num_rows < wanted,
        row_bytes=rows.nbytes / max(1, rows.num_rows),
        seconds=seconds,
    )


def _hashes(table: DataFrame) -> tuple[int, ...]:
    """Return the hashes that `ShardTable` partitions by; Spark hashes them once more."""
    row_hash = F.hash(F.xxhash64(*[F.col(name) for name in table.columns]))
    if "validation" in table.columns:
        table = table.where("NOT coalesce(validation, false)")
    found = table.select(row_hash.alias("hash")).toArrow()
    return tuple(found.column("hash").to_pylist())


def count_rows(df: DataFrame, validation: SparkColumn | None, seconds: float) -> tuple[int, int]:
    """Rows for training and for validation; raises DataError if that takes too long.

    Of columnar files Spark counts by their footers; of other sources it reads the rows.
    """
    doing("counting the rows")
    marked = (
        F.lit(0) if validation is None else F.sum(F.coalesce(validation, F.lit(False)).cast("long"))
    )

    def count() -> tuple[int, int]:
        row = df.agg(F.count(F.lit(1)), marked).first()
        assert row is not None
        return int(row[0]), int(row[1] or 0)

    found = bounded(df.sparkSession, count, seconds, "sparkdl explain: count the rows")
    if found is None:
        raise DataError(
            f"counting the rows took more than {seconds:g} s; say how many there are by "
            f"{option_text('num_rows')}; or give it more time by count_seconds, likewise"
        )
    return found[0] - found[1], found[1]
