"""Looks after what a program keeps outside of its module, and steps read or callbacks fill."""

from __future__ import annotations

import logging

from torch import nn

from sparkdl.config import TrainConfig
from sparkdl.serialization.program.program_state import ProgramState, read_by_steps
from sparkdl.serialization.travel.pickling import sent_code
from sparkdl.train.callbacks import Callback
from sparkdl.train.objective.part import Part

logger = logging.getLogger(__name__)


class ProgramWatch(Part):
    """Warns once of what callbacks change, such as a loss's weight, and no checkpoint has.

    What steps change themselves the driver's trial has judged. What callbacks alone know, such as a
    list of losses, is told of in the end: the program's own stays as it was.
    """

    def __init__(self, module: nn.Module, config: TrainConfig) -> None:
        """Note what the code of the module, the loss and the rest reads, as it is now."""
        self._program: ProgramState | None = None
        # One with a state of its own may set it again.
        forgetful = [one for one in config.callbacks if type(one).state_dict is Callback.state_dict]
        if forgetful:
            self._program = read_by_steps(module, vars(config))
        self._of_callbacks = ProgramState(one for one, _ in sent_code([forgetful]))
        self._has_told = False
        self._by_steps: set[str] = set()
        self._num_steps = 0

    def begin_epoch(self) -> None:
        """Look for what has changed besides, where steps were taken."""
        if self._num_steps:
            self._look()

    def after_step(self, step: int, observer: object) -> None:
        """Note what the first step changes; look at some of the others, ever more rarely."""
        if self._program is None:
            return
        self._num_steps += 1
        if self._num_steps == 1:
            self._by_steps.update(self._program.changed(), self._of_callbacks.changed())
        elif self._num_steps & (self._num_steps - 1) == 0:
            self._look()

    def end_fit(self) -> None:
        """Tell what callbacks have changed besides."""
        changed = [] if self._has_told else self._of_callbacks.changed()
        changed = [name for name in changed if name not in self._by_steps]
        if changed:
            logger.warning(
                "a callback has changed %r outside of itself, in the copy of the program that a "
                "worker has: the program's own stays as it was; see model.summary.history, or give "
                "listeners=, which are called on the driver",
                changed[0],
            )

    def _look(self) -> None:
        changed = [] if self._program is None else self._program.changed()
        by_others = [name for name in changed if name not in self._by_steps]
        if by_others:
            self._program, self._has_told = None, True
            logger.warning(
                "%r, which the module or the loss reads, has changed since training began, and no "
                "checkpoint has it: after a lost worker training goes on with its first value; "
                "keep it in a buffer of the module, which a callback finds at state.model, or "
                "give it back by the callback's state_dict and load_state_dict",
                by_others[0],
            )
