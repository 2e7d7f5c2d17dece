"""The state of a training besides its weights, from which another goes on, with other rows too."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

import torch
from torch import nn

from sparkdl.config import TrainConfig
from sparkdl.errors import ConfigError, StorageError
from sparkdl.sync.frozen_layers import evaluating
from sparkdl.sync.module_tensors import is_same
from sparkdl.sync.strategy import SyncStrategy
from sparkdl.train.optimizers.nested_states import options_of
from sparkdl.train.optimizers.optimizers import make_scheduler, resolve_optimizer
from sparkdl.train.state import TrainState

_PARTS = ("optimizer", "scheduler", "scaler", "strategy", "attributes", "kept", "states", "period")
_REMEDY = "make them equal, or pass the model as initialWeights, which begins with a new optimizer"


@dataclass(frozen=True, kw_only=True)
class TrainingMethod:
    """The settings that must be equal in two trainings if one goes on with the other's state."""

    mode: Literal["gang", "rounds"]
    strategy: str
    """With its options, as text."""
    optimizer: str
    """Class of the optimizer; what makes it, where the driver cannot."""
    scheduler: str | None
    """Maker of the schedule, with its arguments, as text."""
    trained: tuple[str, ...]
    """Names of the parameters that train, or that the optimizer has because callbacks may unfreeze
    them."""
    options: tuple[Mapping[str, Any], ...]
    """Options of each parameter group; empty where the driver cannot make the optimizer."""


@dataclass(frozen=True, kw_only=True)
class TrainingState:
    """The state that a fit has left besides the weights, if ``keepTrainingState`` is set.

    A fit with ``initialState`` goes on from there: optimizer, schedule, loss scale, what the
    strategy shares among its workers, and the counters.
    """

    epoch: int
    """Epochs that were begun so far, in all fits."""
    step: int
    """Steps so far, in all fits."""
    rows_seen: int
    """Samples that were used so far, in all fits."""
    method: TrainingMethod = field(repr=False)
    parts: Mapping[str, Any] = field(repr=False)
    """State dicts, as the mode has them."""
    weights: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """As training goes on with them, by name, where the module's own ``eval()`` has others."""

    def tree(self) -> dict[str, Any]:
        """Plain values and tensors, for a file; copies none."""
        method = {entry.name: getattr(self.method, entry.name) for entry in fields(self.method)}
        own = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        return {**own, "method": method}

    @classmethod
    def from_tree(cls, tree: Any) -> TrainingState:
        """Inverse of `tree`.

        Raises:
            StorageError: it is not what `tree` gave.
        """
        try:
            return cls(**{**tree, "method": TrainingMethod(**tree["method"])})
        except (TypeError, KeyError) as error:
            raise StorageError(f"this is no training state of this version: {error}") from error

    def shared(self) -> dict[str, Any]:
        """Return the state that all ranks begin with, as in a checkpoint, but without weights."""
        state = TrainState(epoch=self.epoch, step=self.step, rows_seen=self.rows_seen)
        return {**self.parts, "state": state.state_dict(), "best_model": None}

    def for_method(self, now: TrainingMethod) -> TrainingState:
        """The state for a training by another method, which differs in the optimizer's options.

        Options that the user has set otherwise take effect. The others go on as they are, which
        may be otherwise than they began.

        Raises:
            ConfigError: the method differs in more; or in options that a schedule changes.
        """
        for what, before, after in _compared(self.method, now):
            if before != after:
                raise ConfigError(
                    f"initialState cannot go on: {what} was {before} and is {after}; {_REMEDY}"
                )
        changed = [
            {key: value for key, value in after.items() if before.get(key) != value}
            for before, after in zip(self.method.options, now.options, strict=False)
        ]
        if not any(changed):
            return self
        if now.scheduler is not None:
            raise ConfigError(
                f"initialState cannot go on: {now.scheduler} sets options of the optimizer, which "
                f"were {list(self.method.options)} and are {list(now.options)}; {_REMEDY}"
            )
        parts = dict(self.parts)
        owner = parts
        if now.mode == "rounds":
            parts["states"] = {**parts["states"], "round": dict(parts["states"]["round"])}
            owner = parts["states"]["round"]
        groups = owner["optimizer"]["param_groups"]
        merged = [{**old, **new} for old, new in zip(groups, changed, strict=True)]
        owner["optimizer"] = {**owner["optimizer"], "param_groups": merged}
        return replace(self, method=now, parts=parts)


