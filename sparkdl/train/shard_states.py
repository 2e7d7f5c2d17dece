"""The state of a shard where bits must not depend on who trains it (``elasticity="bits"``).

Each shard has random generators, buffers, such as BatchNorm's running statistics, and sums of its
own. They are in place while the shard's rows are used, and wander with it from rank to rank. Sums
over shards are formed along the tree of `sync.gradients.shard_tree`, or in the order of shards.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sparkdl.comm.communicator import Communicator
from sparkdl.data.batches import Batch, sequential_batches
from sparkdl.data.source import ShardRows
from sparkdl.errors import ConfigError
from sparkdl.sync.averaging.mean import as_real, fill, flat_of, is_number
from sparkdl.sync.gradients.shard_tree import ShardGather, tree_sum
from sparkdl.sync.module_tensors import (
    Place,
    agreed_on,
    fingerprints,
    give_tensors,
    kind_of,
    moved,
    places_of,
)
from sparkdl.train.objective.label_losses import no_sums
from sparkdl.train.objective.metrics import Metrics
from sparkdl.train.random_state import random_state, seed_everything, set_random_state
from sparkdl.train.replica import Replica
from sparkdl.train.step import StepSums, TrainStep
from sparkdl.train.validation import measure, record


@dataclass
class ShardState:
    """The state of one shard."""

    random: dict[str, Any]
    """See `random_state`."""
    buffers: dict[str, torch.Tensor | None]
    """Buffers by name; not those of held layers."""
    metrics: Metrics | None
    """Has seen the shard's training batches of the present epoch, if they are wanted."""


