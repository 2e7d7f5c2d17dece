"""The lengths of rounds, in steps: fixed, by a share of the time, or by the loss."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from sparkdl.config import require
from sparkdl.storage.stateful import Stateful

_LONGEST_AUTO = 10_000
_LONGEST_ADAPTIVE = 16
"""Steps of the longest round; the second is PaddlePaddle's."""


@dataclass(frozen=True, kw_only=True)
class RoundReport:
    """The measurements of a round; equal on all ranks, so that they decide alike."""

    steps: int
    """Steps of the round."""
    step_seconds: float
    """Seconds of the slowest replica's steps, all together."""
    merge_seconds: float
    """Seconds that agreeing took on top of them."""
    loss: float
    """Mean loss over the samples of all replicas; NaN if there were none."""
    learning_rate: float
    """That of the replicas' optimizers at the end of the round."""


class Period(Stateful, ABC):
    """Decides on the length of every round, on all ranks alike."""

    needs_report: bool = False
    """True if `observe` wants to be called; measuring and sharing a report costs a message."""

    target_share: float | None = None
    """Part of the time that agreeing shall take; None: the period does not follow the clock."""

    @abstractmethod
    def steps(self, step: int) -> int:
        """Steps of the round that begins when ``step`` steps of the run are done; at least 1."""

    def observe(self, report: RoundReport) -> None:
        """Take note of a round that has ended."""


class FixedPeriod(Period):
    """Always the same number of steps."""

    def __init__(self, averaging_period: int) -> None:
        self._period = averaging_period

    def steps(self, step: int) -> int:
        return self._period


class AutoPeriod(Period):
    """As many steps as hold agreement at a share of the time.

    The rule of H2O's Deep Learning (``target_ratio_comm_to_comp``): with ``m`` the seconds that
    agreeing takes and ``s`` those of a step, a round of ``m (1 / share - 1) / s`` steps spends
    ``share``, in (0, 1), of its time on agreeing. Both are smoothed over rounds; a round at most
    doubles or halves the length of the one before.
    """

    needs_report = True
    shared_state: ClassVar = ("length", "step_seconds", "merge_seconds")

    def __init__(self, share: float) -> None:
        self.target_share: float = share
        self._length = 8  # after the first round the times are known
        self._step_seconds = 0.0
        self._merge_seconds = 0.0

    def steps(self, step: int) -> int:
        return self._length

    def observe(self, report: RoundReport) -> None:
        self._step_seconds = _smoothed(self._step_seconds, report.step_seconds / report.steps)
        self._merge_seconds = _smoothed(self._merge_seconds, report.merge_seconds)
        wanted = steps_for_share(self._merge_seconds, self._step_seconds, self.target_share)
        bounded = min(max(wanted, self._length / 2), self._length * 2)
        self._length = min(max(1, round(bounded)), _LONGEST_AUTO)


class AdaptivePeriod(Period):
    """Fewer steps as the loss falls, more as the learning rate does (AdaComm).

    With loss ``F`` and learning rate ``h`` of a round, ``F0`` and ``h0`` of the first one, and
    ``H0`` (``first``) the length of that, the next one has ``floor(sqrt(h0 / h * F / F0 * H0))``
    steps: the rule of Wang & Joshi, "Adaptive Communication Strategies to Achieve the Best
    Error-Runtime Trade-off in Local-Update SGD", MLSys 2019, as PaddlePaddle's adaptive local SGD
    has it, with ``H0`` under the root. A round whose loss or learning rate is not positive changes
    nothing.
    """

    needs_report = True
    shared_state: ClassVar = ("length", "origin")

    def __init__(self, first: int) -> None:
        self._first = first
        self._limit = max(first, _LONGEST_ADAPTIVE)
        self._length = first
        self._origin: float | None = None

    def steps(self, step: int) -> int:
        return self._length

    def observe(self, report: RoundReport) -> None:
        if not (report.loss > 0 and report.learning_rate > 0):  # NaN too
            return
        now = report.loss / report.learning_rate
        if self._origin is None:
            self._origin = now
        wanted = math.sqrt(now / self._origin * self._first)
        self._length = max(1, math.floor(min(wanted, self._limit)))


def steps_for_share(merge_seconds: float, step_seconds: float, share: float) -> float:
    """Steps of a round that spends ``share`` of its time on agreeing; see `AutoPeriod`."""
    return merge_seconds * (1 / share - 1) / max(step_seconds, 1e-9)


def check_period(period: object, *words: str, name: str = "averaging_period") -> None:
    """Raise ConfigError for what is neither a positive number of steps nor one of ``words``."""
    is_count = isinstance(period, int) and not isinstance(period, bool)
    known = "".join(f" or {word!r}" for word in words)
    is_right = (is_count and period >= 1) or period in words  # type: ignore[operator]
    require(is_right, f"{name} must be a number of steps of at least 1{known}", period)


def _smoothed(before: float, now: float) -> float:
    return now if before == 0 else 0.7 * before + 0.3 * now
