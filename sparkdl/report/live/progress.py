"""What the driver's console shows while workers train, and the base of all views of a run.

A terminal has a progress bar with epoch, step, loss, rows per second and worker, and time left;
above it stand the workers' log lines with their rank. Without a terminal there is a line for each
epoch. Warnings of the workers are always shown. Notebooks have a view of their own (`notebook`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from sparkdl.data.plan import TrainPlan
from sparkdl.report.record.run_record import curve_names

logger = logging.getLogger(__name__)

_USUAL_COLUMNS = 80
"""Of a terminal that does not say how many it has."""


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far one rank has come."""

    phase: str = "start"
    """What it does: ``train``, ``evaluate`` ..."""
    epoch: int = 0
    """From 1; 0: training has not begun."""
    step: int = 0
    loss: float = math.nan
    """Of the newest step."""
    rows: int = 0
    """Rows on which it has trained in this attempt."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """What it has spent its time on since the attempt began."""

    @classmethod
    def of(cls, body: Mapping[str, Any]) -> Progress:
        """The progress in a worker's event, which may have other entries as well."""
        names = [entry.name for entry in dataclasses.fields(cls)]
        return cls(**{name: body[name] for name in names if name in body})


class View:
    """Shows or records a run; a subclass overrides what it needs. All calls come on the driver."""

    def attempt(self, number: int, start_step: int) -> None:
        """A gang, or a run in rounds, starts at ``start_step``; ``number`` counts from 0."""

    def begun_again(self, number: int, step: int | None) -> None:
        """What has failed is started again, for the ``number``-th time in the run.

        Of a gang `attempt` follows, if it comes to that; a run in rounds goes on, and only a round
        is repeated.

        Args:
            number: as in `attempt`.
            step: steps done by then; None: not known yet.
        """

    def failure(self, reason: str) -> None:
        """An attempt has failed."""

    def progress(self, rank: int, progress: Progress) -> None:
        """A rank has sent how far it has come."""

    def spent(self, rank: int, totals: Mapping[str, float]) -> None:
        """On what a rank has spent its time since the attempt began."""

    def fact(self, rank: int, body: Mapping[str, Any]) -> None:
        """Another event of a worker: its hardware, or a confusion matrix."""

    def epoch(self, record: Mapping[str, float]) -> None:
        """An epoch ended, or a function has reported; ``record`` goes into the history."""

    def log(self, rank: int, line: str, level: int) -> None:
        """A rank logged or printed a line; ``level`` is that of the module logging."""

    def done(self, steps: int) -> None:
        """Training succeeded after ``steps`` steps in all."""

    def close(self) -> None:
        """The run ended, one way or the other."""


class SilentView(View):
    """Shows nothing (``verbose=0``); the workers' warnings become the driver's."""

    def log(self, rank: int, line: str, level: int) -> None:
        """Log a warning."""
        if level >= logging.WARNING:
            logger.log(level, "[rank %d] %s", rank, line)


class EpochCallback(View):
    """Calls a function with the record of each epoch."""

    def __init__(self, on_epoch: Callable[[Mapping[str, float]], None]) -> None:
        self._on_epoch = on_epoch

    def epoch(self, record: Mapping[str, float]) -> None:
        """Call the function."""
        self._on_epoch(record)


class RunStatus:
    """How far a run has come, in the words that all views use."""

    def __init__(self, plan: TrainPlan | None) -> None:
        """``plan`` is that of a fit; a function has none."""
        self.epochs = 0 if plan is None else plan.epochs
        self.total_steps = 0 if plan is None else plan.total_steps
        self.state = "starting"
        self.has_ended = False
        self.step = 0
        self._loss = ""
        self._restart = ""
        self._first: dict[int, tuple[float, int]] = {}
        self._speeds: dict[int, float] = {}

    def attempt(self, number: int, start_step: int) -> None:
        """Go back to where the gang starts; the ranks count their rows anew."""
        self._restart = f", restart {number}" if number else ""
        self.state, self.step = f"starting{self._restart}", start_step
        self._first.clear()
        self._speeds.clear()

    def progress(self, rank: int, progress: Progress) -> bool:
        """Take note of a rank; True if the run's state, which is that of rank 0, is a new one."""
        if not progress.epoch:
            return False
        now = time.monotonic()
        since, before = self._first.setdefault(rank, (now, progress.rows))
        if now > since:
            self._speeds[rank] = (progress.rows - before) / (now - since)
        if rank != 0:
            return False
        phase = "" if progress.phase == "train" else f" ({progress.phase})"
        self.state = f"epoch {progress.epoch} of {self.epochs}{phase}{self._restart}"
        self._loss = f"loss {progress.loss:.4f}"
        self.step = max(self.step, progress.step)
        return True

    def done(self, steps: int) -> None:
        """Training may have ended before its last planned step."""
        self.has_ended = True
        self.state = ("stopped early" if steps < self.total_steps else "trained") + self._restart
        self.step = self.total_steps = steps

    def details(self) -> list[str]:
        """Loss, and the ranks' mean speed, as far as they are known."""
        speed = sum(self._speeds.values()) / max(1, len(self._speeds))
        shown = [self._loss] if self._loss else []
        return shown + [f"{speed:,.0f} rows/s per worker"] * (speed > 0)


