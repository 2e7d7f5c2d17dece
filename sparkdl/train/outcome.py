"""What does one worker know when training is over?"""

from __future__ import annotations

from dataclasses import dataclass

from sparkdl.train.replica import ResumePoint
from sparkdl.train.state import Record


@dataclass(frozen=True, kw_only=True)
class TrainOutcome:
    """What one worker knows when training is over. The weights are in the module."""

    history: list[Record]
    """One record per epoch; equal on all ranks but for ``seconds``."""
    steps: int
    """Completed steps of the run, with those before a restart."""
    rows: int
    """Samples that all ranks have used, with those before a restart; not those whose gradients came
    too late."""
    stopped_early: bool
    seconds: dict[str, float]
    """This rank's time in this attempt, by `clock.SPENT_ON`.

    On CUDA, whose work is asynchronous, ``compute`` holds what the others do not wait for.
    """
    bytes_sent: int
    """What this rank's strategy has sent to the others in this attempt."""
    final: ResumePoint
    """The state at the end, for the last checkpoint: ``model`` holds the last weights even if
    the module was given the best ones."""
