"""Elastic averaging: replicas explore on their own, tied to a common center by springs.

Zhang, Choromanska & LeCun, "Deep learning with Elastic Averaging SGD", NeurIPS 2015, in its
synchronous form: every rank holds the center, and moves it by the same sum.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from sparkdl.config import TrainConfig, require
from sparkdl.errors import ConfigError
from sparkdl.mesh import Mesh
from sparkdl.sync.apart import OWN_WEIGHTS, OwnWeightsSynchronizer, why_not_apart
from sparkdl.sync.averaging.period import check_period
from sparkdl.sync.collective import CollectiveStrategy
from sparkdl.sync.exchange_pattern import ModelSize, Pattern
from sparkdl.sync.gradient_buckets import Changes
from sparkdl.sync.strategy import SetupArguments

PAPERS_BETA = 0.9
"""World size times elasticity in the paper's experiments."""


@dataclass(frozen=True, kw_only=True)
class ElasticAveraging(CollectiveStrategy):
    """Every ``averaging_period`` steps replicas and center attract each other.

    What is evaluated, kept in checkpoints and returned is the center, which lags behind the
    replicas: an epoch should have many periods. Replicas keep weights and optimizers of their own.
    With SGD and Nesterov's momentum as the optimizer this is the paper's EAMSGD.
    """

    averaging_period: int = 10
    """Steps between two pulls, of the run: epochs do not begin them anew."""
    elasticity: float | None = None
    """Part of its distance to the center by which a replica moves to it, and the center to the
    replica; None: the paper's 0.9 by the number of replicas. 0 gives independent runs."""

    def __post_init__(self) -> None:
        check_period(self.averaging_period)
        require(0 <= (self.elasticity or 0) < 1, "elasticity must be in [0, 1)", self.elasticity)

    trains_apart = True

    def why_not_rounds(self) -> str | None:
        return OWN_WEIGHTS

    def why_not_divided(self, mesh: Mesh) -> str | None:
        return why_not_apart(mesh)

    def check(self, config: TrainConfig, world_size: int) -> None:
        super().check(config, world_size)
        pull = self.elasticity_of(world_size) * world_size
        if pull >= 1:
            raise ConfigError(
                f"elasticity {self.elasticity} times {world_size} replicas is {pull:.3g}, and must "
                "be less than 1: the center would be pulled past the replicas' mean and swing; "
                "lower it, or leave it out for 0.9 by the number of replicas"
            )

    def elasticity_of(self, world_size: int) -> float:
        """Return the value of ``elasticity`` in a gang of ``world_size``."""
        return PAPERS_BETA / world_size if self.elasticity is None else self.elasticity

    def pattern(self, size: ModelSize, world_size: int) -> Pattern:
        return replace(super().pattern(size, world_size), period=self.averaging_period)

    def setup(self, *setup: *SetupArguments) -> ElasticSynchronizer:
        return ElasticSynchronizer(*setup, strategy=self)


class ElasticSynchronizer(OwnWeightsSynchronizer):
    """See `ElasticAveraging`."""

    shared_state: ClassVar = ("center", "pulls")
    rank_state: ClassVar = (*OwnWeightsSynchronizer.rank_state, "pulls")

    def __init__(self, *setup: *SetupArguments, strategy: ElasticAveraging) -> None:
        super().__init__(*setup)
        self._period = strategy.averaging_period
        self._elasticity = strategy.elasticity_of(self._comm.world_size)
        self._center = [parameter.detach().clone() for parameter in self.parameters]
        self._pulls = Changes(self.parameters, self._comm, strategy.resolved_compression())

    def begin(self) -> None:
        super().begin()
        self._center = [parameter.detach().clone() for parameter in self.parameters]

    def after_step(self, step: int) -> bool:
        if (step + 1) % self._period == 0:
            self._pull()
        return True

    def show_agreed(self) -> None:
        """See `OwnWeightsSynchronizer.show_agreed`: the center."""
        for parameter, center in zip(self.parameters, self._center, strict=True):
            parameter.copy_(center)

    @torch.no_grad()
    def _pull(self) -> None:
        """Move this replica towards the center, and the center towards all that have trained."""
        self._pulls.take(self.parameters, self._center)
        for parameter, pull in zip(self.parameters, self._pulls.tensors, strict=True):
            parameter.sub_(pull, alpha=self._elasticity)
        has_trained = self.round_sums[1].item() > 0
        self._pulls.start_all(self._elasticity if has_trained else 0.0)
        self._pulls.wait()
        self.round_sums.zero_()
        for center, pull in zip(self._center, self._pulls.tensors, strict=True):
            center.add_(pull)
