"""Lets a LightningModule train in our loop, without its Trainer.

It is known by its methods, ``training_step`` and ``configure_optimizers``: the package `lightning`
need not be there. Its other hooks are not called, and what it logs goes nowhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from sparkdl.errors import ConfigError


def is_lightning(module: nn.Module) -> bool:
    """True if a module brings its own training step and optimizer."""
    return all(
        callable(getattr(module, name, None)) for name in ("training_step", "configure_optimizers")
    )


def lightning_step(module: nn.Module, inputs: Any, target: Any) -> Any:
    """Call ``module.training_step((inputs, target), 0)``, or with the inputs alone.

    Raises:
        ConfigError: it gives no loss.
    """
    batch = inputs if target is None else (inputs, target)
    value: Any = module.training_step(batch, 0)  # type: ignore[operator]
    if isinstance(value, Mapping):
        value = value.get("loss")
    if not isinstance(value, torch.Tensor):
        raise ConfigError(
            f"{type(module).__name__}.training_step must return a loss, or a dict with one; it "
            f"returned {type(value).__name__}"
        )
    return value


@dataclass(frozen=True)
class Configured:
    """What ``configure_optimizers`` gives."""

    optimizer: torch.optim.Optimizer
    scheduler: Any
    """The learning rate's schedule, or None."""
    interval: str
    """``step`` or ``epoch``: when the schedule is stepped."""
    frequency: int
    """Of how many of these one is."""


class OwnOptimizer:
    """Makes a module's own optimizer; fits `strategy.MakeOptimizer`."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.configured: Configured | None = None
        """What it gave when it was last called."""

    def __call__(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """The optimizer of these parameters, which must be those that train.

        Raises:
            ConfigError: it is not one optimizer of just these.
        """
        name = f"{type(self._module).__name__}.configure_optimizers"
        configured = _configured(name, self._module.configure_optimizers())  # type: ignore[operator]
        wanted = {id(parameter) for parameter in parameters}
        groups = configured.optimizer.param_groups
        has = {id(p) for group in groups for p in group["params"] if p.requires_grad}
        if has != wanted:
            raise ConfigError(
                f"the optimizer of {name} must train all parameters that are not frozen, and the "
                f"strategy must leave them in the module; it has {len(has)} of {len(wanted)}; set "
                "optimizer= instead"
            )
        self.configured = configured
        return configured.optimizer


def _configured(name: str, value: Any) -> Configured:
    """Read the forms that Lightning knows, as far as they mean one optimizer."""
    schedulers: Any = ()
    if isinstance(value, Mapping):
        value, schedulers = value.get("optimizer"), value.get("lr_scheduler") or ()
    elif isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], (list, tuple)):
        value, schedulers = value
    value = list(value) if isinstance(value, (list, tuple)) else [value]
    schedulers = list(schedulers) if isinstance(schedulers, (list, tuple)) else [schedulers]
    if len(value) != 1 or len(schedulers) > 1 or not isinstance(value[0], torch.optim.Optimizer):
        raise ConfigError(
            f"{name} must return one optimizer, with at most one schedule; for several optimizers "
            "make one with a group for each part, or use TorchRunner for a loop of your own"
        )
    options: dict[str, Any] = {"scheduler": None}
    if schedulers:
        given = schedulers[0]
        options = dict(given) if isinstance(given, Mapping) else {"scheduler": given}
    interval, frequency = options.get("interval", "epoch"), int(options.get("frequency", 1))
    if interval not in ("step", "epoch") or frequency < 1:
        raise ConfigError(
            f"the schedule of {name} is stepped each 'step' or 'epoch', with a frequency of at "
            f"least 1; received {interval!r}, {frequency}"
        )
    return Configured(value[0], options.get("scheduler"), interval, frequency)
