"""What a program has changed of modules that other processes import from files.

Code of such modules travels by its name, so that executors have what the files say: ``mylib.SIZE =
3`` in a notebook, or another ``mylib.Net.forward``, stays on the driver. So globals, and attributes
of classes, that the sent code names are compared by digests: with those of an executor and, where
they differ, with those of a fresh process on the driver. That shows whether the program has changed
them, or whether they depend on the machine.
"""

from __future__ import annotations

import dataclasses
import dis
import functools
import hashlib
import importlib
import json
import pickle
import subprocess
import sys
import types
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import cloudpickle

from sparkdl.serialization.trust import is_installed

Place = tuple[str, str]
"""A module of Python, and the name of something in it, with dots."""

_FRESH_SECONDS = 120.0
"""Longest wait for a fresh process, which may have to import torch."""
_CHANGING = {
    "add", "append", "appendleft", "clear", "discard", "extend", "insert", "pop", "popitem",
    "remove", "setdefault", "update",
}  # fmt: skip
"""Methods that change containers."""
_CONTAINERS = (list, dict, set, types.SimpleNamespace)
_FIXED = (
    type(None), bool, int, float, complex, str, bytes, tuple, frozenset, type, types.FunctionType,
    types.BuiltinFunctionType, staticmethod, classmethod, property, functools.partial,
)  # fmt: skip
"""Types of values that do not change by themselves."""
_ABSENT = "absent"


def imported_values(code: Iterable[Any]) -> dict[Place, str]:
    """Digests of what classes and functions name of modules that other processes import."""
    return {place: _digest(value) for place, value in _named(code).items()}


def differing(expected: Mapping[Place, str]) -> dict[Place, str]:
    """Digests of what is otherwise in this process than `imported_values` said of another."""
    found = {place: _found(place) for place in expected}
    return {place: digest for place, digest in found.items() if digest != expected[place]}


def changed_by_program(there: Mapping[Place, str]) -> tuple[list[Place], list[Place]]:
    """What the program has changed, of places that have other digests on an executor.

    Returns:
        The places where a fresh process on this machine has what the executor has, and those of
        which nobody knows why they differ: code of the module itself may have changed them, they
        depend on the machine, or the executor has imported another file.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-c", _FRESH],
            input=pickle.dumps((sys.path, list(there))),
            capture_output=True,
            timeout=_FRESH_SECONDS,
            check=True,
        )
        fresh: dict[Place, str] = pickle.loads(done.stdout)
    except (subprocess.SubprocessError, OSError, pickle.UnpicklingError, EOFError):
        fresh = {}
    changed = [place for place in there if fresh.get(place) == there[place] and _is_fixed(place)]
    return changed, [place for place in there if place not in changed]


_FRESH = """
import os, pickle, sys
out = os.dup(1)
os.dup2(2, 1)  # imports may print
sys.path[:], places = pickle.load(sys.stdin.buffer)
from sparkdl.serialization import imported_values as this
found = {place: this._found(place) for place in places}
with open(out, "wb") as file:
    pickle.dump(found, file)
