"""Ends a fit whose loss has run away, and warns of a monitored value that is NaN."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping

from sparkdl.comm.process_group import speaks_for_all
from sparkdl.errors import TrainingDiverged
from sparkdl.storage.stateful import Stateful

logger = logging.getLogger(__name__)

WINDOW = 10
"""Losses over which a mean is taken; one bad batch is no divergence."""


class LossWatch(Stateful):
    """Compares the mean of the newest losses with that of the first.

    The loss has exploded when the newest mean is more than ``factor`` times the first; None looks
    for infinities and NaN only. Losses that begin at or below zero cannot be judged by a factor,
    and are not. Ones that leap away from the very first loss get a warning: that may come of few
    rows, so it is no reason to end.
    """

    shared_state = ("first", "newest")

    def __init__(self, factor: float | None) -> None:
        self._factor = factor
        self._first: list[float] = []
        self._newest: list[float] = []

    def look(self, loss: float, step: int) -> None:
        """Take note of the loss of step ``step``, from 1; TrainingDiverged if it has run away."""
        if not math.isfinite(loss):
            raise diverged(loss, f"at step {step}", has_learnt=step > 1)
        if self._factor is None:
            return
        if len(self._first) < WINDOW:
            self._first = [*self._first, loss]
            self._warn_of_leap()
            return
        self._newest = [*self._newest, loss][-WINDOW:]
        first = sum(self._first) / WINDOW
        newest = sum(self._newest) / WINDOW
        if len(self._newest) == WINDOW and first > 0 and newest > self._factor * first:
            raise diverged(newest, f"at step {step}, {newest / first:.0f} times that of the start")

    def _warn_of_leap(self) -> None:
        start, late = self._first[0], self._first[WINDOW // 2 :]
        assert self._factor is not None
        has_left = len(self._first) == WINDOW and min(late) > self._factor * start
        if start > 0 and has_left and speaks_for_all():
            logger.warning(
                "the loss is %.4g after %d steps, and was %.4g at the first: lower the learning "
                "rate, set gradientClipNorm, or scale the features",
                *(late[-1], WINDOW, start),
            )


def diverged(loss: float, where: str, *, has_learnt: bool = True) -> TrainingDiverged:
    """The error for a loss that has run away; before a first update it was not the rate."""
    first = "" if has_learnt else "nothing was learnt yet, so look at the rows first: "
    return TrainingDiverged(
        f"the loss is {loss:.4g} {where}; {first}check the features and labels for NaN, infinite "
        "or very large values, lower the learning rate, set gradientClipNorm, or use a wider "
        "precision"
    )


def without_remedies(error: TrainingDiverged) -> str:
    """What `diverged` says of the loss, where the cause is known."""
    return str(error).partition("; ")[0]


def warn_if_nan(what: str, name: str, record: Mapping[str, float]) -> bool:
    """Warn on rank 0 if the value that ``what`` monitors is NaN; True if it is."""
    is_nan = math.isnan(record[name])
    if is_nan and speaks_for_all():
        logger.warning(
            "%s monitors %r, which is NaN at epoch %.5g: that counts as no improvement. Look for "
            "NaN in the rows, and for a metric that is not defined on them, or monitor another "
            "value",
            *(what, name, record["epoch"]),
        )
    return is_nan
