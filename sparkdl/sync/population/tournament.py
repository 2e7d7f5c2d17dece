"""A tournament of models: pairs of trainers meet, and the better model goes on.

Jacobs et al., "Towards Scalable Parallel Training of Deep Neural Networks", MLHPC 2017: LTFB, "let
a thousand flowers bloom", as in LBANN.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import Literal

from sparkdl.config import require
from sparkdl.data.plan import TrainPlan
from sparkdl.errors import DataError
from sparkdl.sync.population.population import Competition, drawn, members_of

logger = logging.getLogger(__name__)

_PAIRS = 1
"""Purpose of the draws, so that they differ from those for others."""


@dataclass(frozen=True, kw_only=True)
class Tournament(Competition):
    """Each shard has a trainer with a model of its own; pairs compete every ``period`` steps.

    Trainers begin from the same weights and see their own shard only. In a contest each of the two
    measures both models on its own tournament set, which are its shard's validation rows, and goes
    on with the better one, by ``monitor``; two partners may decide differently. Who meets whom is
    drawn from the run's seed and the step; an odd one out has no contest. A trainer whose shard has
    no validation row cannot judge and keeps its own model. The result is the model that is best on
    the validation rows of all shards, which all models are measured on at the end of every epoch.

    With ``mutations``, trainers have hyperparameters of their own. These travel with the model that
    wins: who takes over a model goes on with its hyperparameters too.

    Nothing is averaged, so it also fits models that cannot be, such as those of adversaries.

    In the history, ``val_loss`` and the metrics are those of the best model, ``best_member`` is the
    shard where it was trained, ``val_loss_spread`` (or that of another ``monitor``) how much worse
    the worst is, and ``takeovers`` the number of lost contests of the epoch;
    ``TrainingSummary.population`` has each contest.
    """

    exchange: Literal["weights", "all"] = "all"
    """State that a loser takes over: weights and buffers, or the optimizer's state as well."""

    def __post_init__(self) -> None:
        super().__post_init__()
        rule = "exchange must be 'weights' or 'all'"
        require(self.exchange in ("weights", "all"), rule, self.exchange)

    def hold_out(self, plan: TrainPlan) -> TrainPlan:
        plan = super().hold_out(plan)
        trainers = [shard for shard in plan.shards if shard.num_rows]
        blind = [shard.shard_id for shard in trainers if not shard.num_validation_rows]
        if len(blind) == len(trainers):
            raise DataError(
                "no shard has both training rows and validation rows, so no trainer of the "
                "Tournament could judge; mark more rows with validationIndicatorCol, or lower "
                "numWorkers"
            )
        if blind:
            logger.warning(
                "shard(s) %s have no validation rows: their trainers cannot judge, and keep their "
                "own models; mark more rows, or use fewer shards",
                blind,
            )
        return plan

    def rivals(self, plan: TrainPlan, seed: int, step: int) -> dict[int, int]:
        """Draw who meets whom before step ``step``: member -> member, both ways; maybe nobody."""
        if not self.is_due(step):
            return {}
        order = drawn(seed, _PAIRS, step).permutation(len(members_of(plan))).tolist()
        pairs = list(zip(order[0::2], order[1::2], strict=False))  # an odd one out stays alone
        return dict(pairs) | {other: one for one, other in pairs}


def has_won(rival_cost: float, own_cost: float) -> bool:
    """Return True if the rival's model is the better one; not if equal, and NaN is never better."""
    if math.isfinite(rival_cost) and not math.isfinite(own_cost):
        return True
    return rival_cost < own_cost
