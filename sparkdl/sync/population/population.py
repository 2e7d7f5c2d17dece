"""Bases of populations: replicas that keep states of their own, and compete or are merged.

A population lives on plain Spark stages. A member is a replica with its own weights, optimizer
state and schedule; there are as many as shards with training rows. The driver holds the states of
all members between rounds, and each travels to its own task only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

import numpy as np

from sparkdl.config import Mode, TrainConfig, direction, require
from sparkdl.data.plan import Shard, TrainPlan, steps_per_epoch
from sparkdl.errors import ConfigError, DataError
from sparkdl.sync.averaging.period import check_period
from sparkdl.sync.exchange_pattern import ModelSize, Pattern
from sparkdl.sync.population.ranges import Around, Mutation, Range
from sparkdl.sync.strategy import MakeOptimizer, SyncStrategy

if TYPE_CHECKING:
    import torch
    from torch import nn

    from sparkdl.comm.communicator import Communicator


_FIRST = 2
"""Purpose of the draws of first values, so that they differ from those for others."""


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

    They are measured on the validation rows. If a DataFrame has none, the last rows of every shard
    are set aside for it; as rows lie in the order of their hashes, that is a random part of them.
    A source must have validation rows of its own.
    """

    period: int = 100
    """Steps that members train between two competitions; epochs do not matter for it."""
    holdout_fraction: float = 0.1
    """Part of each shard's rows that is set aside where no rows are marked for validation."""
    monitor: str = "val_loss"
    """Value of the history by which members are judged: ``val_loss``, or ``val_<metric name>``."""
    mode: Mode = "auto"
    """Rule by which members are better: smaller or larger values; see `EarlyStopping.mode`."""
    mutations: Mapping[str, Mutation] = field(default_factory=dict)
    """Hyperparameter -> its values, of which each member draws its own when it begins; member 0
    has the user's. ``learning_rate``, or a number in torch's parameter groups, such as
    ``weight_decay``. A schedule keeps its shape; its height is the member's learning rate."""

    def __post_init__(self) -> None:
        check_period(self.period, name="period")
        direction(self.monitor, self.mode)
        for name, mutation in self.mutations.items():
            _check_mutation(name, mutation)
        fraction = self.holdout_fraction
        require(0 < fraction <= 0.5, "holdout_fraction must be in (0, 0.5]", fraction)

    def check(self, config: TrainConfig, world_size: int) -> None:
        super().check(config, world_size)
        names = config.task.default_metrics if config.metrics is None else config.metrics
        known = ["val_loss", *(f"val_{name}" for name in names)]
        if not any(f"{self.monitor}_".startswith(f"{name}_") for name in known):  # or of a label
            raise ConfigError(
                f"{type(self).__name__} judges by {self.monitor!r}, which is not measured on "
                f"validation rows; known: {', '.join(known)}; others need metrics"
            )

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        from sparkdl.sync.population.hyperparameters import first_values

        self.domains(first_values(optimizer, self.mutations))

    def cost(self, record: Mapping[str, float]) -> float:
        """Return the cost of a member, which is to be small; ConfigError if it was not measured."""
        if self.monitor not in record:
            raise ConfigError(
                f"{type(self).__name__} judges by {self.monitor!r}, which is not measured; "
                f"measured are {', '.join(record)}"
            )
        value = record[self.monitor]
        return value if direction(self.monitor, self.mode) == "min" else -value

    def domains(self, own: Mapping[str, float]) -> dict[str, Range | Sequence[float]]:
        """Hyperparameter -> its values, given the user's own; ConfigError for `Around` zero."""
        return {
            name: values.range_of(own[name], name) if isinstance(values, Around) else values
            for name, values in self.mutations.items()
        }

    def first(self, member: int, own: Mapping[str, float], seed: int) -> dict[str, float]:
        """Return the hyperparameters with which a member begins."""
        if member == 0:
            return dict(own)
        generator = drawn(seed, _FIRST, member)
        return {name: sample(values, generator) for name, values in self.domains(own).items()}

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
        steps = steps_per_epoch([shard.num_rows for shard in shards], plan.batch_size)
        return replace(plan, shards=shards, steps_per_epoch=steps)

    def stages_pattern(self, size: ModelSize) -> Pattern:
        return replace(super().stages_pattern(size), period=self.period)

    def is_due(self, step: int) -> bool:
        """Return True if members compete before step number ``step``, from 0, is taken."""
        return step > 0 and step % self.period == 0

    def setup(
        self, model: nn.Module, make_optimizer: MakeOptimizer, comm: Communicator
    ) -> NoReturn:
        """Refuse by a ConfigError; see `why_not_gang`."""
        raise ConfigError(f"{type(self).__name__} does not run in a gang: {self.why_not_gang()}")


def members_of(plan: TrainPlan) -> list[int]:
    """The shards with training rows: the one at position ``m`` is where member ``m`` begins."""
    return [shard.shard_id for shard in plan.shards if shard.num_rows]


def best_first(costs: Sequence[float]) -> list[int]:
    """Positions from the smallest cost to the largest; what is not finite comes last."""
    return sorted(
        range(len(costs)),
        key=lambda i: (not math.isfinite(costs[i]), costs[i] if math.isfinite(costs[i]) else 0),
    )


def sample(values: Range | Sequence[float], generator: np.random.Generator) -> float:
    """One of the values of a hyperparameter."""
    if isinstance(values, Range):
        return values.sample(generator)
    return float(values[int(generator.integers(len(values)))])


def drawn(seed: int, purpose: int, *numbers: int) -> np.random.Generator:
    """A generator whose stream follows from the run's seed and some numbers, on any machine."""
    return np.random.default_rng(np.random.SeedSequence([seed % 2**64, purpose, *numbers]))


def _without_last(shard: Shard, fraction: float) -> Shard:
    if shard.num_rows < 2:
        return shard
    held = min(max(1, round(fraction * shard.num_rows)), shard.num_rows - 1)
    return replace(shard, num_rows=shard.num_rows - held, num_validation_rows=held)


def _check_mutation(name: str, mutation: Any) -> None:
    if isinstance(mutation, Range | Around):
        return
    is_list = isinstance(mutation, Sequence) and not isinstance(mutation, str)
    is_right = bool(is_list and mutation and all(is_number(value) for value in mutation))
    rule = f"mutations['{name}'] must be a Range, an Around or a list of numbers"
    require(is_right, rule, mutation)


def is_number(value: Any) -> bool:
    """True if it is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
