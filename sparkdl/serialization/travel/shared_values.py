"""Objects that a module holds, and its loss, a callback or others that train with it hold, too.

They are pickled apart from the module, so a worker has two where the program has one. It has two
also of what the module and a global of an imported file have in common: the file is imported there
again. That is no matter until one of the two changes, which `Twins` sees.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from sparkdl.errors import ConfigError

Step = tuple[bool, Any]
"""True with the name of an attribute, or False with what an item is found by."""


def variable(number: int) -> tuple[Step, ...]:
    """The way from a function to what a variable holds that it has from around it."""
    return (True, "__closure__"), (False, number), (True, "cell_contents")


@dataclass(frozen=True)
class GlobalPlace:
    """The place of an object in an imported file."""

    file: str
    """The name by which it is imported."""
    name: str
    steps: tuple[Step, ...]

    def __str__(self) -> str:
        return f"the global {_shown(self.name, self.steps)} of {self.file}"

    def value(self) -> Any:
        """What is there in this process."""
        return _followed(vars(importlib.import_module(self.file))[self.name], self.steps)


def _shown(place: str, steps: tuple[Step, ...]) -> str:
    return place + "".join(f".{key}" if named else f"[{key!r}]" for named, key in steps)


def _followed(value: Any, steps: tuple[Step, ...]) -> Any:
    for is_attribute, key in steps:
        value = getattr(value, key) if is_attribute else value[key]
    return value


@dataclass(frozen=True, kw_only=True)
class SharedValue:
    """An object that can be changed, and who has it. It is pickled with its owner."""

    layer: str
    steps: tuple[Step, ...]
    """The way from the layer to it."""
    owner: str
    """The field of `TrainConfig` in which it is, too, or what `place` is called."""
    value: Any = None
    """The object as the owner has it."""
    place: GlobalPlace | None = None
    """Where the owner has it, if that is a global."""

    @property
    def path(self) -> str:
        """Its place in the module, as a user writes it."""
        names = [key for is_attribute, key in self.steps if is_attribute]
        hooks = next((key for key in names if key.endswith("_hooks")), None)
        text = _shown(self.layer, self.steps).removeprefix(".")
        if hooks is None:
            return text
        owner = text.partition(hooks)[0].rstrip(".")
        return f"what a hook of {owner or 'the module'} uses"

    @property
    def is_attribute(self) -> bool:
        """True if a user finds it in the module by `path`."""
        names = [key for is_attribute, key in self.steps if is_attribute]
        return not any(key[:2] == "__" or key.endswith("_hooks") for key in names)

    @property
    def remedy(self) -> str:
        """Where to keep it."""
        if self.is_attribute:
            return (
                "keep it in the module alone, where a callback finds it at "
                f"state.model.{self.path}, and a loss in what forward returns"
            )
        return (
            "keep it in an attribute of a layer, as in layer.seen = output, where a trainingStep "
            "finds it by the module that it gets, a callback at state.model, and a loss in what "
            "forward returns"
        )

    def in_module(self, module: nn.Module) -> Any:
        """The object as the module has it; raises AttributeError or LookupError."""
        return _followed(dict(module.named_modules())[self.layer], self.steps)

    def of_owner(self) -> Any:
        """The object as the owner has it; raises ImportError, AttributeError or LookupError."""
        return self.value if self.place is None else self.place.value()


class Twins:
    """The two objects that a worker has of each shared value."""

    def __init__(
        self, module: nn.Module, shared: Sequence[SharedValue], mark: Callable[[Any], Any]
    ) -> None:
        """Note what they are now; ``mark`` tells values apart."""
        self._mark = mark
        self._twins: list[tuple[SharedValue, Any, Any, tuple[Any, Any]]] = []
        for one in shared:
            # Made anew in another shape, or in a file that is not here.
            with contextlib.suppress(AttributeError, LookupError, ImportError):
                mine, other = one.in_module(module), one.of_owner()
                self._twins.append((one, mine, other, (mark(mine), mark(other))))

    def check(self) -> None:
        """Refuse to go on if one has become another than its twin; raises ConfigError."""
        for one, mine, other, before in self._twins:
            now = self._mark(mine), self._mark(other)
            changed = [new != old for new, old in zip(now, before, strict=True)]
            if changed[0] != changed[1] or (before[0] == before[1] and now[0] != now[1]):
                who = "the module" if changed[0] else "whoever uses that"
                if not changed[0] and one.place is None:
                    who = one.owner
                raise ConfigError(
                    f"{one.path}{' of the module' * one.is_attribute} is also in {one.owner}: "
                    f"workers have two of it, and {who} has changed one of these; {one.remedy}"
                )
