"""Lets a LightningModule train in our loop, without its Trainer.

It is known by its methods, ``training_step`` and ``configure_optimizers``: the package `lightning`
need not be there. `TrainerStandIn` calls its steps and hooks, and keeps what it logs. A hook that
the loop cannot call is refused by its name, rather than left out in silence.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import numbers
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from sparkdl.config import TrainConfig
from sparkdl.errors import ConfigError
from sparkdl.train.objective.logs import WITHOUT_LOSS, Logs, fill, joined_logs, metrics_of
from sparkdl.train.objective.loss import rows_of
from sparkdl.train.objective.manual import (
    ManualBackward,
    SeveralOptimizers,
    SeveralSchedules,
    clip_gradients,
    complete,
    is_manual,
)
from sparkdl.train.objective.metric_states import REDUCTIONS, give, merged, seen_by
from sparkdl.train.objective.part import Part

if TYPE_CHECKING:
    from sparkdl.comm.communicator import Communicator
    from sparkdl.data.batches import Batch
    from sparkdl.data.plan import TrainPlan

_EARLIER = "do this in __init__, before fit"
_INPUTS = "use augmentation= of the estimator, or the transform of an input"
_UPDATE = "the loop updates the weights; use on_before_optimizer_step, or an optimizer of your own"
_MODES = "the loop sets the modes of layers; override train()"
_REFUSED = {
    "backward": _UPDATE,
    "configure_callbacks": "pass callbacks= to the estimator, of sparkdl.Callback",
    "configure_gradient_clipping": "set gradientClipNorm= of the estimator",
    "configure_model": _EARLIER,
    "configure_sharded_model": _EARLIER,
    "lr_scheduler_step": "return a schedule whose step() needs no arguments",
    "on_after_backward": _UPDATE,
    "on_after_batch_transfer": _INPUTS,
    "on_before_backward": _UPDATE,
    "on_before_batch_transfer": _INPUTS,
    "on_before_zero_grad": _UPDATE,
    "on_load_checkpoint": "keep in buffers what checkpoints shall hold",
    "on_save_checkpoint": "keep in buffers what checkpoints shall hold",
    "on_validation_model_eval": _MODES,
    "on_validation_model_train": _MODES,
    "on_validation_model_zero_grad": _UPDATE,
    "optimizer_step": _UPDATE,
    "optimizer_zero_grad": _UPDATE,
    "prepare_data": _EARLIER,
    "setup": _EARLIER,
    "teardown": "use on_fit_end",
    "transfer_batch_to_device": _INPUTS,
}
"""Methods that Lightning would call in a fit and the loop does not, and what to do instead."""
_NOT_IN_ROUNDS = tuple(
    f"on_{what}_{when}"
    for what in ("fit", "train", "train_epoch", "validation", "validation_epoch")
    for when in ("start", "end")
)
"""Hooks for which there is no process that has seen the whole epoch where tasks train."""


def is_lightning(module: nn.Module) -> bool:
    """True if a module brings its own training step and optimizer."""
    return all(
        callable(getattr(module, name, None)) for name in ("training_step", "configure_optimizers")
    )


def is_overridden(module: nn.Module, name: str) -> bool:
    """True if the user has written a method that Lightning's base class has, or would call."""
    method = getattr(module, name, None)
    package = getattr(method, "__module__", None) or ""
    return callable(method) and package.split(".")[0] not in ("lightning", "pytorch_lightning")


def check_module(module: nn.Module) -> None:
    """Refuse a LightningModule of which a part would be left out.

    ConfigError names it, and what to do instead.
    """
    name = type(module).__name__
    found = [method for method in _REFUSED if is_overridden(module, method)]
    if found:
        reasons = "; ".join(f"{name}.{method}: {_REFUSED[method]}" for method in found)
        raise ConfigError(f"without Lightning's Trainer nobody would call {reasons}")


def check_in_rounds(module: nn.Module) -> None:
    """Raise ConfigError for hooks of a LightningModule that tasks of rounds cannot call."""
    found = [hook for hook in _NOT_IN_ROUNDS if is_overridden(module, hook)]
    if found:
        raise ConfigError(
            f"{type(module).__name__} has {', '.join(found)}, but with executionMode='rounds' "
            "each round trains in other tasks, and no process sees a whole epoch; use "
            "executionMode='gang', or do without"
        )


