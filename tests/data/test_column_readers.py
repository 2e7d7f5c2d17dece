"""Do columns become the rows that their specifications ask for, and are bad rows named?"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from sparkdl.data.column_readers import BadRows, read, read_trained
from sparkdl.data.plan import Column
from sparkdl.data.ragged import Ragged
from sparkdl.errors import DataError
from sparkdl.inputs import Sequence, Sparse, Specification, Tensor


def struct(**columns: Any) -> pa.StructArray:
    return pa.StructArray.from_arrays(list(columns.values()), names=list(columns))


def ragged(array: Any, specification: Specification) -> Ragged:
    rows = read(array, specification)
    assert isinstance(rows, Ragged)
    return rows


def message(array: Any, specification: Specification) -> str:
    with pytest.raises(BadRows) as caught:
        read(array, specification, where=" of partition 3", first_row=10)
    return caught.value.findings.message("c")


def test_sequences_keep_their_lengths() -> None:
    rows = ragged(pa.array([[1, 2], [], [3]]).slice(1), Sequence("c"))
    assert rows.parts[0].tolist() == [3] and rows.offsets.tolist() == [0, 0, 1]
    assert rows.shape == ()
    nested = ragged(pa.array([[[1.0, 2.0]], [[3.0, 4.0], [5.0, 6.0]]]), Sequence("c"))
    assert nested.shape == (2,) and nested.lengths.tolist() == [1, 2]
    fixed = ragged(pa.array([[1, 2], [3, 4]], pa.list_(pa.int64(), 2)), Sequence("c"))
    assert fixed.lengths.tolist() == [2, 2]


def test_empty_rows_do_not_tell_the_inner_shape() -> None:
    rows = ragged(pa.array([[], []], pa.list_(pa.list_(pa.float32()))), Sequence("c"))
    assert rows.shape is None and len(rows) == 2


def test_long_sequences_are_cut() -> None:
    rows = ragged(pa.array([[1, 2, 3], [4], [5, 6]]), Sequence("c", max_length=2))
    assert rows.parts[0].tolist() == [1, 2, 4, 5, 6] and rows.lengths.tolist() == [2, 1, 2]


def test_the_remedy_for_nulls_works_in_pandas() -> None:
    rows = [np.array([1.0, 2.0]), np.array([np.nan, 2.0]), None, np.array([3.0, 4.0])]
    df = pd.DataFrame({"c": rows})
    text = message(pa.Table.from_pandas(df)["c"].combine_chunks(), Sequence("c"))
    (remedy,) = re.findall(r"in pandas, .* by (df\[.*\])", text)
    kept = eval(remedy, {"df": df, "np": np, "pd": pd})
    assert kept.index.tolist() == [0, 3]


def test_bad_sequences_are_named() -> None:
    assert "of them among the row's values (first: row 11 of partition 3)" in message(
        pa.array([[1], None, [None, 2]]), Sequence("c")
    )
    assert "ragged: most rows have shape ('any length', 2), but 1 do not" in message(
        pa.array([[[1, 2]], [[1, 2], [3, 4]], [[1, 2, 3]]]), Sequence("c")
    )


def test_sparse_and_dense_vectors_become_sparse_rows() -> None:
    array = struct(
        size=pa.array([4, None], pa.int32()),
        indices=pa.array([[1, 3], None], pa.list_(pa.int32())),
        values=pa.array([[0.5, 2.0], [1.0, 0.0, 3.0, 4.0]]),
    )
    rows = ragged(array, Sparse("c"))
    index, values = rows.parts
    assert index.tolist() == [1, 3, 0, 1, 2, 3] and rows.shape == (4,)
    assert values.tolist() == [0.5, 2.0, 1.0, 0.0, 3.0, 4.0]


@pytest.mark.parametrize(
    ("size", "indices", "said"),
    [
        ([3, 4], [[0], [0]], "most rows have shape (3,), but 1 do not (first: row 11"),
        ([3, 3], [[0], [3]], "1 bad row: indices out of order or outside"),
        ([3, 3], [[0], [-1]], "outside of the size (first: row 11 of partition 3)"),
    ],
)
def test_bad_sparse_rows_are_named(size: list[int], indices: Any, said: str) -> None:
    array = struct(
        size=pa.array(size, pa.int32()),
        indices=pa.array(indices, pa.list_(pa.int32())),
        values=pa.array([[1.0], [2.0]]),
    )
    assert said in message(array, Sparse("c"))


def lengths(batch: pa.RecordBatch) -> list[list[int]]:
    return [list(map(ord, text or "?")) for text in batch.column("text").to_pylist()]


def total(batch: pa.RecordBatch) -> np.ndarray:
    return np.stack([batch.column(name).to_numpy() for name in batch.schema.names], axis=1)


def test_a_transform_gets_the_columns_by_name() -> None:
    rows = ragged(struct(c0=pa.array(["ab", None])), Sequence("text", transform=lengths))
    assert rows.parts[0].tolist() == [97, 98, 63]
    both = struct(c0=pa.array([1, 2]), c1=pa.array([3, 4]))
    assert read(both, Tensor(("a.b", "c"), transform=total)).tolist() == [[1, 3], [2, 4]]  # type: ignore[union-attr]


@pytest.mark.parametrize("zone", ["UTC", "Asia/Tokyo", "America/New_York"])
def test_a_transform_gets_instants_in_utc(zone: str) -> None:
    """Those of a DataFrame come in the session's time zone, those of a file in UTC."""
    noon = pa.array([43_200_000_000], pa.timestamp("us", tz="UTC")).cast(
        pa.timestamp("us", tz=zone)
    )
    hours = Tensor("when", transform=lambda rows: pc.hour(rows["when"]))
    assert read(struct(when=noon), hours).tolist() == [12]
    nested = struct(when=pa.ListArray.from_arrays([0, 1], noon), plain=noon.cast("int64"))
    first = Tensor(("when", "plain"), transform=lambda rows: pc.hour(pc.list_flatten(rows["when"])))
    assert read(nested, first).tolist() == [12]
    local = pa.array([43_200_000_000], pa.timestamp("us"))  # of TIMESTAMP_NTZ
    assert read(struct(when=local), hours).tolist() == [12]


