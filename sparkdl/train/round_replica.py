"""Trains one shard for one round, as a pure function of state and shard.

Whatever a process did before, the same state, shard and round give the same result: that is what
lets Spark run a lost task again, anywhere. A process keeps its module, optimizer and memory warm
between rounds and shards; everything that matters is overwritten at the start of each.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from sparkdl.comm.communicator import LocalCommunicator
from sparkdl.config import Looks, TrainConfig
from sparkdl.data.batches import sequential_batches
from sparkdl.data.plan import RoundPart, TrainPlan
from sparkdl.data.source import ShardRows
from sparkdl.errors import ConfigError
from sparkdl.sync.apart import ApartSynchronizer
from sparkdl.sync.averaging.mean import CHANGES
from sparkdl.sync.frozen_layers import still_names, training_mode
from sparkdl.sync.module_tensors import check_sizes, give_tensors, is_same, places_of, shape_of
from sparkdl.sync.population.hyperparameters import set_values
from sparkdl.train.callbacks import IN_TASKS, CallbackState, Observer, Requests
from sparkdl.train.layer_looks import LayerLooks
from sparkdl.train.modules.memory_format import in_memory_format
from sparkdl.train.objective.logs import as_text, fill, from_text
from sparkdl.train.optimizers.nested_states import own_parts
from sparkdl.train.optimizers.optimizers import require_steps
from sparkdl.train.optimizers.stepping import set_mode
from sparkdl.train.random_state import deterministic_algorithms, seed_everything
from sparkdl.train.rank_state import OWN_STATES, HeldAttributes
from sparkdl.train.replica import begin_optimizer, make_replica
from sparkdl.train.step import TrainStep
from sparkdl.train.time_spent import Clock
from sparkdl.train.validation import measure
from sparkdl.train.validation import record as evaluation_record


def check_held(found: Mapping[str, Any]) -> None:
    """Refuse changes of a module that the next task cannot have.

    Args:
        found: what `HeldAttributes.state_dict` gave.

    Raises:
        ConfigError: layers are others, or attributes of which nobody can read a plain form.
    """
    if found["layers"]:
        raise ConfigError(
            "a callback or forward has changed layers of the module "
            f"({', '.join(found['layers'][:5])}), and in rounds tasks hand on numbers only; change "
            "layers before fit, or use executionMode='gang'"
        )
    if found["lacks"]:
        shown = ", ".join(f"{path}, a {kind}" for path, kind in found["lacks"][:5])
        raise ConfigError(
            f"forward or a callback has changed attributes of the module ({shown}), and in rounds "
            "tasks hand on numbers, strings, tensors, lists and dicts only; use these, or a "
            "buffer, or executionMode='gang'"
        )


@dataclass(frozen=True, kw_only=True)
class RoundOutcome:
    """The outcome of a replica's round."""

    state: dict[str, Any]
    """``model``, ``optimizer``, ``scheduler``, ``scaler``: the replica's own tensors; and
    ``attributes``, what the module holds besides that is not as it came."""
    loss_sum: float
    """Weighted losses over the samples of the round."""
    weight: float
    """Weights of the samples of the round; their number where there are no weights."""
    rows: int
    seconds: float
    """Time that the steps took."""
    spent: dict[str, float]
    """Activity -> its part of that time, by `time_spent.SPENT_ON`."""
    label_sums: tuple[float, ...] = ()
    """The losses of each label, where there are several."""
    logs: str | None = None
    """Values that were seen of the samples besides; see `objective.metric_states`."""