class TrainerStandIn(Part):
    """Takes the place of Lightning's Trainer for a LightningModule; also its training step.

    As ``module.trainer`` it has those attributes of Lightning's that have a meaning here.
    """

    def __init__(self, module: nn.Module, config: TrainConfig) -> None:
        """Take a module that passes `check_module`, which is changed by `attach` only."""
        check_module(module)
        self._module = module
        self._parts = [m for m in module.modules() if m is module or hasattr(m, "_trainer")]
        self._methods: dict[str, Any] = {
            "log": self.log,
            "log_dict": self.log_dict,
            "optimizers": lambda use_pl_optimizer=True: _alone_or_all(self.optimizers),
            "lr_schedulers": lambda: _alone_or_all(self._schedulers),
        }
        self.manual = ManualBackward(module, self.call) if is_manual(module) else None
        """Function for a training step that updates the weights itself; None: the loop does."""
        if self.manual is not None:
            self._methods |= {"manual_backward": self.manual, "clip_gradients": clip_gradients}
        self._validates = is_overridden(module, "validation_step")
        self._paths: dict[int, str] = {}
        self._logs = Logs(module)
        self._validation: Logs | None = None
        self._rows = 0
        self._first_step = 0
        self._batch_idx = 0
        self._outputs: Any = None
        self._schedulers: list[Any] = []
        self.optimizers: list[torch.optim.Optimizer] = []
        self.current_epoch = self.global_step = 0
        self.place(0, 1)
        self.max_epochs, self.max_steps = config.epochs, config.max_steps
        self.num_training_batches = 100  # until the rows are known
        self.sanity_checking = False
        self.logger = self.progress_bar_callback = None
        self.loggers: list[Any] = []
        self.callback_metrics: dict[str, torch.Tensor] = {}

    def __getattr__(self, name: str) -> Any:
        known = sorted(n for n in {**vars(self), **vars(type(self))} if not n.startswith("_"))
        raise AttributeError(
            f"sparkdl trains without Lightning's Trainer, so trainer.{name} is not there; "
            f"trainer has {', '.join(known)}"
        )

    @property
    def training(self) -> bool:
        """True unless validation rows are measured."""
        return self._validation is None

    @property
    def validating(self) -> bool:
        """True while validation rows are measured."""
        return not self.training

    @property
    def should_stop(self) -> bool:
        """False: hooks do not stop training, callbacks do."""
        return False

    @should_stop.setter
    def should_stop(self, value: bool) -> None:
        raise ConfigError(
            "a module cannot stop training by trainer.should_stop; let a sparkdl.Callback do it, "
            "with state.stop()"
        )

    @property
    def estimated_stepping_batches(self) -> int:
        """Steps of the whole run."""
        steps = self.max_epochs * self.num_training_batches
        return steps if self.max_steps < 0 else min(steps, self.max_steps)

    def place(self, rank: int, world_size: int) -> None:
        """Say where this is; workers do not number those of their node."""
        self.global_rank = self.local_rank = rank
        self.world_size, self.is_global_zero = world_size, rank == 0

    def attach(self, plan: TrainPlan | None = None) -> None:
        """Become the module's trainer; with the plan's numbers, once there is a plan."""
        if plan is not None:
            self.num_training_batches = plan.steps_per_epoch
        for part in self._parts:
            vars(part)[_place(part)] = self
            vars(part).update(self._methods)

    def close(self) -> None:
        """Leave the module as it was."""
        for part in self._parts:
            if _place(part) == "_trainer":
                vars(part)["_trainer"] = None
            for name in ("trainer", *self._methods):
                vars(part).pop(name, None)

    def join(self, optimizer: torch.optim.Optimizer, scheduler: Any, comm: Communicator) -> None:
        """Show the module what updates its weights."""
        if self.manual is not None:
            self.manual.join(optimizer, comm)
        parts = optimizer.parts if isinstance(optimizer, SeveralOptimizers) else [optimizer]
        self.optimizers = list(parts)
        if scheduler is not None:
            is_one = not isinstance(scheduler, SeveralSchedules)
            self._schedulers = [scheduler] if is_one else scheduler.parts

    def begin_fit(self) -> None:
        self.call("on_fit_start")
        self.call("on_train_start")

    def begin_epoch(self) -> None:
        self.call("on_train_epoch_start")

    def before_clipping(self, optimizer: torch.optim.Optimizer) -> None:
        self.call("on_before_optimizer_step", optimizer)

    def end_epoch(self) -> None:
        self.call("on_train_epoch_end")

    def end_fit(self) -> None:
        self.call("on_train_end")
        self.call("on_fit_end")

    def call(self, hook: str, *arguments: Any) -> Any:
        """Call a hook of the module's, if the user has written it.

        The index of the batch, which is the last argument of some, is left out if it takes none.
        """
        if is_overridden(self._module, hook):
            return _called(getattr(self._module, hook), *arguments)
        return None

    def move_to(self, epoch: int, step: int, step_in_epoch: int) -> None:
        """Training begins, or goes on, there; see `TrainState` for the numbers."""
        self.current_epoch, self.global_step = epoch, step
        self._first_step = step - step_in_epoch

    def begin_step(self, step: int, batch: Batch) -> None:
        """Step number ``step`` of the run begins; without samples there is no batch to show."""
        self.global_step, self._batch_idx = step, step - self._first_step
        if batch.num_rows and self.call("on_train_batch_start", *self._shown(batch)) == -1:
            raise ConfigError(
                f"{type(self._module).__name__}.on_train_batch_start returned -1, which ends an "
                "epoch in Lightning; let a callback stop training, with state.stop()"
            )

    def end_step(self, batch: Batch) -> None:
        """The step is completed."""
        self.global_step += 1
        if batch.num_rows:
            self.call("on_train_batch_end", self._outputs, *self._shown(batch))
        self._outputs = None

    def _shown(self, batch: Batch) -> tuple[Any, int]:
        inputs = batch.arguments.packed()
        return _batch(inputs, batch.target if batch.has_label else None), self._batch_idx

    def evaluated(
        self, record: dict[str, float], comm: Communicator, *, is_epoch_over: bool
    ) -> None:
        """Enter what the epoch has logged so far into a record. Collective."""
        self.callback_metrics = {name: torch.tensor(value) for name, value in record.items()}
        kept = self._logs.state_dict()
        if is_epoch_over:
            self.call("on_train_epoch_end")
        fill(record, comm.all_gather_bytes(self._logs.packed()), self._module)
        self._logs.load_state_dict(kept)  # the epoch may have been cut short, and go on

    def forget(self) -> None:
        """The epoch is over."""
        self._logs.reset_metrics()
        self._logs = Logs(self._module)

    @contextlib.contextmanager
    def validation(self) -> Iterator[Logs]:
        """Measure validation rows inside; what is logged is kept apart from what training logs.

        Without a ``validation_step`` the rows go through ``training_step``, and what that does to
        metrics is undone.
        """
        kept = None if self._validates else self.state_dict()
        batch_idx, outputs = self._batch_idx, self._outputs
        self._validation, self._batch_idx = Logs(self._module), -1
        try:
            self.call("on_validation_start")
            self.call("on_validation_epoch_start")
            yield self._validation if self._validates else Logs(self._module)
            self.call("on_validation_epoch_end")
            self.call("on_validation_end")
        finally:
            self._validation, self._batch_idx, self._outputs = None, batch_idx, outputs
            if kept is not None:
                self.load_state_dict(kept)

    def validated(self, record: dict[str, float], logs: Logs, comm: Communicator) -> None:
        """Enter what `validation` has kept into a record. Collective."""
        fill(record, comm.all_gather_bytes(logs.packed()), self._module)
        logs.reset_metrics()

    def packed(self) -> bytes:
        """Pack what this rank has logged, for a driver that puts several ranks' together."""
        return self._logs.packed()

    def reset(self) -> None:
        """Forget all that was logged, and all that metrics have seen."""
        self._logs = Logs(self._module)
        for metric in metrics_of(self._module).values():
            metric.reset()

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a checkpoint must hold."""
        metrics = {path: seen_by(metric) for path, metric in metrics_of(self._module).items()}
        return {"logs": self._logs.state_dict(), "metrics": metrics}

    def joined(self, states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Join what several ranks' `state_dict` returned."""
        metrics = {
            path: seen_by(merged(metric, [state["metrics"][path] for state in states]))
            for path, metric in metrics_of(self._module).items()
            if path in states[0]["metrics"]
        }
        return {"logs": joined_logs([state["logs"] for state in states]), "metrics": metrics}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` gave."""
        self._logs.load_state_dict(state["logs"])
        for path, metric in metrics_of(self._module).items():
            if path in state["metrics"]:
                give(metric, state["metrics"][path])

    def __call__(self, module: nn.Module, inputs: Any, target: Any) -> Any:
        """The loss of a batch: of ``training_step``, or ``validation_step`` where that is wanted.

        ConfigError if the training step gives no loss.
        """
        batch = _batch(inputs, target)
        self._rows = rows_of(inputs if target is None else target)
        try:
            if self._validation is not None and self._validates:
                return self._validation_loss(module, batch)
            self._outputs = _called(module.training_step, batch, self._batch_idx)
            if self.manual is not None:
                return self.manual.loss_of_step()
            return _loss_of(self._outputs, f"{type(module).__name__}.training_step")
        finally:
            self._rows = 0

    def _validation_loss(self, module: nn.Module, batch: Any) -> Any:
        assert self._validation is not None
        self._batch_idx += 1
        with torch.no_grad():
            self.call("on_validation_batch_start", batch, self._batch_idx)
            outputs = _called(module.validation_step, batch, self._batch_idx)
            self.call("on_validation_batch_end", outputs, batch, self._batch_idx)
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if isinstance(loss, torch.Tensor):
            return loss
        self._validation.number(WITHOUT_LOSS, 1, 1, "sum")
        return torch.zeros(self._rows, device=next(module.parameters()).device)

    def log(
        self,
        name: str,
        value: Any,
        prog_bar: bool = False,
        logger: bool | None = None,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: Any = "mean",
        enable_graph: bool = False,
        sync_dist: bool = False,
        sync_dist_group: Any = None,
        add_dataloader_idx: bool = True,
        batch_size: int | None = None,
        metric_attribute: str | None = None,
        rank_zero_only: bool = False,
    ) -> None:
        """Keep a number, or a metric, for the history; Lightning's ``log``; or ConfigError.

        The history has one value for each epoch, over the rows of all ranks. So ``on_step``,
        ``sync_dist``, ``prog_bar`` and ``logger`` make no difference.
        """
        reduce = getattr(reduce_fx, "__name__", reduce_fx)
        reduce = "mean" if reduce == "avg" else reduce
        where = f"self.log({name!r})"
        if reduce not in REDUCTIONS:
            raise ConfigError(
                f"{where}: reduce_fx must be one of {', '.join(REDUCTIONS)}; received "
                f"{reduce_fx!r}; log a torchmetrics.Metric for other reductions"
            )
        if on_step is False and on_epoch is False:
            raise ConfigError(f"{where}: with on_step=False and on_epoch=False nothing is kept")
        if sync_dist_group is not None:
            raise ConfigError(f"{where}: sync_dist_group is not known here; leave it out")
        if rank_zero_only and self.global_rank != 0:
            return
        logs = self._logs if self._validation is None else self._validation
        if hasattr(value, "update_count"):
            logs.metric(name, self._path(value, where))
            return
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            value = value.detach().reshape(())
        elif not isinstance(value, numbers.Real):
            what = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
            raise ConfigError(f"{where} takes one number or a torchmetrics.Metric; received {what}")
        logs.number(name, value, batch_size or self._rows or 1, reduce)

    def log_dict(self, dictionary: Any, *arguments: Any, **options: Any) -> None:
        """Lightning's ``log_dict``: `log` of each entry, also of a MetricCollection's."""
        for name, value in dictionary.items():
            self.log(name, value, *arguments, **options)

    def _path(self, metric: Any, where: str) -> str:
        if id(metric) not in self._paths:
            self._paths = {id(part): path for path, part in self._module.named_modules()}
        if id(metric) not in self._paths:
            raise ConfigError(
                f"{where}: {type(metric).__name__} is no attribute of "
                f"{type(self._module).__name__}; set it in __init__"
            )
        return self._paths[id(metric)]


def _alone_or_all(values: list[Any]) -> Any:
    """As Lightning gives optimizers and schedules: a list, but the only one alone, or None."""
    return values if len(values) > 1 else next(iter(values), None)


def _place(module: nn.Module) -> str:
    """Return the name of the attribute in which a module keeps its trainer."""
    is_property = isinstance(getattr(type(module), "trainer", None), property)
    return "_trainer" if is_property else "trainer"


def _batch(inputs: Any, target: Any) -> Any:
    """Return the batch for Lightning's steps: the inputs with the label, or alone."""
    return inputs if target is None else (inputs, target)


def _called(method: Any, *arguments: Any) -> Any:
    """Call a step or a hook; those that take no index of the batch get none."""
    takes_all = _takes(getattr(method, "__func__", method), len(arguments))
    return method(*(arguments if takes_all else arguments[:-1]))


@functools.lru_cache(maxsize=64)
def _takes(function: Any, num_arguments: int) -> bool:
    """True if a method can be called with so many."""
    try:
        inspect.signature(function).bind(None, *[None] * num_arguments)
    except TypeError:
        return False
    return True


def _loss_of(outputs: Any, name: str) -> torch.Tensor:
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
    if not isinstance(loss, torch.Tensor):
        raise ConfigError(
            f"{name} must return a loss, or a dict with one; it returned {type(loss).__name__}"
        )
    return loss


class OwnOptimizer:
    """Makes a module's own optimizer; fits `strategy.MakeOptimizer`."""

    def __init__(self, module: nn.Module, config: TrainConfig) -> None:
        self._module = module
        self._config = config
        self.schedule: Mapping[str, Any] | None = None
        """The schedule that it gave when it was last called, as Lightning's ``lr_scheduler``; None:
        there is none that the loop steps or keeps."""

    def __call__(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """The optimizer of just these parameters, which must be all that train; or ConfigError."""
        name = f"{type(self._module).__name__}.configure_optimizers"
        with self._trainer():
            given = self._module.configure_optimizers()  # type: ignore[operator]
        parts, schedules = _configured(name, given)
        optimizer: torch.optim.Optimizer
        if is_manual(self._module):
            optimizer = SeveralOptimizers(parts)
            # The training step steps them: the loop never does.
            plain = [schedule["scheduler"] for schedule in schedules]
            self.schedule = {"scheduler": SeveralSchedules(plain)} if plain else None
        elif len(parts) == 1 and len(schedules) <= 1:
            optimizer, self.schedule = parts[0], next(iter(schedules), None)
        else:
            raise ConfigError(
                f"{name} must return one optimizer, with at most one schedule; with several set "
                "automatic_optimization=False, and step them in the training step"
            )
        wanted = {id(parameter) for parameter in parameters if parameter.requires_grad}
        groups = optimizer.param_groups
        has = {id(p) for group in groups for p in group["params"] if p.requires_grad}
        if has != wanted:
            raise ConfigError(
                f"the optimizer of {name} must train all parameters that are not frozen, and the "
                f"strategy must leave them in the module; it has {len(has)} of {len(wanted)}; set "
                "optimizer= instead"
            )
        return optimizer

    @contextlib.contextmanager
    def _trainer(self) -> Iterator[None]:
        """Have ``module.trainer`` inside, also on the driver, where nothing trains."""
        if "log" in vars(self._module):
            yield
            return
        stand_in = TrainerStandIn(self._module, self._config)
        stand_in.attach()
        try:
            yield
        finally:
            stand_in.close()


def _configured(
    name: str, value: Any
) -> tuple[list[torch.optim.Optimizer], list[Mapping[str, Any]]]:
    """The optimizers and schedules in one of Lightning's forms; ConfigError if there are none."""
    schedules: Any = []
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], (list, tuple)):
        value, schedules = value
    schedules = list(schedules) if isinstance(schedules, (list, tuple)) else [schedules]
    optimizers = []
    for entry in value if isinstance(value, (list, tuple)) else [value]:
        if isinstance(entry, Mapping):
            given = entry.get("lr_scheduler")
            if given is not None:
                options = given if isinstance(given, Mapping) else {"scheduler": given}
                schedules.append({"monitor": entry.get("monitor"), **options})
            entry = entry.get("optimizer")
        optimizers.append(entry)
    if not optimizers or not all(isinstance(o, torch.optim.Optimizer) for o in optimizers):
        raise ConfigError(
            f"{name} must return one optimizer, or several with automatic_optimization=False; "
            f"it returned {value!r}"
        )
    for optimizer in optimizers:
        complete(optimizer)
    return optimizers, [s if isinstance(s, Mapping) else {"scheduler": s} for s in schedules]
