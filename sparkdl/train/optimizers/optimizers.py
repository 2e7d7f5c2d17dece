"""Makes the optimizer and the schedule that the user asked for.

The learning rate is what the user set, on any number of ranks: it is never scaled.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from sparkdl.config import TrainConfig
from sparkdl.errors import ConfigError, SparkDLError, unknown, unknown_names
from sparkdl.runtime.name_patterns import check_fit, fits
from sparkdl.runtime.tracebacks import users_line
from sparkdl.sync.averaging.outer_step import NEEDS_ANOTHER_LOOP, TORCH_OPTIMIZERS
from sparkdl.sync.sparse_gradients import sparse_parameters
from sparkdl.sync.strategy import TAKES_FROZEN, MakeOptimizer
from sparkdl.train.objective.divergence import warn_if_nan
from sparkdl.train.objective.lightning import OwnOptimizer, is_lightning
from sparkdl.train.objective.manual import SeveralSchedules, complete
from sparkdl.train.optimizers.large_batch import LAMB, LARS

Groups = list[dict[str, Any]]
"""Groups that torch's optimizers take: ``params`` and options of each group."""


def parameter_groups(
    module: nn.Module, options: Mapping[str, Mapping[str, Any]], *, may_thaw: bool = False
) -> Callable[[Sequence[nn.Parameter]], Groups]:
    """Return a function that puts the parameters that train, or may come to train, into groups.

    The first group holds what no pattern means, unless that is nothing; the others follow in the
    order in which they were given. Reports and schedules that speak of the learning rate mean the
    first.

    Args:
        module: its parameters that train are divided.
        options: pattern (see `name_patterns`) -> options, in torch's words, such as ``lr``.
        may_thaw: True if those that are frozen may train later.

    Returns:
        A function of one parameter for each of the module's that trains, or may, in its order; a
        strategy may have others step in their stead. It raises a ConfigError if they are more or
        fewer.

    Raises:
        ConfigError: a pattern means no parameter that trains, or two mean the same one.
    """
    aliases: dict[int, list[str]] = {}
    for name, parameter in nn.Module.named_parameters(module, remove_duplicate=False):
        aliases.setdefault(id(parameter), []).append(name)
    trained = [aliases[id(p)] for p in module.parameters() if p.requires_grad]
    every = [aliases[id(p)] for p in module.parameters() if p.requires_grad or may_thaw]
    check_fit(options, [name for names in every for name in names], "parameterGroups")
    by_number = {
        len(some): [_pattern_of(names, list(options)) for names in some]
        for some in (trained, every)
    }

    def divide(parameters: Sequence[nn.Parameter]) -> Groups:
        patterns = by_number.get(len(parameters))
        if patterns is None:
            raise ConfigError(
                f"parameterGroups divide the {len(trained)} parameters that train, but the "
                f"strategy makes an optimizer of {len(parameters)}; let it pass those with "
                "requires_grad, in the module's order"
            )
        groups: dict[str | None, dict[str, Any]] = {None: {"params": []}}
        groups |= {pattern: {"params": [], **values} for pattern, values in options.items()}
        for parameter, pattern in zip(parameters, patterns, strict=True):
            groups[pattern]["params"].append(parameter)
        return [group for group in groups.values() if group["params"]]

    return divide


def _pattern_of(names: Sequence[str], patterns: Sequence[str]) -> str | None:
    found = [pattern for pattern in patterns if any(fits(pattern, name) for name in names)]
    if len(found) > 1:
        raise ConfigError(
            f"parameterGroups: both {found[0]!r} and {found[1]!r} mean {names[0]!r}; let each "
            "parameter be meant by one pattern only"
        )
    return found[0] if found else None


OPTIMIZERS = TORCH_OPTIMIZERS | {
    "lars": LARS, "lamb": LAMB, "sparseadam": torch.optim.SparseAdam,
}  # fmt: skip
"""Lower-case name -> class: our own, and those of this torch that work step by step."""

