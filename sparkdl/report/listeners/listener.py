"""Listeners, which watch a run from its driver, such as TensorBoard and MLflow.

`Listener` holds the options, a Param that several fits may use, `RunListener` is at work in one.
"""

from __future__ import annotations

import functools
import logging
import math
import operator
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sparkdl.config import Looks
from sparkdl.runtime.tracebacks import formatted

if TYPE_CHECKING:
    from torch import nn

    from sparkdl.report.record.run_record import RunRecord


@dataclass(frozen=True, kw_only=True)
class RunStart:
    """The facts that are known of a run when it begins."""

    run_id: str
    name: str
    """Name of what is run, such as ``TorchClassifier``."""
    folder: str
    """A name for the run's files that no other run has, and that sorts by time."""
    params: Mapping[str, str]
    """Params by name, as text."""
    run_name: str = ""
    """Name that the user gave the run; empty: none."""


class RunListener:
    """Watches one run, on the driver; override what you need.

    What a method raises does not end the run: it is logged, and of the listener's methods only
    `end` is called after that. All methods are called in one thread, which is the listener's own,
    so the run does not wait for them. At its end it waits up to five minutes for `end`.
    """

    def facts(self, facts: Mapping[str, Any]) -> None:
        """Training is about to begin: rows, steps, workers, parameters, and so on."""

    def graph(self, graph: Mapping[str, Any]) -> None:
        """The module's graph is known: ``nodes`` and ``edges``; see `record.module_graph`."""

    def step(self, step: int, values: Mapping[str, float]) -> None:
        """``step`` steps are done: the newest ``loss`` and ``rows_per_second`` of rank 0.

        Called twice a second at most, and so seldom that it takes a twentieth of the time.
        """

    def epoch(self, step: int, record: Mapping[str, float]) -> None:
        """An epoch was completed, or a function has reported; ``record`` is in the history."""

    def layers(self, step: int, found: Mapping[str, Any]) -> None:
        """Rank 0 has measured its layers in step ``step``.

        Args:
            step: steps that are done. After a restart some come again.
            found: may have ``ratios``: by layer the mean magnitude of what the step has changed,
                over that of the parameters, or None; and what a listener's `Listener.looks` asks
                for: ``histograms`` of ``weights/<name>`` and ``gradients/<name>`` with ``low``,
                ``high``, ``counts`` in equal buckets between them, ``sum`` and ``sum_squares``;
                ``images`` of the input ``name`` with their ``shape`` and ``data``, which are bytes
                packed by zlib and base64.
        """

    def failure(self, reason: str) -> None:
        """An attempt has failed, and perhaps another begins."""

    def end(self, record: RunRecord, module: nn.Module | None) -> None:
        """The run has ended; ``record.status`` is ``succeeded`` or ``failed``.

        ``record`` is all that is known of it; ``module`` the trained one, None if there is none.
        """


class Listener(ABC):
    """Options of something that watches runs. It must be picklable, and importable like a callback.

    Example::

        @dataclass(frozen=True)
        class Bell(Listener):
            def start(self, run):
                return BellInOneRun()

        class BellInOneRun(RunListener):
            def end(self, record, module):
                print("ding", record.status)
    """

    @abstractmethod
    def start(self, run: RunStart) -> RunListener:
        """Watch a run, which is about to begin; what this raises ends it.

        In that case `RunListener.end` of the listeners that have started already is called.
        """

    @property
    def looks(self) -> Looks:
        """Options of what `RunListener.layers` gets besides ratios, and how often."""
        return Looks()


def wanted_looks(listeners: Sequence[Listener]) -> Looks:
    """Combine what all listeners ask for; ratios are for the report, also where there is none."""
    return functools.reduce(operator.or_, (listener.looks for listener in listeners), Looks())


logger = logging.getLogger(__name__)

_STEP_SECONDS = 0.5
"""Shortest time between two steps of which a listener is told."""
_MOST_CALLS = 1000
"""Calls that may wait for a listener."""
_MOST_LOOKS = 20
"""Most of these when a look at the layers comes: beyond that it is left out."""
_LATE_SECONDS = 30.0
"""After how long in one call a listener is said to be behind."""
_QUIET_SECONDS, _END_SECONDS = 10.0, 300.0
"""Time that the end of a run waits for its listeners, without a word and in all."""
_STEP_SHARE = 0.05
"""Longest part of the time that a listener may take for steps."""


