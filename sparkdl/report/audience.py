"""Who listens to a run, and how is it that none of them can delay it or end it?

Listeners run on the fit's thread, which looks after the gang. So they are told of steps only as
often as that takes a twentieth of the time, and one that fails is told no more until the end, when
it may close what it holds.
"""

from __future__ import annotations

import logging
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sparkdl.listeners import Listener, RunListener, RunStart

if TYPE_CHECKING:
    from torch import nn

    from sparkdl.report.record import RunRecord

logger = logging.getLogger(__name__)

_STEP_SECONDS = 0.5
"""Shortest time between two steps of which a listener is told."""
_STEP_SHARE = 0.05
"""Longest part of the time that a listener may take for steps."""


@dataclass(kw_only=True)
class _Ear:
    listener: RunListener
    due: float = 0.0
    """When it may be told of a step again."""
    is_deaf: bool = False


class Audience:
    """The listeners of one run."""

    def __init__(self) -> None:
        """Of nobody yet."""
        self._ears: list[_Ear] = []

    def start(self, start: RunStart, listeners: Sequence[Listener]) -> None:
        """Have them listen; what one raises is raised, and those before it hear of the end."""
        for listener in listeners:
            self._ears.append(_Ear(listener=listener.start(start)))

    def tell(self, what: Callable[[RunListener], None]) -> None:
        """Call ``what`` with each that has not failed."""
        for ear in self._ears:
            if not ear.is_deaf:
                _tell(ear, what)

    def step(self, step: int, values: Mapping[str, float]) -> None:
        """Tell of a step those whose time for it has come."""
        for ear in self._ears:
            began = time.monotonic()
            if not ear.is_deaf and began >= ear.due:
                _tell(ear, lambda listener: listener.step(step, values))
                now = time.monotonic()
                ear.due = now + max(_STEP_SECONDS, (now - began) / _STEP_SHARE)

    def end(self, record: RunRecord, module: nn.Module | None) -> None:
        """Tell all that the run has ended, each once."""
        while self._ears:
            _tell(self._ears.pop(0), lambda listener: listener.end(record, module))


def _tell(ear: _Ear, what: Callable[[RunListener], None]) -> None:
    try:
        what(ear.listener)
    except Exception:  # whatever a listener of the user's raises
        ear.is_deaf = True
        logger.warning(
            "%s is told no more of this run but its end, since it failed:\n%s",
            type(ear.listener).__name__,
            traceback.format_exc().rstrip(),
        )
