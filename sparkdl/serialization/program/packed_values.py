"""Pickles of values that a program has changed, and what is said where there is none."""

from __future__ import annotations

import functools
import logging
import types
from collections.abc import Iterable
from typing import Any

from sparkdl.serialization.program.named_code import Place, function_of, is_imported

logger = logging.getLogger(__name__)

MOST_BYTES = 1 << 20
"""Larger values are not sent: they are caches rather than settings."""
told: set[Place] = set()
"""Places of which `tell_once` has warned."""


def pack_value(
    value: Any, modules: Iterable[str], most: int = MOST_BYTES, *, with_classes: bool = True
) -> bytes:
    """A pickle; code of ``modules`` is in it by value; see `CodePickler`."""
    from sparkdl.serialization.travel.pickling import BoundedBytes, CodePickler

    with BoundedBytes(most) as file:
        pickler = CodePickler(file, modules, with_classes=with_classes)
        pickler.dump(value)
        return file.getvalue()


def module_by_value(value: Any) -> list[str]:
    """That of a changed function, whose name would give executors what their file says."""
    function = function_of(value)
    if isinstance(function, functools._lru_cache_wrapper):
        function = function.__wrapped__
    is_function = isinstance(function, types.FunctionType)
    return [function.__module__] if is_function and is_imported(str(function.__module__)) else []


def tell_once(place: Place, why: str) -> None:
    """Warn of a value that is not sent, unless that was done."""
    if place not in told:
        told.add(place)
        logger.warning(
            "the program has changed %s, which cannot be sent to executors (%s): they have what "
            "its file says",
            ".".join(place),
            why,
        )


def reason_of(error: Exception) -> str:
    """Why a value cannot be pickled, in one line."""
    return str(error).partition("\n")[0] or type(error).__name__
