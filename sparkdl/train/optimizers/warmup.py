"""A learning rate that rises gently at the start of training, whatever schedule follows.

It is not made of torch's ``SequentialLR``: in torch 2.13 that starts a schedule without a closed
form, such as ``MultiplicativeLR``, from the last rate of the ramp instead of from the full one, and
older versions warn whenever it hands over.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from sparkdl.errors import ConfigError
from sparkdl.runtime.arguments import plain_arguments
from sparkdl.runtime.tracebacks import plainly
from sparkdl.train.optimizers.optimizers import check_scheduler

MakeSchedule = Callable[[Optimizer], LRScheduler]


@plain_arguments
@plainly
def warmup(
    optimizer: Optimizer | None = None,
    /,
    *,
    steps: int,
    start_factor: float = 0.1,
    then: MakeSchedule | None = None,
) -> Any:
    """Raise the learning rate from a part of itself to the whole within some steps.

    Without an optimizer it returns the factory that the Param ``scheduler`` takes, which is
    pickled and written into run keys by its arguments::

        TorchClassifier(
            module=Net,
            optimizer="sgd",
            numWorkers=8,
            learningRate=8 * 0.1,  # linear scaling is yours to do: the rate is never scaled for you
            scheduler=sparkdl.warmup(
                steps=500,
                start_factor=1 / 8,  # begins at the rate of one worker, as in the paper
                then=functools.partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=9500),
            ),
        )

    In a job file::

        [estimator.scheduler]
        factory = "sparkdl:warmup"
        [estimator.scheduler.args]
        steps = 500
        then = { factory = "torch.optim.lr_scheduler:CosineAnnealingLR", args = { T_max = 9500 } }

    Source: Goyal et al., "Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour",
    arXiv 1706.02677, section 2.2 (gradual warm-up, over five epochs there).

    Args:
        optimizer: whose rates to schedule; the training loop gives it.
        steps: optimizer steps of the ramp; step number ``steps``, from 0, is the first at the full
            rate.
        start_factor: part of the full rate at which the first step is taken, in (0, 1].
        then: makes the schedule that takes over, whose first rate is the full one and whose steps
            count from there; None: the rate stays.

    Returns:
        The schedule, or without an optimizer the factory.

    Raises:
        ConfigError: an option is out of its range, or ``then`` makes no such schedule.
    """
    if steps < 1:
        raise ConfigError(f"steps of the warm-up must be at least 1; received {steps}")
    if not 0 < start_factor <= 1:
        raise ConfigError(f"start_factor must be above 0 and at most 1; received {start_factor}")
    if then is not None and not callable(then):
        raise ConfigError(f"then must be a callable, optimizer -> LRScheduler; received {then!r}")
    if optimizer is None:
        return functools.partial(warmup, steps=steps, start_factor=start_factor, then=then)
    return _WarmUp(optimizer, steps, start_factor, then)


class _WarmUp(LRScheduler):
    """The ramp, and then whatever follows it."""

    def __init__(
        self, optimizer: Optimizer, steps: int, start_factor: float, then: MakeSchedule | None
    ) -> None:
        self._following = None if then is None else check_scheduler(then(optimizer))
        self._full_rates = [float(group["lr"]) for group in optimizer.param_groups]
        self._steps = steps
        self._start_factor = start_factor
        super().__init__(optimizer)

    def get_lr(self) -> list[float | Tensor]:
        """The rates of the step that comes next; the schedule that follows is stepped here."""
        if self._following is not None and self.last_epoch > self._steps:
            self._following.step()
            return self._following.get_last_lr()
        done = min(self.last_epoch / self._steps, 1.0)
        factor = self._start_factor + (1.0 - self._start_factor) * done
        return [rate * factor for rate in self._full_rates]

    def state_dict(self) -> dict[str, Any]:
        """Everything but the optimizer."""
        state = super().state_dict()
        if self._following is not None:
            state["_following"] = self._following.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` gave."""
        state = dict(state_dict)
        following = state.pop("_following")
        super().load_state_dict(state)
        if self._following is not None:
            self._following.load_state_dict(following)