class RoundReplica:
    """A process's replica, kept from one round to the next.

    Args:
        module: the module; its weights do not matter, since each round brings its own.
        config: what the user asked for.
        plan: the numbers that follow from it; each shard is a rank of its own.
        device: where this process computes.
        looks: what is looked at in the layers where the first shard is trained on; None: nothing.
        held: what the module holds besides parameters and buffers, which it shall hold again when
            a round begins; None: nobody cares.
    """

    def __init__(
        self,
        module: nn.Module,
        config: TrainConfig,
        plan: TrainPlan,
        device: torch.device,
        looks: Looks | None = None,
        held: HeldAttributes | None = None,
    ) -> None:
        # The driver watches the mean over replicas for an explosion; one replica's loss may jump.
        config = dataclasses.replace(config, divergence_factor=None)
        setup = partial(ApartSynchronizer, comm=LocalCommunicator())
        self._replica = make_replica(module, config, plan, device, setup)
        require_steps(self._replica.schedule)
        self._first = copy.deepcopy(self._replica.state_dict())
        self._held = held
        self._begin: Mapping[str, Any] = {}
        """Values that the module held when the newest round began."""
        self._looks = [] if looks is None else [LayerLooks(looks, module, plan)]

    def train(
        self,
        state: dict[str, Any],
        shard_id: int,
        rows: ShardRows,
        part: RoundPart,
        observer: Observer,
        *,
        hyperparameters: Mapping[str, float] | None = None,
    ) -> RoundOutcome:
        """Train from ``state`` on the steps of ``part``.

        Args:
            state: where the round begins: ``model``, and what an earlier round's outcome held
                besides; an optimizer that is not in it begins anew.
            shard_id: which shard it is.
            rows: its rows.
            part: the steps.
            observer: gets each step.
            hyperparameters: numbers to give to the optimizer first; see `hyperparameters`.

        Raises:
            TrainingDiverged: the loss is not finite.
            ConfigError: the optimizer has no such hyperparameters.
        """
        training_mode(self._replica.module, self._replica.config.frozen_layers)
        # All that an earlier round has changed.
        model = self._give(state)
        if "optimizer" not in state and own_parts(self._replica.synchronizer.optimizer):
            # It may look at the weights, which were others when the replica was made.
            self._replica = begin_optimizer(self._replica)
            made = self._replica.state_dict()
            self._first |= {key: copy.deepcopy(made[key]) for key in ("optimizer", "scheduler")}
        replica, config = self._replica, self._replica.config
        synchronizer = replica.synchronizer
        assert isinstance(synchronizer, ApartSynchronizer)
        # Copies: optimizers go on with the tensors that they are given.
        first = {key: copy.deepcopy(self._first[key]) for key in self._first.keys() - state.keys()}
        replica.load_state_dict({**first, **state, "model": model})
        self._begin = model
        synchronizer.close_round()
        if hyperparameters:
            set_values(synchronizer.optimizer, replica.scheduler, hyperparameters)
        seed_everything(config.seed, shard_id, part.step)
        if replica.collector is not None:
            replica.collector.reset()
        set_mode(synchronizer.optimizer, trains=True)
        requests = Requests(refusal=IN_TASKS)
        clock = Clock()
        step = TrainStep(replica, clock=clock, others=self._looks if shard_id == 0 else ())
        for other in step.parts:
            other.place(shard_id, replica.plan.world_size)
            other.move_to(part.epoch, part.step, part.step_in_epoch)
        flags = self._first["trains"]  # the last step of a round may have unfrozen something
        named = replica.module.named_parameters()
        step.require_known(p for name, p in named if p.requires_grad and not flags[name])
        batches = replica.batches([rows], shard_id, epoch=part.epoch, first_step=part.step_in_epoch)
        num_rows, began = 0, time.perf_counter()
        label_sums = torch.zeros(len(replica.labels), dtype=torch.float64)
        with (
            contextlib.closing(batches),
            deterministic_algorithms(config.deterministic),
            in_memory_format(replica.module, config.memory_format),
        ):
            for number in range(part.step, part.step + part.num_steps):
                batch = next(batches)
                clock.lap("data")
                sums = step(replica.on_device(batch), max(1, batch.num_rows), number)
                label_sums += sums.local[2:].cpu()
                synchronizer.after_step(number)
                for other in step.parts:
                    other.after_step(number, observer)
                num_rows += batch.num_rows
                observer.step(
                    epoch=part.epoch + 1, step=number + 1, loss=step.loss, rows=batch.num_rows
                )
                if config.callbacks:
                    seen = CallbackState(
                        rank=shard_id,
                        world_size=replica.plan.world_size,
                        epoch=part.epoch,
                        step=number + 1,
                        loss=step.loss,
                        model=replica.module,
                        learning_rate=replica.learning_rate,
                        requests=requests,
                    )
                    for callback in config.callbacks:
                        callback.on_step_end(seen)
                clock.lap("other")
        loss_sum, weight = synchronizer.round_sums.tolist()
        set_mode(synchronizer.optimizer, trains=False)
        return RoundOutcome(
            state={**replica.state_dict(), "attributes": self._attributes()},
            loss_sum=loss_sum,
            weight=weight,
            rows=num_rows,
            seconds=time.perf_counter() - began,
            spent=clock.seconds,
            label_sums=tuple(label_sums.tolist()),
            logs=None if replica.collector is None else as_text(replica.collector.packed()),
        )

    def _give(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Have the module hold what ``state`` says, and else what came; return its tensors."""
        attributes = state.get("attributes")
        if self._held is not None:
            self._held.load_state_dict(attributes)
        self._replica.kept.load_state_dict((attributes or {}).get(OWN_STATES))
        model = {**self._first["model"], **state["model"]}
        give_tensors(self._replica.module, model, removes_others=True)
        check_sizes(self._replica.module)
        return model

    def _attributes(self) -> dict[str, Any] | None:
        """Return the attributes of the module that are not as they came; see `check_held`."""
        if self._held is None:
            return None
        found = self._held.state_dict()
        check_held(found)
        return {**found, OWN_STATES: self._replica.kept.state_dict()}

    def moving(self, state: dict[str, Any], *, compressed: bool = False) -> dict[str, Any]:
        """An outcome's state without those weights and buffers that training has left alone.

        Where it is to be ``compressed``, it has the parameters' `CHANGES` in the round in place of
        the parameters that train.
        """
        still = still_names(self._replica.module)
        model = {
            name: value
            for name, value in state["model"].items()
            if name not in still or not is_same(value, self._begin.get(name))
        }
        state = {name: value for name, value in state.items() if name != "attributes"}
        if not compressed:
            return {**state, "model": model}
        changes: dict[str, torch.Tensor] = {}
        made: dict[int, torch.Tensor] = {}
        for name, parameter in nn.Module.named_parameters(
            self._replica.module, remove_duplicate=False
        ):
            if name in model and name not in still:
                value = model.pop(name)
                if id(parameter) not in made:  # tied weights travel once
                    made[id(parameter)] = value - self._begin[name].to(value.device)
                changes[name] = made[id(parameter)]
        return {**state, "model": model, CHANGES: changes}

    def odd(self, moving: Mapping[str, Any]) -> dict[str, Any]:
        """Return what the driver must know of what `moving` gave, besides the mean, as JSON values.

        ``moved``: names of what should have stayed as it was; ``shapes``: of persistent buffers
        that have another shape than at the round's beginning.
        """
        still, begin = still_names(self._replica.module), self._begin
        places = [p for p in places_of(self._replica.module) if p.kind == "buffer"]
        shapes = {place.name: shape_of(place.value) for place in places}
        return {
            "moved": sorted(still & moving["model"].keys()),
            "shapes": {n: s for n, s in shapes.items() if n in begin and s != shape_of(begin[n])},
        }

    def evaluate(
        self, state: dict[str, Any], validation: ShardRows
    ) -> tuple[tuple[float, ...], bytes, str | None]:
        """Measure ``state`` on this shard's validation rows.

        Returns:
            The sums that `validation.measure` gives, the metrics' states, and what a
            LightningModule has logged.
        """
        replica, lightning = self._replica, self._replica.lightning
        self._give(state)
        if lightning is not None:
            lightning.reset()
        with (
            in_memory_format(replica.module, replica.config.memory_format),
            contextlib.nullcontext() if lightning is None else lightning.validation() as logs,
        ):
            sums = measure(replica, sequential_batches([validation], replica.plan))
        text = None if logs is None else as_text(logs.packed())
        return tuple(sums.tolist()), replica.metrics.packed(), text

    def record(self, sums: Sequence[float], metrics: bytes, logs: str | None) -> dict[str, float]:
        """The history's entries of what `evaluate` gave, as if there were no other shards."""
        replica = self._replica
        values = replica.metrics.compute_over([metrics])
        record = evaluation_record(torch.tensor(sums), values, replica.labels)
        fill(record, [from_text(logs)] if logs else [], replica.module)
        return record

    @property
    def config(self) -> TrainConfig:
        """The configuration that the user asked for."""
        return self._replica.config