AUTO = "auto"
"""The optimizer that a LightningModule configures, or else Adam."""
_FUSED = {torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW}
"""Optimizers that can update all parameters in one operation, on the CPU and on CUDA."""


def resolve_optimizer(config: TrainConfig, module: nn.Module | None = None) -> MakeOptimizer:
    """The function that makes the optimizer of the given parameters.

    One given by name is torch's fused kind where there is one, unless an option says otherwise.

    Args:
        config: names the optimizer, its options and its parameter groups.
        module: whose parameters these are, in its order; None if they are no module's: then there
            are no groups. The optimizer gets those that are frozen only if there are callbacks,
            which may unfreeze them.

    Raises:
        ConfigError: the name is unknown, the options do not fit, or a callable that makes its own
            optimizer was given together with options for it.
    """
    options = dict(config.optimizer_params)
    if config.learning_rate is not None:
        if "lr" in options:
            raise ConfigError("optimizerParams holds 'lr' and learningRate is set; keep one")
        options["lr"] = config.learning_rate
    kind = _kind(config, module)
    groups = config.parameter_groups if module is not None else {}
    is_class = isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)
    if is_class and kind.__name__ in NEEDS_ANOTHER_LOOP:
        raise ConfigError(f"optimizer {kind.__name__} does not work step by step; use another")
    if not callable(kind):
        raise ConfigError(f"optimizer must be a name, a class or a callable; received {kind!r}")
    if not is_class and (options or groups):
        who = "a callable"
        if isinstance(kind, OwnOptimizer):
            who = "configure_optimizers of the module"
        raise ConfigError(
            f"{who} makes its optimizer itself; set {sorted(options) or 'the parameterGroups'} "
            "there, or choose an optimizer by its name or class"
        )
    if isinstance(kind, OwnOptimizer):
        return kind
    may_fuse = (
        isinstance(config.optimizer, str)
        and kind in _FUSED
        # Its scaler may skip the first step, after which fused SGD has a momentum of garbage.
        and config.precision != "fp16"
        and not options.keys() & {"fused", "foreach", "differentiable"}
        and not (module is not None and sparse_parameters(module))
    )
    may_thaw = bool(config.callbacks)
    divide = None
    if module is not None and groups:
        divide = parameter_groups(module, groups, may_thaw=may_thaw)

    def make(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        parameters = [p for p in parameters if p.requires_grad or may_thaw]
        can_fuse = may_fuse and all(
            p.is_floating_point() and p.device.type in ("cpu", "cuda") for p in parameters
        )
        # Its first gradient of a parameter counts whole, which fused SGD does for all at once only.
        can_fuse = can_fuse and not options.get("dampening")
        fused = {"fused": True} if can_fuse else {}
        for values in groups.values():
            # All parameters with a group's options: in groups an optimizer never looks at them.
            _made(kind, parameters, {**options, **values}, fused, " of parameterGroups")
        made = _made(kind, divide(parameters) if divide else parameters, options, fused)
        if not isinstance(made, torch.optim.Optimizer):
            raise ConfigError(
                f"optimizer must make a torch.optim.Optimizer; received {made!r}; return the "
                "optimizer itself, derive a wrapper's class from torch.optim.Optimizer, and write "
                "what it does with learning rates as scheduler="
            )
        complete(made)
        if can_fuse and kind is torch.optim.SGD:
            made.register_step_pre_hook(_begin_momentum)
        return made

    setattr(make, TAKES_FROZEN, may_thaw)
    return make


def _begin_momentum(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Give a momentum of zero to what is used for the first time after others were.

    Torch's fused SGD begins all or none in a step; without dampening the result is the same.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if not 0 < len(optimizer.state) < len(parameters):
        return
    for group in optimizer.param_groups:
        for parameter in group["params"] if group["momentum"] else ():
            if parameter.grad is not None and parameter not in optimizer.state:
                zeros = torch.zeros_like(parameter, memory_format=torch.preserve_format)
                optimizer.state[parameter]["momentum_buffer"] = zeros


def _kind(config: TrainConfig, module: nn.Module | None) -> Any:
    """Return what makes the optimizer: a class, a callable, or an `OwnOptimizer`.

    Raises:
        ConfigError: the name is unknown.
    """
    kind = config.optimizer
    if kind == AUTO:
        if module is not None and is_lightning(module):
            return OwnOptimizer(module, config)
        kind = "adam"
    if not isinstance(kind, str):
        return kind
    if kind.lower() not in OPTIMIZERS:
        raise unknown("optimizer", kind, OPTIMIZERS)
    return OPTIMIZERS[kind.lower()]


def _strange(kind: Any, options: Iterable[str]) -> tuple[list[str], list[str]]:
    """The options that a kind of optimizer does not take, and those that it takes."""
    try:
        _, *others = inspect.signature(kind).parameters.values()  # the first are parameters
    except (TypeError, ValueError):
        return [], []
    if any(one.kind is one.VAR_KEYWORD for one in others):
        return [], []
    known = [one.name for one in others]
    return [name for name in options if name not in known], known


def _made(
    kind: Any,
    parameters: Any,
    options: Mapping[str, Any],
    fused: Mapping[str, Any],
    where: str = "",
) -> Any:
    """Make an optimizer of ``kind`` with the user's ``options``; ``fused`` are ours.

    Raises:
        ConfigError: with the optimizer's reason to refuse the options.
    """
    try:
        return kind(parameters, **{**fused, **options})
    except (TypeError, ValueError) as error:
        name = getattr(kind, "__name__", repr(kind))
        strange, known = _strange(kind, options)
        reason = unknown_names("it has no option", strange, known) if strange else str(error)
        raise ConfigError(f"optimizer {name} refused {options}{where}: {reason}") from error


@dataclass(frozen=True)
class Schedule:
    """The learning rate's schedule."""

    scheduler: torch.optim.lr_scheduler.LRScheduler
    every: int = 1
    """Steps after which it is stepped, unless evaluations step it."""
    monitors: tuple[str, ...] = ()
    """The value of the history that ReduceLROnPlateau gets at each evaluation, if it is one: the
    first of these that is there."""
    warned: set[str] = field(default_factory=set)
    """Names of those that were NaN before; also what early stopping warns of."""

    def is_due(self, steps: int) -> bool:
        """True if it is to be stepped after so many steps of the run."""
        return not self.monitors and steps % self.every == 0

    def evaluated(self, record: Mapping[str, float]) -> None:
        """Step it if evaluations do; ``record`` is the entry in the history, equal on all ranks.

        Raises:
            ConfigError: what it monitors is not in the history.
        """
        if not self.monitors:
            return
        found = [name for name in self.monitors if name in record]
        if not found:
            raise ConfigError(
                f"ReduceLROnPlateau monitors {self.monitors[0]!r}, but the history has only "
                f"{', '.join(record)}; log it at each evaluation"
            )
        name = found[0]
        if name not in self.warned and warn_if_nan("ReduceLROnPlateau", name, record):
            self.warned.add(name)
        self.scheduler.step(record[name])  # type: ignore[arg-type] # of ReduceLROnPlateau


def require_steps(schedule: Schedule | None) -> None:
    """Refuse a schedule for rounds that evaluations step.

    Raises:
        ConfigError: it is ReduceLROnPlateau.
    """
    if schedule is not None and schedule.monitors:
        raise ConfigError(
            "ReduceLROnPlateau needs executionMode='gang': in rounds the driver evaluates, and the "
            "schedules are in the tasks; use a schedule that counts steps"
        )


def make_scheduler(
    config: TrainConfig,
    optimizer: torch.optim.Optimizer,
    make_optimizer: MakeOptimizer,
    steps_per_epoch: int,
) -> Schedule | None:
    """The learning-rate schedule, or None.

    Args:
        config: names it; it is stepped after every optimizer step, or if it is ReduceLROnPlateau
            by evaluations.
        optimizer: whose learning rates it sets.
        make_optimizer: what made the optimizer; a LightningModule's brings a schedule along.
        steps_per_epoch: after so many steps it is stepped if it counts epochs.

    Raises:
        ConfigError: this is no schedule, or early stopping wants the opposite of what it wants.
    """
    stopping = config.early_stopping
    warned = set() if stopping is None else {stopping.monitor}
    if config.scheduler is None:
        own = make_optimizer.schedule if isinstance(make_optimizer, OwnOptimizer) else None
        return None if own is None else _own_schedule(own, steps_per_epoch, warned)
    if not callable(config.scheduler):
        raise ConfigError(
            f"scheduler must be a callable, optimizer -> LRScheduler; received {config.scheduler!r}"
        )
    try:
        scheduler = config.scheduler(optimizer)
    except SparkDLError:
        raise
    except Exception as error:  # whatever the user's function raises
        raise ConfigError(
            f"the schedule cannot be made{users_line(error)}: {type(error).__name__}: {error}; "
            "scheduler is called with the optimizer alone, and returns its schedule"
        ) from error
    if isinstance(scheduler, ReduceLROnPlateau):
        if stopping is not None and not stopping.may_stop:
            stopping = None  # a search's own: the schedule is that of a fit outside of it
        if stopping is not None and stopping.direction != scheduler.mode:
            raise ConfigError(
                f"ReduceLROnPlateau gets {stopping.monitor!r}, which early stopping monitors with "
                f"mode={stopping.direction!r}; give it that mode too, not {scheduler.mode!r}"
            )
        monitors = ("val_loss", "loss") if stopping is None else (stopping.monitor,)
        return Schedule(scheduler, monitors=monitors, warned=warned)
    return Schedule(check_scheduler(scheduler))


def _own_schedule(given: Mapping[str, Any], steps_per_epoch: int, warned: set[str]) -> Schedule:
    """A LightningModule's, of its ``lr_scheduler``.

    Raises:
        ConfigError: it is not stepped as Lightning steps it.
    """
    scheduler = given["scheduler"]
    interval, frequency = given.get("interval", "epoch"), int(given.get("frequency", 1))
    if interval not in ("step", "epoch") or frequency < 1:
        raise ConfigError(
            "the schedule of configure_optimizers is stepped each 'step' or 'epoch', with a "
            f"frequency of at least 1; received {interval!r}, {frequency}"
        )
    if not isinstance(scheduler, ReduceLROnPlateau):
        every = frequency * (steps_per_epoch if interval == "epoch" else 1)
        return Schedule(check_scheduler(scheduler), every)
    if not given.get("monitor") or interval == "step" or frequency > 1:
        raise ConfigError(
            "ReduceLROnPlateau of configure_optimizers is stepped by each evaluation: its "
            "lr_scheduler needs a 'monitor', and neither interval='step' nor a frequency"
        )
    return Schedule(scheduler, monitors=(given["monitor"],), warned=warned)


def check_scheduler(scheduler: Any) -> torch.optim.lr_scheduler.LRScheduler:
    """Return ``scheduler`` if it can be stepped after every optimizer step.

    Raises:
        ConfigError: it cannot, or is no schedule.
    """
    if isinstance(scheduler, SeveralSchedules):  # the loop keeps their state, and steps none
        return scheduler  # type: ignore[return-value]
    if isinstance(scheduler, ReduceLROnPlateau):
        raise ConfigError("ReduceLROnPlateau is stepped by evaluations; it follows no warm-up")
    if not isinstance(scheduler, torch.optim.lr_scheduler.LRScheduler):
        raise ConfigError(
            f"scheduler must return an LRScheduler; received {scheduler!r}; derive the class from "
            "torch.optim.lr_scheduler.LRScheduler, or write its rule as a LambdaLR"
        )
    return scheduler
