"""Listeners, which watch a run from its driver, such as TensorBoard and MLflow.

A listener is two objects, because one is a Param, which is copied, saved and used by several fits
at once, and the other belongs to one run: `Listener` holds the options, `RunListener` is the
listener at work. Unlike callbacks, which are on the workers, listeners need no module there.
"""

from __future__ import annotations

import logging
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

    from sparkdl.report.record.run_record import RunRecord


@dataclass(frozen=True, kw_only=True)
class RunStart:
    """What is known of a run when it begins."""

    run_id: str
    name: str
    """What is run, such as ``TorchClassifier``."""
    folder: str
    """A name for the run's files that no other run has, and that sorts by time."""
    params: Mapping[str, str]
    """Params by name, as text."""


class RunListener:
    """Watches one run, on the driver; override what you need.

    What a method raises does not end the run: it is logged, and of the listener's methods only
    `end` is called after that. The fit waits for what a method does.
    """

    def facts(self, facts: Mapping[str, Any]) -> None:
        """Training is about to begin: rows, steps, workers, parameters, and so on."""

    def step(self, step: int, values: Mapping[str, float]) -> None:
        """``step`` steps are done: the newest ``loss`` and ``rows_per_second`` of rank 0.

        Called twice a second at most, and so seldom that it takes a twentieth of the time.
        """

    def epoch(self, step: int, record: Mapping[str, float]) -> None:
        """An epoch was completed, or a function has reported; ``record`` is in the history."""

    def failure(self, reason: str) -> None:
        """An attempt has failed, and perhaps another begins."""

    def end(self, record: RunRecord, module: nn.Module | None) -> None:
        """The run has ended; ``record.status`` is ``succeeded`` or ``failed``.

        Args:
            record: all that is known of it.
            module: the trained module; None if there is none.
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


logger = logging.getLogger(__name__)

_STEP_SECONDS = 0.5
"""Shortest time between two steps of which a listener is told."""
_STEP_SHARE = 0.05
"""Longest part of the time that a listener may take for steps."""


@dataclass(kw_only=True)
class _Entry:
    listener: RunListener
    next_step_at: float = 0.0
    """When its `RunListener.step` may be called again."""
    has_failed: bool = False

    def call(self, what: Callable[[RunListener], None]) -> None:
        try:
            what(self.listener)
        except Exception:  # whatever a listener of the user's raises
            self.has_failed = True
            logger.warning(
                "%s has failed; of this run it is only told the end:\n%s",
                type(self.listener).__name__,
                traceback.format_exc().rstrip(),
            )


class Listeners:
    """The listeners of one run."""

    def __init__(self) -> None:
        """There are none yet."""
        self._entries: list[_Entry] = []

    def start(self, start: RunStart, listeners: Sequence[Listener]) -> None:
        """Start them; what one raises is raised, and those before it are told of the end."""
        for listener in listeners:
            self._entries.append(_Entry(listener=listener.start(start)))

    def call(self, what: Callable[[RunListener], None]) -> None:
        """Call ``what`` with each that has not failed."""
        for entry in self._entries:
            if not entry.has_failed:
                entry.call(what)

    def step(self, step: int, values: Mapping[str, float]) -> None:
        """Tell of a step those whose time for it has come."""
        for entry in self._entries:
            began = time.monotonic()
            if not entry.has_failed and began >= entry.next_step_at:
                entry.call(lambda listener: listener.step(step, values))
                now = time.monotonic()
                entry.next_step_at = now + max(_STEP_SECONDS, (now - began) / _STEP_SHARE)

    def end(self, record: RunRecord, module: nn.Module | None) -> None:
        """Tell all that the run has ended, each once."""
        while self._entries:
            self._entries.pop(0).call(lambda listener: listener.end(record, module))
