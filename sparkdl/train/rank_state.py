"""The state of one rank of a gang that survives a restart, and how it comes back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from sparkdl.errors import SparkDLError, StorageError
from sparkdl.sync.averaging.mean import merge
from sparkdl.sync.divided_state import DividedState, Part, whole_part
from sparkdl.sync.module_tensors import check_sizes, give_tensors
from sparkdl.train.callbacks import Requests, give_states, states_of
from sparkdl.train.optimizers.nested_states import plain_state
from sparkdl.train.random_state import seed_everything, set_random_state
from sparkdl.train.rank_epoch import Epoch
from sparkdl.train.replica import Replica
from sparkdl.train.state import EpochBook
from sparkdl.train.step import TrainStep

DIVIDED = "divided"
"""Key in a rank's state of what it has of a model that is divided; see `DividedState.part`."""

OWN_STATES = "kept"
"""Key of what loss, training step and augmentation keep, see `Kept`."""
OWN_ROWS = "has_own_rows"
"""Key of `DividedState.has_own_rows`."""


class CheckpointSink(Protocol):
    """The destination of checkpoints; every rank calls `save` at the same steps."""

    def due(self, step: int) -> bool:
        """True if a checkpoint is wanted after ``step`` completed steps; equal on all ranks."""

    def save(self, step: int, shared: dict[str, Any], rank_state: dict[str, Any]) -> None:
        """Copy all tensors before returning; write them afterwards."""


class HeldAttributes(Protocol):
    """The attributes of a module besides parameters and buffers, as `Attributes` knows them."""

    def check_shared(self) -> None:
        """See that what others hold, too, is still the same; raises ConfigError."""

    def state_dict(self) -> dict[str, Any]:
        """Return what training has changed of them; raises what `check_shared` raises."""

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Restore what `state_dict` gave; None: it is not known."""


@dataclass(frozen=True, kw_only=True)
class ResumePoint:
    """A checkpoint as the training loop sees it. Its tensors may become the replica's own."""

    step: int
    """Completed steps."""
    shared: dict[str, Any]
    """Equal on all ranks; rank 0's is kept."""
    parts: Callable[[], Iterable[Part]] | None = None
    """Reads what ranks had of a model that was divided; None: it was not."""
    rank_state: dict[str, Any] | None
    """This rank's own; of a gang of another size what `united` gives of all ranks' states; None
    where the rows are not those of the checkpoint, or the strategy depends on who has them."""


