"""One step of training: forward, backward, exchange of gradients, update.

The gradient that the optimizer sees is that of (sum of weighted losses) / (sum of weights) over
all ranks and micro-batches. A module whose training depends on the batch, such as BatchNorm, sees
one micro-batch at a time, its rank's own, or with ``syncBatchNorm`` those of all ranks; torch
refuses some of these modules a batch of one sample.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import types
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from sparkdl.data.batches import Batch
from sparkdl.data.plan import batch_bounds
from sparkdl.errors import ConfigError
from sparkdl.sync.gradients.shard_tree import ShardTreeSynchronizer
from sparkdl.sync.module_tensors import fingerprint
from sparkdl.sync.strategy import Pipelined
from sparkdl.train.objective.divergence import LossWatch
from sparkdl.train.objective.label_losses import no_sums, sums_of
from sparkdl.train.objective.loss import ClassLoss
from sparkdl.train.objective.manual import ManualBackward
from sparkdl.train.objective.metrics import Metrics, detached
from sparkdl.train.objective.part import Part
from sparkdl.train.objective.training_step import run, taken
from sparkdl.train.optimizers.stepping import Stepper
from sparkdl.train.random_state import SharedDraws
from sparkdl.train.replica import Replica
from sparkdl.train.time_spent import Clock


def augmented(batch: Batch, augmentation: Callable[[Any], Any]) -> Batch:
    """The batch with other inputs; its target stays.

    Args:
        batch: a training batch of at least one sample.
        augmentation: gets the input tensor, the tuple of several, or, if all have names, a dict;
            and returns the same with as many samples. It must not change what it gets in place
            where the inputs are the target too.

    Raises:
        ConfigError: it returned something else.
    """
    try:
        changed = batch.arguments.repacked(augmentation(batch.arguments.packed()))
    except TypeError as error:
        raise ConfigError(f"augmentation must return what it gets, changed: {error}") from error
    for value in changed.values:
        if value.dim() == 0 or len(value) != batch.num_rows:
            raise ConfigError(
                f"augmentation must keep the {batch.num_rows} samples of a batch; it returned a "
                f"tensor of shape {tuple(value.shape)}"
            )
    return dataclasses.replace(batch, inputs=changed.values)


def _mean(shared: torch.Tensor) -> torch.Tensor:
    """The mean loss that an optimizer's closure returns."""
    return shared[0] / shared[1].clamp(min=torch.finfo(shared.dtype).tiny)


def _names_gradients(module: nn.Module) -> bool:
    """True if the user's classes name an attribute ``grad``, as of a parameter or a tensor."""
    kinds = {kind for layer in module.modules() for kind in type(layer).__mro__}
    users = [kind for kind in kinds if kind.__module__.partition(".")[0] not in _NO_USERS]
    parts = [getattr(part, "__func__", part) for kind in users for part in vars(kind).values()]
    codes = [part.__code__ for part in parts if isinstance(part, types.FunctionType)]
    for code in codes:
        codes += [part for part in code.co_consts if isinstance(part, types.CodeType)]
    return any("grad" in code.co_names for code in codes)


_NO_USERS = ("torch", "sparkdl", "builtins")
"""Packages whose classes know of gradients what workers do with them."""
READ_EVERY = 16
"""Steps between two looks at the loss on CUDA, where every look waits for the device."""
NORM_EVERY = 16
"""Steps of an epoch between two norms of the gradient: one costs up to a third of a small step."""


@dataclass(frozen=True)
class StepSums:
    """Sum of weighted losses and sum of weights of one step, float64."""

    local: torch.Tensor
    """``(2 + labels,)`` over this rank's batch, with the losses of each label where there are
    several; zero for a step that fp16 skipped; of `TrainStep.over_shards` a row for each of the
    rank's shards."""
    shared: torch.Tensor
    """``(2,)`` over the ranks that share a gradient."""
    ranks: tuple[int, ...] | None
    """The ranks whose samples were used; None: all."""


class ShardsApart(Protocol):
    """The states of a rank's shards, which are trained on apart; see `ShardStates`."""

    epoch_sums: torch.Tensor

    @property
    def numbers(self) -> Sequence[int]:
        """The shards that the rank has, in order."""

    def follow_freezing(self) -> None:
        """Expect other parameters to stay as they are."""

    def training(self, number: int) -> AbstractContextManager[Metrics | None]:
        """Have a shard's generators and buffers in place, and its metrics."""

    def drawing(self, number: int) -> AbstractContextManager[None]:
        """Draw random numbers from a shard's generators."""


