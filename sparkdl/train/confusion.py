"""What does a classifier take for what, on the validation rows? Counts, which add up over ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

MOST_CLASSES = 100
"""With more, nobody could read the matrix, and it would travel for nothing."""


class Confusion:
    """One rank's counts of one evaluation: label by prediction."""

    def __init__(self) -> None:
        """Count nothing yet; how many classes there are, the first output tells."""
        self._counts: torch.Tensor | None = None

    def reset(self) -> None:
        """Forget all rows."""
        self._counts = None

    def update(self, probabilities: Any, target: Any) -> None:
        """Count a batch; what is no classification of rows is passed over.

        Args:
            probabilities: ``(batch, classes)``, or of class 1 alone, ``(batch,)``, ``(batch, 1)``.
            target: ``(batch,)`` or ``(batch, 1)``; labels that are no class do not count.
        """
        both = (probabilities, target)
        if not all(isinstance(v, torch.Tensor) and v.dim() in (1, 2) for v in both):
            return
        if target.dim() == 2 and target.shape[1] == 1:
            target = target[:, 0]
        single = probabilities.dim() == 1 or probabilities.shape[1] == 1
        num_classes = 2 if single else probabilities.shape[1]
        if target.dim() != 1 or num_classes > MOST_CLASSES:
            return
        predicted = probabilities.flatten() > 0.5 if single else probabilities.argmax(1)
        label = target.long()
        known = (label >= 0) & (label < num_classes)
        place = (label * num_classes + predicted.long())[known]
        counts = torch.bincount(place, minlength=num_classes**2).view(num_classes, num_classes)
        self._counts = counts if self._counts is None else self._counts + counts

    def state(self) -> tuple[int, dict[str, torch.Tensor]]:
        """As a metric's: whether there is anything, and the counts."""
        return (0, {}) if self._counts is None else (1, {"counts": self._counts})


def added(states: Sequence[tuple[int, dict[str, torch.Tensor]]]) -> list[list[int]] | None:
    """The counts of several ranks together; None if none has any."""
    counts = [values["counts"].cpu() for number, values in states if number]
    if not counts:
        return None
    total: list[list[int]] = sum(counts[1:], start=counts[0]).tolist()
    return total
