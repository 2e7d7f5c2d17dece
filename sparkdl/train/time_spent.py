"""Counts what a rank's time is spent on while it trains, under one of a few words.

A lap says what the time since the lap before was spent on, so that nothing is left out and nothing
is counted twice.
"""

from __future__ import annotations

import time

from sparkdl.comm.communicator import Communicator, LocalCommunicator

SPENT_ON = ("data", "compute", "communication", "waiting", "evaluate", "checkpoint", "other")
"""Activities that time is spent on: ``data``, until a batch is there; ``compute``;
``communication``, the exchange with other ranks as far as it is not hidden behind computing;
``waiting``, until slower ranks have come to it, where the communicator can tell; ``evaluate`` and
``checkpoint``; ``other``, such as callbacks."""
TRAINING = ("data", "compute", "communication", "waiting")
"""Activities of the steps."""


class Clock:
    """One rank's time in one attempt.

    Attributes:
        seconds: what it was spent on -> how long, so far; may be read by other threads.
    """

    def __init__(self, comm: Communicator | None = None) -> None:
        """Start; ``comm`` tells how long it has waited for other ranks, wherever that was."""
        self._comm = comm if comm is not None else LocalCommunicator()
        self.seconds = dict.fromkeys(SPENT_ON, 0.0)
        self._waited = self._comm.waited_seconds
        self._last = time.perf_counter()

    def lap(self, spent_on: str) -> None:
        """Count the time since the last lap, but for that spent waiting for other ranks."""
        now, waited = time.perf_counter(), self._comm.waited_seconds
        seconds = now - self._last
        if waited != self._waited:
            self.seconds["waiting"] += waited - self._waited
            seconds -= waited - self._waited
            self._waited = waited
        self.seconds[spent_on] += seconds
        self._last = now
