from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import pytest
import torch

from sparkdl.data.collate import Rows
from sparkdl.data.plan import Column
from sparkdl.data.ragged import Ragged
from sparkdl.errors import TrainingDiverged
from sparkdl.train.objective import not_finite
from sparkdl.train.objective.not_finite import with_columns

COLUMNS = [
    Column(name="image", role="feature", dtype="float32", shape=(2, 2)),
    Column(name="words", role="feature", dtype="int64", shape=()),
    Column(name="curve", role="feature", dtype="float64", shape=()),
    Column(name="price", role="label", dtype="float64", shape=()),
]


class Shard:
    """Rows of all kinds, several of which are not finite."""

    num_rows = 3

    def in_order(self, batch_size: int) -> Iterator[Mapping[str, Rows]]:
        image = torch.zeros(3, 2, 2)
        image[1] = float("nan")  # four values of one row
        image[2, 0, 1] = float("-inf")
        curve = np.array([1.0, np.nan, np.inf, 2.0, 3.0])
        yield {
            "feature image": image,
            "feature words": torch.tensor([1, 2, 3]),
            "feature curve": Ragged((curve,), np.array([0, 0, 3, 5]), ()),
            "label price": torch.tensor([1.0, 2.0, float("nan")], dtype=torch.float64),
        }


class Nothing:
    num_rows = 0


def said(columns: list[Column], *shards: object) -> str:
    error = TrainingDiverged("the loss is nan")
    return str(with_columns(error, columns, shards, None))  # type: ignore[arg-type]


def test_rows_are_counted_by_column() -> None:
    assert said(COLUMNS, Shard(), Nothing(), Shard()) == (
        "the loss is nan. Among the 6 training rows NaN or infinite values are in: "
        'feature "image" of 4; feature "curve" of 2; label "price" of 2; '
        "drop or mend these rows"
    )


def test_rows_that_are_finite_are_not_blamed() -> None:
    assert said(COLUMNS[1:2], Shard()) == (
        "the loss is nan. None of the 3 training rows has NaN or an infinite value"
    )


def test_a_look_that_takes_long_says_what_it_has_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(not_finite, "SECONDS", -1.0)
    assert "None of the 0 training rows looked at" in said(COLUMNS, Shard())


def test_rows_without_any_value_are_told() -> None:
    class Tokens:
        num_rows = 3

        def in_order(self, batch_size: int) -> Iterator[Mapping[str, Rows]]:
            yield {"feature tokens": Ragged((np.array([1, 2, 3]),), np.array([0, 0, 3, 3]), ())}

    column = Column(name="tokens", role="feature", dtype="int64", shape=())
    assert said([column], Tokens()) == (
        "the loss is nan. None of the 3 training rows has NaN or an infinite value; empty lists, "
        'whose mean is NaN, are in: feature "tokens" of 2'
    )
