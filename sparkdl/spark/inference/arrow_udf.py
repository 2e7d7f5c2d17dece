"""A column that Python computes from others, Arrow arrays in and out.

It is an ``arrow_udf``, which Spark has since 4.1. Before (petastorm needs Spark 4.0), all columns
of the DataFrame travel through Python and back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pyarrow as pa
from pyspark.sql import Column as SparkColumn
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T
from pyspark.sql.pandas import functions as python_functions

from sparkdl.errors import SparkDLError
from sparkdl.runtime.tracebacks import shortened
from sparkdl.spark.session.compat import run_workers_here
from sparkdl.spark.session.settings import session_settings
from sparkdl.worker.watcher import ended_when_hung

Function = Callable[[Iterator[Sequence[pa.Array]]], Iterator[pa.Array]]
"""From batches, one array per input, to arrays with as many rows in all."""


def with_columns(
    df: DataFrame,
    prefix: str,
    inputs: Sequence[SparkColumn],
    function: Function,
    data_type: T.DataType,
    made: Mapping[str, Callable[[SparkColumn], SparkColumn]],
) -> DataFrame:
    """Add columns that are made of what a function computes from others.

    Over columnar files, Spark 4.3 passes all columns through a converter that fails with
    UNSUPPORTED_DATATYPE on user-defined types, such as the vectors of Spark ML. Where there are
    such, an expression that the optimizer must not move makes the plan go row by row below the
    function; it stays in the plan because the new columns depend on it.

    ``prefix`` is of the names of columns that are there for a while only; ``made`` has by name what
    makes the new column of what the function gave.
    """
    packed, marker = f"{prefix}_output", f"{prefix}_partition"
    is_plain = all(_is_convertible(field.dataType) for field in df.schema.fields)
    rows = df if is_plain else df.withColumn(marker, F.spark_partition_id())
    seconds = session_settings(df.sparkSession).heartbeat_timeout_seconds
    computed = with_column(rows, packed, inputs, partial(_watched, function, seconds), data_type)
    columns = {name: make(F.col(packed)) for name, make in made.items()}
    if not is_plain:
        columns = {name: F.when(F.col(marker) >= 0, c) for name, c in columns.items()}
    return computed.withColumns(columns).drop(packed, marker)


def _watched(
    function: Function, timeout_seconds: float, batches: Iterator[Sequence[pa.Array]]
) -> Iterator[pa.Array]:
    """Yield what the function gives, in a process that is ended if it hangs."""
    with ended_when_hung(timeout_seconds):
        try:
            yield from function(batches)
        except SparkDLError as error:
            # Spark shows the traceback three times.
            raise shortened(error) from error.__cause__


def _is_convertible(data_type: T.DataType) -> bool:
    if isinstance(data_type, T.ArrayType):
        return _is_convertible(data_type.elementType)
    if isinstance(data_type, T.MapType):
        return _is_convertible(data_type.keyType) and _is_convertible(data_type.valueType)
    if isinstance(data_type, T.StructType):
        return all(_is_convertible(field.dataType) for field in data_type.fields)
    known = (T.NumericType, T.StringType, T.BinaryType, T.BooleanType, T.DateType)
    return isinstance(data_type, (*known, T.TimestampType, T.TimestampNTZType))


def with_column(
    df: DataFrame,
    name: str,
    inputs: Sequence[SparkColumn],
    function: Function,
    data_type: T.DataType,
) -> DataFrame:
    """``df`` with column ``name`` of ``data_type``, which ``function`` computes from ``inputs``."""
    run_workers_here(df.sparkSession)
    arrow_udf: Any = getattr(python_functions, "arrow_udf", None)
    if arrow_udf is not None:
        # Spark tells the kind of a UDF by its type hints.
        def torch_on_column(batches: Iterator[pa.Array]) -> Iterator[pa.Array]:
            return function((array,) for array in batches)

        def torch_on_columns(batches: Iterator[tuple[pa.Array, ...]]) -> Iterator[pa.Array]:
            return function(batches)

        work = torch_on_column if len(inputs) == 1 else torch_on_columns
        return df.withColumn(name, arrow_udf(work, data_type)(*inputs))
    packed = f"{name}_inputs"
    parts = [column.alias(f"_{number}") for number, column in enumerate(inputs)]
    schema = T.StructType([*df.schema.fields, T.StructField(name, data_type)])
    task = WithColumn(function=function, name=name, inputs=packed)
    return df.withColumn(packed, F.struct(*parts)).mapInArrow(task, schema)


@dataclass(frozen=True, kw_only=True)
class WithColumn:
    """Puts what a function computes next to the columns that were there. Runs on executors."""

    function: Function
    name: str
    """The new column."""
    inputs: str
    """A struct column of what the function gets; it is left out."""

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        waiting: deque[pa.RecordBatch] = deque()

        def arrays() -> Iterator[Sequence[pa.Array]]:
            for batch in batches:
                waiting.append(batch)
                yield batch.column(self.inputs).flatten()

        found: list[pa.Array] = []
        for array in self.function(arrays()):  # of any length: a task cuts batches as it likes
            found.append(array)
            while waiting and sum(map(len, found)) >= waiting[0].num_rows:
                batch = waiting.popleft()
                joined = pa.concat_arrays(found)
                found = [joined.slice(batch.num_rows)]
                columns = dict(zip(batch.schema.names, batch.columns, strict=True))
                del columns[self.inputs]
                columns[self.name] = joined.slice(0, batch.num_rows)
                yield pa.RecordBatch.from_arrays(list(columns.values()), names=list(columns))
        assert not sum(map(len, found)), "the function gave more rows than it got"
