"""SlowMo: local SGD whose means have a slow momentum of their own.

Wang et al., "SlowMo: Improving Communication-Efficient Distributed SGD with Slow Momentum",
ICLR 2020.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sparkdl.config import require
from sparkdl.errors import ConfigError
from sparkdl.sync.averaging.averaging import AveragingStrategy, OptimizerState, check_choices
from sparkdl.sync.averaging.outer_step import MomentumRule, OuterRule
from sparkdl.sync.averaging.period import check_period


@dataclass(frozen=True, kw_only=True)
class SlowMo(AveragingStrategy):
    """Adds to each round's mean a momentum that is measured in units of the learning rate.

    So a falling learning rate makes the remembered steps shorter too. FairScale's documentation
    advises a slow momentum of 0.2 for 4 replicas, 0.5 for 8 and 0.6 for 16. With momentum 0 and
    learning rate 1 it is plain averaging.
    """

    averaging_period: int = 12
    """Steps of a round."""
    slow_momentum: float = 0.5
    """The paper's beta."""
    slow_learning_rate: float = 1.0
    """The paper's alpha."""
    optimizer_state: OptimizerState = "reset"
    """Treatment of the optimizers' states: new ones each round, as the paper has it for SGD, so
    that fast and slow momentum do not add up; for Adam it keeps them."""

    def __post_init__(self) -> None:
        check_period(self.averaging_period)
        momentum, rate = self.slow_momentum, self.slow_learning_rate
        require(0 <= momentum < 1, "slow_momentum must be in [0, 1)", momentum)
        require(rate > 0, "slow_learning_rate must be positive", rate)
        check_choices(optimizer_state=self.optimizer_state)

    def make_outer(self, world_size: int) -> OuterRule:
        return SlowMoRule(self.slow_momentum, self.slow_learning_rate)


class SlowMoRule(MomentumRule):
    """``u <- momentum * u + (anchor - mean) / h``, and ``anchor - alpha * h * u`` begins anew.

    ``h`` is the replicas' learning rate. Where a schedule has come to 0, steps have no unit: such
    a round adds nothing to ``u``, and the mean stays as it is.
    """

    saved_as = "momenta"

    def step(
        self, anchor: Sequence[torch.Tensor], mean: Sequence[torch.Tensor], learning_rate: float
    ) -> None:
        """See `OuterRule.step`; ConfigError if the optimizer has no learning rate."""
        if not learning_rate >= 0:
            raise ConfigError(
                "SlowMo needs an optimizer with a learning rate ('lr' in its parameter groups); "
                "use BlockMomentum or LocalSGD with this optimizer"
            )
        if learning_rate == 0:
            return
        for begin, weight, momentum in zip(anchor, mean, self.moments(anchor), strict=True):
            momentum.mul_(self._momentum).add_((begin - weight) / learning_rate)
            weight.copy_(begin).sub_(momentum, alpha=self._learning_rate * learning_rate)
