"""Specifications refuse what makes no sense, and travel as JSON."""

from __future__ import annotations

import math
from typing import Any

import pytest

from sparkdl import Image, Sequence, Sparse, Tensor
from sparkdl.errors import ConfigError
from sparkdl.inputs import Specification, check_names, named
from sparkdl.serialization.json_objects import describe, restore


def made(batch: Any) -> Any:
    return batch.column(0)


@pytest.mark.parametrize(
    "specification",
    [
        Tensor("x", shape=(1, 2)),
        Tensor(("a", "b"), transform=made),
        Sequence("tokens", mask="is_token", padding_value=-1, max_length=9),
        Image("photo", size=(8, 9), channels=1, decode="batch"),
        Sparse("words", dense=False),
    ],
)
def test_json_gives_the_specification_back(specification: Specification) -> None:
    assert restore(describe(specification)) == specification


def test_lists_become_tuples() -> None:
    assert Tensor(["a", "b"], transform=made).columns == ("a", "b")  # type: ignore[arg-type]
    assert Image("x", size=[3, 4]).size == (3, 4)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Tensor(""), "needs a column's name"),
        (lambda: Tensor(("a", "b")), "names several columns: pass a transform"),
        (lambda: Tensor("a", transform=3), "transform must be a function"),
        (lambda: Tensor("a", shape=(0,)), "shape must hold whole numbers"),
        (lambda: Sequence("a", max_length=0), "max_length must be at least 1"),
        (lambda: Sequence("a", mask=""), "mask must be the name"),
        (lambda: Image("a", size=(3,)), r"size must be \(height, width\)"),
        (lambda: Image("a", channels=2), "channels must be one of"),
        (lambda: Image("a", decode="later"), "decode must be 'spool' or 'batch'"),
    ],
)
def test_nonsense_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


@pytest.mark.parametrize(
    ("value", "dtype", "fits"),
    [
        (0.5, "float32", True), (math.nan, "float64", True), (-100, "int64", True),
        (255.0, "uint8", True), (1, "bool", True), (0.5, "int64", False), (-100, "uint8", False),
        (math.nan, "int64", False), (math.inf, "int32", False), (2**31, "int32", False),
        (-1, "bool", False),
    ],
)  # fmt: skip
def test_padding_must_be_a_value_of_the_column(value: float, dtype: str, fits: bool) -> None:
    kind = Sequence("tokens", padding_value=value)
    if fits:
        kind.check_padding(dtype)
        return
    with pytest.raises(ConfigError, match=f'"tokens" is no {dtype}, of which its values are'):
        kind.check_padding(dtype)


def test_an_argument_is_named_once() -> None:
    check_names(named({"x": Tensor("a"), "t": Sequence("b", mask="m")}))
    with pytest.raises(ConfigError, match="name the argument 'x' of forward twice"):
        check_names(named({"x": Tensor("a"), "t": Sequence("b", mask="x")}))
    with pytest.raises(ConfigError, match="name a column twice by position"):
        check_names(named([Tensor("a"), Sequence("a")]))
