"""The comparison of two modules: their structure, and what else they hold."""

from __future__ import annotations

import copyreg
import dataclasses
import enum
import logging
import types
import weakref
from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from sparkdl.serialization.travel.pickling import HOOKS

_VALUES = (
    bool, int, float, complex, str, bytes, frozenset, set, enum.Enum, np.generic,
    torch.dtype, torch.device,
)  # fmt: skip
"""Types whose ``==`` says whether two are equal."""
CODE = (
    type, types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType,
    weakref.ReferenceType, torch.Generator, logging.Logger,
)  # fmt: skip
"""Types of what nobody knows how to compare."""


def find_difference(a: nn.Module, b: nn.Module) -> str | None:
    """Name a difference in the structure of two modules' state, or None.

    Compares names, shapes and dtypes in the state dicts, and which parameters are tied.
    """
    ours, theirs = _state(a), _state(b)
    for name in sorted(ours.keys() | theirs.keys()):
        one, other = ours.get(name, "nothing"), theirs.get(name, "missing")
        if one != other and not {"nothing", "missing"} & {one, other} and None in (one, other):
            continue  # one of them has no shape yet
        if one != other:
            return f"{name} ({other} instead of {one})"
    if _ties(a) != _ties(b):
        return "which parameters are shared"
    return None


def _state(module: nn.Module) -> dict[str, Any]:
    return {name: _kind(value) for name, value in module.state_dict().items()}


def _kind(value: Any) -> Any:
    """Shape and dtype of a tensor; of a state that a module adds, its type."""
    if not isinstance(value, torch.Tensor):
        return type(value)
    return None if is_lazy(value) else (tuple(value.shape), value.dtype)


def _ties(module: nn.Module) -> list[list[str]]:
    groups: dict[int, list[str]] = {}
    for name, parameter in nn.Module.named_parameters(module, remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    return sorted(groups.values())


def find_attribute(a: nn.Module, b: nn.Module) -> str | None:
    """Name something else that differs: class, printed form, hooks, plain attributes."""
    if repr(a) != repr(b):
        return "its printed form"
    ours, theirs = dict(a.named_modules()), dict(b.named_modules())
    for name, one in ours.items():
        other = theirs.get(name)
        if other is None or type(one) is not type(other):
            return f"the class of {name or 'itself'}"
        held, their = state_of(one), state_of(other)
        for key in sorted((held.keys() | their.keys()) - repeated_attributes(one)):
            if not _is_same(key, held.get(key), their.get(key)):
                return f"{name}.{key}".lstrip(".")
        if not _has_same_buffers(one, other):
            return f"the buffers of {name or 'it'}"
        flags = [[p.requires_grad for p in m.parameters(recurse=False)] for m in (one, other)]
        if flags[0] != flags[1]:
            return f"which parameters of {name or 'it'} train"
    return None


def _is_same(key: str, ours: Any, theirs: Any) -> bool:
    if key in ("training", "_modules", "_parameters", "_buffers"):  # a mode; compared elsewhere
        return True
    if key in HOOKS:
        return not ours
    return is_equal(ours, theirs)


def _has_same_buffers(one: nn.Module, other: nn.Module) -> bool:
    """Names must agree, and values too where the weights' file will not bring them."""
    ours, theirs = one._buffers, other._buffers
    return ours.keys() == theirs.keys() and all(
        is_equal(ours[name], theirs[name])
        if name in one._non_persistent_buffers_set
        else (ours[name] is None) == (theirs[name] is None)
        for name in ours
    )


def repeated_attributes(module: nn.Module) -> set[str]:
    """Attributes that only repeat what the registered parameters say."""
    return {"_flat_weights", "_flat_weight_refs"} if isinstance(module, nn.RNNBase) else set()


def is_equal(
    ours: Any,
    theirs: Any,
    registered: Mapping[int, str] | None = None,
    seen: frozenset[int] = frozenset(),
) -> bool:
    """Compare two attributes of modules, part by part.

    ``registered`` has the names of the parameters, buffers and layers of both modules by their
    ``id``, which are equal if their names are. With it, objects that do not say themselves whether
    they are equal are so if their attributes are; and of those without any (functions, locks,
    generators) it is enough that their types are the same. Without it, they must say it themselves.
    ``seen`` are those, by ``id``, of which the attributes are being compared already.
    """
    if registered is not None and (id(ours) in registered or id(theirs) in registered):
        return registered.get(id(ours)) == registered.get(id(theirs))
    if type(ours) is not type(theirs):
        return False
    if isinstance(ours, torch.Tensor):
        return ours.dtype == theirs.dtype and torch.equal(ours.cpu(), theirs.cpu())
    if isinstance(ours, np.ndarray):
        return ours.dtype == theirs.dtype and np.array_equal(ours, theirs)
    if isinstance(ours, nn.Module):  # no child of anything, so no file has its weights
        is_alike = find_difference(ours, theirs) is None and find_attribute(ours, theirs) is None
        states = dict(ours.state_dict()), dict(theirs.state_dict())
        return (is_alike or registered is not None) and is_equal(*states, registered)
    if registered is not None and dataclasses.is_dataclass(ours) and not isinstance(ours, type):
        names = [field.name for field in dataclasses.fields(ours)]
        ours, theirs = ({n: getattr(v, n, None) for n in names} for v in (ours, theirs))
    if isinstance(ours, list | tuple | deque):
        pairs = zip(ours, theirs, strict=False)
        return len(ours) == len(theirs) and all(is_equal(*p, registered, seen) for p in pairs)
    if isinstance(ours, dict):
        return ours.keys() == theirs.keys() and all(
            is_equal(value, theirs[key], registered, seen) for key, value in ours.items()
        )
    if registered is not None and not isinstance(ours, _VALUES):
        if ours is theirs or isinstance(ours, CODE) or id(ours) in seen:
            return True
        kind: Any = type(ours)
        if kind.__eq__ is object.__eq__:
            return is_equal(state_of(ours), state_of(theirs), registered, seen | {id(ours)})
    try:
        return bool(ours == theirs) or (ours != ours and theirs != theirs)
    except (TypeError, ValueError, RuntimeError):  # some objects have no single truth value
        return False


def state_of(value: Any) -> dict[str, Any]:
    """The attributes of an object, in a dict and in slots."""
    found = {key: getattr(value, key) for key in slots_of(value) if hasattr(value, key)}
    return {**getattr(value, "__dict__", {}), **found}


def slots_of(value: Any) -> list[str]:
    """Names of the attributes for which an object's class has slots."""
    slots: list[str] = copyreg._slotnames(type(value))  # type: ignore[attr-defined]
    return slots
