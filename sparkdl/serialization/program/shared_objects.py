"""Looks for objects that a module has in common with others that train with it."""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn

from sparkdl.serialization.program.program_state import ProgramWalk
from sparkdl.serialization.travel.pickling import HOOKS, TENSOR_HOOKS, Pickler, sent_code
from sparkdl.serialization.travel.shared_values import GlobalPlace, SharedValue, Step, variable

_CHANGING = (
    list, dict, set, deque, bytearray, np.ndarray, np.random.Generator, np.random.RandomState,
)  # fmt: skip
_DEEPEST = 4
"""Objects between a layer's attribute or hook and one that is looked at."""
_MOST_ITEMS = 1000
"""Items of a container that are looked at."""
_Place = TypeVar("_Place")


def shared_values(module: nn.Module, owners: Mapping[str, Any]) -> tuple[SharedValue, ...]:
    """Find what the attributes of a module share with others, who cannot have its layers.

    Args:
        module: as the program has it.
        owners: fields of `TrainConfig`.
    """
    held: dict[int, tuple[str | GlobalPlace, Any]] = {}
    walk = ProgramWalk(code for code, is_by_name in sent_code((module, owners)) if is_by_name)
    named = [
        (GlobalPlace(file, name, ()), value)
        for file, name, value in walk.globals
        if file != "__main__"
    ]
    for place, steps, value in _reached((place, (), value) for place, value in named):
        held.setdefault(id(value), (replace(place, steps=steps), value))
    layers: dict[int, tuple[str, nn.Module]] = {}
    for owner, value in owners.items():
        if not isinstance(value, str | int | float | None):
            looking = _Looking()
            with contextlib.suppress(Exception):  # `check_travels` refuses what cannot be pickled
                looking.dump(value)
            held.update({id(one): (owner, one) for one in looking.found})
            layers.update({id(one): (owner, one) for one in looking.layers})
    found = []
    begin = (place for name, layer in module.named_modules() for place in _held_by(name, layer))
    for layer, steps, value in _reached(begin, lambda value: id(value) in held):
        who, _ = held.get(id(value), ("", None))
        if isinstance(who, GlobalPlace):
            found.append(SharedValue(layer=layer, steps=steps, owner=str(who), place=who))
        elif who:
            found.append(SharedValue(layer=layer, steps=steps, owner=who, value=value))
    for name, part in module.named_modules():
        if id(part) in layers and not type(part).__module__.startswith("torch."):
            owner, value = layers[id(part)]
            found.append(SharedValue(layer=name, steps=(), owner=owner, value=value))
    return tuple(found)


def _reached(
    begin: Iterable[tuple[_Place, tuple[Step, ...], Any]],
    ends: Callable[[Any], bool] = lambda _: False,
) -> Iterator[tuple[_Place, tuple[Step, ...], Any]]:
    """Yield each object that can change and is a few steps away; what is behind ``ends`` not."""
    todo, seen = deque((0, *one) for one in begin), set[int]()
    while todo:
        depth, place, steps, value = todo.popleft()
        is_code = isinstance(value, types.FunctionType | types.MethodType | functools.partial)
        if id(value) in seen or not (is_code or _can_change(value)):
            continue
        seen.add(id(value))
        if not is_code:
            yield place, steps, value
        if depth < _DEEPEST and not ends(value):
            todo += ((depth + 1, place, (*steps, *more), part) for more, part in _parts(value))


def _held_by(name: str, layer: nn.Module) -> Iterator[tuple[str, tuple[Step, ...], Any]]:
    """What a layer has in attributes of its own, and its hooks with those of its parameters."""
    for key, value in vars(layer).items():
        if key not in _TORCHS:
            yield name, ((True, key),), value
    hooked: list[tuple[tuple[Step, ...], Any, frozenset[str]]] = [((), layer, HOOKS)]
    for own, parameter in layer._parameters.items():
        hooked.append((((True, own),), parameter, frozenset(TENSOR_HOOKS)))
    for steps, owner, keys in hooked:
        for key in keys:
            for number, hook in (getattr(owner, key, None) or {}).items():
                yield name, (*steps, (True, key), (False, number)), hook


_TORCHS = frozenset(vars(nn.Module()))


def _can_change(value: Any) -> bool:
    """True for an object of which copies may come apart; tensors and layers have their own ways."""
    if isinstance(value, torch.Tensor | nn.Module | type | types.ModuleType):
        return False
    if isinstance(value, types.FunctionType | types.MethodType):
        return False
    is_known = type(value).__module__.startswith(("torch.", "sparkdl."))
    return isinstance(value, (*_CHANGING, tuple)) or (hasattr(value, "__dict__") and not is_known)


def _parts(value: Any) -> Iterator[tuple[tuple[Step, ...], Any]]:
    if isinstance(value, dict):
        items = itertools.islice(value.items(), _MOST_ITEMS)
        yield from ((((False, key),), v) for key, v in items if isinstance(key, str | int))
    elif isinstance(value, list | tuple | deque):
        few = itertools.islice(value, _MOST_ITEMS)
        yield from ((((False, number),), v) for number, v in enumerate(few))
    elif isinstance(value, types.FunctionType):
        for number, cell in enumerate(value.__closure__ or ()):
            with contextlib.suppress(ValueError):  # it is empty
                yield variable(number), cell.cell_contents
        for number, default in enumerate(value.__defaults__ or ()):
            yield ((True, "__defaults__"), (False, number)), default
    elif isinstance(value, types.MethodType):
        yield ((True, "__self__"),), value.__self__
        yield ((True, "__func__"),), value.__func__
    elif isinstance(value, functools.partial):
        for key in ("func", "args", "keywords"):
            yield ((True, key),), getattr(value, key)
    elif hasattr(value, "__dict__"):
        yield from ((((True, key),), v) for key, v in vars(value).items())


class _Looking(Pickler):
    """Takes note of all objects that can change; tensors are left out."""

    def __init__(self) -> None:
        super().__init__(io.BytesIO())
        self.found: list[Any] = []
        self.layers: list[nn.Module] = []

    def persistent_id(self, value: Any) -> str | None:
        """Leave out a tensor; note an object, and what may be a layer."""
        if isinstance(value, torch.Tensor):
            return ""
        if isinstance(value, nn.Module):
            self.layers.append(value)
        elif not isinstance(value, tuple) and _can_change(value):
            self.found.append(value)
        return None
