"""Population based training: members find good hyperparameters while they train.

Jaderberg et al., "Population Based Training of Neural Networks", arXiv 1711.09846; the numbers are
those of the paper and of Ray Tune.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from sparkdl.config import require
from sparkdl.data.plan import TrainPlan
from sparkdl.sync.population.population import (
    Competition,
    best_first,
    drawn,
    is_number,
    members_of,
    sample,
)
from sparkdl.sync.population.ranges import Around, Mutation, Range

# Purposes of the draws, so that they differ from each other.
_EXPLOIT, _EXPLORE = 3, 4


@dataclass(frozen=True, kw_only=True)
class PopulationBasedTraining(Competition):
    """Members train with hyperparameters of their own; bad ones copy good ones and change a bit.

    Member 0 begins with the user's own hyperparameters, the others with values drawn from
    ``mutations``. Every ``period`` steps all members are measured on the validation rows of all
    shards. Each of the worst ``exploit_fraction``, and any whose loss is not finite, takes weights,
    optimizer state and hyperparameters of one of the best ``exploit_fraction``; each of its
    hyperparameters is then drawn anew with ``resample_probability``, or else multiplied by one of
    ``factors`` (of a list of values, the one before or after is taken). The best member is the
    result.

    A member trains on one shard for a period and on the next one in the following period, so that
    it sees all rows in time, and each row is used once an epoch by one member.

    Example::

        PopulationBasedTraining(
            period=200,
            mutations={"learning_rate": Range(1e-4, 1.0, log=True), "momentum": [0.0, 0.9]},
        )

    In the history, ``val_loss``, the metrics and ``learning_rate`` are those of the best member,
    ``best_member`` its number and ``val_loss_spread`` how much worse the worst is;
    ``TrainingSummary.population`` has all members' losses and hyperparameters over time.
    """

    mutations: Mapping[str, Mutation] = field(default_factory=lambda: {"learning_rate": Around()})
    """Hyperparameter -> its values; see `Competition.mutations`."""
    exploit_fraction: float = 0.25
    """Part of the members that copies, and part that is copied; at most half."""
    resample_probability: float = 0.25
    """Probability with which a member that copies another draws a hyperparameter anew."""
    factors: Sequence[float] = (0.8, 1.2)
    """Factors, by one of which the hyperparameters that are not drawn anew are multiplied."""

    def __post_init__(self) -> None:
        super().__post_init__()
        exploited, drawn_anew = self.exploit_fraction, self.resample_probability
        require(0 < exploited <= 0.5, "exploit_fraction must be in (0, 0.5]", exploited)
        require(0 <= drawn_anew <= 1, "resample_probability must be in [0, 1]", drawn_anew)
        are_positive = bool(self.factors) and all(is_number(f) and f > 0 for f in self.factors)
        require(are_positive, "factors must be positive numbers", self.factors)
        rule = "mutations must name at least one hyperparameter"
        require(bool(self.mutations), rule, self.mutations)

    def donors(self, costs: Sequence[float], seed: int, step: int) -> dict[int, int]:
        """Return which member copies which other, given the costs of all; best ones copy nobody."""
        order = best_first(costs)
        count = min(math.ceil(self.exploit_fraction * len(costs)), len(costs) // 2)
        best = [member for member in order[:count] if math.isfinite(costs[member])]
        lost = {member for member in order if not math.isfinite(costs[member])}
        if not best:
            return {}
        return {
            member: best[int(drawn(seed, _EXPLOIT, step, member).integers(len(best)))]
            for member in sorted(lost.union(order[len(order) - count :]))
        }

    def explored(
        self,
        values: Mapping[str, float],
        own: Mapping[str, float],
        *,
        seed: int,
        step: int,
        member: int,
    ) -> dict[str, float]:
        """Return a variation of the hyperparameters that ``member`` has copied."""
        generator = drawn(seed, _EXPLORE, step, member)
        changed = {}
        for name, domain in self.domains(own).items():
            if generator.random() < self.resample_probability:
                changed[name] = sample(domain, generator)
            elif isinstance(domain, Range):
                changed[name] = domain.perturbed(values[name], self.factors, generator)
            else:
                changed[name] = _neighbour(values[name], domain, generator)
        return changed

    def shard_of(self, plan: TrainPlan, member: int, step: int) -> int:
        """Return the shard of ``member`` for the period in which step number ``step`` lies."""
        shards = members_of(plan)
        return shards[(member + step // self.period) % len(shards)]


def _neighbour(value: float, values: Sequence[float], generator: np.random.Generator) -> float:
    """The value before or after in the list; any, if it is not there."""
    if value not in values:
        return sample(values, generator)
    position = list(values).index(value) + (1 if generator.random() < 0.5 else -1)
    return float(values[min(max(position, 0), len(values) - 1)])
