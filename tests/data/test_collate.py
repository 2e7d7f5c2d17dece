"""Do rows become what forward takes: padded, filled in, by name?"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from sparkdl.data.collate import (
    Arguments,
    arguments,
    copied,
    example_arguments,
    narrow,
    no_rows,
    split,
)
from sparkdl.data.plan import Column
from sparkdl.data.ragged import Ragged, offsets_of
from sparkdl.inputs import Image, Sequence, Sparse, Specification


def column(
    specification: Specification, shape: tuple[int, ...] = (), dtype: str = "int64", **more: Any
) -> Column:
    return Column(
        name="c", role="feature", dtype=dtype, shape=shape, specification=specification, **more
    )


def tokens(*rows: list[int]) -> Ragged:
    flat = np.array([v for row in rows for v in row], dtype=np.int64)
    return Ragged((flat,), offsets_of(np.array([len(row) for row in rows])), ())


def test_each_batch_is_padded_to_its_own_longest_row() -> None:
    spec = Sequence("c", mask="is_token", padding_value=-1)
    found = split(column(spec, argument="t"), tokens([1, 2], [3], [4], [], [5, 6, 7]), [2, 1, 2])
    assert [name for name, _ in found] == ["t", "is_token"]
    (_, values), (_, masks) = found
    assert [v.tolist() for v in values] == [
        [[1, 2], [3, -1]],
        [[4]],
        [[-1, -1, -1], [5, 6, 7]],
    ]
    assert [m.tolist() for m in masks][2] == [[False] * 3, [True] * 3]


def test_empty_rows_and_batches_keep_one_place() -> None:
    spec = column(Sequence("c", padding_value=9))
    ((_, (rows, none)),) = split(spec, tokens([], []), [2, 0])
    assert rows.tolist() == [[9], [9]] and none.shape == (0, 1)


def test_sparse_rows_are_filled_in_or_stay_sparse() -> None:
    rows = Ragged(
        (np.array([1, 0, 2], dtype=np.int32), np.array([5.0, 6.0, 7.0], dtype=np.float32)),
        np.array([0, 1, 3]),
        (3,),
    )
    wanted = [[0.0, 5.0, 0.0], [6.0, 0.0, 7.0]]
    dense = arguments([column(Sparse("c"), (3,), "float32")], [rows]).values[0]
    assert dense.tolist() == wanted and dense.dtype == torch.float32
    sparse = arguments([column(Sparse("c", dense=False), (3,), "float32")], [rows]).values[0]
    assert sparse.is_sparse and sparse.is_coalesced() and sparse.to_dense().tolist() == wanted
    assert narrow(sparse, 1, 2).to_dense().tolist() == wanted[1:]


def test_modules_are_called_by_name_and_position() -> None:
    def forward(a: Any, *, b: Any = 0) -> Any:
        return a, b

    one, two = torch.ones(1), torch.zeros(1)
    assert Arguments((one, two), (None, "b")).call(forward) == (one, two)
    assert Arguments((two, one), ("b", "a")).call(forward) == (one, two)
    assert Arguments((one,)).call(forward) == (one, 0)


@pytest.mark.parametrize("names", [(), (None, None), ("a", "b"), (None, "b")])
def test_users_see_inputs_as_they_named_them(names: tuple[str | None, ...]) -> None:
    values = torch.ones(1), torch.zeros(1)
    given = Arguments(values, names)
    packed = given.packed()
    assert isinstance(packed, dict if names == ("a", "b") else tuple)
    again = given.repacked(packed)
    assert all(x is y for x, y in zip(again.values, values, strict=True)) and again.names == names
    with pytest.raises(TypeError, match="expected"):
        given.repacked(values[0])


def test_examples_have_the_shapes_of_batches() -> None:
    columns = [
        column(Sequence("c", mask="m"), (2,), "float32", longest=5, argument="s"),
        column(Image("c", decode="batch"), (3, 4, 4), "uint8", argument="i"),
        column(Sparse("c", dense=False), (7,), "float32", argument="v"),
    ]
    example = example_arguments(columns, 3)
    assert example.names == ("s", "m", "i", "v")
    assert [tuple(v.shape) for v in example.values] == [(3, 5, 2), (3, 5), (3, 3, 4, 4), (3, 7)]
    assert example.values[-1].is_sparse


def test_no_rows_and_copies() -> None:
    spec = column(Sparse("c"), (7,), "float32")
    assert len(no_rows(spec)) == 0
    rows = tokens([1], [2, 3])
    again = copied(rows[1:])
    assert isinstance(again, Ragged) and again.offsets.tolist() == [0, 2]
    again.parts[0][0] = 9
    assert rows.parts[0].tolist() == [1, 2, 3]
