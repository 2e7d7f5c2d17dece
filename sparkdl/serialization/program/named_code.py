"""What classes and functions name, and what of that is in modules of the user's own."""

from __future__ import annotations

import ast
import builtins
import collections
import dis
import enum
import gc
import importlib
import inspect
import itertools
import logging
import sys
import threading
import types
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import cloudpickle

from sparkdl.serialization.travel.operators import codes_in, imported_by
from sparkdl.serialization.trust import is_installed

Place = tuple[str, str]
"""A module of Python, and the name of something in it, with dots."""
_MOST_PARTS = 10_000
"""So many of what a value holds, nearest first, are asked for code."""
_OPAQUE = (
    *(types.ModuleType, types.CodeType, types.FrameType, types.TracebackType, types.GeneratorType),
    logging.Logger,
)
"""Kinds of objects that lead to all of a process, or to no code."""
_DRIVERS = {"pyspark", "py4j"}
"""Packages whose objects are connections."""
_PARSING = threading.Lock()
ATOMS = {type(None), bool, int, float, complex, str, bytes}
_OF_OBJECTS = {"getattr", "hasattr", "attrgetter", "vars", "__dict__"}
_LOOKUPS = {
    *_OF_OBJECTS, "globals", "eval", "exec", "modules", "__import__", "import_module",
    "resolve_name",
}  # fmt: skip
"""Names by which code reaches what it does not name: attributes of objects, or anything."""
_OF_IMPORT = {*vars(types.ModuleType("")), "__builtins__", "__cached__", "__file__", "__path__"}
"""Globals that importing a module sets: each process has its own."""


def named_by(code: Iterable[Any], *, by_name: bool) -> dict[Place, Any]:
    """Return what code names of the user's own modules, and of those that it names in turn.

    ``by_name``: without code itself and modules, and without what travels with other code.
    """
    found: dict[Place, Any] = {}
    seen: dict[tuple[int, bool], Any] = {}  # the values too, so that no id is used twice
    todo = [(one, False) for one in code]
    """Values to look at, with True if other processes have them because they import a module."""
    made: dict[int, Place] = {}
    """Classes that functions have made, by id, and where other processes have theirs."""
    while todo:
        start, is_there = todo.pop()
        for value in _code_in(start, seen, is_there):
            if isinstance(value, types.ModuleType):
                for key, member in _members_of(value):
                    if not (by_name and type(member) is types.ModuleType):
                        found[value.__name__, key] = member
                    if type(member) is not types.ModuleType:
                        todo.append((member, True))
                continue
            module = str(value.__module__)
            has_name = is_imported(module) and _travels_by_name(value)
            if has_name and not by_name:
                found[module, value.__qualname__] = value
            is_known = is_there or has_name
            if not isinstance(value, type):
                todo += [(part, is_known) for part in _held_by(value)]
                for place, member in _globals_of(value, is_known or not by_name):
                    if place is not None and isinstance(member, type):
                        made.setdefault(id(member), place)
                    if place is not None and not (by_name and type(member) is types.ModuleType):
                        found[place] = member
                    if type(member) is not types.ModuleType:
                        todo.append((member, place is not None))
                continue
            todo += [(part, is_known) for part in (type(value), *value.__bases__)]
            there = (module, value.__qualname__) if has_name else made.get(id(value))
            members = value._member_map_ if isinstance(value, enum.EnumMeta) else {}
            for name, one in members.items():
                for key, part in vars(one).items():
                    if there and (key == "_value_" or not key.startswith("_")):
                        found[there[0], f"{there[1]}.{name}.{key}"] = part
            for key, member in vars(value).items():
                is_special = key.startswith("__") and not isinstance(member, types.FunctionType)
                is_fixed = isinstance(value, enum.EnumMeta) and not isinstance(
                    member, types.FunctionType | staticmethod | classmethod | property
                )
                if there and not is_special and not is_fixed:
                    found[there[0], f"{there[1]}.{key}"] = member
                if key != "__annotations__":
                    todo.append((member, is_known))
    return found


def _code_in(value: Any, seen: dict[tuple[int, bool], Any], is_there: bool) -> Iterator[Any]:
    """The user's own classes, functions and modules that are nearest to a value, each once.

    Who holds a module may take anything of it.

    What an object holds is asked of the garbage collector, which runs no code of its class.
    """
    todo = collections.deque([value])
    for _ in range(_MOST_PARTS):
        if not todo:
            return
        one = todo.popleft()
        kind = type(one)
        if {(id(one), is_there), (id(one), True)} & seen.keys():
            continue
        seen[id(one), is_there] = one
        if issubclass(kind, type):
            if not is_installed(one.__module__):
                yield one
        elif kind is types.FunctionType:
            if is_installed(one.__module__) and is_installed(one.__globals__.get("__name__")):
                todo += _held_by(one)
            else:
                yield one
        elif kind is types.ModuleType:
            if is_imported(one.__name__):
                yield one
        elif (
            not issubclass(kind, _OPAQUE) and str(kind.__module__).partition(".")[0] not in _DRIVERS
        ):
            parts = itertools.islice(gc.get_referents(one), _MOST_PARTS)
            todo.append(kind)
            todo += [part for part in parts if type(part) not in ATOMS]