class ShardStates:
    """The states of one rank's shards.

    Attributes:
        numbers: of the rank's shards, in order.
        epoch_sums: each shard's sums of the present epoch, ``(own shards, 2 + labels)``, as
            `StepSums.local` has them.
    """

    def __init__(self, replica: Replica, comm: Communicator) -> None:
        """Begin a run; ``replica`` has the buffers with which all shards begin."""
        self._replica, plan = replica, replica.plan
        self._gather = ShardGather(comm, plan.shards_by_rank)
        self.numbers = plan.shards_by_rank[comm.rank]
        self._layers = [layer._buffers for layer in replica.module.modules()]
        self._places = self._all_places()
        self._first = fingerprints(replica.module)
        self._with_rows = [n for n, shard in enumerate(plan.shards) if shard.num_rows]
        none = no_sums(replica.loss, replica.device)
        self.epoch_sums = none.new_zeros((len(self.numbers), len(none)))
        self._states: dict[int, ShardState] = {}
        self.begin()

    def begin(self, step: int = 0) -> None:
        """Give all shards the module's buffers, and random numbers that nobody has drawn yet."""
        for number in self.numbers:
            seed_everything(self._replica.config.seed, number, step)
            self._states[number] = ShardState(
                random=random_state(),
                buffers=self._buffers(),
                metrics=self._new_metrics(),
            )

    def _all_places(self) -> list[Place]:
        places = places_of(self._replica.module, aliases=False)
        return [place for place in places if place.kind != "parameter" and not place.is_held]

    def _buffers(self) -> dict[str, torch.Tensor | None]:
        """Copies of the module's, which it may have replaced, or registered, meanwhile."""
        if sum(map(len, self._layers)) != len(self._places):
            self._places = self._all_places()
        values = ((place.name, place.value) for place in self._places)
        return {name: value if value is None else value.clone() for name, value in values}

    def _use(self, buffers: Mapping[str, torch.Tensor | None]) -> None:
        """Give the module a shard's buffers, and none that only other shards have."""
        if buffers.keys() == {place.name for place in self._places}:
            for place in self._places:
                place.set(buffers[place.name])
        else:
            held = {p.name: p.value for p in places_of(self._replica.module) if p.is_held}
            give_tensors(self._replica.module, {**held, **buffers}, removes_others=True)
            self._places = self._all_places()

    def _new_metrics(self) -> Metrics | None:
        replica = self._replica
        wants = replica.training_metrics is not None
        return Metrics.of(replica.config, replica.loss, replica.device) if wants else None

    def follow_freezing(self) -> None:
        """Expect other parameters to stay as they are: some train now that did not."""
        now = fingerprints(self._replica.module)
        self._first = {name: self._first[name] for name in now if name in self._first}

    def train(
        self,
        step: TrainStep,
        batches: Mapping[int, Batch],
        rows_by_rank: Sequence[int],
        number: int,
    ) -> StepSums:
        """Train on the batches of step ``number``; see `RankEpoch.train`."""
        return step.over_shards(batches, sum(rows_by_rank), number, self)

    def put_back(self) -> None:
        """Leave the module as it is: each shard has its own buffers."""

    def batch(self, parts: Iterator[Batch]) -> dict[int, Batch]:
        """A step's batch of each shard that has rows, by its number; see `Batches.by_shard`.

        In memory of its own, on the CPU too: results of matrix products depend on whether their
        operands begin at a multiple of 16 bytes, which here no batch before them must decide.
        """
        own = [number for number in self.numbers if number in self._with_rows]
        device = self._replica.device
        if device.type == "cpu":
            return {number: next(parts).map(torch.clone) for number in own}
        return {
            number: next(parts).map(lambda value: value.to(device, non_blocking=True))
            for number in own
        }

    @contextlib.contextmanager
    def training(self, number: int) -> Iterator[Metrics | None]:
        """Have a shard's generators and buffers in place, and its metrics."""
        state = self._states[number]
        with self.drawing(number):
            self._use(state.buffers)
            yield state.metrics
            state.buffers = self._buffers()

    @contextlib.contextmanager
    def drawing(self, number: int) -> Iterator[None]:
        """Draw random numbers from a shard's generators; what is drawn between does not count."""
        state = self._states[number]
        set_random_state(state.random)
        yield
        state.random = random_state()

    def totals(self, norms: torch.Tensor) -> torch.Tensor:
        """Return the epoch's sums over all shards, and ``norms``, which ranks share. Collective."""
        return torch.cat([tree_sum(self._gather(self.epoch_sums)), norms])

    def average_buffers(self, *, for_good: bool) -> None:
        """Make the module's buffers the mean over the shards that have rows. Collective.

        Others than floating ones become those of the first of these. ``for_good``: all shards go on
        with them.

        Raises:
            ConfigError: forward has changed a frozen parameter; or a persistent buffer has other
                shapes for other shards.
        """
        if changed := sorted(moved(self._replica.module, self._first)):
            raise ConfigError(
                f"forward changes {changed[0]!r}, which has no gradient, once for each shard; with "
                "elasticity='bits' its values would depend on who trains which shard: make it a "
                "buffer, or leave elasticity out"
            )
        kinds = {place.name: place.kind for place in self._places}
        described = [
            [[name, *kind_of(value), kinds.get(name, "fleeting")] for name, value in own.items()]
            for own in (state.buffers for state in self._all)
        ]
        sent = self._gather.bytes([json.dumps(own).encode() for own in described])
        counts = [number in self._with_rows for number in range(len(sent))]
        device = self.epoch_sums.device
        mean = {
            name: torch.zeros(shape, dtype=getattr(torch, dtype), device=device)
            for name, shape, dtype, _ in agreed_on([json.loads(own) for own in sent], counts)
        }
        mine = [
            {name: _if_alike(state.buffers.get(name), zeros) for name, zeros in mean.items()}
            for state in self._all
        ]
        floating = [name for name, zeros in mean.items() if is_number(zeros)]
        if floating:
            flat = [flat_of([as_real(own[n]).double() for n in floating]) for own in mine]
            sums = tree_sum(self._gather(torch.stack(flat))[self._with_rows])
            fill([as_real(mean[name]) for name in floating], sums / len(self._with_rows))
        for name in [name for name in mean if name not in floating]:
            rows = torch.stack([own[name] for own in mine])
            mean[name].copy_(self._gather(rows)[self._with_rows[0]])
        give_tensors(self._replica.module, mean)
        if for_good:
            for state in self._all:
                state.buffers |= {name: value.clone() for name, value in mean.items()}

    @property
    def _all(self) -> list[ShardState]:
        return list(self._states.values())

    def training_metrics(self) -> dict[str, float]:
        """The values over the epoch's training batches so far. Collective."""
        metrics = self._replica.training_metrics
        if metrics is None:
            return {}
        packed = [state.metrics.packed() for state in self._all if state.metrics is not None]
        return metrics.compute_over(self._gather.bytes(packed))

    def evaluate(self, rows: Sequence[ShardRows]) -> dict[str, float]:
        """As `validation.evaluate`, where ``rows`` are the validation rows of each own shard."""
        replica = self._replica
        sums, packed = torch.zeros_like(self.epoch_sums), []
        for place, number in enumerate(self.numbers):
            batches = sequential_batches([rows[place]], replica.plan)
            with self.drawing(number):
                sums[place] = measure(replica, (batch.map(torch.clone) for batch in batches))
            packed.append(replica.metrics.packed())
        values = replica.metrics.compute_over(self._gather.bytes(packed)) if replica.metrics else {}
        return record(tree_sum(self._gather(sums)), values, replica.labels)

    def begin_epoch(self) -> None:
        """Forget what has added up."""
        self.epoch_sums.zero_()
        for state in self._all:
            if state.metrics is not None:
                state.metrics.reset()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of each shard that a checkpoint must hold, by the shard's number."""
        shards = {
            str(number): {
                "random": state.random,
                "buffers": state.buffers,
                "metrics": None if state.metrics is None else state.metrics.state_dict(),
                "epoch_sums": self.epoch_sums[place],
            }
            for place, (number, state) in enumerate(self._states.items())
        }
        return {"shards": shards}

    def load_state_dict(self, state: Mapping[str, Any], **_: Any) -> None:
        """Restore the states of this rank's shards, out of those of all."""
        saved_by_shard = state["shards"]
        for place, (number, own) in enumerate(self._states.items()):
            saved = saved_by_shard[str(number)]
            own.random = saved["random"]
            device = self.epoch_sums.device
            own.buffers = {
                name: value if value is None else value.to(device, copy=True)
                for name, value in saved["buffers"].items()
            }
            if own.metrics is not None:
                own.metrics.load_state_dict(saved["metrics"])
            self.epoch_sums[place] = saved["epoch_sums"]


def _if_alike(value: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    """``value``, or ``like`` where it is another kind of tensor."""
    return value if value is not None and kind_of(value) == kind_of(like) else like
