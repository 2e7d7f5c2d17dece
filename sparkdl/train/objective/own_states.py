"""The state that a user's own loss, training step or augmentation keeps from call to call.

A loss may count its calls, or follow a mean, in attributes or buffers. Checkpoints hold that, and
rounds hand on what the first shard has, as they do with attributes of the module.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from sparkdl.config import TrainConfig
from sparkdl.storage.tensor_tree import snapshot, unpack
from sparkdl.sync.module_tensors import give_tensors, tensors_of
from sparkdl.sync.own_attributes import is_of_user, read, written
from sparkdl.train.objective.label_losses import LossSum
from sparkdl.train.objective.loss import LossFunction
from sparkdl.train.objective.training_step import StepLoss

_TORCHS = frozenset(vars(nn.Module()))


class Kept:
    """The callables of the user's own that training calls, and what they keep."""

    def __init__(self, config: TrainConfig, loss: LossFunction) -> None:
        """Take note of what they keep at first."""
        named = {**dict(_own(loss, "loss")), "augmentation": config.augmentation}
        self._things = {
            name: thing
            for name, thing in named.items()
            if (isinstance(thing, nn.Module) or is_of_user(thing))
            and not type(thing).__module__.startswith(("torch.", "sparkdl."))
        }
        self._first = snapshot(self.state_dict())

    def state_dict(self) -> dict[str, Any]:
        """Return what they keep at present, as far as a checkpoint can hold it."""
        return {
            name: {
                "tensors": tensors_of(thing) if isinstance(thing, nn.Module) else {},
                "attributes": written(_attributes(thing)),
            }
            for name, thing in self._things.items()
        }

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Restore what `state_dict` gave; None: what there was at first."""
        if state is None:
            state = unpack(self._first.value, copy.deepcopy(self._first.tensors))
        assert state is not None
        for name, thing in self._things.items():
            own = state[name]
            if isinstance(thing, nn.Module):
                give_tensors(thing, own["tensors"])
            now, layers = _attributes(thing), _layers(thing)
            for path, found in read(dict(now), own["attributes"]).items():
                there = vars(layers[path])
                for key in now[path].keys() - found.keys():
                    del there[key]
                there.update(found)


def _layers(thing: Any) -> dict[str, Any]:
    return dict(thing.named_modules()) if isinstance(thing, nn.Module) else {"": thing}


def _attributes(thing: Any) -> dict[str, dict[str, Any]]:
    """Return what layers hold besides tensors and other layers, or an object at all."""
    left_out = _TORCHS if isinstance(thing, nn.Module) else ()
    return {
        path: {key: value for key, value in vars(layer).items() if key not in left_out}
        for path, layer in _layers(thing).items()
    }


def _own(loss: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield the user's own callables in a loss, with their names."""
    if isinstance(loss, StepLoss):
        yield "training step", loss.step
        loss = loss.shown
    if isinstance(loss, LossSum):
        for label, part in loss.parts.items():
            yield from _own(part, f"loss of {label}")
    else:
        yield name, loss.own
