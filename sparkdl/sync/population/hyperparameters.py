"""Reads and changes the numbers of an optimizer during training."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from sparkdl.errors import ConfigError

LEARNING_RATE = "learning_rate"
"""Our name of what torch's parameter groups call ``lr``."""

_RATES = ("lr", "initial_lr", "max_lr", "min_lr")
"""Entries of a parameter group that grow with its learning rate."""
_SCHEDULED = ("base_lrs", "_last_lr", "max_lrs", "_full_rates")
"""Entries of a schedule's state that do: torch's, and those of `warmup`."""


def first_values(optimizer: torch.optim.Optimizer, names: Iterable[str]) -> dict[str, float]:
    """The numbers ``names`` of the first parameter group; ConfigError if it lacks one.

    The learning rate is that which a schedule starts from.
    """
    return {name: _first_value(optimizer, name) for name in names}


def set_values(
    optimizer: torch.optim.Optimizer, scheduler: LRScheduler | None, values: Mapping[str, float]
) -> None:
    """Give the first parameter group ``values``; those that it has already change nothing.

    Other groups keep their proportion to the first; if that has 0, they get the same value. A
    schedule keeps its shape and its place in it. ConfigError if there is no such number.
    """
    for name, value in values.items():
        before = _first_value(optimizer, name)
        if value == before:
            continue
        factor = value / before if before else None
        keys = _RATES if name == LEARNING_RATE else (name,)
        base = _key(optimizer, name)
        for group in optimizer.param_groups:
            for key in keys:
                if key in group:
                    is_base = key == base and group[key] == before
                    group[key] = value if is_base or factor is None else group[key] * factor
        if name == LEARNING_RATE and scheduler is not None and factor is not None:
            scheduler.load_state_dict(rescaled(scheduler.state_dict(), factor))


def set_present_rate(
    groups: list[dict[str, Any]], rate: float, *, is_scheduled: bool
) -> float | None:
    """Give the first of an optimizer's parameter groups, or its state's, the learning rate now.

    Other groups keep their proportion to it; if it was 0, they get the same. The result is by what
    the rates of a schedule that goes on from there must be multiplied (see `rescaled`); None if it
    was 0. ConfigError if there is no learning rate, or a schedule has set it to 0.
    """
    before = groups[0].get("lr")
    if not isinstance(before, int | float):
        raise ConfigError(f"the optimizer has no number lr that could be changed; it has {before}")
    if before == 0 and is_scheduled:
        raise ConfigError(
            f"the schedule has set the learning rate to 0, of which it cannot go on to {rate:g}"
        )
    factor = rate / before if before else None
    for group in groups:
        for key in _RATES:
            if key == "lr" and (group is groups[0] or factor is None):
                group[key] = rate
            elif key in group and factor is not None:
                group[key] *= factor
    return factor


def rescaled(state: Any, factor: float | None) -> Any:
    """A schedule's state, and those of schedules in it, with rates times a factor of the above."""
    assert factor is not None, "refused by set_present_rate"
    if isinstance(state, list):
        return [rescaled(item, factor) for item in state]
    if not isinstance(state, dict):
        return state
    return {
        key: [rate * factor for rate in value] if key in _SCHEDULED else rescaled(value, factor)
        for key, value in state.items()
    }


def _first_value(optimizer: torch.optim.Optimizer, name: str) -> float:
    group = optimizer.param_groups[0]
    key = _key(optimizer, name)
    value = group.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float):
        known = sorted(k for k, v in group.items() if type(v) in (int, float) and k not in _RATES)
        raise ConfigError(
            f"{type(optimizer).__name__} has no number called {name!r} that could be changed; it "
            f"has {', '.join([LEARNING_RATE, *known])}"
        )
    return float(value)


def _key(optimizer: torch.optim.Optimizer, name: str) -> str:
    if name != LEARNING_RATE:
        return name
    # A schedule keeps the rate that it started from there, and multiplies it.
    return "initial_lr" if "initial_lr" in optimizer.param_groups[0] else "lr"
