"""Bases of synchronizers whose replicas train apart: by rounds, or with weights of their own."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import torch
from torch import nn

from sparkdl.comm.communicator import Communicator, counting_anew
from sparkdl.mesh import Mesh
from sparkdl.sync.strategy import MakeOptimizer, Reduced, Synchronizer, parameters_for

OWN_WEIGHTS = "a lost task could not be run again if each replica kept weights of its own"
"""Why strategies of this kind do not run on plain Spark stages."""


def why_not_apart(mesh: Mesh) -> str | None:
    """Why replicas along ``mesh`` cannot train apart; None if they can."""
    if mesh.shard_optimizer:
        return (
            "shard_optimizer divides one replica along data, so none trains apart; use "
            "Mesh(data=..., shard=...)"
        )
    return None


class ApartSynchronizer(Synchronizer):
    """Trains one replica by itself, and counts the weights of the samples of the round."""

    trains_apart = True

    def __init__(self, model: nn.Module, make_optimizer: MakeOptimizer, comm: Communicator) -> None:
        self.model = model
        self._comm = counting_anew(comm)
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = make_optimizer(parameters_for(make_optimizer, model))
        self.round_sums = torch.zeros(2, dtype=torch.float64)
        """Weighted losses and weights of the samples of the present round, ``(2,)``."""
        self.round_steps = 0

    @property
    def bytes_sent(self) -> int:
        return self._comm.bytes_sent

    def follow_freezing(self) -> None:
        """See `Synchronizer.follow_freezing`; alone, a replica agrees with itself."""
        if self._comm.world_size > 1:
            super().follow_freezing()
        self.parameters = self.trained_parameters()

    def reduce_gradients(self, sums: torch.Tensor, divisor: float) -> Reduced:
        self.round_sums += sums.cpu()
        return Reduced(sums, divisor)

    def after_step(self, step: int) -> bool:
        """See `Synchronizer.after_step`; alone, a replica always agrees with itself."""
        self.round_steps += 1
        return True

    def close_round(self) -> None:
        """Begin to count anew."""
        self.round_sums.zero_()
        self.round_steps = 0

    def begin(self) -> None:
        self.round_sums.zero_()
        self.round_steps = 0

    def learning_rate(self) -> float:
        """That of the first parameter group."""
        return float(self.optimizer.param_groups[0].get("lr", float("nan")))


class OwnWeightsSynchronizer(ApartSynchronizer):
    """Trains one replica by itself; what all agree on is in the model between rounds only.

    Buffers, such as BatchNorm's statistics, are those of the replicas: the loop averages them at
    the end of every epoch. The optimizer's state is the replica's own.
    """

    keeps_optimizer = True
    rank_state: ClassVar[tuple[str, ...]] = ("own", "round_sums")
    _own: list[torch.Tensor] | None = None
    """The replica's weights while the model shows the agreed ones; if a checkpoint does not hold
    them, the replica begins from the agreed."""

    def follow_freezing(self) -> None:
        """See `Synchronizer.follow_freezing`: weights of its own are those that trained before."""
        Synchronizer.follow_freezing(self)

    @abstractmethod
    def show_agreed(self) -> None:
        """Overwrite the parameters by what all replicas agree on; collective, without gradients."""

    def zero_gradients(self) -> None:
        if self._own is not None:
            with torch.no_grad():
                for parameter, own in zip(self.parameters, self._own, strict=True):
                    parameter.copy_(own)
            self._own = None
        super().zero_gradients()

    def close_round(self) -> None:
        """See `Synchronizer.close_round`; `round_sums` are counted on."""
        if self._own is not None:
            return
        self._own = [parameter.detach().clone() for parameter in self.parameters]
        with torch.no_grad():
            self.show_agreed()