@dataclass(frozen=True, kw_only=True)
class RankState:
    """Everything that training changes on one rank."""

    replica: Replica
    book: EpochBook
    epoch: Epoch
    """What adds up over the epoch: over the rank's rows, or, where bits must not depend on who has
    them, over those of each shard."""
    step: TrainStep
    """Has the norms of the epoch's gradients, and what the loss is compared with."""
    requests: Requests
    """Requests of callbacks that were not fulfilled yet."""
    held: HeldAttributes | None = None
    """Attributes of the module; None: nobody asks."""

    def snapshot(self) -> ResumePoint:
        """The present state; its tensors are the replica's own, not copies."""
        synchronizer = self.replica.synchronizer
        divided = synchronizer.divided
        attributes = None if self.held is None else self.held.state_dict()
        kept = self.replica.kept.state_dict()
        own = self.epoch.state_dict()
        if divided is not None:
            own |= {DIVIDED: divided.part(self.book.best_model), OWN_ROWS: divided.has_own_rows}
        return ResumePoint(
            step=self.book.state.step,
            shared={
                **self.replica.state_dict(),
                "strategy": synchronizer.state_dict(),
                **self.book.state_dict(),
                **({} if divided is None else {"best_model": None}),
                "callbacks": states_of(self.replica.config.callbacks),
                "attributes": attributes,
                OWN_STATES: kept,
            },
            rank_state={
                **own,
                "attributes": attributes,
                OWN_STATES: kept,
                "strategy": synchronizer.rank_state_dict(),
                "own": self._own_state(),
                "gradient_norms": self.step.gradient_norms,
                "watch": self.step.watch.state_dict(),
                "requests": self.requests.state_dict(),
            },
        )

    def restore(self, point: ResumePoint, *, seed: int, rank: int) -> None:
        """Go back to ``point``; bit-exact if it holds this rank's own state.

        If it holds what all ranks had `united`, the epoch goes on, with random numbers that no rank
        has drawn yet. Otherwise an epoch that was under way is begun anew with the checkpoint's
        weights.

        Raises:
            StorageError: the rank's own state has not the form that `snapshot` gives it.
        """
        state = point.rank_state
        if self.held is not None:  # before weights, which may be of other layers
            self.held.load_state_dict((state or point.shared).get("attributes"))
        self.replica.kept.load_state_dict((state or point.shared).get(OWN_STATES))
        best = self._restore_weights(point)
        synchronizer = self.replica.synchronizer
        was_divided = point.parts is not None and synchronizer.divided is None
        if "strategy" in point.shared and not was_divided:  # of an earlier fit there may be none
            synchronizer.load_state_dict(point.shared["strategy"])
        else:
            synchronizer.begin()
        self.book.load_state_dict({**point.shared, "best_model": best})
        if "callbacks" in point.shared:  # those of an earlier fit are not asked
            give_states(self.replica.config.callbacks, point.shared["callbacks"])
        if state is None:
            self.book.state.begin_epoch_anew()
            self.epoch.begin(self.book.state.step)
            seed_everything(seed, rank, self.book.state.step)
            return
        try:
            self._restore_rank(state, is_united="rng" not in state, rank=rank)
            if "rng" in state:
                set_random_state(state["rng"])
        except SparkDLError:
            raise
        except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            raise StorageError(
                f"what rank {rank} has kept in the checkpoint of step {point.step} is of another "
                f"form ({type(error).__name__}: {error}); remove this checkpoint, and the fit goes "
                "on from the one before"
            ) from error
        if "rng" not in state:
            seed_everything(seed, rank, self.book.state.step)

    def _restore_weights(self, point: ResumePoint) -> dict[str, Any] | None:
        """Restore all that the replica holds; return the best weights, as they lie here."""
        replica, shared, divided = self.replica, point.shared, self.replica.synchronizer.divided
        if divided is None and point.parts is None:
            replica.load_state_dict(shared)
            found: dict[str, Any] | None = shared["best_model"]
            return found
        if divided is None:
            divided = DividedState(replica.module, replica.synchronizer.optimizer)
        best = divided.load([whole_part(shared)] if point.parts is None else point.parts())
        buffers = {k: v for k, v in shared["model"].items() if k not in divided.parameters}
        give_tensors(replica.own_module, buffers)
        others = {name: shared[name] for name in ("scaler", "scheduler")}
        replica.load_state_dict({**others, "optimizer": None})
        check_sizes(replica.own_module)
        return best

    def _restore_rank(self, state: dict[str, Any], *, is_united: bool, rank: int) -> None:
        replica = self.replica
        if state["own"] is not None:
            replica.load_state_dict(state["own"])
        if not is_united:  # of what is united, no rank has kept anything of its own
            replica.synchronizer.load_rank_state_dict(state["strategy"])
        self.step.watch.load_state_dict(state["watch"])
        self.requests.load_state_dict(state["requests"])
        self.step.gradient_norms.copy_(state["gradient_norms"])  # all ranks note the same
        self.epoch.load_state_dict(state, is_united=is_united, rank=rank)

    def _own_state(self) -> dict[str, Any] | None:
        """Return what is equal on ranks unless they train apart (fp16 skips steps on some only)."""
        synchronizer = self.replica.synchronizer
        if not synchronizer.trains_apart:
            return None
        own = self.replica.state_dict()
        del own["model"]
        divided = synchronizer.divided
        is_own = synchronizer.keeps_optimizer and (divided is None or not divided.is_kept)
        return {**own, "optimizer": plain_state(synchronizer.optimizer) if is_own else None}


def united(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Unite the rank states of a gang, for a gang of another size to go on from.

    For strategies with `SyncStrategy.is_elastic`. Buffers become their mean, as at an epoch's end;
    what belongs to shards stays theirs.

    Args:
        states: of all ranks, in their order, as `RankState.snapshot` gave them.
    """
    states = [state for state in states if state.get(OWN_ROWS, True)]
    first = states[0]
    if "shards" in first:
        shards = {number: own for state in states for number, own in state["shards"].items()}
        return {**first, "shards": shards}
    buffers = merge([state["buffers"] for state in states], [1.0] * len(states))
    sums = torch.stack([state["epoch_sums"] for state in states]).sum(0)
    collected = [state["collected"] for state in states if "collected" in state]
    known = {name: value for name, value in first.items() if name not in ("rng", DIVIDED, OWN_ROWS)}
    return {**known, "epoch_sums": sums, "buffers": buffers, "collected": collected}
