"""DataFrames of pandas become tables whose types Spark has."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from pyspark.sql.pandas.types import from_arrow_schema

from sparkdl.errors import DataError
from sparkdl.spark.frames.user_data import arrow_table

ROWS = 2


def test_types_that_spark_does_not_have_are_widened() -> None:
    table = arrow_table(
        pd.DataFrame(
            {
                "image": [np.full(3, 255, dtype=np.uint8)] * ROWS,
                "half": np.full(ROWS, 0.5, dtype=np.float16),
                "label": pd.Series([1, 2], dtype="uint8"),
                "count": pd.Series([2**40, None], dtype="UInt64"),
                "kind": pd.Categorical([4, 5]),
            }
        )
    )
    assert from_arrow_schema(table.schema).simpleString() == (
        "struct<image:array<smallint>,half:float,label:smallint,count:bigint,kind:bigint>"
    )
    assert table["image"].to_pylist()[0] == [255, 255, 255]
    assert table["count"].to_pylist() == [2**40, None]


@pytest.mark.parametrize(
    "frame",
    [
        pd.DataFrame([[0, 1]], columns=["label", "label"]),
        pd.DataFrame({"label": pd.arrays.SparseArray([0] * ROWS)}),
        pd.DataFrame({"label": [1, "one"]}),
        pd.DataFrame({"label": pd.period_range("2020", periods=ROWS)}),
        pd.DataFrame({"label": np.array([2**64 - 1], dtype=np.uint64)}),
    ],
    ids=["twice", "sparse", "mixed", "period", "too large"],
)
def test_what_cannot_be_read_is_said_in_a_sentence(frame: pd.DataFrame) -> None:
    with pytest.raises(DataError, match=r"cannot be read: .*; give each column a name of its own"):
        arrow_table(frame)


def test_a_pandas_frame_without_rows() -> None:
    assert arrow_table(pd.DataFrame({"x": np.zeros(0)})).num_rows == 0
    with pytest.raises(DataError, match=r'no rows, so the type of column "y" is not known; check'):
        arrow_table(pd.DataFrame({"x": np.zeros(0), "y": pd.Series([], dtype=object)}))
