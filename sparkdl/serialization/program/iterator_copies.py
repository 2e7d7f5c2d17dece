"""Copies of iterators of Python's own, which go on from where these are now."""

from __future__ import annotations

import contextlib
import operator
import types
import warnings
from typing import Any

_GENERATORS = (types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType)
"""Iterators of Python's own of which there are no copies."""
_MOST_PARTS = 1000
"""Longer tuples are data, in which no iterators are looked for."""


def copy_of(value: Any, copies: dict[int, Any]) -> Any:
    """Return a copy of an iterator, also of those that a tuple has; other values are the same."""
    if type(value) is tuple and len(value) <= _MOST_PARTS:
        parts = tuple(copy_of(part, copies) for part in value)
        return value if all(map(operator.is_, parts, value)) else parts
    if not moves_on(value):
        return value
    if id(value) not in copies:
        reduced = _reduced(value)
        copies[id(value)] = value if reduced is None else _made_again(reduced, copies)
    return copies[id(value)]


def moves_on(value: Any) -> bool:
    """True for an iterator of Python's own; a copy of an earlier time takes its place."""
    kind = type(value)
    of_python = kind.__module__ in ("builtins", "itertools")
    return of_python and hasattr(kind, "__next__") and kind not in _GENERATORS


def _reduced(iterator: Any) -> tuple[Any, ...] | None:
    """Return how to make it again; None: it cannot be. Newer Pythons warn of those of itertools."""
    with warnings.catch_warnings(), contextlib.suppress(TypeError):
        warnings.simplefilter("ignore", DeprecationWarning)
        found: tuple[Any, ...] = iterator.__reduce__()
        return found
    return None


def rest_of(iterator: Any) -> tuple[Any, ...] | None:
    """Return what is left, to be compared; a copy of a dictionary's iterator is that of a list."""
    reduced = _reduced(iterator)
    if reduced is None or reduced[0] is not iter or type(reduced[1][0]) is not list:
        return reduced
    return iter, reduced[1][0][(*reduced[2:], 0)[0] :]


def _made_again(reduced: tuple[Any, ...], copies: dict[int, Any]) -> Any:
    make, args, *state = (copy_of(part, copies) for part in reduced)
    made = make(*args)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        for one in state:
            if type(one) is tuple:  # with a list of its own, to which itertools.cycle adds
                one = tuple(list(part) if type(part) is list else part for part in one)
            if one is not None:
                made.__setstate__(one)
    return made
