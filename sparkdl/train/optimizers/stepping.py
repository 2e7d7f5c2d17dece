"""The steps of optimizers that want more than a call of ``step()``, and what is refused.

Some have a ``train()`` and an ``eval()``, between which the weights differ (schedule-free ones);
some want a closure, which computes loss and gradients anew (L-BFGS, SAM).
"""

from __future__ import annotations

import inspect
import logging
import warnings
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import nn

from sparkdl import sync
from sparkdl.config import TrainConfig
from sparkdl.errors import CheckpointError, ConfigError
from sparkdl.storage.tensor_tree import pack, unpack
from sparkdl.sync.asynchronous.async_sgd import AsyncSGD
from sparkdl.sync.averaging.averaging import AveragingStrategy
from sparkdl.sync.gradients.allreduce import AllReduce
from sparkdl.sync.module_tensors import fingerprint
from sparkdl.sync.optimizer_attributes import left_out
from sparkdl.train.objective.manual import SeveralSchedules
from sparkdl.train.optimizers.nested_states import (
    BESIDES,
    begin_states,
    give_state,
    is_known,
    kept_values,
    plain_state,
)
from sparkdl.train.optimizers.optimizers import Schedule

logger = logging.getLogger(__name__)

_MOST_STEPS = 50_000
"""Of a schedule that is tried; longer ones go to their end at once."""
_MOST_NUMBERS = 1 << 22
"""Parameters of more numbers than this take no part in the trial step, unless all are larger."""


def has_modes(optimizer: torch.optim.Optimizer) -> bool:
    """True if weights are others for training than for evaluation."""
    return all(callable(getattr(optimizer, name, None)) for name in ("train", "eval"))


def set_mode(optimizer: torch.optim.Optimizer, *, trains: bool) -> None:
    """Have the weights for training, or those that are measured and kept."""
    if has_modes(optimizer):
        (optimizer.train if trains else optimizer.eval)()  # type: ignore[attr-defined]


def takes_closure(optimizer: torch.optim.Optimizer) -> bool | None:
    """Return True if ``step`` must have a closure; None: it may."""
    try:
        found = list(inspect.signature(optimizer.step).parameters.values())
    except (TypeError, ValueError):
        return False
    own = next(
        (one for one in found if one.name == "closure" or one.kind is one.VAR_POSITIONAL), None
    )
    if own is None:
        return False
    return True if own.default is own.empty and own.kind is not own.VAR_POSITIONAL else None


