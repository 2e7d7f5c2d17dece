"""Manual optimization of LightningModules: their training step steps its optimizers by itself.

As with torch's DistributedDataParallel, gradients are summed over the ranks when a backward pass
ends, so that each optimizer sees those of the united batch. Where replicas train apart, they are
the rank's own.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from sparkdl.comm.communicator import Communicator, LocalCommunicator
from sparkdl.config import TrainConfig
from sparkdl.errors import ConfigError
from sparkdl.sync.averaging.averaging import AveragingStrategy
from sparkdl.sync.averaging.mean import by_kind, fill, flat_of
from sparkdl.sync.gradients.allreduce import AllReduce
from sparkdl.sync.own_attributes import same_objects
from sparkdl.sync.sparse_gradients import sparse_parameters, sum_gradients

if TYPE_CHECKING:
    from sparkdl.sync.strategy import SyncStrategy


def is_manual(module: nn.Module) -> bool:
    """True if a LightningModule updates its weights itself."""
    return getattr(module, "automatic_optimization", True) is False


def check_manual(config: TrainConfig, strategy: SyncStrategy, name: str) -> None:
    """Raise ConfigError for what does not go together with manual optimization."""
    asked = {
        "gradientClipNorm": config.gradient_clip_norm is not None,
        "gradientAccumulationSteps": config.gradient_accumulation_steps > 1,
        "precision='fp16'": config.precision == "fp16",
        "syncBatchNorm": config.sync_batch_norm,
        "optimizer": config.optimizer != "auto",
        "scheduler": config.scheduler is not None,
    }
    found = [option for option, is_asked in asked.items() if is_asked]
    if found:
        raise ConfigError(
            f"{name} sets automatic_optimization=False, so its training step clips, accumulates "
            f"and schedules by itself; leave out {', '.join(found)}"
        )
    is_plain = isinstance(strategy, AllReduce) and strategy.num_backup_workers == 0
    is_plain = is_plain and not strategy.double_buffering  # type: ignore[attr-defined]
    if isinstance(strategy, AveragingStrategy):
        is_plain = getattr(strategy, "warmup_steps", 0) == 0
    if not is_plain or getattr(strategy, "compression", None) is not None:
        raise ConfigError(
            f"{name} sets automatic_optimization=False, which goes together with AllReduce() and "
            f"with strategies that average replicas, without compression; received {strategy}"
        )


def complete(optimizer: torch.optim.Optimizer) -> None:
    """Give an optimizer what torch's ``Optimizer.__init__`` would have, where it called none.

    A wrapper may be stepped without; states, schedules and reports want it.

    Raises:
        ConfigError: it has no parameter groups, which only its own code knows.
    """
    kind = type(optimizer).__name__
    if not hasattr(optimizer, "param_groups"):
        raise ConfigError(
            f"optimizer {kind} has no param_groups: call super().__init__(parameters, defaults) in "
            f"its __init__, or let param_groups be those of the optimizer that {kind} wraps"
        )
    blank = torch.optim.Optimizer([nn.Parameter(torch.zeros(()))], {})
    for name, value in vars(blank).items():
        if not hasattr(optimizer, name):
            setattr(optimizer, name, value)


class SeveralOptimizers(torch.optim.Optimizer):
    """Optimizers of different parameters as one, of which the loop keeps the state."""

    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        """Take optimizers, which go on to share their groups and their state with this.

        ConfigError if a parameter belongs to two of them.
        """
        groups = [group for part in parts for group in part.param_groups]
        seen = [id(p) for group in groups for p in group["params"]]
        if len(set(seen)) < len(seen):
            raise ConfigError(
                "a parameter belongs to two of the optimizers of configure_optimizers; give each "
                "parameter to one"
            )
        super().__init__([p for group in groups for p in group["params"]], {})
        self.parts = list(parts)
        self.param_groups = groups
        self.state = defaultdict(dict, {p: s for part in parts for p, s in part.state.items()})
        for part in self.parts:
            part.state = self.state

    def load_state_dict(self, state_dict: Any) -> None:
        with same_objects(self):
            super().load_state_dict(state_dict)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Refuse: the training step does that."""
        raise AssertionError("the training step steps the optimizers")