def _held_by(function: types.FunctionType) -> list[Any]:
    """Return what a function has besides its globals, such as what it wraps."""
    held = function.__closure__, function.__defaults__, function.__kwdefaults__, vars(function)
    return [part for part in held if part]


def _globals_of(function: types.FunctionType, is_there: bool) -> Iterator[tuple[Place | None, Any]]:
    """The globals that a function reads, and what it reads of modules among them.

    ``is_there``: whether other processes have the function's own module.
    """
    where = str(function.__globals__.get("__name__"))
    if is_installed(where):
        return
    read: set[str] = set()
    attributes: set[str] = set()
    texts: set[str] = set()
    for code in codes_in(function.__code__):
        texts |= {const for const in code.co_consts if isinstance(const, str)}
        for step in dis.get_instructions(code):
            if step.opname in ("LOAD_GLOBAL", "LOAD_NAME", "IMPORT_NAME"):
                read.add(str(step.argval))
            elif step.opname in ("LOAD_ATTR", "LOAD_METHOD", "IMPORT_FROM"):
                attributes.add(str(step.argval))
    lookups = _LOOKUPS & (read | attributes)
    read -= _OF_IMPORT
    attributes -= _OF_IMPORT
    own = vars(sys.modules.get(where, types))
    is_own = is_there and function.__globals__ is own and is_imported(where)
    if lookups - _OF_OBJECTS and is_own:
        read |= {key for key, _ in _members_of(sys.modules[where])}
    todo = [(name, function.__globals__.get(name, sys.modules.get(name))) for name in sorted(read)]
    if lookups - _OF_OBJECTS:
        todo += [("", sys.modules[name]) for name in sorted(texts & sys.modules.keys())]
    seen = set()
    for name, value in todo:
        if isinstance(value, types.ModuleType):
            if is_own and name in function.__globals__:
                yield (where, name), value
            if is_imported(value.__name__) and value.__name__ not in seen:
                seen.add(value.__name__)
                members = [key for key, _ in _members_of(value)] if lookups else attributes
                for member in sorted(vars(value).keys() & members):
                    found = vars(value)[member]
                    if issubclass(type(found), types.ModuleType):
                        todo.append(("", found))
                    else:
                        yield (value.__name__, member), found
        elif name in function.__globals__:
            yield (where, name) if is_own else None, value


def _members_of(module: types.ModuleType) -> list[tuple[str, Any]]:
    """What a module has under names, but for what each process has for itself."""
    return [(key, value) for key, value in list(vars(module).items()) if key not in _OF_IMPORT]


def is_imported(module: str) -> bool:
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
        found = inspect.getattr_static(found, name, None)
    return function_of(found) is value


def is_code(value: Any) -> bool:
    """True for classes and functions."""
    return isinstance(value, type | types.FunctionType)


def functions_of(code: Iterable[Any]) -> list[types.FunctionType]:
    """The functions among these classes and functions, and those of the classes."""
    members = [
        part for one in code for part in (vars(one).values() if isinstance(one, type) else [one])
    ]
    return [one for one in map(function_of, members) if isinstance(one, types.FunctionType)]


def function_of(value: Any) -> Any:
    """That of a method; other values as they are."""
    is_method = type(value) in (staticmethod, classmethod, types.MethodType)
    return value.__func__ if is_method else value


def computes_only(function: Any) -> bool:
    """True if a function of plain arguments can do nothing but compute.

    All that it names must be known: plain values, and functions of Python, torch and numpy that
    change nothing and draw nothing.
    """
    if type(function) is not types.FunctionType or function.__closure__:
        return False
    defaults = (function.__defaults__ or (), function.__kwdefaults__ or {})
    return all(map(is_plain, defaults)) and all(
        _names_no_array_to_write(part)
        and all(_may_be(step, function.__globals__) for step in dis.get_instructions(part))
        for part in codes_in(function.__code__)
    )


def _names_no_array_to_write(code: types.CodeType) -> bool:
    values = [v for one in code.co_consts for v in (one if type(one) is tuple else (one,))]
    return "out" not in values


def _may_be(step: dis.Instruction, names: Mapping[str, Any]) -> bool:
    """Whether a step of code with these globals changes nothing but its own variables."""
    name, word = step.opname, step.argval
    if name in ("LOAD_GLOBAL", "LOAD_NAME"):
        value = names.get(word, vars(builtins).get(word))
        is_known = any(value is vars(builtins)[known] for known in _COMPUTE)
        is_module = any(value is sys.modules.get(known) for known in _COMPUTING)
        return value is not None and (is_known or is_module or is_plain(value))
    if name in ("LOAD_ATTR", "LOAD_METHOD"):
        return word in _COMPUTED
    is_in_place = name.startswith("INPLACE") or (name == "BINARY_OP" and step.argrepr[-1] == "=")
    return not is_in_place and name not in _CHANGE and not name.startswith("IMPORT")


