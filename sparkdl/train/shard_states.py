"""What belongs to a shard where bits must not depend on who trains it (``elasticity="bits"``).

Each shard has random generators, buffers, such as BatchNorm's running statistics, and sums of its
own. They are in place while the shard's rows are used, and wander with it from rank to rank. Sums
over shards are formed along the tree of `sync.gradients.shard_tree`, or in the order of shards.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from sparkdl.comm.communicator import Communicator
from sparkdl.data.batches import Batch, sequential_batches
from sparkdl.data.source import ShardRows
from sparkdl.sync.averaging.mean import fill, flat_of
from sparkdl.sync.frozen_layers import moving_buffers
from sparkdl.sync.gradients.shard_tree import ShardGather, tree_sum
from sparkdl.train.objective.label_losses import no_sums
from sparkdl.train.objective.metrics import Metrics
from sparkdl.train.random_state import random_state, seed_everything, set_random_state
from sparkdl.train.replica import Replica
from sparkdl.train.validation import measure, record


@dataclass
class ShardState:
    """What one shard has."""

    random: dict[str, Any]
    """See `random_state`."""
    buffers: list[torch.Tensor]
    """Of `moving_buffers`."""
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
        self._slots = _buffer_slots(replica.module)
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
                buffers=[buffer.clone() for buffer in self._buffers],
                metrics=self._new_metrics(),
            )

    @property
    def _buffers(self) -> list[torch.Tensor]:
        """The module's, which it may have replaced by others."""
        return [owner[name].detach() for owner, name in self._slots]

    def _new_metrics(self) -> Metrics | None:
        replica = self._replica
        wants = replica.training_metrics is not None
        return Metrics.of(replica.config, replica.loss, replica.device) if wants else None

    def batches(self, parts: Iterator[Batch]) -> dict[int, Batch]:
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
        with self._drawing(state):
            _copy(state.buffers, self._buffers)
            yield state.metrics
            _copy(self._buffers, state.buffers)

    @contextlib.contextmanager
    def _drawing(self, state: ShardState) -> Iterator[None]:
        """Draw random numbers from a shard's generators; what is drawn between does not count."""
        set_random_state(state.random)
        yield
        state.random = random_state()

    def total(self) -> torch.Tensor:
        """The sums of the epoch over all shards. Collective."""
        return tree_sum(self._gather(self.epoch_sums))

    def average_buffers(self, *, for_good: bool) -> None:
        """Make the module's buffers the mean over the shards that have rows. Collective.

        Others than floating ones become those of the first of these. ``for_good``: all shards go on
        with them.
        """
        buffers = self._buffers
        floating = [place for place, b in enumerate(buffers) if b.is_floating_point()]
        if floating:
            like = torch.cat([buffers[place].double().flatten() for place in floating])
            rows = like.new_empty((len(self.numbers), len(like)))
            for row, state in zip(rows, self._all, strict=True):
                row.copy_(flat_of([state.buffers[place].double() for place in floating]))
            mean = tree_sum(self._gather(rows)[self._with_rows]) / len(self._with_rows)
            fill([buffers[place] for place in floating], mean)
        for place, buffer in enumerate(buffers):
            if not buffer.is_floating_point():
                rows = buffer.new_empty((len(self.numbers), *buffer.shape))
                for row, state in zip(rows, self._all, strict=True):
                    row.copy_(state.buffers[place])
                buffer.copy_(self._gather(rows)[self._with_rows[0]])
        if for_good:
            for state in self._all:
                _copy(buffers, state.buffers)

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
            with self._drawing(self._states[number]):
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
        """What a checkpoint must hold: a state for each shard, by its number."""
        return {
            str(number): {
                "random": state.random,
                "buffers": state.buffers,
                "metrics": None if state.metrics is None else state.metrics.state_dict(),
                "epoch_sums": self.epoch_sums[place],
            }
            for place, (number, state) in enumerate(self._states.items())
        }

    def load_state_dict(self, states: Mapping[str, Any]) -> None:
        """Restore the states of this rank's shards, out of those of all."""
        for place, (number, state) in enumerate(self._states.items()):
            saved = states[str(number)]
            state.random = saved["random"]
            _copy(saved["buffers"], state.buffers)
            if state.metrics is not None:
                state.metrics.load_state_dict(saved["metrics"])
            self.epoch_sums[place] = saved["epoch_sums"]


def _copy(source: Sequence[torch.Tensor], into: Sequence[torch.Tensor]) -> None:
    if into:
        torch._foreach_copy_(list(into), list(source))


def _buffer_slots(module: nn.Module) -> list[tuple[dict[str, Any], str]]:
    """Where the buffers of `moving_buffers` are: a layer's dict, and the name in it."""
    wanted = {id(buffer) for buffer in moving_buffers(module)}
    slots: dict[int, tuple[dict[str, Any], str]] = {}
    for layer in module.modules():
        for name, buffer in layer._buffers.items():
            if id(buffer) in wanted:
                slots.setdefault(id(buffer), (layer._buffers, name))
    return list(slots.values())
