"""One-shot averaging: replicas train apart to the end, and then take their mean.

Zinkevich et al., "Parallelized Stochastic Gradient Descent", NIPS 2010; Mann et al., "Efficient
Large-Scale Distributed Training of Conditional Maximum Entropy Models", NIPS 2009, for the weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from sparkdl.comm.communicator import Communicator
from sparkdl.sync.apart import OwnWeightsSynchronizer
from sparkdl.sync.averaging.averaging import Weighting, check_choices
from sparkdl.sync.averaging.mean import MeanOfReplicas
from sparkdl.sync.module_tensors import give_tensors, places_of
from sparkdl.sync.population.population import PopulationStrategy
from sparkdl.sync.strategy import MakeOptimizer, SetupArguments


@dataclass(frozen=True, kw_only=True)
class OneShotAveraging(PopulationStrategy):
    """Each shard's replica trains by itself for all epochs; the result is the mean of them.

    Proved for convex losses only: of networks that have gone different ways the mean may be worse
    than any. On plain Spark stages, where it is one job per epoch, or in a gang.

    At the end of every epoch the mean as it would be then is what is evaluated, what early stopping
    sees and what callbacks get; the replicas go on from their own weights all the same. ``loss`` in
    the history is the mean over the replicas' own training losses.
    """

    weighting: Weighting = "examples"
    """A replica counts by all samples it has seen (their weights), or ``"equal"``: as others."""

    def __post_init__(self) -> None:
        check_choices(weighting=self.weighting)

    def setup(
        self, model: nn.Module, make_optimizer: MakeOptimizer, comm: Communicator
    ) -> OneShotSynchronizer:
        return OneShotSynchronizer(model, make_optimizer, comm, strategy=self)


class OneShotSynchronizer(OwnWeightsSynchronizer):
    """See `OneShotAveraging`. Buffers are the replica's own as well, and part of the mean."""

    buffers_agree = True
    rank_state: ClassVar = (*OwnWeightsSynchronizer.rank_state, "own_buffers")
    _own_buffers: dict[str, torch.Tensor | None] | None = None
    """The replica's buffers while the model shows the mean."""

    def __init__(self, *setup: *SetupArguments, strategy: OneShotAveraging) -> None:
        super().__init__(*setup)
        self._weighting = strategy.weighting
        self._mean = MeanOfReplicas(self.model, self.optimizer, self._comm)

    def zero_gradients(self) -> None:
        if self._own_buffers is not None:
            give_tensors(self.model, self._own_buffers)
            self._own_buffers = None
        super().zero_gradients()

    def show_agreed(self) -> None:
        self._own_buffers = {
            place.name: place.value if place.value is None else place.value.clone()
            for place in places_of(self.model)
            if place.kind != "parameter"
        }
        weight = self.round_sums[1].item()
        weight = float(weight > 0) if self._weighting == "equal" else weight
        shares = self._mean.shares(weight, with_buffers=True)
        if any(shares):
            self._mean.tensors(self.parameters, shares)
            self._mean.buffers(shares)
