"""Looks for objects that a module has in common with others that train with it."""

from __future__ import annotations

import contextlib
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
from sparkdl.serialization.travel.pickling import Pickler, sent_code
from sparkdl.serialization.travel.shared_values import GlobalPlace, SharedValue, Step

_CHANGING = (
    list, dict, set, deque, bytearray, np.ndarray, np.random.Generator, np.random.RandomState,
)  # fmt: skip
_DEEPEST = 4
"""Steps from a layer to an object that is looked at."""
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
    for owner, value in owners.items():
        if not isinstance(value, str | int | float | None):
            looking = _Looking()
            with contextlib.suppress(Exception):  # `check_travels` refuses what cannot be pickled
                looking.dump(value)
            held.update({id(one): (owner, one) for one in looking.found})
    found = []
    attributes = (
        (name, ((True, key),), value)
        for name, layer in module.named_modules()
        for key, value in vars(layer).items()
        if key not in _TORCHS
    )
    for layer, steps, value in _reached(attributes, lambda value: id(value) in held):
        who, _ = held.get(id(value), ("", None))
        if isinstance(who, GlobalPlace):
            found.append(SharedValue(layer=layer, steps=steps, owner=str(who), place=who))
        elif who:
            found.append(SharedValue(layer=layer, steps=steps, owner=who, value=value))
    return tuple(found)


def _reached(
    begin: Iterable[tuple[_Place, tuple[Step, ...], Any]],
    ends: Callable[[Any], bool] = lambda _: False,
) -> Iterator[tuple[_Place, tuple[Step, ...], Any]]:
    """Yield each object that can change and is a few steps away; what is behind ``ends`` not."""
    todo, seen = deque(begin), set[int]()
    while todo:
        place, steps, value = todo.popleft()
        if id(value) in seen or not _can_change(value):
            continue
        seen.add(id(value))
        yield place, steps, value
        if len(steps) < _DEEPEST and not ends(value):
            todo += ((place, (*steps, step), part) for step, part in _parts(value))


_TORCHS = frozenset(vars(nn.Module()))


def _can_change(value: Any) -> bool:
    """True for an object of which copies may come apart; tensors and layers have their own ways."""
    if isinstance(value, torch.Tensor | nn.Module | type | types.FunctionType | types.ModuleType):
        return False
    is_known = type(value).__module__.startswith(("torch.", "sparkdl."))
    return isinstance(value, (*_CHANGING, tuple)) or (hasattr(value, "__dict__") and not is_known)


def _parts(value: Any) -> Iterator[tuple[Step, Any]]:
    if isinstance(value, dict):
        items = itertools.islice(value.items(), _MOST_ITEMS)
        yield from (((False, key), v) for key, v in items if isinstance(key, str | int))
    elif isinstance(value, list | tuple | deque):
        few = itertools.islice(value, _MOST_ITEMS)
        yield from (((False, number), v) for number, v in enumerate(few))
    elif hasattr(value, "__dict__"):
        yield from (((True, key), v) for key, v in vars(value).items())


class _Looking(Pickler):
    """Takes note of all objects that can change; tensors are left out."""

    def __init__(self) -> None:
        super().__init__(io.BytesIO())
        self.found: list[Any] = []

    def persistent_id(self, value: Any) -> str | None:
        """Leave out a tensor; note an object."""
        if isinstance(value, torch.Tensor):
            return ""
        if not isinstance(value, tuple) and _can_change(value):
            self.found.append(value)
        return None