def record_text(record: Mapping[str, float]) -> str:
    """An epoch's record, or a function's report, as a line: ``epoch 3: loss 0.1, val_loss 0.2``."""
    unit = "report" if "report" in record else "epoch"
    names = curve_names([record]) if unit == "epoch" else [n for n in record if n != unit]
    values = ", ".join(f"{name} {record[name]:.5g}" for name in names)
    return f"{unit} {record[unit]:.5g}: {values}"


def terminal_columns() -> int | None:
    """Columns of the terminal on which what this process writes to stderr appears at once, if any.

    spark-submit starts the driver's Python with a pipe for its output, and copies that to its own,
    so there the JVM's counts, which is the parent process.
    """
    if "PYSPARK_GATEWAY_PORT" in os.environ:
        way = os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK
        # Not of a socket, of another user's process, or where there is no /proc.
        with contextlib.suppress(OSError):
            output = os.open(f"/proc/{os.getppid()}/fd/1", way)
            try:
                return _columns(output)
            finally:
                os.close(output)
    return _columns(sys.stderr.fileno()) if sys.stderr.isatty() else None


def _columns(output: int) -> int | None:
    try:
        return os.get_terminal_size(output).columns or _USUAL_COLUMNS
    except OSError:  # it is no terminal
        return None


class ConsoleView(View):
    """A line for each epoch or report and for workers' lines; on a terminal with a bar below them.

    Without the bar, which would fill a file, restarts and the end have lines too.
    """

    def __init__(self, plan: TrainPlan | None, *, has_bar: bool, shows_logs: bool) -> None:
        """``plan`` is that of a fit; a function has none, and no bar."""
        self._status = RunStatus(plan)
        self._least_level = logging.NOTSET if shows_logs else logging.WARNING
        self._bar: Any = None
        if has_bar:
            from tqdm import tqdm

            self._bar = tqdm(
                total=self._status.total_steps,
                unit="step",
                ncols=terminal_columns(),
                dynamic_ncols=sys.stderr.isatty(),
                file=sys.stderr,
                mininterval=0.2,
                # 80 columns have room for it.
                bar_format="{desc} |{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]",
                desc=self._status.state,
            )

    def _write(self, line: str) -> None:
        if self._bar is None:
            print(line, file=sys.stderr, flush=True)
        else:
            self._bar.write(line, file=sys.stderr)

    def attempt(self, number: int, start_step: int) -> None:
        """Put the bar where the gang starts, or print where a restart goes on."""
        self._status.attempt(number, start_step)
        if self._bar is not None:
            self._bar.reset(total=self._status.total_steps)
            self._bar.n = self._bar.initial = start_step
            self._bar.set_description_str(self._status.state)
        elif number > 0:
            unit = "step" if self._status.epochs else "checkpoint"
            place = f"from {unit} {start_step}" if start_step else "from the beginning"
            self._write(f"restart {number}, {place}")

    def progress(self, rank: int, progress: Progress) -> None:
        """Move the bar with rank 0."""
        if self._bar is not None and self._status.progress(rank, progress):
            self._bar.set_description_str(self._status.state)
            self._bar.set_postfix_str(", ".join(self._status.details()), refresh=False)
            self._bar.update(max(0, progress.step - self._bar.n))

    def epoch(self, record: Mapping[str, float]) -> None:
        """Print the record."""
        self._write(record_text(record))

    def log(self, rank: int, line: str, level: int) -> None:
        """Print a worker's line."""
        if level >= self._least_level:
            self._write(f"[rank {rank}] {line}")

    def done(self, steps: int) -> None:
        """Fill the bar, or print whether training ended before its last planned step."""
        planned = self._status.total_steps
        self._status.done(steps)
        if self._bar is not None:
            self._bar.total = steps
            self._bar.update(steps - self._bar.n)
            self._bar.set_description_str(self._status.state)
        elif self._status.epochs:
            state = "stopped early" if steps < planned else "trained"
            self._write(f"{state}: {steps}/{planned} steps")

    def close(self) -> None:
        """Leave the bar on the screen."""
        if self._bar is not None:
            self._bar.close()
