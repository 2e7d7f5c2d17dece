"""A gang starts again when there are slots for more workers, or without those that do not come."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from sparkdl.spark.cluster.attempt import Attempt
from sparkdl.spark.cluster.launch import Launch
from sparkdl.spark.cluster.scouts import Scouts
from sparkdl.spark.session.compat import num_slots

Pays = Callable[[Attempt, int, float], str | None]
"""``pays(attempt, workers, since)``: why to start again with so many now; None: it does not pay.

``since`` says from when on there had been slots for them for a while.
"""


class Resize:
    """Decides if a gang starts again with another number of workers; see `supervisor.supervise`.

    With more it may once all workers of an attempt are there, and the slots for more have been
    there for a while. With fewer it begins if slots have gone since it was submitted, or, where it
    is a plain stage, with those that have come, if that has not changed for a while; there `Scouts`
    look for slots for more. ``limit`` is told how many these are.
    """

    def __init__(self, run: Launch, pays: Pays, limit: Callable[[int], None]) -> None:
        self._run = run
        self._pays = pays
        self._limit = limit
        self._scouts = Scouts(run)
        self._seen: tuple[int, float] | None = None
        """A number of workers that could be had, and since when."""

    def __call__(self, attempt: Attempt) -> str | None:
        """Why to start again; None: go on."""
        run, slots = self._run, self._run.slots
        if slots.max_workers is None:
            return None
        if not slots.is_barrier and len(attempt.last_event) < attempt.world_size:
            return self._without_the_missing(attempt, len(attempt.last_event), "have come")
        there = self._slots_there(attempt, slots.max_workers)
        if there < attempt.world_size and not attempt.last_event:  # an executor went meanwhile
            return self._without_the_missing(attempt, there, "have slots")
        if there <= attempt.world_size or len(attempt.last_event) < attempt.world_size:
            self._seen = None
            return None
        now = time.monotonic()
        if self._seen is None or self._seen[0] != there:
            self._seen = (there, now)
        since = self._seen[1] + run.settings.elastic_wait_seconds
        reason = self._pays(attempt, there, since) if now >= since else None
        if reason is None:
            return None
        if not slots.is_barrier:
            self._scouts.call_back()
            self._limit(there)
        return f"there are slots for {there} workers: {reason}"

    def end(self) -> None:
        """See `supervisor.Change`."""
        self._seen = None
        self._scouts.end()

    def _slots_there(self, attempt: Attempt, most: int) -> int:
        """For how many workers there are slots, at most so many."""
        run, size = self._run, attempt.world_size
        if run.slots.is_barrier:
            return min(most, num_slots(run.spark, run.slots.profile))
        if size == most:
            return size
        return size + self._scouts.num_there(size, most - size, partial(self._would, attempt, most))

    def _would(self, attempt: Attempt, workers: int) -> str | None:
        """Why to start again with so many if a checkpoint were written just now."""
        if attempt.saved is None:
            return None
        step = attempt.saved[0] if attempt.steps is None else attempt.steps[0]
        now = time.monotonic()
        return self._pays(replace(attempt, saved=(step, now)), workers, 0.0)

    def _without_the_missing(self, attempt: Attempt, there: int, what: str) -> str | None:
        now, least = time.monotonic(), self._run.slots.min_workers
        # As long as scouts keep slots, the missing may have had none.
        if self._seen is None or self._seen[0] != there or not self._scouts.have_left():
            self._seen = (there, now)
        waits = self._run.settings.elastic_wait_seconds
        if least is None or there < least or now - self._seen[1] < waits:
            return None
        self._limit(there)
        return f"{there} of {attempt.world_size} workers {what}; the gang starts with these"
