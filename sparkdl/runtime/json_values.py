"""Plain values as JSON can hold them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin


def finite(value: Any) -> Any:
    """The same value with None in place of every NaN and infinity, and tuples as lists."""
    if isinstance(value, Mapping):
        return {key: finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def fits(value: Any, hint: Any) -> bool:
    """True if a value that JSON gave is of an annotated type; whole numbers are floats, too."""
    kind, inner = get_origin(hint), get_args(hint)
    if kind in (Union, UnionType):
        return any(fits(value, one) for one in inner)
    if kind is Literal:
        return type(value) in map(type, inner) and value in inner
    if kind in (list, tuple):
        return type(value) in (list, tuple) and all(fits(entry, inner[0]) for entry in value)
    if kind is dict:
        return type(value) is dict and all(
            fits(key, inner[0]) and fits(entry, inner[1]) for key, entry in value.items()
        )
    if hint is float:
        return type(value) in (int, float)
    return hint is Any or (value is None if hint is NoneType else type(value) is hint)


def plain(value: Any) -> Any:
    """The same value of dicts, lists, texts, numbers and None; anything else, a key too, as text.

    So it can always be written as JSON, whatever it holds; only the names of a dict that have the
    same text become one.
    """
    if isinstance(value, Mapping):
        return {
            key if type(key) in _KEYS else str(key): plain(entry) for key, entry in value.items()
        }
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return str(value)


_KEYS = (str, int, float, bool, type(None))
"""Types that `json` takes for an entry's name; subclasses may write themselves in another way."""