class SeveralSchedules:
    """Schedules that the training step steps, of which the loop keeps the state."""

    def __init__(self, parts: Sequence[Any]) -> None:
        self.parts = list(parts)

    def state_dict(self) -> dict[str, Any]:
        """The states of all."""
        return {"_schedulers": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` gave."""
        for part, own in zip(self.parts, state["_schedulers"], strict=True):
            part.load_state_dict(own)


class ManualBackward:
    """The backward passes of a step, whose gradients become those of the united batch."""

    def __init__(self, module: nn.Module, call: Callable[..., Any]) -> None:
        """Take a module, and what calls its hooks."""
        self._module = module
        self._call = call
        self._share = 1.0
        self._summed: list[weakref.ref[torch.Tensor]] = []
        """Gradients of all ranks. Not their ids, which those that follow freed ones may get."""
        self.comm: Communicator = LocalCommunicator()
        self._loss: torch.Tensor | None = None

    def join(self, optimizer: torch.optim.Optimizer, comm: Communicator) -> None:
        """Take part in a gang whose ranks share gradients; alone, a rank's are its own."""
        self.comm = comm
        for parameter in self._module.parameters():
            parameter.grad = None  # not those of the strategy, which sums others
        assert isinstance(optimizer, SeveralOptimizers)
        for part in optimizer.parts:
            part.register_step_pre_hook(self._check)

    def begin(self, num_rows: int, global_rows: int) -> None:
        """A step begins, on so many samples of this rank and of all."""
        self._loss = None
        self._share = num_rows / global_rows if self.comm.world_size > 1 else 1.0

    def __call__(self, loss: torch.Tensor, *arguments: Any, **options: Any) -> None:
        """Lightning's ``manual_backward``, of a mean over this rank's batch. Collective."""
        self._loss = loss.detach() if self._loss is None else self._loss + loss.detach()
        if self.comm.world_size == 1:
            loss.backward(*arguments, **options)  # type: ignore[no-untyped-call]
            return
        rows = {id(p) for p in sparse_parameters(self._module).values()}
        every = [p for p in self._module.parameters() if p.requires_grad]
        trained = [p for p in every if id(p) not in rows]
        before = [p.grad for p in every]
        for parameter in every:
            parameter.grad = None
        (loss * self._share).backward(*arguments, **options)  # type: ignore[no-untyped-call]
        sum_gradients([p for p in every if id(p) in rows], self.comm)
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in trained]
        used = torch.tensor([p.grad is not None for p in trained], device=every[0].device)
        marks = used.to(every[0].dtype)
        for own in by_kind([*gradients, marks]):
            flat = flat_of(own)
            self.comm.all_reduce(flat)
            fill(own, flat)
        for parameter, gradient, mark in zip(trained, gradients, marks.tolist(), strict=True):
            parameter.grad = gradient if mark else None
        for parameter, old in zip(every, before, strict=True):
            if parameter.grad is None:
                parameter.grad = old
            elif old is not None:
                parameter.grad = old + parameter.grad  # of which one may be sparse
        summed = [p.grad for p in self._module.parameters()]
        self._summed = [weakref.ref(g) for g in summed if g is not None]

    def loss_of_step(self) -> torch.Tensor:
        """Sum of the losses of this step's backward passes; ConfigError if there was none."""
        if self._loss is None:
            raise ConfigError(
                f"{type(self._module).__name__}.training_step must call self.manual_backward(loss) "
                "at least once, since automatic_optimization is False"
            )
        return self._loss

    def _check(self, optimizer: torch.optim.Optimizer, *unused: Any) -> None:
        """Refuse to step with gradients of one rank's samples."""
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"]]
        summed = {id(gradient) for known in self._summed if (gradient := known()) is not None}
        if self.comm.world_size > 1 and any(
            gradient is not None and id(gradient) not in summed for gradient in gradients
        ):
            raise ConfigError(
                "an optimizer was stepped with gradients that were not summed over the ranks; call "
                "self.manual_backward(loss) in place of loss.backward()"
            )
        self._call("on_before_optimizer_step", optimizer)


def clip_gradients(
    optimizer: torch.optim.Optimizer,
    gradient_clip_val: float | None = None,
    gradient_clip_algorithm: str | None = None,
) -> None:
    """Lightning's ``clip_gradients``, by ``norm`` or by ``value``; ConfigError for another way."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if gradient_clip_algorithm not in (None, "norm", "value"):
        raise ConfigError(
            f"gradient_clip_algorithm must be 'norm' or 'value'; received "
            f"{gradient_clip_algorithm!r}"
        )
    if not gradient_clip_val:
        return
    if gradient_clip_algorithm == "value":
        torch.nn.utils.clip_grad_value_(parameters, gradient_clip_val)
    else:
        torch.nn.utils.clip_grad_norm_(parameters, gradient_clip_val)