class _Entry:
    """A listener at work in a thread of its own, so that it cannot hold up the run."""

    def __init__(self, listener: RunListener) -> None:
        self._listener = listener
        self._name = type(listener).__name__
        self._calls: queue.SimpleQueue[tuple[Callable[[RunListener], None], bool]]
        self._calls = queue.SimpleQueue()
        """Functions to call, each with True if it is the last."""
        self._has_failed = self._is_behind = False
        self._busy_since = math.inf
        self._next_step_at = 0.0
        """Time from which its `RunListener.step` may be called again."""
        self._is_over = threading.Event()
        threading.Thread(target=self._run, name="sparkdl-listener", daemon=True).start()

    @property
    def num_waiting(self) -> int:
        return self._calls.qsize()

    def call(self, what: Callable[[RunListener], None]) -> None:
        """Have it called when all that was asked before is done."""
        is_full = self.num_waiting >= _MOST_CALLS
        if not self._is_behind and (is_full or time.monotonic() - self._busy_since > _LATE_SECONDS):
            self._is_behind = True
            logger.warning(
                "%s does not keep up with the run, which goes on without it: what it is told comes "
                "late, and is left out where more than %d calls wait",
                *(self._name, _MOST_CALLS),
            )
        if not is_full:
            self._calls.put((what, False))

    def step(self, step: int, values: Mapping[str, float]) -> None:
        """Tell it of a step, if its time has come and it has nothing else to do."""
        is_idle = self._busy_since == math.inf and self._calls.empty()
        if is_idle and time.monotonic() >= self._next_step_at:
            self.call(lambda listener: listener.step(step, values))
            self._next_step_at = time.monotonic() + _STEP_SECONDS

    def end(self, what: Callable[[RunListener], None]) -> None:
        """Have it called once more, whatever has happened."""
        self._calls.put((what, True))

    def wait(self, seconds: float) -> None:
        if self._is_over.wait(min(seconds, _QUIET_SECONDS)):
            return
        logger.info("waiting up to %.0f s for %s to end", seconds, self._name)
        if not self._is_over.wait(seconds - _QUIET_SECONDS):
            logger.warning(
                "%s has not ended within %.0f s; the run is over all the same, and what it does "
                "now goes on in the background",
                *(self._name, seconds),
            )

    def _run(self) -> None:
        is_last = False
        while not is_last:
            what, is_last = self._calls.get()
            began = self._busy_since = time.monotonic()
            try:
                if is_last or not self._has_failed:
                    what(self._listener)
            # Whatever a listener raises, SystemExit too: else nobody would see its end.
            except BaseException as error:
                self._has_failed = True
                logger.warning(
                    "%s has failed; it is told nothing more of this run but its end:\n%s",
                    self._name,
                    formatted(error).rstrip(),
                )
            now, self._busy_since = time.monotonic(), math.inf
            rest = (now - began) / _STEP_SHARE
            self._next_step_at = max(self._next_step_at, now + rest)
        self._is_over.set()


class Listeners:
    """The listeners of one run."""

    def __init__(self) -> None:
        self._entries: list[_Entry] = []

    def __bool__(self) -> bool:
        return bool(self._entries)

    def start(self, start: RunStart, listeners: Sequence[Listener]) -> None:
        """Start them; what one raises is raised, and those before it are told of the end."""
        for listener in listeners:
            self._entries.append(_Entry(listener.start(start)))

    def call(self, what: Callable[[RunListener], None]) -> None:
        """Have ``what`` called with each that has not failed; nobody waits for that."""
        for entry in self._entries:
            entry.call(what)

    def step(self, step: int, values: Mapping[str, float]) -> None:
        """Tell of a step those whose time for it has come."""
        for entry in self._entries:
            entry.step(step, values)

    def layers(self, step: int, found: Mapping[str, Any]) -> None:
        """Show a look at the layers, which is large, to those who keep up."""
        for entry in self._entries:
            if entry.num_waiting < _MOST_LOOKS:
                entry.call(lambda listener: listener.layers(step, found))

    def end(self, record: RunRecord, module: nn.Module | None) -> None:
        """Tell all that the run has ended, each once, and wait for them, but not for ever."""
        entries, self._entries = self._entries, []
        for entry in entries:
            entry.end(lambda listener: listener.end(record, module))
        deadline = time.monotonic() + _END_SECONDS
        for entry in entries:
            entry.wait(max(0.0, deadline - time.monotonic()))
