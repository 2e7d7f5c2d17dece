"""Values that JSON gave are of the types that were annotated, or are not."""

from __future__ import annotations

from typing import Any, Literal

import pytest

from sparkdl.runtime.json_values import fits

GOOD: list[tuple[Any, Any]] = [
    (1, int), (1, float), (1.5, float), (True, bool), ("x", str), (None, int | None),
    (2, int | None), ([], list[int]), ([1, 2], list[int]), ({"a": [1.0]}, dict[str, list[float]]),
    ([1], list), ({}, dict), (object(), Any), ("a", Literal["a", "b"]), ((1, 2), list[int]),
]  # fmt: skip
BAD: list[tuple[Any, Any]] = [
    (True, int), (True, float), ("1", int), (1.0, int), (None, int), (1, str),
    ([1, "x"], list[int]), ({"a": 1}, list[int]), ({1: 1}, dict[str, int]),
    ({"a": None}, dict[str, int]), ("c", Literal["a"]), (True, Literal[1]),
    ([], Literal["a"] | None), ([], dict), (0, str | None),
]  # fmt: skip


@pytest.mark.parametrize(("value", "hint"), GOOD)
def test_a_value_of_the_type(value: Any, hint: Any) -> None:
    assert fits(value, hint)


@pytest.mark.parametrize(("value", "hint"), BAD)
def test_a_value_of_another_type(value: Any, hint: Any) -> None:
    assert not fits(value, hint)
