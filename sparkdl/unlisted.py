"""What does a module hold that its state dict does not list, and how does it come back?

Buffers that are not persistent and plain attributes are the constructor's to make. Where those of
a module made anew are others (drawn at random, counted while it ran, set by the user), predictions
would differ without a word. So such values are saved beside the weights.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from sparkdl.errors import CheckpointError
from sparkdl.runtime.json_objects import DescribeError
from sparkdl.storage.tensor_tree import pack

_OWN = {*vars(nn.Module()), "_compiled_call_impl"}
"""What torch itself keeps in each module: registers, hooks, the mode, a compiled twin."""
_VALUES = (
    bool, int, float, complex, str, bytes, frozenset, set, enum.Enum, np.generic,
    torch.dtype, torch.device,
)  # fmt: skip
"""Types whose ``==`` says whether two are equal."""


def find_unlisted(module: nn.Module, again: nn.Module) -> dict[str, Any]:
    """What ``module`` holds otherwise than a module of the same structure that was made anew.

    Objects of which nobody knows how they compare (functions, locks, generators) are taken for
    equal where both modules hold one of the same type.

    Returns:
        ``{"buffers": {name: tensor}, "attributes": [(part's name, attribute, value), ...]}``, a
        tree for `checkpoint.tree.pack` with the module's own tensors; empty if nothing differs.

    Raises:
        DescribeError: an attribute differs and cannot be written; names it.
    """
    ours, theirs = _buffers(module), _buffers(again)
    registered = {**_registered(module), **_registered(again)}
    buffers = {n: value for n, value in ours.items() if not _is_same_part(value, theirs.get(n), {})}
    attributes = list(_attributes(module, again, registered))
    return {"buffers": buffers, "attributes": attributes} if buffers or attributes else {}


def give_unlisted(module: nn.Module, unlisted: Mapping[str, Any]) -> None:
    """Give a module made anew what `find_unlisted` has found; it keeps these very values."""
    for name, value in unlisted["buffers"].items():
        part, _, buffer = name.rpartition(".")
        module.get_submodule(part)._buffers[buffer] = value
    for part, key, value in unlisted["attributes"]:
        vars(module.get_submodule(part))[key] = value


def derived(module: nn.Module) -> set[str]:
    """Attributes that only repeat what the registered parameters say."""
    return {"_flat_weights", "_flat_weight_refs"} if isinstance(module, nn.RNNBase) else set()


def _buffers(module: nn.Module) -> dict[str, Any]:
    """The buffers that the state dict leaves out, by name."""
    return {
        f"{name}.{key}".lstrip("."): part._buffers[key]
        for name, part in module.named_modules()
        for key in sorted(part._non_persistent_buffers_set)
    }


def _registered(module: nn.Module) -> dict[int, str]:
    """What comes back by itself, wherever else a module refers to it, by identity."""
    kinds = (module.named_parameters(), module.named_buffers(), module.named_modules())
    return {id(value): name for kind in kinds for name, value in kind}


def _attributes(
    module: nn.Module, again: nn.Module, registered: Mapping[int, str]
) -> Iterator[tuple[str, str, Any]]:
    others = dict(again.named_modules())
    for name, part in module.named_modules():
        made = vars(others[name]) if name in others else {}
        for key in sorted(vars(part).keys() - _OWN - derived(part)):
            value = vars(part)[key]
            if key in made and _is_same_part(value, made[key], registered):
                continue
            try:
                pack(value)
            except CheckpointError as error:
                raise DescribeError(
                    f"the attribute {f'{name}.{key}'.lstrip('.')} is not what the factory makes "
                    f"and cannot be written, being of {type(value)}; set it in the factory, or "
                    "register it as a buffer"
                ) from error
            yield name, key, value


def _is_same_part(ours: Any, theirs: Any, registered: Mapping[int, str]) -> bool:
    names = registered.get(id(ours)), registered.get(id(theirs))
    if names != (None, None):
        return names[0] == names[1]
    if type(ours) is not type(theirs):
        return False
    if isinstance(ours, torch.Tensor):
        return ours.dtype == theirs.dtype and torch.equal(ours.cpu(), theirs.cpu())
    if isinstance(ours, np.ndarray):
        return ours.dtype == theirs.dtype and np.array_equal(ours, theirs)
    if isinstance(ours, _VALUES):
        return bool(ours == theirs) or (ours != ours and theirs != theirs)
    pairs = _parts(ours), _parts(theirs)
    return pairs[0].keys() == pairs[1].keys() and all(
        _is_same_part(value, pairs[1][key], registered) for key, value in pairs[0].items()
    )


def _parts(value: Any) -> Mapping[Any, Any]:
    """What a value is made of, as far as it can be known."""
    if isinstance(value, nn.Module):  # no child of anything, so no file has its weights
        return value.state_dict()
    if isinstance(value, list | tuple):
        return dict(enumerate(value))
    if isinstance(value, dict):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: getattr(value, f.name, None) for f in dataclasses.fields(value)}
    return {}
