"""Estimates which part of its group's batch a rank has, without asking the others at each step."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from sparkdl.comm.communicator import Communicator
from sparkdl.storage.stateful import Stateful


class BatchShare(Stateful):
    """Estimates a rank's part, by the samples' weights, in the united batch of a group of ranks.

    The loop says how many samples all ranks have in a step, but not what they weigh and how many of
    them are the group's. Their weight per sample is taken from the closed rounds; the first step's
    is asked for. Where all ranks are the group and samples count alike, the shares are exact.
    """

    rank_state: ClassVar = ("total", "divisors")

    def __init__(self, group: Communicator, device: torch.device) -> None:
        self._group = group
        self._device = device
        self._ratio: float | None = None
        self._total = 0.0
        self._divisors = 0.0
        self._round = [0.0, 0.0]

    def of(self, weight: float, divisor: float) -> float:
        """The share of this rank's ``weight`` in the group's batch, of ``divisor`` samples in all.

        Collective until it is once positive.
        """
        self._round = [self._round[0] + weight, self._round[1] + divisor]
        if self._group.world_size == 1:
            return float(weight > 0)
        if self._ratio is None:
            total = self._sum(weight)
            if total == 0:
                return 0.0
            self._ratio = total / divisor
        return weight / (divisor * self._ratio)

    def close_round(self) -> None:
        """Learn from the steps since the last call. Collective."""
        weight, divisor = self._round
        self._round = [0.0, 0.0]
        self._total += self._sum(weight)
        self._divisors += divisor
        if self._total > 0:
            self._ratio = self._total / self._divisors

    def load_rank_state_dict(self, state: dict[str, Any]) -> None:
        super().load_rank_state_dict(state)
        self._ratio = self._total / self._divisors if self._total > 0 else None

    def _sum(self, value: float) -> float:
        total = torch.tensor([value], dtype=torch.float64, device=self._device)
        self._group.all_reduce(total)
        return total.item()