def _compared(before: TrainingMethod, now: TrainingMethod) -> Iterator[tuple[str, Any, Any]]:
    """Yield each setting that must be equal, in words, with both values."""
    yield "executionMode", before.mode, now.mode
    yield "syncStrategy", before.strategy, now.strategy
    yield "the optimizer", before.optimizer, now.optimizer
    yield "the schedule", before.scheduler, now.scheduler
    lost = sorted(set(before.trained) ^ set(now.trained))[:5]
    if lost:
        yield f"what trains differs in {', '.join(lost)}: it", len(before.trained), len(now.trained)
    yield "the order of what trains", before.trained, now.trained
    if before.options and now.options:
        yield "the number of parameter groups", len(before.options), len(now.options)


def method_of(
    config: TrainConfig, module: nn.Module, mode: Literal["gang", "rounds"]
) -> TrainingMethod:
    """Return the method of training; ``module`` is a copy, whose frozen parameters are frozen."""
    strategy: SyncStrategy = config.sync_strategy
    scheduler = config.scheduler
    made = TrainingMethod(
        mode=mode,
        strategy=_text(strategy),
        optimizer=_name(config.optimizer),
        scheduler=None if scheduler is None else _text(scheduler),
        trained=tuple(
            name for name, p in module.named_parameters() if p.requires_grad or config.callbacks
        ),
        options=(),
    )
    if config.device == "cuda" and not isinstance(config.optimizer, str | type):
        return made  # the driver need not have what the user's own function asks for
    make = resolve_optimizer(config, module)
    optimizer = make(module.parameters())
    options = tuple(
        {k: v.tolist() if isinstance(v, torch.Tensor) else v for k, v in group.items()}
        for group in options_of(optimizer)
    )
    schedule = make_scheduler(config, optimizer, make, steps_per_epoch=1)
    if schedule is not None and scheduler is None:  # a LightningModule's
        made = replace(made, scheduler=_name(type(schedule.scheduler)))
    return replace(made, optimizer=_name(type(optimizer)), options=options)


def _name(value: Any) -> str:
    return value if isinstance(value, str) else f"{value.__module__}.{value.__qualname__}"


def _text(value: Any) -> str:
    """A value as text that is equal in all processes."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def leave_training(module: nn.Module) -> dict[str, Any]:
    """Put a module into evaluation mode; return what its own ``eval()`` has changed, as it was."""
    own = (nn.Module.train, nn.Module.eval)
    is_own = any((type(layer).train, type(layer).eval) != own for layer in module.modules())
    before = copy.deepcopy(dict(module.state_dict())) if is_own else {}
    after = evaluating(module).state_dict()
    return {name: value for name, value in before.items() if not is_same(value, after.get(name))}


def left_by(shared: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a `TrainingState`, without method, that a run's last state leaves.

    The weights are those of the fitted model. Where these are the best ones and not the last, the
    strategy begins anew: what it remembers belongs to the last ones.
    """
    state = TrainState.from_state_dict(shared["state"])
    parts = {name: shared[name] for name in _PARTS if name in shared}
    is_last = shared["best_model"] is None
    if "states" in parts:
        states = dict(parts["states"])
        kept = states["round"].items()
        states["round"] = {key: v for key, v in kept if key not in ("model", "trains")}
        parts["states"] = {k: v for k, v in states.items() if is_last or k == "round"}
    elif not is_last:
        del parts["strategy"]
    return {
        "epoch": state.epoch + (state.step_in_epoch > 0),
        "step": state.step,
        "rows_seen": state.rows_seen,
        "parts": parts,
    }
