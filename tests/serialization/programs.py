"""Modules of Python that a program has made: their code travels by value, as a notebook's does."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager

import cloudpickle


@contextmanager
def program(code: str, name: str = "program_of_tests") -> Iterator[types.ModuleType]:
    """A module with this code; other processes do not have it, nor has this one afterwards."""
    made = types.ModuleType(name)
    sys.modules[name] = made
    exec(code, vars(made))
    cloudpickle.register_pickle_by_value(made)
    try:
        yield made
    finally:
        cloudpickle.unregister_pickle_by_value(made)
        del sys.modules[name]
