"""A column that Python computes, also as Spark 4.0 does it, which has no arrow_udf."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from sparkdl.spark.inference.arrow_udf import WithColumn, python_functions, with_column

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def double(arrays: Iterator[Sequence[pa.Array]]) -> Iterator[pa.Array]:
    for (array,) in arrays:
        doubled = pc.multiply(array, 2)
        yield doubled.slice(0, 1)
        yield doubled.slice(1)


def added(arrays: Iterator[Sequence[pa.Array]]) -> Iterator[pa.Array]:
    """Looks a batch ahead, as a task may."""
    before = None
    for pair in arrays:
        if before is not None:
            yield pc.add(*before)
        before = pair
    if before is not None:
        yield pc.add(*before)


def record_batch(*rows: int) -> pa.RecordBatch:
    inputs = pa.array([{"_0": row} for row in rows], pa.struct([("_0", pa.int64())]))
    return pa.RecordBatch.from_arrays([pa.array(rows), inputs], ["x", "inputs"])


def test_rows_stay_with_their_batches() -> None:
    task = WithColumn(function=double, name="twice", inputs="inputs")
    found = list(task(iter([record_batch(1, 2, 3), record_batch(), record_batch(4)])))
    assert [batch.to_pydict() for batch in found if batch.num_rows] == [
        {"x": [1, 2, 3], "twice": [2, 4, 6]},
        {"x": [4], "twice": [8]},
    ]


@pytest.mark.spark
@pytest.mark.parametrize("has_udf", [True, False])
def test_the_other_columns_are_there(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch, has_udf: bool
) -> None:
    from pyspark.ml.functions import array_to_vector
    from pyspark.sql import functions as F
    from pyspark.sql.types import LongType

    if not has_udf:
        monkeypatch.delattr(python_functions, "arrow_udf")
    vector = array_to_vector(F.array(F.col("id").cast("double"))).alias("vector")
    df = spark.range(0, 50, 1, 3).select("id", vector)
    functions: list[tuple[Any, Any]] = [(double, [F.col("id")]), (added, [F.col("id")] * 2)]
    for function, inputs in functions:
        found = with_column(df, "twice", inputs, function, LongType())
        assert found.columns == ["id", "vector", "twice"]
        rows = sorted(found.collect())
        assert [row["twice"] for row in rows] == list(range(0, 100, 2))
        assert [row["vector"][0] for row in rows] == list(range(50))
