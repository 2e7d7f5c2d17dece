"""Rows that cannot be used, in words: by their values and files, since Spark numbers no rows."""

from __future__ import annotations

import contextlib
import datetime
import decimal
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from pyspark.errors import AnalysisException
from pyspark.logger import PySparkLogger
from pyspark.sql import Column as SparkColumn
from pyspark.sql import DataFrame, Row
from pyspark.sql import functions as F
from pyspark.sql import types as T

from sparkdl.data.plan import SpoolColumn
from sparkdl.errors import DataError, TrainingDiverged
from sparkdl.spark.session.background_job import bounded

_PLAIN = (bool, int, float, str, decimal.Decimal, datetime.date)
_MOST_VALUES, _MOST_CHARACTERS = 4, 40
_NOT_FINITE = re.compile(
    r"NaN or infinite values are in: \w+ \"(.+?)\" of [\d,]+.*rows$", re.DOTALL
)
"""Pattern of the message of `not_finite.named`, and the first column in it."""
_LOOK_SECONDS = 60.0
"""Longest that rows are looked for, which reads the source up to them."""


@dataclass(frozen=True)
class UserRows:
    """The rows as the user has given them, for messages."""

    df: DataFrame
    columns: Sequence[SpoolColumn]
    """As they are spooled: a hash of these finds a row again."""
    validation: SparkColumn | None = None
    is_of_first: bool = False
    """True if messages are of the very first rows only, so that no others need to be read."""
    before: Callable[[], None] | None = None
    """Called before rows are read, by a job of their own."""

    def named(self, text: str, hashes: Mapping[str, int], name: str) -> str:
        """A message about column ``name``, with values and files of rows in place of numbers.

        ``hashes`` has the rows as the message calls them, see `SpooledShard.hashes`.
        """
        wanted = {place: value for place, value in hashes.items() if place in text}
        if not wanted:
            return text
        parts = [column.expression for column in self.columns]
        hashed = F.xxhash64(*parts, *([] if self.validation is None else [self.validation]))
        origin = _origin(self.df).alias("origin")
        rows = self.df.select(F.struct("*").alias("row"), origin, hashed.alias("hash"))
        rows = rows.where(F.col("hash").isin(list(wanted.values())))
        rows = rows.limit(len(wanted)) if self.is_of_first else rows.dropDuplicates(["hash"])
        what = f"sparkdl: look for a row that cannot be used, by {name}"
        if self.before is not None:
            self.before()
        found = bounded(self.df.sparkSession, rows.collect, _LOOK_SECONDS, what)
        words = {row["hash"]: _words(row["row"], row["origin"], name) for row in found or ()}
        for place in sorted(wanted, key=len, reverse=True):  # a place may be the start of another
            text = text.replace(place, words.get(wanted[place]) or place)
        return text.replace("(first: ", "(such as ")  # of rows in the order of their hashes


def _origin(df: DataFrame) -> SparkColumn:
    """The file that Spark has read a row from, with the row's number where the format has one."""
    numbered = F.format_string("row %d of %s", "_metadata.row_index", "_metadata.file_path")
    # It tells even what is caught. A logger of this name that pyspark has not made breaks pyspark.
    log = PySparkLogger.getLogger("DataFrameQueryContextLogger")
    was_disabled, log.disabled = log.disabled, True
    try:
        df.select(numbered).schema  # noqa: B018 # Spark Connect finds out now
        return numbered
    except AnalysisException:
        return F.input_file_name()
    finally:
        log.disabled = was_disabled


def _words(row: Row, origin: str, first: str) -> str:
    values = in_words(row, first)
    return ", which is ".join(filter(None, [f"the row with {values}" * bool(values), origin]))


def in_words(row: Row, first: str | None = None) -> str:
    """The plain values of a row with their columns, ``first`` before the others."""
    values = row.asDict()
    ordered = {first: values[first], **values} if first in values else values
    told = [
        f"{name}={_shortened(repr(value))}"
        for name, value in ordered.items()
        if isinstance(value, _PLAIN)
    ]
    return ", ".join(told[:_MOST_VALUES])


def _shortened(text: str) -> str:
    return text if len(text) <= _MOST_CHARACTERS else f"{text[: _MOST_CHARACTERS - 3]}..."


@contextlib.contextmanager
def showing_filter(df: DataFrame) -> Iterator[None]:
    """Let an error that names columns with NaN or infinite values show how to drop such rows."""
    try:
        yield
    except (DataError, TrainingDiverged) as error:
        told = _NOT_FINITE.search(str(error))
        shown = None if told is None else finite_rows(df, told[1])
        if shown is None:
            raise
        raise type(error)(f"{error}, as by df.{shown}") from error.__cause__


def finite_rows(df: DataFrame, name: str) -> str | None:
    """How to keep the rows whose values in a column are finite; None: by no simple filter.

    It drops null rows as well.
    """
    quoted = name if all(part.isidentifier() for part in name.split(".")) else f"`{name}`"
    is_column = name in df.columns
    quoted = f"`{name}`" if is_column and not name.isidentifier() else quoted
    try:
        kind = df.select(quoted).schema[0].dataType
    except AnalysisException:
        return None
    if type(kind).__name__ == "VectorUDT":
        values = f'vector_to_array("{quoted}")'
        return (
            f'where(F.forall({values}, lambda v: F.abs(v) < float("inf"))), with vector_to_array '
            "of pyspark.ml.functions; VectorAssembler(handleInvalid='skip') drops NaN and null"
        )
    text = quoted
    while isinstance(kind, T.ArrayType):
        if isinstance(kind.elementType, T.ArrayType):
            text = f"flatten({text})"
        elif isinstance(kind.elementType, T.NumericType):
            return f"where(\"forall({text}, v -> abs(v) < double('inf'))\")"
        kind = kind.elementType
    return f"where(\"abs({text}) < double('inf')\")" if isinstance(kind, T.NumericType) else None
