"""How long the rest of a run takes, estimated from its steps so far."""

from __future__ import annotations

import math

from sparkdl.report.record.run_record import thin

_LEAST_SECONDS = 2.0
_LEAST_REPORTS = 3
"""Of steps, after the first one, before anything is said."""
_MEMORY_SECONDS = 30.0
"""The pace is that of the last seconds, so many at least, and of half the time in a long run."""
_WARM_UP_REPORTS = 20
_WARM_UP_FACTOR = 2.0
"""Steps so many times faster than all before are taken for the end of the warm-up."""
_MOST_REPORTS = 1000


class TimeLeft:
    """Takes reports of how many steps are done.

    The first step is left out, since what is compiled, loaded or connected makes it slow. So are
    all steps before an early report by which the run has become much faster.
    """

    def __init__(self, start_step: int = 0) -> None:
        self._begin = start_step
        self._reports: list[tuple[float, int]] = []
        """When so many steps were done, from the first step on."""
        self._fastest = math.inf
        """Seconds of a step."""

    def take(self, now: float, step: int) -> None:
        """At ``now``, in seconds by any clock, ``step`` steps are done."""
        before, done = self._reports[-1] if self._reports else (-math.inf, self._begin)
        if step <= done or now <= before:
            return
        pace = (now - before) / (step - done)
        if _WARM_UP_FACTOR * pace < self._fastest and len(self._reports) <= _WARM_UP_REPORTS:
            del self._reports[:-1]
        self._fastest = min(self._fastest, pace)
        self._reports.append((now, step))
        thin(self._reports, _MOST_REPORTS)

    def seconds(self, now: float, total_steps: int) -> float | None:
        """Seconds from ``now`` to the last of ``total_steps`` steps; None: not known well yet."""
        if len(self._reports) <= _LEAST_REPORTS:
            return None
        (first, _), (last, step) = self._reports[0], self._reports[-1]
        if last - first < _LEAST_SECONDS or step >= total_steps:
            return None
        newer = max(first, min(last - _MEMORY_SECONDS, (first + last) / 2))
        since, done = next(report for report in reversed(self._reports) if report[0] <= newer)
        return max(0.0, (total_steps - step) * (last - since) / (step - done) - (now - last))
