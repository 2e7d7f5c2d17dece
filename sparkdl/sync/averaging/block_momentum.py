"""Block momentum (CNTK's BMUF): the mean of the replicas is a gradient, and has momentum.

Chen & Huo, "Scalable Training of Deep Learning Machines by Incremental Block Training with
Intra-block Parallel Optimization and Blockwise Model-Update Filtering", ICASSP 2016.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sparkdl.config import require
from sparkdl.sync.averaging.averaging import AveragingStrategy, OptimizerState, check_choices
from sparkdl.sync.averaging.outer_step import MomentumRule, OuterRule
from sparkdl.sync.averaging.period import check_period


@dataclass(frozen=True, kw_only=True)
class BlockMomentum(AveragingStrategy):
    """Filters the replicas' mean over rounds: ``W`` replicas in a round go ``W`` times as far.

    The change of the mean over a round counts as it is, by the mean over replicas, as Chen & Huo
    have it; CNTK multiplies the sum over replicas by one minus the block momentum, which is the
    same for the default momentum. Keep the momentum of the replicas' own optimizer at most 0.9,
    and begin from weights that were trained a little: the first rounds are long steps otherwise.
    """

    averaging_period: int = 16
    """Steps of a round (a block)."""
    block_momentum: float | None = None
    """None: one minus one by the number of replicas, as Chen & Huo advise. Without Nesterov's
    form and with a block learning rate of 1, momentum 0 is plain averaging."""
    block_learning_rate: float = 1.0
    """Factor by which the change of a round is multiplied."""
    nesterov: bool = True
    """True if rounds begin where momentum alone would lead."""
    optimizer_state: OptimizerState = "reset"
    """Treatment of the optimizers' states: by default each round begins with new ones, as in CNTK,
    so that the momentum of the last round does not act twice."""

    def __post_init__(self) -> None:
        check_period(self.averaging_period)
        momentum, rate = self.block_momentum, self.block_learning_rate
        require(0 <= (momentum or 0) < 1, "block_momentum must be in [0, 1)", momentum)
        require(rate > 0, "block_learning_rate must be positive", rate)
        check_choices(optimizer_state=self.optimizer_state)

    def make_outer(self, world_size: int) -> OuterRule:
        momentum = self.block_momentum
        if momentum is None:
            momentum = 1 - 1 / world_size
        return BlockMomentumRule(momentum, self.block_learning_rate, self.nesterov)


class BlockMomentumRule(MomentumRule):
    """``D <- momentum * D + learning_rate * (mean - anchor)``, and ``W <- W + D``.

    A round begins from ``W``, or with Nesterov's form from ``W + momentum * D``; ``mean - anchor``
    is counted from there.
    """

    saved_as = "updates"

    def __init__(self, momentum: float, learning_rate: float, nesterov: bool) -> None:
        super().__init__(momentum, learning_rate)
        self._nesterov = nesterov

    def step(
        self, anchor: Sequence[torch.Tensor], mean: Sequence[torch.Tensor], learning_rate: float
    ) -> None:
        for begin, weight, update in zip(anchor, mean, self.moments(anchor), strict=True):
            gain = weight - begin
            weight.copy_(begin)
            if self._nesterov:
                weight.sub_(update, alpha=self._momentum)  # back from where the round began to W
            update.mul_(self._momentum).add_(gain, alpha=self._learning_rate)
            weight.add_(update)
            if self._nesterov:
                weight.add_(update, alpha=self._momentum)
