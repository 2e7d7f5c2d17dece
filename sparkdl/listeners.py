"""Who may watch a run from its driver? Listeners, such as TensorBoard and MLflow.

A listener is two objects, because one is a Param, which is copied, saved and used by several fits
at once, and the other belongs to one run: `Listener` holds the options, `RunListener` is the
listener at work. Unlike callbacks, which are on the workers, listeners need no module there.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

    from sparkdl.report.record import RunRecord


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

    What a method raises does not end the run: it is logged, and the listener is told no more but
    the end. The fit waits for what a method does.
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
        """The run has ended, well or not: ``record.status`` tells.

        Args:
            record: all that is known of it.
            module: the trained module; None if there is none.
        """


class Listener(ABC):
    """Options of something that watches runs. Picklable, and described like other objects.

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

        Then the listeners that have started already hear of its end.
        """
