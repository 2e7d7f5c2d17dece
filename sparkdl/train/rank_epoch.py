"""A rank's part of the present epoch: what adds up over its samples, and what it draws.

When the epoch ends, buffers such as BatchNorm's statistics become equal on all ranks.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from sparkdl.comm.communicator import Communicator
from sparkdl.comm.process_group import speaks_for_all
from sparkdl.data.batches import Batch, sequential_batches
from sparkdl.data.source import ShardRows
from sparkdl.sync.averaging.mean import as_real, fill, flat_of, is_number
from sparkdl.sync.module_tensors import (
    Agreement,
    Place,
    device_of,
    fingerprints,
    give_tensors,
    moved,
    places_of,
)
from sparkdl.train.objective.label_losses import no_sums
from sparkdl.train.random_state import random_state
from sparkdl.train.replica import Replica
from sparkdl.train.step import StepSums, TrainStep
from sparkdl.train.validation import evaluate, in_step

if TYPE_CHECKING:
    from sparkdl.sync.divided.mesh_ranks import MeshRanks  # brings torch's compiler

logger = logging.getLogger(__name__)

_OF_ROUNDING = 1e-3


@dataclass(frozen=True)
class WholeRanks:
    """Ranks that have a replica each, as `MeshRanks` are those that divide some."""

    readers: Communicator
    """The ranks that train on different rows: all of them."""
    gathers = False

    @property
    def together(self) -> range:
        """The ranks of ``readers`` that train the same replica as this rank."""
        return range(self.readers.rank, self.readers.rank + 1)


class Epoch(Protocol):
    """What a rank has of the present epoch; `RankEpoch`, or by shard `ShardStates`."""

    epoch_sums: torch.Tensor
    """Weighted losses and weights of the rank's samples, and the losses of each label where there
    are several, float64; a row for each shard where shards are trained on apart."""

    def begin(self, step: int) -> None:
        """Begin an epoch anew after ``step`` steps of the run."""

    def batch(self, batches: Iterator[Batch]) -> Any:
        """Return what `train` takes in the next step."""

    def train(
        self, step: TrainStep, batch: Any, rows_by_rank: Sequence[int], number: int
    ) -> StepSums:
        """Train on the batch of step ``number``, in which ranks have so many rows."""

    def average_buffers(self, *, for_good: bool) -> None:
        """Make equal on all ranks what the strategy does not. Collective.

        ``for_good``: training goes on with that; otherwise with its own, once they are `put_back`.
        """

    def put_back(self) -> None:
        """Give the module what it held before `average_buffers`."""

    def totals(self, norms: torch.Tensor) -> torch.Tensor:
        """Return the epoch's sums, and those of ``norms``, over all ranks. Collective."""

    def training_metrics(self) -> dict[str, float]:
        """Return the values over the epoch's training batches so far. Collective."""

    def evaluate(self, rows: Sequence[ShardRows]) -> dict[str, float]:
        """Measure the validation rows of this rank's shards, and of all others'. Collective."""

    def begin_epoch(self) -> None:
        """Forget what has added up."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a checkpoint must hold; tensors are the replica's own."""

    def load_state_dict(self, state: Mapping[str, Any], *, is_united: bool, rank: int) -> None:
        """Restore what `state_dict` gave, or `rank_state.united`; random numbers are the caller's.

        What adds up over ranks is rank 0's where states are united.
        """


