"""What becomes of the replicas' mean at the end of a round? The step that follows averaging.

An outer rule sees where the round began (the anchor) and where the replicas came to on average,
and says where the next round begins. It is the same in a gang and in rounds, where the driver
applies it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch


class OuterRule(ABC):
    """A rule at work; all ranks call it with equal values, so that their states stay equal."""

    @abstractmethod
    def step(
        self, anchor: Sequence[torch.Tensor], mean: Sequence[torch.Tensor], learning_rate: float
    ) -> None:
        """Overwrite ``mean`` with the parameters that begin the next round.

        Args:
            anchor: the trained parameters when the round began; left as they are.
            mean: the mean of the replicas' parameters at its end.
            learning_rate: that of the replicas' optimizers at the end of the round.
        """

    def state_dict(self) -> dict[str, Any]:
        """What the rule must remember."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: B027  # may stay
        """Restore what `state_dict` gave."""


def moments(
    saved: Sequence[torch.Tensor], parameters: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """What a rule remembers of each parameter, on its device; zeros if there is nothing yet."""
    if not saved:
        return [torch.zeros_like(parameter) for parameter in parameters]
    return [one.to(parameter) for one, parameter in zip(saved, parameters, strict=True)]
