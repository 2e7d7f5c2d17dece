"""A column that Python computes from others, Arrow arrays in and out.

It is an ``arrow_udf``, which Spark has since 4.1. Before (petastorm needs Spark 4.0), all columns
of the DataFrame travel through Python and back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyspark.sql import Column as SparkColumn
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T
from pyspark.sql.pandas import functions as python_functions

Function = Callable[..., Iterator[pa.Array]]
"""From an iterator of arrays, or of tuples of them if there are several columns, to one of arrays,
with as many rows in all."""


def with_column(
    df: DataFrame,
    name: str,
    inputs: Sequence[SparkColumn],
    function: Function,
    data_type: T.DataType,
) -> DataFrame:
    """``df`` with column ``name`` of ``data_type``, which ``function`` computes from ``inputs``."""
    arrow_udf: Any = getattr(python_functions, "arrow_udf", None)
    if arrow_udf is not None:
        return df.withColumn(name, arrow_udf(function, data_type)(*inputs))
    packed = f"{name}_inputs"
    parts = [column.alias(f"_{number}") for number, column in enumerate(inputs)]
    schema = T.StructType([*df.schema.fields, T.StructField(name, data_type)])
    task = WithColumn(function=function, name=name, inputs=packed, is_one=len(inputs) == 1)
    return df.withColumn(packed, F.struct(*parts)).mapInArrow(task, schema)


@dataclass(frozen=True, kw_only=True)
class WithColumn:
    """Puts what a function computes next to the columns that were there. Runs on executors."""

    function: Function
    name: str
    """The new column."""
    inputs: str
    """A struct column of what the function gets; it is left out."""
    is_one: bool

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield each record batch with the new column in place of the inputs."""
        waiting: deque[pa.RecordBatch] = deque()

        def arrays() -> Iterator[Any]:
            for batch in batches:
                waiting.append(batch)
                parts = batch.column(self.inputs).flatten()
                yield parts[0] if self.is_one else tuple(parts)

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
