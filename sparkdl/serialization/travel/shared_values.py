"""Objects that a module holds, and its loss, a callback or others that train with it hold, too.

They are pickled apart from the module, so a worker has two where the program has one. That is no
matter until one of the two changes, which `Twins` sees.
"""

from __future__ import annotations

import contextlib
import io
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from sparkdl.errors import ConfigError
from sparkdl.serialization.travel.pickling import Pickler

_CHANGING = (
    list, dict, set, deque, bytearray, np.ndarray, np.random.Generator, np.random.RandomState,
)  # fmt: skip
_DEEPEST = 4
"""Steps from a layer to an object that is looked at."""
_Step = tuple[bool, Any]
"""True with the name of an attribute, or False with what an item is found by."""


@dataclass(frozen=True, kw_only=True)
class SharedValue:
    """An object that can be changed, and who has it. It is pickled with its owner."""

    layer: str
    steps: tuple[_Step, ...]
    """The way from the layer to it."""
    owner: str
    """The field of `TrainConfig` in which it is, too."""
    value: Any
    """The object as the owner has it."""

    @property
    def path(self) -> str:
        """Its place in the module, as a user writes it."""
        found = self.layer
        for is_attribute, key in self.steps:
            found += f".{key}" if is_attribute else f"[{key!r}]"
        return found.removeprefix(".")

    def in_module(self, module: nn.Module) -> Any:
        """The object as the module has it; raises AttributeError or LookupError."""
        found: Any = module.get_submodule(self.layer)
        for is_attribute, key in self.steps:
            found = getattr(found, key) if is_attribute else found[key]
        return found


def shared_values(module: nn.Module, owners: Mapping[str, Any]) -> tuple[SharedValue, ...]:
    """Find what the attributes of a module share with others, who cannot have its layers.

    Args:
        module: as the program has it.
        owners: fields of `TrainConfig`.
    """
    held: dict[int, tuple[str, Any]] = {}
    for owner, value in owners.items():
        if not isinstance(value, str | int | float | None):
            looking = _Looking()
            with contextlib.suppress(Exception):  # `check_travels` refuses what cannot be pickled
                looking.dump(value)
            held.update({id(one): (owner, one) for one in looking.found})
    found = []
    todo: deque[tuple[str, tuple[_Step, ...], Any]] = deque(
        (name, ((True, key),), value)
        for name, layer in module.named_modules()
        for key, value in vars(layer).items()
        if key not in _TORCHS
    )
    seen = set[int]()
    while todo:
        layer, steps, value = todo.popleft()
        if id(value) in seen or not _can_change(value):
            continue
        seen.add(id(value))
        if id(value) in held:
            owner, _ = held[id(value)]
            found.append(SharedValue(layer=layer, steps=steps, owner=owner, value=value))
        elif len(steps) < _DEEPEST:
            todo += ((layer, (*steps, step), part) for step, part in _parts(value))
    return tuple(found)


_TORCHS = frozenset(vars(nn.Module()))


def _can_change(value: Any) -> bool:
    """True for an object of which copies may come apart; tensors and layers have their own ways."""
    if isinstance(value, torch.Tensor | nn.Module | type | types.FunctionType | types.ModuleType):
        return False
    is_known = type(value).__module__.startswith(("torch.", "sparkdl."))
    return isinstance(value, (*_CHANGING, tuple)) or (hasattr(value, "__dict__") and not is_known)


def _parts(value: Any) -> Iterator[tuple[_Step, Any]]:
    if isinstance(value, dict):
        yield from (((False, key), v) for key, v in value.items() if isinstance(key, str | int))
    elif isinstance(value, list | tuple | deque):
        yield from (((False, number), v) for number, v in enumerate(value))
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


class Twins:
    """The two objects that a worker has of each shared value."""

    def __init__(
        self, module: nn.Module, shared: Sequence[SharedValue], mark: Callable[[Any], Any]
    ) -> None:
        """Note what they are now; ``mark`` tells values apart."""
        self._mark = mark
        self._twins: list[tuple[SharedValue, Any, tuple[Any, Any]]] = []
        for one in shared:
            with contextlib.suppress(AttributeError, LookupError):  # made anew in another shape
                mine = one.in_module(module)
                self._twins.append((one, mine, (mark(mine), mark(one.value))))

    def check(self) -> None:
        """Refuse to go on if one has become another than its twin; raises ConfigError."""
        for one, mine, before in self._twins:
            now = self._mark(mine), self._mark(one.value)
            changed = [new != old for new, old in zip(now, before, strict=True)]
            if changed[0] != changed[1] or (before[0] == before[1] and now[0] != now[1]):
                who = "the module" if changed[0] else one.owner
                raise ConfigError(
                    f"{one.path} of the module is also in {one.owner}: workers have two of it, and "
                    f"{who} has changed one of these; keep it in the module alone, where a "
                    f"callback finds it at state.model.{one.path}, and a loss in what forward "
                    "returns"
                )
