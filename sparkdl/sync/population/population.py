"""Bases of populations: replicas that keep states of their own, and compete or are merged.

A population lives on plain Spark stages. A member is a replica with its own weights, optimizer
state and schedule; there are as many as shards with training rows. The driver holds the states of
all members between rounds, and each travels to its own task only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, NoReturn

import numpy as np

from sparkdl.data.plan import Shard, TrainPlan, steps_per_epoch
from sparkdl.errors import ConfigError, DataError
from sparkdl.sync.averaging.period import check_period
from sparkdl.sync.exchange_pattern import ModelSize, Pattern
from sparkdl.sync.strategy import MakeOptimizer, SyncStrategy

if TYPE_CHECKING:
    from torch import nn

    from sparkdl.comm.communicator import Communicator


@dataclass(frozen=True, kw_only=True)
class PopulationStrategy(SyncStrategy):
    """Base of strategies whose replicas go on from states of their own after every round."""

    prefers_rounds: ClassVar[bool] = True

    @property
    def trains_apart(self) -> bool:
        return True

    def why_not_rounds(self) -> str | None:
        return None

    def pattern(self, size: ModelSize, world_size: int) -> Pattern:
        """See `SyncStrategy.pattern`; nothing is exchanged before the end."""
        return replace(super().pattern(size, world_size), period=math.inf)


@dataclass(frozen=True, kw_only=True)
class Competition(PopulationStrategy):
    """Base of populations whose members are measured against each other.

    They are measured on the validation rows. Without ``validationIndicatorCol``, the last rows of
    every shard are set aside for it; as rows lie in the order of their hashes, that is a random
    part of them.
    """

    period: int = 100
    """Steps that members train between two competitions; epochs do not matter for it."""
    holdout_fraction: float = 0.1
    """Part of each shard's rows that is set aside where no rows are marked for validation."""

    def __post_init__(self) -> None:
        check_period(self.period, name="period")
        if not 0 < self.holdout_fraction <= 0.5:
            raise ConfigError(
                f"holdout_fraction must be in (0, 0.5]; received {self.holdout_fraction}"
            )

    def why_not_gang(self) -> str | None:
        return (
            "its members never agree on one set of weights, as the workers of a gang must whenever "
            "an epoch ends"
        )

    def hold_out(self, plan: TrainPlan) -> TrainPlan:
        if plan.num_validation_rows:
            return plan
        shards = tuple(_without_last(shard, self.holdout_fraction) for shard in plan.shards)
        if not any(shard.num_validation_rows for shard in shards):
            raise DataError(
                f"{type(self).__name__} measures models on rows that are not trained on, and there "
                "are none to set aside: every shard has one row at most; lower numWorkers, give "
                "more rows, or mark some with validationIndicatorCol"
            )
        amended = replace(plan, shards=shards)
        rows = [amended.rows_of(rank) for rank in range(plan.world_size)]
        return replace(amended, steps_per_epoch=steps_per_epoch(rows, plan.batch_size))

    def stages_pattern(self, size: ModelSize) -> Pattern:
        return replace(super().stages_pattern(size), period=self.period)

    def is_due(self, step: int) -> bool:
        """Whether members compete before step number ``step``, from 0, is taken."""
        return step > 0 and step % self.period == 0

    def setup(
        self, model: nn.Module, make_optimizer: MakeOptimizer, comm: Communicator
    ) -> NoReturn:
        """Refuse; see `why_not_gang`.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(f"{type(self).__name__} does not run in a gang: {self.why_not_gang()}")


def members_of(plan: TrainPlan) -> list[int]:
    """The shards with training rows: the one at position ``m`` is where member ``m`` begins."""
    return [shard.shard_id for shard in plan.shards if shard.num_rows]


def best_first(losses: Sequence[float]) -> list[int]:
    """Positions from the smallest loss to the largest; what is not finite comes last."""
    return sorted(
        range(len(losses)),
        key=lambda i: (not math.isfinite(losses[i]), losses[i] if math.isfinite(losses[i]) else 0),
    )


def drawn(seed: int, purpose: int, *numbers: int) -> np.random.Generator:
    """A generator whose stream follows from the run's seed and some numbers, on any machine."""
    return np.random.default_rng(np.random.SeedSequence([seed % 2**64, purpose, *numbers]))


def _without_last(shard: Shard, fraction: float) -> Shard:
    if shard.num_rows < 2:
        return shard
    held = min(max(1, round(fraction * shard.num_rows)), shard.num_rows - 1)
    return replace(shard, num_rows=shard.num_rows - held, num_validation_rows=held)