class RankEpoch:
    """An epoch of a rank whose rows of a step are one batch."""

    def __init__(self, replica: Replica, ranks: WholeRanks | MeshRanks) -> None:
        """Begin a run of a replica, which the ranks have each, or in parts."""
        self._replica, self._ranks, self._comm = replica, ranks, ranks.readers
        self._with_rows = [r for r in range(replica.plan.world_size) if replica.plan.rows_of(r)]
        self._first = fingerprints(replica.module)
        """Frozen parameters before training; forward may change them."""
        self._own: list[tuple[Place, torch.Tensor | None]] = []
        self._has_warned = False
        self.epoch_sums = no_sums(replica.loss, replica.device)

    def begin(self, step: int) -> None:
        pass  # the rank draws its numbers itself

    def batch(self, batches: Iterator[Batch]) -> Batch:
        return next(batches)

    def train(
        self, step: TrainStep, batch: Batch, rows_by_rank: Sequence[int], number: int
    ) -> StepSums:
        of_replica = sum(rows_by_rank[rank] for rank in self._ranks.together)
        return step(self._replica.on_device(batch), sum(rows_by_rank), number, of_replica)

    def average_buffers(self, *, for_good: bool) -> None:
        synchronizer = self._replica.synchronizer
        own = []
        if not synchronizer.buffers_agree:
            trained = [] if synchronizer.divided is not None else synchronizer.trained_parameters()
            own = agree_on_buffers(self._replica.module, self._comm, self._with_rows, trained)
            if for_good:
                self._warn_of_apart(own, trained)
        self._own = [] if for_good else own

    def put_back(self) -> None:
        for place, value in self._own:
            place.set(value)

    def _warn_of_apart(
        self, own: Sequence[tuple[Place, torch.Tensor | None]], trained: Sequence[torch.Tensor]
    ) -> None:
        """Say so, once, if weights that all ranks step alike were not equal: forward sets them."""
        if self._has_warned or not speaks_for_all():
            return
        wanted = {id(parameter) for parameter in trained}
        for place, old in own:
            now = place.value
            if old is None or now is None or id(place.owner[place.key]) not in wanted:
                continue
            if bool((now - old).abs().max() > _OF_ROUNDING * now.abs().max()):
                self._has_warned = True
                logger.warning(
                    "the parameter %r was another on each worker, though all take the same steps: "
                    "forward changes it by the rows that it gets. Training goes on with the mean; "
                    "set numWorkers=1, or a strategy that averages replicas",
                    place.name,
                )
                return

    def totals(self, norms: torch.Tensor) -> torch.Tensor:
        both = torch.cat([self.epoch_sums, norms])
        self._comm.all_reduce(both)
        return both

    def training_metrics(self) -> dict[str, float]:
        metrics, pipeline = self._replica.training_metrics, self._replica.synchronizer.pipeline
        if metrics is None:
            return {}
        if pipeline is None:
            return metrics.compute(self._comm)
        # only the last stage's have seen outputs
        return pipeline.from_last(metrics.compute(self._comm) if pipeline.is_last else None)

    def evaluate(self, rows: Sequence[ShardRows]) -> dict[str, float]:
        batches = sequential_batches(rows, self._replica.plan)
        if self._ranks.gathers:
            batches = in_step(batches, self._replica.plan)
        return evaluate(self._replica, batches, self._comm)

    def begin_epoch(self) -> None:
        self.epoch_sums.zero_()

    def state_dict(self) -> dict[str, Any]:
        # Running statistics differ between ranks until the epoch ends.
        module, collector = self._replica.module, self._replica.collector
        buffers = {p.name: p.value for p in places_of(module) if p.kind != "parameter"}
        return {
            "rng": random_state(),
            "buffers": {**buffers, **moved(module, self._first)},
            "epoch_sums": self.epoch_sums,
            **({} if collector is None else {"collected": collector.state_dict()}),
        }

    def load_state_dict(self, state: Mapping[str, Any], *, is_united: bool, rank: int) -> None:
        give_tensors(self._replica.module, state["buffers"])
        if is_united and rank > 0:
            return
        self.epoch_sums.copy_(state["epoch_sums"])
        collector = self._replica.collector
        if collector is not None:
            collected = state["collected"]
            collector.load_state_dict(collector.joined(collected) if is_united else collected)


def agree_on_buffers(
    module: nn.Module,
    comm: Communicator,
    ranks_with_rows: Sequence[int],
    trained: Iterable[torch.Tensor] = (),
) -> list[tuple[Place, torch.Tensor | None]]:
    """Make buffers, such as BatchNorm's running statistics, equal on all ranks. Collective.

    Floating ones become the mean over ranks with rows; others those of the first of these. So do
    frozen parameters, and those ``trained``, where they differ because forward has changed them.

    Args:
        module: the replica.
        comm: the ranks.
        ranks_with_rows: those of them that have trained.
        trained: parameters that are equal on all ranks unless forward changes them.

    Returns:
        What has been made equal, and a copy of what it was.

    Raises:
        ConfigError: a persistent buffer has other shapes on other ranks.
    """
    if comm.world_size == 1:
        return []
    held = {place.name: place.value for place in places_of(module, aliases=False)}
    agreement = Agreement(module, trained)
    device = device_of(module)
    digests = comm.all_gather(torch.tensor([agreement.digest], device=device)).flatten().tolist()
    counts = [rank in ranks_with_rows for rank in range(comm.world_size)]
    places = agreement.places(comm, digests, counts)
    olds = [held.get(place.name) for place in places]
    before = [(p, old if old is None else old.clone()) for p, old in zip(places, olds, strict=True)]
    values = [(place, value) for place in places if (value := place.value) is not None]
    floating = [(place, value) for place, value in values if is_number(value)]
    if floating:
        means = [as_real(value).double() for _, value in floating]
        flat = flat_of(means)
        if comm.rank not in ranks_with_rows:
            flat.zero_()
        comm.all_reduce(flat)
        fill(means, flat.div_(len(ranks_with_rows)))
        for (place, value), mean in zip(floating, means, strict=True):
            place.set((torch.view_as_complex(mean) if value.is_complex() else mean).to(value.dtype))
    others = [(place, value) for place, value in values if not is_number(value)]
    if others:
        sent = torch.cat([value.flatten().view(torch.uint8) for _, value in others])
        comm.broadcast(sent, ranks_with_rows[0])
        pieces = torch.split(sent, [value.nbytes for _, value in others])
        for (place, value), piece in zip(others, pieces, strict=True):
            # Cloned: a view of a wider dtype needs memory that begins at a multiple of its size.
            place.set(piece.clone().view(value.dtype).view(value.shape))
    return before
