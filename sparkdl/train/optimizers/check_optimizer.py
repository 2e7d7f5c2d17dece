"""Refuses unfit optimizers and schedules, by some trial steps on the driver."""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import nn

from sparkdl import sync
from sparkdl.config import TrainConfig
from sparkdl.errors import CheckpointError, ConfigError
from sparkdl.runtime.process import seeded
from sparkdl.storage.tensor_tree import pack
from sparkdl.sync.asynchronous.async_sgd import AsyncSGD
from sparkdl.sync.averaging.averaging import AveragingStrategy
from sparkdl.sync.gradients.allreduce import AllReduce
from sparkdl.sync.own_attributes import left_out
from sparkdl.train.objective.manual import SeveralSchedules
from sparkdl.train.optimizers.nested_states import (
    BESIDES,
    begin_states,
    copied,
    give_state,
    is_known,
    kept_values,
    options_of,
    plain_state,
)
from sparkdl.train.optimizers.optimizers import Schedule
from sparkdl.train.optimizers.stepping import Stepper, has_modes, owned, set_mode, takes_closure

logger = logging.getLogger(__name__)

_MOST_STEPS = 50_000
"""Most steps of a schedule that is tried; longer ones go to their end at once."""
_TRIED_STEPS = 12
"""Steps of an optimizer and of another with its state; some act in each fifth step only."""
_OF_ROUNDING = 1e-6
_MOST_NUMBERS = 1 << 22
"""Parameters of more numbers than this take no part in the trial step, unless all are larger."""


