"""Operators of torch and modules that code names; those that a program has made are there alone."""

from __future__ import annotations

import contextlib
import dis
import importlib
import pkgutil
import types
from collections.abc import Iterator
from dataclasses import dataclass

_FIRST = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF", "LOAD_CLASSDEREF")
_NEXT = ("LOAD_ATTR", "LOAD_METHOD")


@dataclass(frozen=True)
class Operators:
    """Operators that must be there."""

    names: frozenset[str] = frozenset()
    """Their names below ``torch.ops``, such as ``aten.add``."""
    imports: frozenset[str] = frozenset()
    """Names of the modules that code imports, by which operators come."""

    def missing(self) -> str | None:
        """Return the first that this process lacks; None: none."""
        if self.names:
            for module in sorted(self.imports):
                with contextlib.suppress(Exception):  # whoever needs it says so
                    importlib.import_module(module)
        return next((name for name in sorted(self.names) if not _is_there(name)), None)


def named_operators(code: types.CodeType) -> set[str]:
    """Return the names of those that code, and the functions in it, take from ``torch.ops``."""
    found: set[str] = set()
    for path in (path for part in codes_in(code) for path in _paths(part)):
        if "ops" in path:
            below = path[path.index("ops") + 1 :][:2]
            if len(below) == 2 and _is_there(".".join(below)):
                found.add(".".join(below))
    return found


def codes_in(code: types.CodeType) -> Iterator[types.CodeType]:
    """Code, and that of the functions in it."""
    yield code
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            yield from codes_in(const)


def imported_by(code: types.CodeType) -> set[str]:
    """The modules that a function imports when it is called."""
    steps = (step for part in codes_in(code) for step in dis.get_instructions(part))
    return {str(step.argval) for step in steps if step.opname == "IMPORT_NAME"}


def _is_there(name: str) -> bool:
    try:
        pkgutil.resolve_name(f"torch.ops.{name}")
    except AttributeError:
        return False
    return True


def _paths(code: types.CodeType) -> Iterator[list[str]]:
    """Yield the attributes that code reads one of the other, from a variable on."""
    path: list[str] = []
    for step in dis.get_instructions(code):
        if step.opname in _FIRST:
            yield path
            path = [step.argval]
        elif step.opname in _NEXT and path:
            path.append(step.argval)
        else:
            yield path
            path = []
    yield path