"""


def _named(code: Iterable[Any]) -> dict[Place, Any]:
    found: dict[Place, Any] = {}
    todo = list(code)
    seen: dict[int, Any] = {}  # the values too, so that no id is used twice
    while todo:
        value = todo.pop()
        value = getattr(value, "__func__", value)
        if id(value) in seen:
            continue
        seen[id(value)] = value
        if isinstance(value, property):
            todo += [value.fget, value.fset]
        elif isinstance(value, type) and not is_installed(value.__module__):
            todo += value.__bases__
            for key, member in vars(value).items():
                if key.startswith("__") and not isinstance(member, types.FunctionType):
                    continue
                if _is_imported(value.__module__) and _travels_by_name(value):
                    found[value.__module__, f"{value.__qualname__}.{key}"] = member
                todo.append(member)
        elif isinstance(value, types.FunctionType) and not is_installed(value.__module__):
            for place, member in _globals_of(value):
                if place is not None:
                    found[place] = member
                todo.append(member)
    return found


def _globals_of(function: types.FunctionType) -> Iterator[tuple[Place | None, Any]]:
    """The globals that a function names, and what it names of modules among them."""
    names = {name for code in _codes(function.__code__) for name in code.co_names}
    own = vars(sys.modules.get(function.__module__, types))
    is_own = function.__globals__ is own and _is_imported(function.__module__)
    is_own = is_own and _travels_by_name(function)
    for name in sorted(names):
        value = function.__globals__.get(name, sys.modules.get(name))
        if isinstance(value, types.ModuleType):
            if _is_imported(value.__name__):
                for member in sorted(names & vars(value).keys()):
                    yield (value.__name__, member), vars(value)[member]
        elif name in function.__globals__:
            yield (function.__module__, name) if is_own else None, value


def _is_imported(module: str) -> bool:
    """True for a module of the user's own that travels by its name."""
    by_value = cloudpickle.list_registry_pickle_by_value()
    package = module.partition(".")[0]
    is_own = module not in ("__main__", "__mp_main__") and not is_installed(module)
    spec = getattr(sys.modules.get(module), "__spec__", None)
    return is_own and spec is not None and not {module, package} & set(by_value)


def _travels_by_name(value: type | types.FunctionType) -> bool:
    """True if its module has it under its name: what functions make travels with all it names."""
    found: Any = sys.modules.get(value.__module__)
    for name in value.__qualname__.split("."):
        found = getattr(found, name, None)
    return getattr(found, "__func__", found) is value


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            yield from _codes(const)


def _found(place: Place) -> str:
    try:
        owner: Any = importlib.import_module(place[0])
        *path, last = place[1].split(".")
        for name in path:
            owner = vars(owner)[name]
        return _digest(vars(owner)[last])
    except Exception:  # whatever a module raises when it is imported, or a name that is not there
        return _ABSENT


def _digest(value: Any) -> str:
    from sparkdl.serialization.identity import identity

    value = getattr(value, "__func__", value)
    if isinstance(value, property):
        value = value.fget
    about: Any
    if isinstance(value, types.FunctionType):
        # Of code that comes from the file nobody asks what it is: imports may have rewritten it.
        code = None if _is_of_its_file(value) else value.__code__
        about = identity((code, value.__defaults__, value.__kwdefaults__))
        about = [value.__module__, value.__qualname__, about]
    elif isinstance(value, type | types.ModuleType):
        about = [getattr(value, "__module__", ""), getattr(value, "__qualname__", value.__name__)]
    else:
        about = identity(value)
    return hashlib.sha256(json.dumps(about).encode()).hexdigest()


def _is_of_its_file(function: types.FunctionType) -> bool:
    file = getattr(sys.modules.get(function.__module__), "__file__", None) or ""
    return Path(file).stem == Path(function.__code__.co_filename).stem


def _is_fixed(place: Place) -> bool:
    """True if no code of the module itself gives another value to a name, as far as that shows."""
    name = place[1].rpartition(".")[2]
    value: Any = sys.modules.get(place[0])
    for part in place[1].split("."):
        value = getattr(value, part, None)
    is_data = dataclasses.is_dataclass(value) or isinstance(value, _CONTAINERS)
    if not (is_data or isinstance(value, _FIXED)):
        return False  # an object that may change itself
    for code in _codes_of(place[0]):
        for step in dis.get_instructions(code):
            if step.opname in ("STORE_GLOBAL", "STORE_ATTR") and step.argval == name:
                return False
        changes = _CHANGING & set(code.co_names) or any(
            step.opname in ("STORE_SUBSCR", "STORE_ATTR") for step in dis.get_instructions(code)
        )
        if is_data and changes and name in code.co_names:
            return False
    return True


def _codes_of(module: str) -> Iterator[types.CodeType]:
    """The code of all functions that a module defines."""
    todo = list(vars(sys.modules[module]).values())
    while todo:
        value = todo.pop()
        value = getattr(value, "__func__", value)
        if getattr(value, "__module__", None) != module:
            continue
        if isinstance(value, type):
            todo += vars(value).values()
        elif isinstance(value, types.FunctionType):
            yield from _codes(value.__code__)
