"""How long the rest of a run takes, estimated from its steps so far."""

from __future__ import annotations

import math

_LEAST_SECONDS = 2.0
_LEAST_REPORTS = 3
"""Of steps, after the first one, before anything is said."""
_MEMORY_SECONDS = 30.0
"""Within which older steps lose weight, at least; in a long run they keep it longer."""
_WARM_UP_REPORTS = 20
_WARM_UP_FACTOR = 2.0
"""Steps so many times faster than all before are taken for the end of the warm-up."""


class TimeLeft:
    """Takes reports of how many steps are done; the pace is an exponential mean over time.

    The first step is left out, since what is compiled, loaded or connected makes it slow. So are
    all steps before an early report by which the run has become much faster.
    """

    def __init__(self, start_step: int = 0) -> None:
        """Of a run that begins after ``start_step`` steps."""
        self._last: tuple[float, int] | None = None
        self._begin = start_step
        self._num_reports = self._num_kept = 0
        self._seconds = self._steps = self._measured = 0.0
        self._fastest = math.inf
        """Seconds of a step."""

    def take(self, now: float, step: int) -> None:
        """At ``now``, in seconds by any clock, ``step`` steps are done."""
        if self._last is None:
            if step > self._begin:
                self._last = now, step
            return
        seconds, steps = now - self._last[0], step - self._last[1]
        if steps <= 0 or seconds <= 0:
            return
        self._last = now, step
        self._num_reports += 1
        is_faster = _WARM_UP_FACTOR * seconds / steps < self._fastest
        self._fastest = min(self._fastest, seconds / steps)
        if is_faster and self._num_reports <= _WARM_UP_REPORTS:
            self._num_kept = 0
            self._seconds = self._steps = self._measured = 0.0
        decay = math.exp(-seconds / max(_MEMORY_SECONDS, self._measured / 2))
        self._seconds = self._seconds * decay + seconds
        self._steps = self._steps * decay + steps
        self._measured += seconds
        self._num_kept += 1

    def seconds(self, now: float, total_steps: int) -> float | None:
        """Seconds from ``now`` to the last of ``total_steps`` steps; None: not known well yet."""
        is_known = self._num_kept >= _LEAST_REPORTS and self._measured >= _LEAST_SECONDS
        if self._last is None or not is_known or self._last[1] >= total_steps:
            return None
        at, step = self._last
        return max(0.0, (total_steps - step) * self._seconds / self._steps - (now - at))
