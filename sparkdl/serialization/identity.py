"""Describes what makes a value behave as it does, as JSON that is equal in every process.

A pickle would not do: cloudpickle numbers classes of notebooks at random. So values are told apart
by what they hold: tensors by their bytes, objects by their state, functions and classes by their
names, and, where they do not come with an installed package, by their compiled code as well, and by
all values that this names.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import sys
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from sparkdl.runtime.public_names import public_module
from sparkdl.serialization.recorded.recipe import digest_of
from sparkdl.serialization.travel.operators import imported_by
from sparkdl.serialization.travel.pickling import HOOKS
from sparkdl.serialization.trust import is_installed

_DRIVERS = {"pyspark", "py4j"}
"""Packages whose objects are connections, which differ from process to process."""
_UNSEEN = {"training", "_graph"}
"""Attributes of modules that do not tell them apart: a graph of torch.fx has code beside it."""
_HEAP_TYPE = 1 << 9
"""Flag of classes that Python code has made."""
_DEEPEST = 150
"""Depth below which a value counts by its type alone."""
_PLAIN = (type(None), bool, int, float, complex, str, bytes, type(...), type(NotImplemented))


def identity(value: Any, digest: Callable[[torch.Tensor], str | None] | None = None) -> Any:
    """Return what makes a value behave as it does, as JSON: equal in processes of equal versions.

    An object that cannot be taken apart, such as a lock, counts by its type alone. ``digest`` gives
    that of a tensor that is not there, see `RecordedWeights`; None for others.
    """
    return _Describer(digest).describe(value)


class _Describer:
    """One walk through a value; what comes up again is named by its number."""

    def __init__(self, digest: Callable[[torch.Tensor], str | None] | None) -> None:
        self._digest = digest
        self._depth = 0
        self._open: set[int] = set()
        self._met: dict[int, tuple[int, Any]] = {}  # the values too, so that no id is used twice

    def describe(self, value: Any) -> Any:
        if type(value) in _PLAIN:
            return [type(value).__name__, repr(value)]
        if type(value) is tuple:
            return ["tuple", *map(self.describe, value)]
        if id(value) in self._met:
            return ["met", self._met[id(value)][0]]
        self._met[id(value)] = (len(self._met), value)
        if self._depth > _DEEPEST:
            return ["deep", _name(type(value))]
        self._depth += 1
        try:
            for kinds, describe in self._describers():
                if isinstance(value, kinds):
                    return describe(value)
            return self._object(value)
        finally:
            self._depth -= 1

    def _describers(self) -> Iterable[tuple[Any, Any]]:
        yield torch.Tensor, self._tensor
        yield np.ndarray, self._array
        yield (torch.jit.ScriptModule, torch.jit.ScriptFunction), self._script
        yield nn.Module, self._module
        yield functools._lru_cache_wrapper, lambda value: self.describe(value.__wrapped__)
        yield type, self._class
        yield types.FunctionType, self._function
        yield types.MethodType, lambda m: ["method", *map(self.describe, (m.__func__, m.__self__))]
        yield types.CodeType, self._code
        yield (staticmethod, classmethod), lambda method: self.describe(method.__func__)
        yield property, lambda value: self.describe((value.fget, value.fset))
        yield types.ModuleType, _name
        yield types.BuiltinFunctionType, self._builtin
        yield (set, frozenset), lambda items: sorted(json.dumps(identity(item)) for item in items)
        yield Mapping, self._mapping
        yield list, lambda items: ["list", *map(self.describe, items)]

    def _mapping(self, value: Mapping[Any, Any]) -> Any:
        items = [[self.describe(key), self.describe(item)] for key, item in value.items()]
        made_of = []
        with contextlib.suppress(Exception):  # such as a view of a class's members
            if type(value) is not dict:
                made_of = [self.describe(part) for part in value.__reduce_ex__(4)[1:3] if part]
        return [self.describe(type(value)), items, *made_of]

    def _module(self, module: nn.Module) -> Any:
        state = {
            # Hooks are filed under numbers that count all hooks of the process.
            key: self.describe(list(item.values()) if key in HOOKS and item else item)
            for key, item in sorted(vars(module).items())
            if key not in _UNSEEN and item is not None
        }
        return [self.describe(type(module)), state]

    def _tensor(self, tensor: torch.Tensor) -> Any:
        about = [type(tensor).__name__, str(tensor.dtype), list(tensor.shape), tensor.requires_grad]
        known = None if self._digest is None else self._digest(tensor)
        if known is not None:
            return [*about, known]
        if tensor.layout is not torch.strided or tensor.device.type == "meta":
            return [*about, str(tensor.layout)]
        return [*about, digest_of(tensor)]

    def _array(self, array: np.ndarray[Any, Any]) -> Any:
        about = [_name(type(array)), array.dtype.str, list(array.shape)]
        if array.dtype.hasobject:
            return [*about, self.describe(array.tolist())]
        return [*about, hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()]

    def _script(self, script: Any) -> Any:
        if not isinstance(script, nn.Module):
            return ["script", script.code]
        parts = {name: str(getattr(part, "code", "")) for name, part in script.named_modules()}
        return ["script", parts, self.describe(dict(script.state_dict(keep_vars=True)))]

    def _builtin(self, function: Any) -> Any:
        owner = function.__self__
        is_method = owner is not None and not isinstance(owner, types.ModuleType)
        return [_name(function), self.describe(owner)] if is_method else _name(function)

    def _object(self, value: Any) -> Any:
        if type(value).__module__.partition(".")[0] in _DRIVERS:
            return ["object", _name(type(value))]
        try:
            parts = value.__reduce_ex__(4)
        except Exception:  # whatever the value's class raises for what cannot be pickled
            return ["object", self.describe(type(value))]
        if isinstance(parts, str):
            return ["object", self.describe(type(value)), parts]
        items = [list(part) if part is not None else None for part in parts[3:5]]
        return ["object", *map(self.describe, parts[:3]), *map(self.describe, items)]

    def _class(self, kind: type) -> Any:
        bases = [self.describe(base) for base in kind.__bases__]
        is_made = kind.__module__ == "builtins" and kind.__flags__ & _HEAP_TYPE  # by exec
        if (
            is_installed(kind.__module__) and not is_made
        ):  # torch makes classes of others' at run time
            is_own = any(not is_installed(base.__module__) for base in kind.__mro__)
            return [_name(kind), bases] if is_own else _name(kind)
        members = {
            name: self.describe(member)
            for name, member in sorted(vars(kind).items())
            if isinstance(member, types.FunctionType | staticmethod | classmethod | property)
            or not name.startswith("__")
        }
        made_by = [self.describe(type(kind))] if not is_installed(type(kind).__module__) else []
        return [_name(kind), bases, members, *made_by]

    def _function(self, function: types.FunctionType) -> Any:
        holds = [_content(cell) for cell in function.__closure__ or ()]
        # What exec makes has no module, and says that it is of builtins.
        if is_installed(function.__module__) and "__name__" in function.__globals__:
            return [_name(function), self.describe(holds)]
        defaults = (function.__defaults__, function.__kwdefaults__)
        names, found = _names(function.__code__), function.__globals__
        used = {name: self._named(found[name], names) for name in sorted(names & found.keys())}
        for name in sorted(imported_by(function.__code__) - used.keys()):
            used[name] = self._named(sys.modules.get(name), names)
        return [_name(function), *map(self.describe, (holds, function.__code__, *defaults)), used]

    def _named(self, value: Any, names: set[str]) -> Any:
        """A value that code names; of a module of one's own, what the code may name of it."""
        if not isinstance(value, types.ModuleType) or is_installed(value.__name__):
            return self.describe(value)
        if id(value) in self._open:
            return _name(value)
        self._open.add(id(value))
        members = {
            n: self._named(vars(value)[n], names) for n in sorted(names & vars(value).keys())
        }
        self._open.discard(id(value))
        return [_name(value), members]

    def _code(self, code: types.CodeType) -> Any:
        """Without file and line numbers, so that only what it does counts."""
        return [code.co_code.hex(), *map(self.describe, (code.co_consts, code.co_names))]


def _name(value: Any) -> str:
    name = getattr(value, "__qualname__", value.__name__)
    module = getattr(value, "__module__", None)
    return f"{public_module(module, name, value) if module else None}:{name}"


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None


def _names(code: types.CodeType) -> set[str]:
    """Global names that a function uses, those of functions inside it included."""
    inner = (const for const in code.co_consts if isinstance(const, types.CodeType))
    return set(code.co_names).union(*map(_names, inner))