@pytest.mark.parametrize(
    ("transform", "specification", "said"),
    [
        (lambda batch: 1 / 0, Tensor, "failed: ZeroDivisionError"),
        (lambda batch: [1], Tensor, "returned 1 rows for 2"),
        (lambda batch: np.array(["a", "b"]), Tensor, "it must hold numbers"),
        (lambda batch: np.array([1, 2]), Sequence, "of which Sequence cannot be made"),
        (lambda batch: [1, 2], Sparse, "returned int64, of which Sparse cannot be made"),
        (lambda batch: ["a", "b"], Tensor, "returned values that are no numbers, of which Tensor"),
    ],
)
def test_a_transform_that_fails_says_so(transform: Any, specification: Any, said: str) -> None:
    with pytest.raises(DataError, match=said):
        read(struct(c0=pa.array([1, 2])), specification("x", transform=transform))


def test_a_model_refuses_other_shapes_than_trained() -> None:
    column = Column(
        name="c", role="feature", dtype="float32", shape=(2,), specification=Sequence("c")
    )
    rows, _ = read_trained(pa.array([[[1.0, 2.0]]]), column)
    assert isinstance(rows, Ragged) and rows.parts[0].dtype == np.float32
    with pytest.raises(DataError, match=r"has rows of shape \(3,\); the module was trained on"):
        read_trained(pa.array([[[1.0, 2.0, 3.0]]]), column)
    with pytest.raises(DataError, match="has 1 null row"):
        read_trained(pa.array([None, [[1.0, 2.0]]]), column)


def test_rows_are_put_into_the_shape_and_dtype_of_training() -> None:
    column = Column(name="f", role="feature", dtype="float32", shape=(4,))
    rows, kept = read_trained(pa.array([[[1, 2], [3, 4]]]), column)
    assert isinstance(rows, np.ndarray) and kept is None
    assert (rows.dtype, rows.tolist()) == (np.float32, [[1, 2, 3, 4]])
    none, _ = read_trained(pa.array([], pa.list_(pa.float32())), column)
    assert isinstance(none, np.ndarray) and none.shape == (0, 4)
    with pytest.raises(DataError, match=r'column "f" has rows of shape \(2,\); the module was'):
        read_trained(pa.array([[1.0, 2.0]]), column)
