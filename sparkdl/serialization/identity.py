"""What makes a value behave as it does, as JSON that is equal in every process.

A pickle would not do: cloudpickle numbers classes of notebooks at random. So values are told apart
by what they hold: tensors by their bytes, objects by their state, functions and classes by their
names, and, where they do not come with an installed package, by their compiled code as well.
"""

from __future__ import annotations

import json
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from sparkdl.runtime.public_names import public_module
from sparkdl.serialization.recorded.recipe import digest_of
from sparkdl.serialization.trust import is_installed

_PLAIN = (type(None), bool, int, float, complex, str, bytes, type(...), type(NotImplemented))


def identity(value: Any, digest: Callable[[torch.Tensor], str | None] | None = None) -> Any:
    """What makes a value behave as it does, as JSON: equal in every process of equal versions.

    An object that cannot be taken apart, such as a lock, counts by its type alone. ``digest`` gives
    that of a tensor that is not there, see `RecordedWeights`; None for others.
    """
    return _Describer(digest).describe(value)


class _Describer:
    """One walk through a value; what comes up again is named by its number."""

    def __init__(self, digest: Callable[[torch.Tensor], str | None] | None) -> None:
        self._digest = digest
        self._met: dict[int, tuple[int, Any]] = {}  # the values too, so that no id is used twice

    def describe(self, value: Any) -> Any:
        if type(value) in _PLAIN:
            return [type(value).__name__, repr(value)]
        if type(value) is tuple:
            return ["tuple", *map(self.describe, value)]
        if id(value) in self._met:
            return ["met", self._met[id(value)][0]]
        self._met[id(value)] = (len(self._met), value)
        for kinds, describe in self._describers():
            if isinstance(value, kinds):
                return describe(value)
        return self._object(value)

    def _describers(self) -> Iterable[tuple[Any, Any]]:
        yield torch.Tensor, self._tensor
        yield nn.Module, self._module
        yield type, self._class
        yield types.FunctionType, self._function
        yield types.CodeType, self._code
        yield (staticmethod, classmethod), lambda method: self.describe(method.__func__)
        yield property, lambda value: self.describe((value.fget, value.fset))
        yield (types.ModuleType, types.BuiltinFunctionType), _name
        yield (set, frozenset), lambda items: sorted(json.dumps(identity(item)) for item in items)
        yield Mapping, self._mapping
        yield list, lambda items: ["list", *map(self.describe, items)]

    def _mapping(self, value: Mapping[Any, Any]) -> Any:
        items = [[self.describe(key), self.describe(item)] for key, item in value.items()]
        return [self.describe(type(value)), items]

    def _module(self, module: nn.Module) -> Any:
        state = {
            # Hooks are filed under numbers that count all hooks of the process.
            key: self.describe(list(item.values()) if key.endswith("_hooks") else item)
            for key, item in sorted(vars(module).items())
            if key != "training" and item is not None
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

    def _object(self, value: Any) -> Any:
        try:
            parts = value.__reduce_ex__(4)
        except Exception:  # whatever the value's class raises for what cannot be pickled
            return ["object", self.describe(type(value))]
        if isinstance(parts, str):
            return ["object", self.describe(type(value)), parts]
        items = [list(part) if part is not None else None for part in parts[3:5]]
        return ["object", *map(self.describe, parts[:3]), *map(self.describe, items)]

    def _class(self, kind: type) -> Any:
        if is_installed(kind.__module__):
            return _name(kind)
        members = {
            name: self.describe(member)
            for name, member in sorted(vars(kind).items())
            if isinstance(member, types.FunctionType | staticmethod | classmethod | property)
            or (not name.startswith("__") and type(member) in _PLAIN)
        }
        return [_name(kind), [self.describe(base) for base in kind.__bases__], members]

    def _function(self, function: types.FunctionType) -> Any:
        holds = [_content(cell) for cell in function.__closure__ or ()]
        if is_installed(function.__module__):
            return [_name(function), self.describe(holds)]
        defaults = (function.__defaults__, function.__kwdefaults__)
        used = {
            name: self.describe(function.__globals__[name])
            for name in sorted(_names(function.__code__) & function.__globals__.keys())
            if isinstance(function.__globals__[name], (type, types.FunctionType, *_PLAIN))
        }
        return [_name(function), *map(self.describe, (holds, function.__code__, *defaults)), used]

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
