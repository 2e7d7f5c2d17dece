"""What a program has put into packages, such as a function of its own in the place of torch's.

Code of packages travels by its name, and executors have what the packages' files say. What is
there otherwise is told by its names: a function whose module is the user's own, a name that the
package's file does not set, or sets to another plain value.
"""

from __future__ import annotations

import ast
import builtins
import collections
import contextlib
import functools
import inspect
import json
import sys
import types
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.util import resolve_name
from typing import Any

from sparkdl.serialization.program.named_code import (
    ATOMS,
    Place,
    function_of,
    functions_of,
    owner_of,
    parsed,
    value_at,
)
from sparkdl.serialization.program.packed_values import (
    module_by_value,
    pack_value,
    reason_of,
    tell_once,
)
from sparkdl.serialization.travel.operators import codes_in
from sparkdl.serialization.trust import is_installed

_PATCHED = ("torch", "torch.nn.functional")
"""Modules of packages whose functions programs put others in the place of."""
_OF_CLASSES = ("torch.nn", "torch.optim", "torch.optim.lr_scheduler")
"""Modules of packages into whose classes programs put what they name otherwise, or not at all."""
_HEAP_TYPE = 1 << 9
"""Flag of classes that Python code has made."""
_VALUES = {
    *ATOMS, list, tuple, dict, set, frozenset, types.SimpleNamespace, collections.OrderedDict,
    collections.defaultdict, collections.deque, collections.Counter,
}  # fmt: skip
_ARRAYS = {("torch", "Tensor"), ("numpy", "ndarray"), ("numpy", "generic")}
"""Kinds of values that a program may have put into a package."""


def package_patches(code: Iterable[Any]) -> dict[Place, bytes]:
    """What the program has put into packages, and code finds there.

    So in the place of functions of torch and methods of classes, values under names that the
    packages' own files do not have, such as ``nn.Linear.scale = 2``, and constants and default
    arguments that these files have otherwise, such as ``torch.pi = 3``.
    """
    code = list(code)
    read: set[str] = set()
    owners: dict[Any, str] = {sys.modules[name]: "" for name in _PATCHED if name in sys.modules}
    owners[builtins] = ""
    if "torch" in sys.modules:
        owners[sys.modules["torch"].Tensor] = "Tensor."
    for name in _OF_CLASSES:
        for kind in vars(sys.modules.get(name, types)).values() if name in sys.modules else ():
            if isinstance(kind, type) and _at_home(kind):
                owners[kind] = f"{kind.__qualname__}."
    for function in functions_of(code):
        if is_installed(function.__globals__.get("__name__")):
            continue
        names: set[str] = set()
        for part in codes_in(function.__code__):
            names |= {const for const in part.co_consts if isinstance(const, str)}
            names.update(part.co_names)
        read |= names
        modules = _modules(function.__globals__.get(name) for name in names)
        for name in sorted(names):  # as in torch.cuda
            modules |= _modules(vars(module).get(name) for module in modules)
        owners |= dict.fromkeys(modules, "")
    kinds = [one for one in code if isinstance(one, type)]
    named = dict.fromkeys(base for kind in kinds for base in kind.__mro__ if base is not object)
    owners |= {base: f"{base.__qualname__}." for base in named}
    found: dict[Place, bytes] = {}
    for owner, prefix in owners.items():
        if prefix and not owner.__flags__ & _HEAP_TYPE:  # nobody can put anything there
            continue
        module = str(owner.__module__) if prefix else owner.__name__
        for key, member in list(vars(owner).items()) if is_installed(module) else ():
            place = module, prefix + key
            if not _is_put_there(module, prefix, key, member, read):
                is_used = not prefix or owner in named or owner.__name__ in read
                is_called = key in read or (prefix and key in ("__init__", "forward"))
                if not (is_used and is_called) or not _has_other_defaults(
                    module, prefix, key, member
                ):
                    continue
                place, member = (module, f"{prefix}{key}.__defaults__"), member.__defaults__
            try:
                found[place] = pack_value(member, module_by_value(member), with_classes=False)
            except Exception as error:  # whatever classes raise that cannot be pickled
                tell_once(place, reason_of(error))
    return found


def describe_patches(places: Iterable[Place]) -> str:
    """Text that is equal in processes with equal values there; empty: no places."""
    from sparkdl.serialization.identity import identity

    found = []
    for place in sorted(places):
        owner, name = owner_of(place)
        found.append([*place, identity(getattr(owner, name, None))])
    return json.dumps(found) if found else ""


def _has_other_defaults(module: str, prefix: str, key: str, member: Any) -> bool:
    """True if a function of a package has other default arguments than its file says."""
    if type(member) is not types.FunctionType or member.__qualname__ != prefix + key:
        return False
    made = _names_in(module, prefix.rstrip("."))
    literal = None if made is None else made.defaults.get(key)
    return literal is not None and repr(literal) != repr(member.__defaults__ or ())