def check_parameters(optimizer: torch.optim.Optimizer, module: nn.Module) -> None:
    """Refuse an optimizer of parameters that the module has not got; raises ConfigError.

    A training loop clears, adds up and keeps those of the module.
    """
    known = {id(parameter) for parameter in module.parameters()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in known:
                raise ConfigError(
                    f"the optimizer has a parameter of shape {tuple(parameter.shape)} that the "
                    "module has not got, so workers would neither clear nor add up its gradients, "
                    "and the model would lack it; make it an attribute of the module, or of a "
                    "module around it, and use it in trainingStep, which gets the module"
                )


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
    stepper.zero()
    if stepper.with_closure:
        check_closure(config, name)
    check_kept("optimizer", optimizer)
    check_kept("scheduler", scheduler)
    check_comes_back(optimizer, before, again, sparse)
    check_divisible(optimizer, config, again)


def check_comes_back(
    optimizer: torch.optim.Optimizer,
    before: Mapping[str, Any],
    again: Callable[[], torch.optim.Optimizer] | None,
    sparse: Collection[nn.Parameter] = (),
) -> None:
    """Refuse an optimizer of which a new one cannot go on as this would; raises ConfigError.

    Args:
        optimizer: has taken a step.
        before: what `left_out` gave before that.
        again: makes it once more, for a copy of the module, whose steps are compared, or for a
            large module itself; None: only what is left out is compared.
        sparse: parameters with gradients of rows.
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
    other, ours = again(), owned(optimizer)
    begin_states(other)
    is_small = sum(parameter.numel() for parameter in ours) <= _MOST_NUMBERS
    numbers = range(1, _TRIED_STEPS if is_small else 2)
    try:
        for number in numbers:
            with seeded(number):
                step_once(optimizer, sparse, number)
        wanted, ours = kept_values(optimizer), owned(optimizer)
        state = copied(plain_state(optimizer))
        with torch.no_grad():
            for parameter, value in zip(owned(other), ours, strict=True):
                parameter.copy_(value)
        give_state(other, state)
    except Exception as error:  # whatever the user's class raises
        raise ConfigError(
            f"optimizer {name} fails after some steps, or a new one that shall go on from there: "
            f"{type(error).__name__}: {error}; have all parameters in it from the beginning, and "
            "let load_state_dict() take what state_dict() gives"
        ) from error
    found, theirs = kept_values(other), owned(other)
    lost = next((place for place in wanted if wanted[place] != found.get(place)), None)
    if lost is not None:
        raise ConfigError(
            f"a new optimizer {name} that gets the state of another has not its {lost}, so "
            "training could not go on after a restart; make what it keeps in __init__, and let "
            "state_dict() and load_state_dict() hold all of it"
        )
    if any(own is other for own, other in zip(ours, theirs, strict=True)):
        return
    chosen = {id(parameter) for parameter in sparse}
    alike = [other for own, other in zip(ours, theirs, strict=True) if id(own) in chosen]
    for number in numbers:
        for one, rows in ((optimizer, sparse), (other, alike)):
            with seeded(number):
                step_once(one, rows, number)
    if not all(map(_is_alike, ours, theirs)):
        raise ConfigError(
            f"a new optimizer {name} that gets weights and state of another steps otherwise, so "
            "training could not go on after a restart; let it keep what it needs in attributes, or "
            "in its state by parameters, not by their ids, in its class, in globals, or in "
            "variables of functions that it calls"
        )


def _is_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """True if two tensors differ by rounding at most."""
    if not one.is_floating_point() and not one.is_complex():
        return torch.equal(one, other)
    one, other = one.detach(), other.detach()
    most = one.abs().nan_to_num(0.0, 0.0).max().item() if one.numel() else 0.0
    return torch.allclose(one, other, rtol=0.0, atol=most * _OF_ROUNDING, equal_nan=True)


def check_divisible(
    optimizer: torch.optim.Optimizer,
    config: TrainConfig,
    again: Callable[[], torch.optim.Optimizer] | None = None,
) -> None:
    """Refuse what keeps attributes where only states of parameters are known; raises ConfigError.

    ``again`` makes the optimizer once more.
    """
    strategy, name = sync.resolve(config.sync_strategy), type(optimizer).__name__
    resets = isinstance(strategy, AveragingStrategy) and strategy.optimizer_state == "reset"
    if config.parallelism is None and not isinstance(strategy, AsyncSGD) and not resets:
        return
    kept = [key for one in plain_state(optimizer).get(BESIDES, ()) for key in one]
    if kept:
        where = "parallelism" if config.parallelism is not None else type(strategy).__name__
        does = "takes apart by parameters"
        if resets and config.parallelism is None:
            does = "clears after each round"
        raise ConfigError(
            f"optimizer {name} keeps its attribute {kept[0]} besides its state, which {where} "
            f"{does}; keep it in the state or in the groups, or train without"
        )
    if resets and again is not None and again().state:
        raise ConfigError(
            f"optimizer {name} makes its state in __init__, and {type(strategy).__name__} clears "
            "it after each round; make it in step(), or leave out optimizer_state='reset'"
        )


def step_once(
    optimizer: torch.optim.Optimizer, sparse: Collection[nn.Parameter] = (), number: int = 0
) -> Stepper:
    """Step an optimizer with gradients, those of ``sparse`` of one row; how it went.

    They are small, or from a ``number`` of 1 on others in each step.
    """
    rows = {id(parameter) for parameter in sparse}
    every = [parameter for parameter in owned(optimizer) if parameter.requires_grad]
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
                if number > 0:
                    parameter.grad += torch.sin(7 * parameter.detach() + number)
        return torch.ones(())

    stepper = Stepper(optimizer)
    set_mode(optimizer, trains=True)
    stepper.zero()
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


def check_schedule(optimizer: torch.optim.Optimizer, make: Callable[[Any], Any]) -> None:
    """Refuse a schedule of which a new one cannot go on as this would; raises ConfigError.

    It gets a small optimizer with the groups of ``optimizer``; one that wants another is not tried.
    """
    groups, found = options_of(optimizer), list[Any]()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch wants steps of the optimizer in between
        try:
            for _ in range(2):
                own: list[dict[str, Any]] = copy.deepcopy(groups)
                for group in own:
                    group["params"] = [nn.Parameter(torch.zeros(1))]
                schedule = make(torch.optim.Optimizer(own, {}))
                if not found:
                    schedule.step()
                    schedule.step()
                else:
                    for one, other in zip(_kept_by(schedule), _kept_by(found[0]), strict=True):
                        give_state(one, copied(plain_state(other)))
                found.append(schedule)
            rates = [
                [(one.step(), pack(options_of(one.optimizer))[0])[1] for _ in range(3)]
                for one in found
            ]
        except Exception as error:  # whatever a schedule of the user's own raises
            logger.debug("a schedule is not tried: %s", error)
            return
    if rates[0] != rates[1]:
        raise ConfigError(
            f"a new scheduler {type(found[0]).__name__} that gets the state of another goes on "
            "otherwise, so training could not go on after a restart; let it count by last_epoch, "
            "by what it gets, or in attributes, not in variables of functions"
        )


def _kept_by(schedule: Any) -> tuple[Any, Any]:
    return schedule.optimizer, schedule


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
