"""How can replicas keep weights of their own, although the loop wants to see what all agree on?

When a round is closed, each replica puts its weights aside and shows the agreed ones; the next
step puts its own back. So a round can be closed at any step without changing the course of
training, and the ends of epochs are no ends of rounds.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch

from sparkdl.sync.averaging.averaging import ApartSynchronizer

OWN_WEIGHTS = "a lost task could not be run again if each replica kept weights of its own"
"""Why strategies of this kind do not run on plain Spark stages."""


class OwnWeightsSynchronizer(ApartSynchronizer):
    """Trains one replica by itself; what all agree on is in the model between rounds only.

    Buffers, such as BatchNorm's statistics, are those of the replicas: the loop averages them at
    the end of every epoch. The optimizer's state is the replica's own.
    """

    keeps_optimizer = True
    _own: Sequence[torch.Tensor] | None = None
    """The replica's weights while the model shows the agreed ones."""

    @abstractmethod
    def show_agreed(self) -> None:
        """Overwrite the parameters by what all replicas agree on; collective, without gradients."""

    def zero_gradients(self) -> None:
        """See `Synchronizer.zero_gradients`."""
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

    def rank_state_dict(self) -> dict[str, Any]:
        """See `Synchronizer.rank_state_dict`."""
        own = None if self._own is None else list(self._own)
        return {"own": own, "round_sums": self.round_sums}

    def load_rank_state_dict(self, state: dict[str, Any]) -> None:
        """See `Synchronizer.load_rank_state_dict`; without it a replica begins from the agreed."""
        self._own = state["own"]
        self.round_sums.copy_(state["round_sums"])