def _modules(values: Iterable[Any]) -> set[types.ModuleType]:
    return {value for value in values if type(value) is types.ModuleType}


def _at_home(kind: type) -> bool:
    """True if a class is where its names say."""
    try:
        return value_at((kind.__module__, kind.__qualname__)) is kind
    except (AttributeError, ImportError, KeyError):
        return False


def _is_put_there(module: str, prefix: str, key: str, member: Any, read: set[str]) -> bool:
    """True if the program has put this into a package: a function of its own, or a new value."""
    function = function_of(member)
    kind = type(function)
    if kind is types.FunctionType:
        own = inspect.unwrap(function)
        where = getattr(own, "__globals__", {}).get("__name__")
        if where in sys.modules and not is_installed(where):
            return True
    if key[:2] == "__" or (key not in read and key != "forward") or module == "sys":
        return False
    if kind is types.FunctionType and inspect.unwrap(function).__qualname__ == prefix + key:
        return False
    made = _names_in(module, prefix.rstrip("."))
    is_defined = made is not None and key in made.functions
    if kind is types.FunctionType or is_defined:
        return is_defined
    if kind is types.BuiltinFunctionType:
        return bool(function.__name__ != key) and not (made and key in made.names)
    if made is None:  # of C: numbers that are the same everywhere may go along
        return kind in ATOMS
    if kind in ATOMS and key in made.values:
        return repr(made.values[key]) != repr(member)  # as text, so that NaN is NaN
    if kind in ATOMS and key in made.origins:
        where, name = made.origins[key]
        origin = vars(sys.modules.get(where, types)).get(name)
        return type(origin) in ATOMS - {type(None)} and repr(origin) != repr(member)
    is_of_c = key in vars(sys.modules.get(f"{module}._C", types))
    return key not in made.names and not is_of_c and _is_value(member)


def _is_value(member: Any) -> bool:
    """True for plain values, arrays, and what is of the user's own classes."""
    kind = type(member)
    if issubclass(kind, type):
        return not is_installed(member.__module__)
    bases = {(base.__module__, base.__qualname__) for base in kind.__mro__}
    is_users = not is_installed(kind.__module__)
    return kind in _VALUES or is_users or bool(bases & _ARRAYS)


@dataclass(frozen=True)
class _Names:
    """The names that a file sets, in its module or in one of its classes."""

    names: frozenset[str]
    functions: frozenset[str]
    """Those of them that a definition without decorators makes."""
    defaults: Mapping[str, tuple[Any, ...]]
    """Default arguments of these functions, where all are plain values."""
    values: Mapping[str, Any]
    """Plain values under names that are set once, and by no function."""
    origins: Mapping[str, Place]
    """Where such names are imported from."""


@functools.lru_cache(maxsize=256)
def _names_in(module: str, kind: str) -> _Names | None:
    """The names that the file of a module sets in it, or in a class; None: no file can be read."""
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    try:
        found: ast.AST = parsed(file)
    except (OSError, SyntaxError, ValueError):
        return None
    for name in filter(None, kind.split(".")):
        classes = (one for one in ast.walk(found) if isinstance(one, ast.ClassDef))
        named = next((one for one in classes if one.name == name), None)
        if named is None:
            return None
        found = named
    names: list[str] = []
    functions: set[str] = set()
    defaults: dict[str, tuple[Any, ...]] = {}
    values: dict[str, Any] = {}
    origins: dict[str, Place] = {}
    package = getattr(sys.modules[module], "__package__", None) or ""
    todo = list(ast.iter_child_nodes(found))
    while todo:
        one = todo.pop()
        if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.append(one.name)
            if not isinstance(one, ast.ClassDef) and not one.decorator_list:
                functions.add(one.name)
                with contextlib.suppress(ValueError):
                    defaults[one.name] = tuple(map(ast.literal_eval, one.args.defaults))
            continue
        if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store):
            names.append(one.id)
        elif isinstance(one, ast.alias):
            names.append(one.asname or one.name)
        elif isinstance(one, ast.Assign) and isinstance(one.targets[0], ast.Name):
            with contextlib.suppress(ValueError):
                values[one.targets[0].id] = ast.literal_eval(one.value)
        elif isinstance(one, ast.ImportFrom):
            with contextlib.suppress(ImportError):
                where = resolve_name("." * one.level + (one.module or ""), package)
                origins |= {part.asname or part.name: (where, part.name) for part in one.names}
        todo += ast.iter_child_nodes(one)
    once = {name for name, count in collections.Counter(names).items() if count == 1}
    for one in ast.walk(found):
        once -= set(one.names) if isinstance(one, ast.Global) else set()
    return _Names(
        names=frozenset(names),
        functions=frozenset(functions & once),
        defaults={name: defaults[name] for name in defaults.keys() & functions & once},
        values={name: values[name] for name in values.keys() & once},
        origins={name: origins[name] for name in origins.keys() & once},
    )
