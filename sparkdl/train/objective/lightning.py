"""Lets a LightningModule train in our loop, without its Trainer.

It is known by its methods, ``training_step`` and ``configure_optimizers``: the package `lightning`
need not be there. Its other hooks are not called, and what it logs goes nowhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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


class OwnOptimizer:
    """Makes a module's own optimizer; fits `strategy.MakeOptimizer`."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.schedule: tuple[Any, str, int] | None = None
        """The schedule that it gave when it was last called: the scheduler, ``step`` or ``epoch``,
        and after how many of these it is stepped; None: there is none."""

    def __call__(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """The optimizer of these parameters, which must be those that train.

        Raises:
            ConfigError: it is not one optimizer of just these.
        """
        name = f"{type(self._module).__name__}.configure_optimizers"
        optimizer, schedule = _configured(name, self._module.configure_optimizers())  # type: ignore[operator]
        wanted = {id(parameter) for parameter in parameters}
        groups = optimizer.param_groups
        has = {id(p) for group in groups for p in group["params"] if p.requires_grad}
        if has != wanted:
            raise ConfigError(
                f"the optimizer of {name} must train all parameters that are not frozen, and the "
                f"strategy must leave them in the module; it has {len(has)} of {len(wanted)}; set "
                "optimizer= instead"
            )
        self.schedule = schedule
        return optimizer


def _configured(name: str, value: Any) -> tuple[torch.optim.Optimizer, tuple[Any, str, int] | None]:
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
    given = schedulers[0] if schedulers else None
    options: Mapping[str, Any] = given if isinstance(given, Mapping) else {"scheduler": given}
    interval, frequency = options.get("interval", "epoch"), int(options.get("frequency", 1))
    if interval not in ("step", "epoch") or frequency < 1:
        raise ConfigError(
            f"the schedule of {name} is stepped each 'step' or 'epoch', with a frequency of at "
            f"least 1; received {interval!r}, {frequency}"
        )
    scheduler = options.get("scheduler")
    return value[0], None if scheduler is None else (scheduler, interval, frequency)
