"""Ends a fit whose loss has run away."""

from __future__ import annotations

import math
from collections import deque
from typing import Any

from sparkdl.errors import TrainingDiverged

WINDOW = 10
"""Losses over which a mean is taken; one bad batch is no divergence."""


class LossWatch:
    """Compares the mean of the newest losses with that of the first.

    Args:
        factor: the loss has exploded when the newest mean is more than so many times the first;
            None looks for infinities and NaN only. Losses that begin at or below zero cannot be
            judged by a factor, and are not.
    """

    def __init__(self, factor: float | None) -> None:
        self._factor = factor
        self._first: list[float] = []
        self._newest: deque[float] = deque(maxlen=WINDOW)

    def look(self, loss: float, step: int) -> None:
        """Take note of the loss of step number ``step``, from 1.

        Raises:
            TrainingDiverged: it is not finite, or has exploded.
        """
        if not math.isfinite(loss):
            raise diverged(loss, f"at step {step}")
        if self._factor is None:
            return
        if len(self._first) < WINDOW:
            self._first.append(loss)
            return
        self._newest.append(loss)
        first = sum(self._first) / WINDOW
        newest = sum(self._newest) / WINDOW
        if len(self._newest) == WINDOW and first > 0 and newest > self._factor * first:
            raise diverged(newest, f"at step {step}, {newest / first:.0f} times that of the start")

    def state_dict(self) -> dict[str, Any]:
        """The losses that are compared."""
        return {"first": list(self._first), "newest": list(self._newest)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` gave."""
        self._first = list(state["first"])
        self._newest = deque(state["newest"], maxlen=WINDOW)


def diverged(loss: float, where: str) -> TrainingDiverged:
    """The error for a loss that has run away."""
    return TrainingDiverged(
        f"the loss is {loss:.4g} {where}; lower the learning rate, set gradientClipNorm, check the "
        "features for NaN, infinite or very large values, or use a wider precision"
    )