def is_plain(value: Any) -> bool:
    """True for numbers, texts, tensors and arrays, and for tuples, lists and dicts of them."""
    if type(value) in (tuple, list):
        return all(map(is_plain, value))
    if type(value) is dict:
        return all(map(is_plain, (*value, *value.values())))
    kind = type(value)
    name = kind.__module__, kind.__name__
    if name == ("numpy", "ndarray"):
        return not value.dtype.hasobject
    return kind in ATOMS or name in _PLAIN


_PLAIN = {("torch", name) for name in ("Tensor", "device", "dtype", "Size")}
_COMPUTING = ("math", "numpy", "torch", "torch.nn", "torch.nn.functional")
_COMPUTE = (
    "abs", "bool", "dict", "enumerate", "float", "int", "len", "list", "max", "min", "range",
    "reversed", "round", "sorted", "sum", "tuple", "zip",
)  # fmt: skip
_COMPUTED = {
    "abs", "acos", "arange", "argmax", "argsort", "array", "as_tensor", "asarray", "asin", "atan",
    "bool", "cat", "ceil", "clamp", "clip", "clone", "comb", "concatenate", "contiguous", "copy",
    "cos", "cosh", "cpu", "cumprod", "cumsum", "detach", "device", "diag", "diff", "dot",
    "double", "dtype", "e", "einsum", "exp", "expand", "expand_as", "eye", "factorial", "flatten",
    "flip", "float", "float16", "float32", "float64", "floor", "full", "full_like", "functional",
    "half", "hann_window", "hypot", "inf", "int", "int32", "int64", "inverse", "item", "linspace",
    "log", "log10", "log1p", "log2", "log_softmax", "long", "masked_fill", "matmul", "max",
    "maximum", "mean", "meshgrid", "min", "minimum", "mul", "nan", "ndim", "new_ones",
    "new_zeros", "newaxis", "nn", "norm", "normalize", "numel", "numpy", "one_hot", "ones",
    "ones_like", "outer", "pad", "permute", "pi", "pow", "prod", "repeat", "repeat_interleave",
    "reshape", "roll", "round", "rsqrt", "shape", "sigmoid", "sign", "sin", "sinh", "size",
    "softmax", "sqrt", "square", "squeeze", "stack", "std", "sum", "tan", "tanh", "tensor",
    "tile", "to", "tolist", "transpose", "tril", "triu", "unsqueeze", "var", "view", "where",
    "zeros", "zeros_like",
}  # fmt: skip
"""Attributes of modules, tensors and arrays that change nothing. ``copy`` of an array."""
_CHANGE = (
    "STORE_ATTR", "STORE_GLOBAL", "STORE_NAME", "STORE_SUBSCR", "STORE_SLICE", "STORE_DEREF",
    "DELETE_ATTR", "DELETE_GLOBAL", "DELETE_NAME", "DELETE_SUBSCR", "DICT_MERGE",
)  # fmt: skip
"""Steps of Python's code; the last gives named arguments that the code does not name."""


def lookups_in(code: types.CodeType) -> list[str]:
    """Words by which a function asks its process for names that no code of it has."""
    steps = [step for part in codes_in(code) for step in dis.get_instructions(part)]
    read = {str(step.argval) for step in steps if step.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    found = [f"{word}()" for word in ("eval", "exec", "globals") if word in read]
    found += ["__main__"] if "__main__" in imported_by(code) else []
    taken = {str(step.argval) for step in steps if step.opname in ("LOAD_ATTR", "LOAD_METHOD")}
    return found + [
        f"sys.{word}" for word in ("argv", "modules") if "sys" in read and word in taken
    ]


def parsed(file: str) -> ast.Module:
    """The syntax tree of a file of code; raises OSError, SyntaxError or ValueError.

    Python 3.11 raises SystemError where two threads make trees at a time, as parallel fits do:
    https://github.com/python/cpython/issues/106905
    """
    data = Path(file).read_bytes()
    with _PARSING:
        return ast.parse(data)


def owner_of(place: Place) -> tuple[Any, str]:
    """The module or class that has a name, and the last part of that."""
    owner: Any = importlib.import_module(place[0])
    *path, last = place[1].split(".")
    for name in path:
        members = owner._member_map_ if isinstance(owner, enum.EnumMeta) else {}
        owner = members[name] if name in members else vars(owner)[name]
    return owner, last


def value_at(place: Place) -> Any:
    """What is at a place; raises what importing its module raises, or KeyError."""
    owner, name = owner_of(place)
    return vars(owner)[name]
