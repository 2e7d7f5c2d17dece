"""States of optimizers and schedules as plain values, whatever they hold.

A schedule may have another schedule as an attribute, and torch's ``state_dict()`` then holds the
object itself. An optimizer may keep more than its ``state_dict()`` tells; see
`sync.own_attributes`.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch

from sparkdl.storage.tensor_tree import pack, snapshot, unpack
from sparkdl.sync.module_tensors import fingerprint
from sparkdl.sync.own_attributes import (
    HOOKS,
    attributes,
    check_fused,
    give_attributes,
    has_state,
    note_first,
    same_objects,
)
from sparkdl.train.objective.manual import SeveralOptimizers

_INSIDE = "the state of"
BESIDES = "attributes"
"""Key of what an optimizer keeps outside of its ``state_dict()``."""
GROUPS = "param_groups"
_KNOWN = ("torch.", "sparkdl.")
"""Packages whose optimizers keep nothing there, and do without a closure, or say if not."""


def is_known(*owners: Any) -> bool:
    """True if optimizers and schedules are torch's own or ours, with no step or hooks else."""
    code: list[Any] = [type(owner) for owner in owners if owner is not None]
    for owner in owners:
        if isinstance(owner, torch.optim.Optimizer):
            own = vars(owner)
            code += [own["step"]] if "step" in own else []
            code += [hook for name in HOOKS for hook in own.get(name, {}).values()]
    modules = (str(getattr(inspect.unwrap(one), "__module__", "")) for one in code)
    return all(module.startswith(_KNOWN) for module in modules)


def begin_states(optimizer: torch.optim.Optimizer) -> None:
    """Take note of what a new optimizer keeps, for `plain_state`."""
    for owner in own_parts(optimizer):
        note_first(owner, plain_state)


def plain_state(owner: Any, inside: tuple[int, ...] = ()) -> Any:
    """The state of an object, with the states of objects inside in their place.

    ``inside`` are the ids of objects in which it was found. Raises CheckpointError if an optimizer
    keeps something that no checkpoint can hold.
    """
    state = _plain(owner.state_dict())
    if isinstance(owner, torch.optim.Optimizer):  # one of the user's own may leave them out
        state.setdefault(GROUPS, _plain(options_of(owner)))
    besides = [attributes(one, plain_state, inside) for one in own_parts(owner)]
    return {**state, BESIDES: besides} if besides else state


def give_state(owner: Any, state: Any) -> None:
    """Restore what `plain_state` gave; objects inside stay those that they are."""
    if not isinstance(owner, torch.optim.Optimizer):
        owner.load_state_dict(_restored(owner.state_dict(), state))
        return
    if BESIDES in state:
        for one, found in zip(own_parts(owner), state[BESIDES], strict=True):
            give_attributes(one, found, give_state)
        state = {key: value for key, value in state.items() if key != BESIDES}
    if GROUPS not in owner.state_dict():
        state = dict(state)
        for group, options in zip(owner.param_groups, state.pop(GROUPS, ()), strict=False):
            group.update(options)
    with same_objects(owner):
        owner.load_state_dict(_restored(owner.state_dict(), state))
    _restore_kinds(owner, state)
    check_fused(owner)


def options_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return the options of each parameter group."""
    groups = optimizer.param_groups
    return [{key: value for key, value in group.items() if key != "params"} for group in groups]


def kept_values(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return what an optimizer keeps, by the names of its places, in a form for comparisons."""
    state = plain_state(optimizer)
    places = {f"attribute {key}": v for one in state.pop(BESIDES, ()) for key, v in one.items()}
    found = {}
    for place, value in {**{f"state ({key})": v for key, v in state.items()}, **places}.items():
        tree, tensors = pack(value)
        found[place] = tree, {name: fingerprint(t) for name, t in tensors.items()}
    return found


def own_parts(owner: Any) -> list[torch.optim.Optimizer]:
    """The optimizers in it that are the user's own: they may keep more than their state dict."""
    parts = owner.parts if isinstance(owner, SeveralOptimizers) else [owner]
    return [one for one in parts if isinstance(one, torch.optim.Optimizer) and not is_known(one)]


def copied(state: Any) -> Any:
    """Return a copy of a state that `plain_state` gave."""
    taken = snapshot(state)
    return unpack(taken.value, taken.tensors)


def _plain(value: Any) -> Any:
    if has_state(value):
        return {_INSIDE: plain_state(value)}
    if type(value) in (list, tuple):
        return type(value)(map(_plain, value))
    return {key: _plain(v) for key, v in value.items()} if type(value) is dict else value


def _restored(now: Any, saved: Any) -> Any:
    if has_state(now) and isinstance(saved, Mapping) and _INSIDE in saved:
        give_state(now, saved[_INSIDE])
        return now
    if type(saved) in (list, tuple) and type(now) is type(saved) and len(now) == len(saved):
        return type(saved)(_restored(a, b) for a, b in zip(now, saved, strict=True))
    if type(saved) is dict:
        inside = now if type(now) is dict else {}
        return {key: _restored(inside.get(key), value) for key, value in saved.items()}
    return saved


def _restore_kinds(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Put back values that torch's ``load_state_dict`` makes others of: a text, another dtype."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    numbers = [n for group in state.get(GROUPS, ()) for n in group["params"]]
    plain = (int, float, bool, type(None), dict, list, tuple)
    for number, parameter in zip(numbers, parameters, strict=bool(numbers)):
        for key, value in state.get("state", {}).get(number, {}).items():
            now = optimizer.state[parameter].get(key)
            if type(value) in plain or type(now) is not type(value):
                continue
            if type(value) is torch.Tensor and now.dtype == value.dtype:
                continue
            optimizer.state[parameter][key] = _placed(value, parameter.device)


def _placed(value: Any, device: torch.device) -> Any:
    """A container's copy with its tensors on a device; deques keep their length."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if hasattr(value, "maxlen"):
        return type(value)((_placed(one, device) for one in value), value.maxlen)
    return value
