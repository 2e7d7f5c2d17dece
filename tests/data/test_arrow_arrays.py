"""Arrow arrays become numpy arrays; what is not uniform is found, counted and shown."""

from __future__ import annotations

import re

import numpy as np
import pyarrow as pa
import pytest

from sparkdl.data.arrow_arrays import Findings, NotUniform, examine, uniform


@pytest.mark.parametrize(
    "dtype", ["int8", "int16", "int32", "int64", "float32", "float64", "uint8"]
)
def test_numbers_keep_dtype_and_are_views(dtype: str) -> None:
    source = np.arange(5).astype(dtype)
    values = uniform(pa.array(source))
    assert values.dtype == dtype
    np.testing.assert_array_equal(values, source)
    assert np.shares_memory(values, source)


def test_booleans() -> None:
    values = uniform(pa.array([True, False]))
    assert values.tolist() == [True, False]


@pytest.mark.parametrize("large", [False, True])
def test_lists_become_matrices_without_a_copy(large: bool) -> None:
    kind = pa.large_list(pa.float32()) if large else pa.list_(pa.float32())
    array = pa.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], kind)
    values = uniform(array)
    assert values.tolist() == [[1, 2], [3, 4], [5, 6]]
    inner = array.values.to_numpy()
    assert np.shares_memory(values, inner)
    assert uniform(array.slice(1, 2)).tolist() == [[3, 4], [5, 6]]


def test_nested_lists() -> None:
    array = pa.array([[[1.0, 2.0], [3.0, 4.0]]] * 3)
    assert uniform(array).shape == (3, 2, 2)


@pytest.mark.parametrize("kind", [pa.binary(), pa.large_binary()])
def test_binary_becomes_bytes(kind: pa.DataType) -> None:
    array = pa.array([b"ab", b"cd", b"ef"], kind)
    assert uniform(array.slice(1)).tolist() == [[99, 100], [101, 102]]
    assert uniform(pa.array([b"", b""], kind)).shape == (2, 0)


def test_fixed_size_lists() -> None:
    array = pa.array([[1, 2], [3, 4]], pa.list_(pa.int32(), 2))
    assert uniform(array.slice(1)).tolist() == [[3, 4]]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (
            [[1.0], None, [None]],
            r'"f" has 2 rows with a null, in 1 of them among .* \(first: row 1\); drop or fill',
        ),
        ([[1.0], [2.0], [3.0, 4.0]], r"1 do not \(first: row 2, of shape \(2,\)\)"),
        (
            [[[1.0], [2.0]], [[1.0], [2.0, 3.0]], [[1.0], [2.0]]],
            r"ragged: 1 row with lists of different lengths inside \(first: row 1\); pad or drop",
        ),
        ([[[1.0], [2.0, 3.0]]] * 3, r"ragged: 3 rows with lists of different .* \(first: row 0\)"),
    ],
)
def test_what_is_not_uniform_is_named(rows: list[object], message: str) -> None:
    with pytest.raises(NotUniform):
        uniform(pa.array(rows))
    assert re.search(message, examine(pa.array(rows)).message("f"))


@pytest.mark.parametrize("rows", [[[1, 2], [None, 3]], [[1, 2], None], [[1, 2], [3, None], None]])
def test_nulls_in_lists_of_fixed_size(rows: list[object]) -> None:
    array = pa.array(rows, pa.list_(pa.int64(), 2))
    with pytest.raises(NotUniform):
        uniform(array)
    found = examine(array)
    assert (found.nulls, found.first_null) == (len(rows) - 1, "row 1")
    assert found.shapes == {"(2,)": 1}
    inside = examine(pa.array([[row] for row in rows], pa.list_(array.type)))
    assert inside.nulls == len(rows) - 1


def test_a_null_deep_inside_belongs_to_its_row() -> None:
    found = examine(pa.array([[[1.0]], [[None]]]), where=" of partition 3", first_row=10)
    assert found.nulls == 1
    assert found.first_null == "row 11 of partition 3"


def test_findings_add_up_and_survive_json() -> None:
    left = examine(pa.array([[1.0], [2.0], [1.0, 2.0]]))
    right = Findings.from_dict(examine(pa.array([[1.0, 2.0]] * 5), first_row=3).to_dict())
    left.merge(right)
    assert left.shapes == {"(1,)": 2, "(2,)": 6}
    assert "most rows have shape (2,), but 2 do not (first: row 0" in left.message("f")
