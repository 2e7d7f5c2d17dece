"""States of optimizers and schedules that have objects with a state inside, as plain values.

A schedule may have another schedule as an attribute, and torch's ``state_dict()`` then holds the
object itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

_INSIDE = "the state of"


def plain_state(owner: Any) -> Any:
    """The ``state_dict()`` of an object, with the states of objects inside in their place."""
    return _plain(owner.state_dict())


def give_state(owner: Any, state: Any) -> None:
    """Restore what `plain_state` gave; objects inside stay those that they are."""
    owner.load_state_dict(_restored(owner.state_dict(), state))
    if isinstance(owner, torch.optim.Optimizer):
        _restore_kinds(owner, state)


def _has_state(value: Any) -> bool:
    methods = ("state_dict", "load_state_dict")
    return not isinstance(value, type) and all(callable(getattr(value, m, None)) for m in methods)


def _plain(value: Any) -> Any:
    if _has_state(value):
        return {_INSIDE: plain_state(value)}
    if type(value) in (list, tuple):
        return type(value)(map(_plain, value))
    return {key: _plain(v) for key, v in value.items()} if type(value) is dict else value


def _restored(now: Any, saved: Any) -> Any:
    if _has_state(now) and isinstance(saved, Mapping) and _INSIDE in saved:
        give_state(now, saved[_INSIDE])
        return now
    if type(saved) in (list, tuple) and type(now) is type(saved) and len(now) == len(saved):
        return type(saved)(_restored(a, b) for a, b in zip(now, saved, strict=True))
    if type(saved) is dict:
        inside = now if type(now) is dict else {}
        return {key: _restored(inside.get(key), value) for key, value in saved.items()}
    return saved


def _restore_kinds(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Put back values that torch's ``load_state_dict`` makes something else of, such as a text."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    numbers = [n for group in state["param_groups"] for n in group["params"]]
    for number, parameter in zip(numbers, parameters, strict=True):
        for key, value in state["state"].get(number, {}).items():
            now = optimizer.state[parameter].get(key)
            if type(value) not in (
                torch.Tensor,
                int,
                float,
                bool,
                type(None),
                dict,
                list,
                tuple,
            ) and (type(now) is type(value)):
                optimizer.state[parameter][key] = _placed(value, parameter.device)


def _placed(value: Any, device: torch.device) -> Any:
    """A container's copy with its tensors on a device; deques keep their length."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if hasattr(value, "maxlen"):
        return type(value)((_placed(one, device) for one in value), value.maxlen)
    return value