class Stepper:
    """Steps an optimizer, with a closure if it does not do without.

    The gradients of the step are there already. So the first call of the closure computes nothing,
    unless the optimizer has changed the weights before, as SAM does.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self.with_closure = takes_closure(optimizer) is True
        self._may_need_one = not is_known(optimizer) and takes_closure(optimizer) is None
        checks: Any = torch.sparse.check_sparse_tensor_invariants
        if not checks.is_enabled():
            checks.disable()  # else Adagrad's first sparse gradient warns that nobody has said so

    def __call__(self, loss: Callable[[], Any], again: Callable[[], Any]) -> None:
        """Step; ``loss`` gives that of this moment, ``again`` gradients and loss of another."""
        if not self.with_closure:
            parameters = [p for group in self._optimizer.param_groups for p in group["params"]]
            kept = [p.detach().clone() for p in parameters] if self._may_need_one else []
            try:
                self._optimizer.step()
                self._may_need_one = False
                return
            except Exception:
                if not self._may_need_one:
                    raise
                self.with_closure = True  # if it was not that, it fails once more
            with torch.no_grad():
                for parameter, value in zip(parameters, kept, strict=True):
                    parameter.copy_(value)  # it may have moved them before it failed
        before: list[int] | None = self._weights()

        def closure() -> Any:
            nonlocal before
            is_first, before = before is not None and before == self._weights(), None
            return loss() if is_first else again()

        self._optimizer.step(closure)

    def _weights(self) -> list[int]:
        parameters = [p for group in self._optimizer.param_groups for p in group["params"]]
        gradients = [fingerprint(p.grad) for p in parameters]
        return [*map(fingerprint, parameters), *gradients]


def check_closure(config: TrainConfig, name: str) -> None:
    """Refuse what makes no sense with an optimizer that wants a closure; raises ConfigError."""
    strategy = sync.resolve(config.sync_strategy)
    fits = isinstance(strategy, AveragingStrategy)
    if isinstance(strategy, AllReduce):
        fits = strategy.num_backup_workers == 0 and not strategy.double_buffering
    if not fits:
        raise ConfigError(
            f"optimizer {name} wants a closure, which computes gradients several times in a step; "
            f"that goes together with AllReduce() and with strategies that average replicas, not "
            f"with {strategy}"
        )
    if config.precision == "fp16" or config.parallelism is not None:
        raise ConfigError(
            f"optimizer {name} wants a closure, which computes gradients several times in a step; "
            "leave out precision='fp16' and parallelism, or use another optimizer"
        )


def check_modes(config: TrainConfig, name: str) -> None:
    """Refuse strategies that an optimizer with modes makes no sense with; raises ConfigError."""
    strategy = sync.resolve(config.sync_strategy)
    if not isinstance(strategy, AllReduce | AveragingStrategy):
        raise ConfigError(
            f"optimizer {name} has train() and eval(), between which the weights differ, and the "
            f"workers of {type(strategy).__name__} exchange weights in between; use AllReduce or "
            "ParameterAveraging"
        )


def check_steps(
    optimizer: torch.optim.Optimizer,
    scheduler: Any,
    config: TrainConfig,
    sparse: Collection[nn.Parameter] = (),
    again: Callable[[], torch.optim.Optimizer] | None = None,
) -> None:
    """Step once, on a copy of the module, so that what training would refuse shows now.

    Only parameters of moderate size take part, and ``sparse`` ones, with gradients of that kind.
    Torch's own optimizers and schedules, and ours, are known to do, and are not asked. ``again``
    makes the optimizer once more, which must be able to go on with the state of the first.

    Raises:
        ConfigError: the optimizer cannot be stepped, or a checkpoint cannot hold a state.
    """
    name = type(optimizer).__name__
    if has_modes(optimizer):
        check_modes(config, name)
    if takes_closure(optimizer) is True:
        check_closure(config, name)
    if is_known(optimizer):
        check_kept("scheduler", scheduler)
        return
    begin_states(optimizer)
    before = left_out(optimizer)
    try:
        stepper = step_once(optimizer, sparse)
    except Exception as error:
        raise ConfigError(
            f"optimizer {name} fails in its first step: {type(error).__name__}: {error}; step it "
            "once in a loop of your own, with gradients of some parameters and with none of others"
        ) from error
    if stepper.with_closure:
        check_closure(config, name)
    check_kept("optimizer", optimizer)
    check_kept("scheduler", scheduler)
    check_comes_back(optimizer, before, again)
    check_divisible(optimizer, config)


def check_comes_back(
    optimizer: torch.optim.Optimizer,
    before: Mapping[str, Any],
    again: Callable[[], torch.optim.Optimizer] | None,
) -> None:
    """Refuse an optimizer of which a new one cannot go on as this would; raises ConfigError.

    Args:
        optimizer: has taken a step.
        before: what `left_out` gave before that.
        again: makes it once more; None: only what is left out is compared.
    """
    name = type(optimizer).__name__
    for path, (kind, digest) in left_out(optimizer).items():
        if before.get(path) != (kind, digest):
            raise ConfigError(
                f"optimizer {name} changes its attribute {path}, a {kind}, which no checkpoint can "
                "hold: training could not go on after a restart; keep numbers, texts, tensors, "
                "lists and dicts of them, or the optimizer's state"
            )
    if again is None:
        return
    wanted, other = kept_values(optimizer), again()
    give_state(other, unpack(*pack(plain_state(optimizer))))
    found = kept_values(other)
    lost = next((place for place in wanted if wanted[place] != found.get(place)), None)
    if lost is not None:
        raise ConfigError(
            f"a new optimizer {name} that gets the state of another has not its {lost}, so "
            "training could not go on after a restart; make what it keeps in __init__, and let "
            "state_dict() and load_state_dict() hold all of it"
        )


def check_divisible(optimizer: torch.optim.Optimizer, config: TrainConfig) -> None:
    """Refuse what keeps attributes where only states of parameters are kept; raises ConfigError."""
    strategy = sync.resolve(config.sync_strategy)
    if config.parallelism is None and not isinstance(strategy, AsyncSGD):
        return
    kept = [name for one in plain_state(optimizer).get(BESIDES, ()) for name in one]
    if kept:
        where = "parallelism" if config.parallelism is not None else type(strategy).__name__
        raise ConfigError(
            f"optimizer {type(optimizer).__name__} keeps its attribute {kept[0]} besides its "
            f"state, which {where} takes apart by parameters; keep it in the state or in the "
            "groups, or train without"
        )


def step_once(optimizer: torch.optim.Optimizer, sparse: Collection[nn.Parameter] = ()) -> Stepper:
    """Step an optimizer with small gradients, those of ``sparse`` of one row; how it went."""
    rows = {id(parameter) for parameter in sparse}
    every = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    moderate = [p for p in every if p.numel() <= _MOST_NUMBERS or id(p) in rows] or every

    def gradients() -> torch.Tensor:
        for parameter in moderate:
            if id(parameter) in rows:
                row = torch.zeros((1, 1), dtype=torch.int64, device=parameter.device)
                values = torch.full_like(parameter[:1], 1e-3)
                parameter.grad = torch.sparse_coo_tensor(
                    row, values, parameter.shape, check_invariants=False
                )
            else:
                parameter.grad = torch.full_like(parameter, 1e-3)
        return torch.ones(())

    stepper = Stepper(optimizer)
    set_mode(optimizer, trains=True)
    gradients()
    stepper(gradients, gradients)
    set_mode(optimizer, trains=False)
    return stepper


def check_length(
    schedule: Schedule,
    num_steps: int,
    config: TrainConfig,
    again: Callable[[], Schedule],
) -> None:
    """Step a schedule as often as the run will, which changes it; long ones only at the end.

    If it fails, another decides, since a schedule may read what a step of the optimizer leaves.
    Warns where the run may end earlier.

    Args:
        schedule: what is stepped.
        num_steps: steps of the run, at least.
        config: what the user asked for.
        again: makes the same once more, with an optimizer that has taken a step.

    Raises:
        ConfigError: it fails.
    """
    problem = _problem(schedule, num_steps) and _problem(again(), num_steps)
    if problem is None:
        return
    if config.early_stopping is None and not config.callbacks:
        raise ConfigError(problem)
    logger.warning("unless training is stopped before: %s", problem)


def _problem(schedule: Schedule, num_steps: int) -> str | None:
    """Describe how a schedule fails within so many steps; None: it does not."""
    scheduler: Any = schedule.scheduler
    times = 0 if schedule.monitors or isinstance(scheduler, SeveralSchedules) else num_steps
    times //= schedule.every
    if times > _MOST_STEPS:
        scheduler.last_epoch, times = times - 1, 1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch wants steps of the optimizer in between
        try:
            for _ in range(times):
                scheduler.step()
        except Exception as error:  # whatever a schedule of the user's own raises
            return (
                f"scheduler {type(scheduler).__name__} fails within the {num_steps} steps that "
                f"this fit takes at least: {type(error).__name__}: {error}; it is stepped after "
                "each step, not each epoch: give it as many (total_steps), or set maxSteps"
            )
    return None


def check_kept(what: str, owner: Any) -> None:
    """Refuse an optimizer or a schedule whose state no checkpoint can hold; raises ConfigError."""
    if owner is None:
        return
    try:
        pack(plain_state(owner))
    except CheckpointError as error:
        raise ConfigError(
            f"{what} {type(owner).__name__} has a state that no checkpoint can hold: {error}"
        ) from error