class TrainStep:
    """Trains on one batch at a time.

    Attributes:
        loss: the newest loss that was read; on CUDA up to `READ_EVERY` steps old.
        watch: what the loss is compared with.
        parts: those that are called at each step.
        gradient_norms: sum and number of the gradient's norms since the epoch began, float64; see
            `NORM_EVERY`.
    """

    def __init__(
        self,
        replica: Replica,
        *,
        clock: Clock,
        talks_within: bool = False,
        others: Sequence[Part] = (),
    ) -> None:
        """Prepare steps.

        Args:
            replica: what is trained.
            clock: counts what the steps' time is spent on.
            talks_within: whether the model waits for those of the other ranks in its forward and
                backward passes. Then all ranks run equally many, also without samples.
            others: parts that are called at each step besides those of the replica.
        """
        self._replica, self._config = replica, replica.config
        self._synchronizer, self._format = replica.synchronizer, replica.number_format
        self._talks_within = talks_within
        self.parts = [*replica.parts, *others]
        self._parameters = self._synchronizer.trained_parameters()
        self._all = list(replica.module.parameters())
        self._flags = self._trains()
        loss, columns = replica.loss, replica.plan.columns
        self._weighs = any(column.role == "weight" for column in columns) or (
            isinstance(loss, ClassLoss) and loss.has_weights
        )
        """True if rows do not count alike, which all ranks know."""
        self._divisor: float | torch.Tensor | None = None
        """Divisor of the losses of this step, if that was their weights' sum."""
        self._stepper = Stepper(self._synchronizer.optimizer)
        self._drops = _names_gradients(replica.module)
        """True if forward may look at gradients: in a plain loop there are none yet."""
        self._clock = clock
        self.after_forward: list[int] | None = None
        """Fingerprints of all parameters before the first backward pass; None: there was none."""
        self._left_by_forward: list[str] = []
        """The parameters that had a gradient before the first backward pass of a step."""
        self.moved_by_backward: list[str] | None = None
        """The parameters that the first backward pass has changed itself, by a hook; None: there
        was none yet."""
        self.loss = math.nan
        self.watch = LossWatch(self._config.divergence_factor)
        self.gradient_norms = torch.zeros(2, dtype=torch.float64, device=replica.device)

    def __call__(
        self, batch: Batch, global_rows: int, step: int, replica_rows: int | None = None
    ) -> StepSums:
        """Train on ``batch``, which may be empty; every rank calls.

        Args:
            batch: this rank's samples.
            global_rows: samples of all ranks in this step.
            step: number of the step in the run, from 0.
            replica_rows: samples of all ranks among which this replica is divided; None: this
                rank's.

        Raises:
            TrainingDiverged: the loss is not finite or has exploded; on all ranks alike, unless
                they train apart.
        """
        if self._replica.manual is not None:
            return self._train_manually(self._replica.manual, batch, global_rows, step)
        self._follow_freezing()
        self._stepper.zero()
        self._synchronizer.zero_gradients()
        if self._synchronizer.is_late:
            batch = batch.rows(0, 0)
        for part in self.parts:
            part.begin_step(step, batch)
        batch = self._augmented(batch)
        local = self._backward(batch, global_rows, self._replica.training_metrics)
        self._check_agreed()
        self._clock.lap("compute")
        shared, divisor, ranks = self._synchronizer.reduce_gradients(
            local[:2].clone(), float(global_rows)
        )
        self._clock.lap("communication")
        self._read(shared, step)
        divided_by = divisor if self._divisor is None else self._divisor
        own_rows = batch.num_rows if replica_rows is None else replica_rows
        if divisor == 0 or (own_rows == 0 and self._synchronizer.trains_apart):
            self._advance_schedule(step)  # nothing to learn from; momentum alone must not move it
        elif not self._update(
            shared, divided_by, step, lambda: self._again(batch, global_rows, own_rows)
        ):
            # The forward pass may have overflowed too; such a step is no part of the history.
            local.zero_()
        for part in self.parts:
            part.end_step(batch)
        self._clock.lap("compute")
        return StepSums(local=local, shared=shared, ranks=ranks)

    def over_shards(
        self, batches: Mapping[int, Batch], global_rows: int, step: int, states: ShardsApart
    ) -> StepSums:
        """As `__call__`, where each shard is a micro-batch of its own.

        ``batches`` are by the number of the shard; a shard without a batch has no rows.
        """
        synchronizer = self._synchronizer
        assert isinstance(synchronizer, ShardTreeSynchronizer)
        if self._follow_freezing():
            states.follow_freezing()
        self._stepper.zero()
        if self._config.augmentation is not None:
            given, batches = batches, dict(batches)
            for number, batch in given.items():
                with states.drawing(number):
                    batches[number] = self._augmented(batch)
        local = self._over_shards(batches, global_rows, states)
        self._check_agreed()
        self._clock.lap("compute")
        shared, divisor, _ = synchronizer.reduce_gradients(local[:, :2].clone(), float(global_rows))
        self._clock.lap("communication")
        self._read(shared, step)
        if not self._update(
            shared, divisor, step, lambda: self._again_over_shards(batches, global_rows, states)
        ):
            local.zero_()
        self._clock.lap("compute")
        return StepSums(local=local, shared=shared, ranks=None)

    def _again(self, batch: Batch, global_rows: int, own_rows: int) -> torch.Tensor:
        """Loss and gradients once more, with other weights, for a closure; all ranks call."""
        synchronizer = self._synchronizer
        synchronizer.zero_gradients()
        shared = self._backward(batch, global_rows, None)[:2].clone()
        divisor = float(global_rows)
        if not synchronizer.trains_apart:
            shared, divisor, _ = synchronizer.reduce_gradients(shared, divisor)
        return self._finished(shared, divisor if self._divisor is None else self._divisor)

    def _again_over_shards(
        self, batches: Mapping[int, Batch], global_rows: int, states: ShardsApart
    ) -> torch.Tensor:
        """As `_again`, for `over_shards`."""
        local = self._over_shards(batches, global_rows, states, counts=False)
        shared, divisor, _ = self._synchronizer.reduce_gradients(local[:, :2], float(global_rows))
        return self._finished(shared, divisor)

    def _finished(self, shared: torch.Tensor, divisor: float | torch.Tensor) -> torch.Tensor:
        """Make the gradients what an optimizer gets; the mean loss."""
        self._divide_by_weights(shared, divisor)
        if self._config.gradient_clip_norm is not None:
            norm = self._synchronizer.gradient_norm(self._parameters)
            most = self._config.gradient_clip_norm
            torch.nn.utils.clip_grads_with_norm_(self._parameters, most, norm)
        return _mean(shared)

    def _trains(self) -> list[bool]:
        return [parameter.requires_grad for parameter in self._all]

    def _follow_freezing(self) -> bool:
        """Train what shall train now, and say if that is new.

        Raises:
            ConfigError: the strategy or the optimizer cannot.
        """
        flags = self._trains()
        if flags == self._flags:
            return False
        pairs = zip(self._all, flags, self._flags, strict=True)
        thawed = [parameter for parameter, now, before in pairs if now and not before]
        self._flags = flags
        self._synchronizer.follow_freezing()
        self._parameters = self._synchronizer.trained_parameters()
        self.require_known(thawed)
        return True

    def require_known(self, thawed: Iterable[nn.Parameter]) -> None:
        """Raise ConfigError if the optimizer has not got what was unfrozen."""
        wanted = {id(parameter) for parameter in thawed}
        groups = self._synchronizer.optimizer.param_groups
        known = {id(parameter) for group in groups for parameter in group["params"]}
        for name, parameter in self._replica.module.named_parameters():
            if id(parameter) in wanted - known:
                raise ConfigError(
                    f"parameter {name!r} was unfrozen while training runs, and the optimizer does "
                    "not have it; unfreeze it in a callback, since with callbacks optimizers get "
                    "frozen parameters too, or let configure_optimizers return one that has it"
                )

    def _check_agreed(self) -> None:
        """Raise ConfigError if forward has unfrozen what no worker sums gradients of."""
        if self._replica.plan.world_size == 1 or self._synchronizer.trains_apart:
            return
        for now, before, place in zip(self._trains(), self._flags, self._all, strict=True):
            if now and not before:
                names = (n for n, p in self._replica.module.named_parameters() if p is place)
                raise ConfigError(
                    f"forward has unfrozen the parameter {next(names, '')!r} within a step, and "
                    "workers agree before each step on what trains; set requires_grad in a "
                    "callback (on_step_end), or numWorkers=1"
                )

    def _over_shards(
        self,
        batches: Mapping[int, Batch],
        global_rows: int,
        states: ShardsApart,
        *,
        counts: bool = True,
    ) -> torch.Tensor:
        """Forward and backward passes of all shards of this rank; what they sum up to."""
        synchronizer = self._synchronizer
        assert isinstance(synchronizer, ShardTreeSynchronizer)
        synchronizer.zero_gradients()
        local = torch.zeros_like(states.epoch_sums)
        for place, number in enumerate(states.numbers):
            synchronizer.begin_shard()
            batch = batches.get(number)
            if batch is not None and batch.num_rows > 0:
                with states.training(number) as metrics:
                    local[place] = self._backward(batch, global_rows, metrics if counts else None)
            synchronizer.end_shard(number)
        return local

    def _train_manually(
        self,
        manual: ManualBackward,
        batch: Batch,
        global_rows: int,
        step: int,
    ) -> StepSums:
        """As `__call__`, where the training step of a LightningModule updates the weights."""
        loss, synchronizer = self._replica.loss, self._synchronizer
        local = no_sums(loss, self._replica.device)
        if synchronizer.trains_apart:
            kept = [parameter.grad for parameter in self._parameters]
            synchronizer.zero_gradients()
            for parameter, gradient in zip(self._parameters, kept, strict=True):
                parameter.grad = gradient
        if batch.num_rows > 0:
            if self._config.augmentation is not None:
                batch = augmented(batch, self._config.augmentation)
            for part in self.parts:
                part.begin_step(step, batch)
            manual.begin(batch.num_rows, global_rows)
            with synchronizer.no_sync(), self._format.autocast():
                value = run(loss, synchronizer.model, batch)
            local += self._added(*sums_of(loss, value, batch.target, batch.weight))
            for part in self.parts:
                part.end_step(batch)
        self._clock.lap("compute")
        shared = local[:2].clone()
        if synchronizer.trains_apart:
            synchronizer.reduce_gradients(shared.clone(), float(global_rows))
        else:
            manual.comm.all_reduce(shared)
        self._clock.lap("communication")
        self._read(shared, step)
        return StepSums(local=local, shared=shared, ranks=None)

    def _augmented(self, batch: Batch) -> Batch:
        if self._config.augmentation is None or batch.num_rows == 0:
            return batch
        return augmented(batch, self._config.augmentation)

    def _backward(self, batch: Batch, global_rows: int, metrics: Metrics | None) -> torch.Tensor:
        """Add up the gradients of ``loss / global_rows``; return `StepSums.local`.

        The loss is divided by the sum of the weights instead, in `_divisor`, where that is known in
        time, so that hooks of gradients see what they see in a loop of one's own.
        """
        self._divisor = None
        loss = self._replica.loss
        sums = no_sums(loss, self._replica.device)
        for part in self.parts:
            part.see(batch)
        if self._synchronizer.pipeline is not None:
            return self._through_stages(self._synchronizer.pipeline, batch, global_rows, metrics)
        num_parts = self._config.gradient_accumulation_steps
        if not self._talks_within:
            num_parts = min(num_parts, batch.num_rows)
        for number in range(num_parts):
            micro_batch = batch
            if num_parts > 1:
                micro_batch = batch.rows(*batch_bounds(batch.num_rows, num_parts, number))
            is_last = number == num_parts - 1
            for parameter in self._all if self._drops and number == 0 else ():
                parameter.grad = None
            # A backward pass of the user's own, within forward, is none that ends the step.
            with self._synchronizer.no_sync(), self._format.autocast():
                output = run(loss, self._synchronizer.model, micro_batch)
            loss_sum, weight_sum, parts = sums_of(
                loss, output, micro_batch.target, micro_batch.weight
            )
            if micro_batch.num_rows > 0:  # the mean of no losses is not a number
                sums += self._added(loss_sum, weight_sum, parts)
                if metrics is not None:
                    metrics.update(detached(output), micro_batch.target, micro_batch.weight)
            if is_last:
                self._synchronizer.start_sums(sums[:2].clone())
                self._divisor = self._weight_of_all(sums, global_rows)
            divisor = global_rows if self._divisor is None else self._divisor
            before = self._fingerprints() if micro_batch.num_rows > 0 else None
            with contextlib.nullcontext() if is_last else self._synchronizer.no_sync():
                self._format.backward(loss_sum, divisor)
            if before is not None:
                self._note_moved(before)
        if num_parts == 0:
            self._divisor = self._weight_of_all(sums, global_rows)
        return sums

    def _fingerprints(self) -> list[int] | None:
        """Return the fingerprints of all parameters, before the first backward pass."""
        if self.moved_by_backward is not None or self._synchronizer.divided is not None:
            return None
        self.after_forward = [fingerprint(parameter) for parameter in self._all]
        self._left_by_forward = [
            name
            for name, parameter in self._replica.module.named_parameters()
            if (grad := parameter.grad) is not None and (grad.layout != torch.strided or grad.any())
        ]
        return self.after_forward

    def _note_moved(self, before: list[int]) -> None:
        """Note what a backward pass has changed itself; ConfigError if workers share gradients."""
        pairs = zip(self._all, before, strict=True)
        moved = {id(p) for p, number in pairs if fingerprint(p) != number}
        named = self._replica.module.named_parameters()
        self.moved_by_backward = [name for name, p in named if id(p) in moved]
        if self._replica.plan.world_size > 1 and not self._synchronizer.trains_apart:
            self.check_shared_gradients()

    def check_shared_gradients(self) -> None:
        """Raise ConfigError for what workers that share gradients cannot have.

        The first backward pass has changed weights, or forward has left gradients.
        """
        if self._left_by_forward:
            raise ConfigError(
                f"forward, or trainingStep, leaves a gradient in {self._left_by_forward[0]!r} by a "
                "backward pass of its own, and workers would add theirs up; call zero_grad() after "
                "it, use torch.autograd.grad, add its loss to that of the step, or set numWorkers=1"
            )
        if self.moved_by_backward:
            raise ConfigError(
                f"the backward pass changes the parameter {self.moved_by_backward[0]!r} itself, as "
                "an optimizer in a hook of gradients does, and workers add gradients up after it; "
                "let optimizer= step it, or set numWorkers=1, or a strategy that averages replicas"
            )

    def _weight_of_all(self, sums: torch.Tensor, global_rows: int) -> float | torch.Tensor | None:
        """The weights of all rows that share a gradient, if they are known; not 0."""
        if self._config.gradient_accumulation_steps > 1:  # earlier parts do not know it
            return None
        if self._talks_within and self._synchronizer.trains_apart:  # one pass needs one divisor
            return None
        shared = self._synchronizer.early_sums(sums[:2].clone(), waits=self._weighs)
        if shared is None:
            return None
        if self._replica.device.type != "cpu":
            return torch.where(shared[1] > 0, shared[1], float(global_rows))
        return shared[1].item() or float(global_rows)

    def _through_stages(
        self, pipeline: Pipelined, batch: Batch, global_rows: int, metrics: Metrics | None
    ) -> torch.Tensor:
        """As `_backward`, where other ranks compute other stages of the same rows."""
        loss = self._replica.loss
        sums = no_sums(loss, self._replica.device)

        def use(output: Any, rows: Batch) -> torch.Tensor:
            nonlocal sums
            output = taken(loss, output)
            loss_sum, weight_sum, parts = sums_of(loss, output, rows.target, rows.weight)
            sums += self._added(loss_sum, weight_sum, parts)
            if metrics is not None:
                metrics.update(detached(output), rows.target, rows.weight)
            return loss_sum / global_rows

        num_parts = self._config.gradient_accumulation_steps
        for part in range(num_parts):
            rows = batch.rows(*batch_bounds(batch.num_rows, num_parts, part))
            with self._synchronizer.no_sync():
                pipeline.train(rows, use, self._format.autocast)
        pipeline.comm.all_reduce(sums)  # those of the last stage
        self._synchronizer.start_sums(sums[:2].clone())
        return sums

    def _added(
        self,
        loss_sum: torch.Tensor,
        weight_sum: torch.Tensor | float,
        parts: tuple[torch.Tensor, ...],
    ) -> torch.Tensor:
        """The sums of a micro-batch, as in `StepSums.local`."""
        values = (loss_sum, weight_sum, *parts)
        if self._replica.device.type == "cpu":  # numbers take a tenth of the time of small tensors
            numbers = [v.item() if isinstance(v, torch.Tensor) else v for v in values]
            return torch.tensor(numbers, dtype=torch.float64)
        device = self._replica.device
        there = [v.detach() for v in values if isinstance(v, torch.Tensor)]
        there = [v.to(device, torch.float64).reshape(()) for v in there]
        if not isinstance(weight_sum, torch.Tensor):
            there.insert(1, torch.full_like(there[0], weight_sum))
        return torch.stack(there)  # few calls: each costs the host some microseconds

    def _update(
        self,
        shared: torch.Tensor,
        divisor: float | torch.Tensor,
        step: int,
        again: Callable[[], torch.Tensor],
    ) -> bool:
        optimizer = self._synchronizer.optimizer
        self._format.unscale(optimizer)
        self._divide_by_weights(shared, divisor)
        for part in self.parts:
            part.before_clipping(optimizer)
        norm = None
        if self._config.gradient_clip_norm is not None:
            norm = self._synchronizer.gradient_norm(self._parameters)
            most = self._config.gradient_clip_norm
            torch.nn.utils.clip_grads_with_norm_(self._parameters, most, norm)
        step_in_epoch = step % self._replica.plan.steps_per_epoch
        if step_in_epoch % NORM_EVERY == 0 and not self._synchronizer.trains_apart:
            self._note_norm(norm)
        for part in self.parts:
            part.before_update(step)
        if self._format.may_skip_steps:
            was_stepped = self._format.step(optimizer)
        else:
            self._step_optimizer(step, lambda: _mean(shared), again)
            was_stepped = True
        if was_stepped:
            for part in self.parts:
                part.after_update()
            self._advance_schedule(step)
        return was_stepped

    def _step_optimizer(
        self, step: int, loss: Callable[[], Any], again: Callable[[], torch.Tensor]
    ) -> None:
        """Step; where ranks share gradients an optimizer that draws numbers draws the same ones."""
        if not self._stepper.is_own or self._synchronizer.trains_apart:
            self._stepper(loss, again)
            return

        def apart() -> torch.Tensor:
            with draws.apart():
                return again()

        with SharedDraws(self._config.seed, step) as draws:
            self._stepper(loss, apart)

    def _note_norm(self, norm: torch.Tensor | None) -> None:
        """Take note of the gradient's norm, which clipping knows already, if it is finite."""
        if norm is None:
            norm = self._synchronizer.gradient_norm(self._parameters)
        seen = torch.stack([norm.double(), torch.ones_like(norm, dtype=torch.float64)])
        self.gradient_norms += torch.where(torch.isfinite(norm), seen, 0.0)

    def _advance_schedule(self, step: int) -> None:
        schedule = self._replica.schedule
        if schedule is not None and schedule.is_due(step + 1):
            with warnings.catch_warnings():
                # torch wants an optimizer's step first; a replica without samples takes none.
                warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
                schedule.scheduler.step()

    def _divide_by_weights(self, shared: torch.Tensor, divisor: float | torch.Tensor) -> None:
        """Turn the sum of losses by ``divisor`` into the mean that the weights ask for."""
        if isinstance(divisor, torch.Tensor):  # their sum, by which the losses were divided
            return
        factor: torch.Tensor | float
        if self._replica.device.type == "cpu":
            weight_sum = shared[1].item()
            factor = divisor / weight_sum if weight_sum > 0 else 0.0
            if factor == 1.0:
                return
        else:
            factor = torch.where(shared[1] > 0, divisor / shared[1], 0.0)
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        if gradients:
            torch._foreach_mul_(gradients, factor)

    def _read(self, shared: torch.Tensor, step: int) -> None:
        if self._replica.device.type != "cpu" and step % READ_EVERY != 0:
            return
        loss_sum, weight_sum = shared.tolist()
        if weight_sum == 0:  # no samples, so nothing is known
            return
        loss = loss_sum / weight_sum
        if math.isfinite(loss) or not self._format.may_skip_steps:
            self.watch.look(loss, step + 1)
        self.loss = loss
