"""What the driver shows while workers train.

On a terminal: a progress bar with epoch, step, loss, rows per second and worker, and time left;
above it, the workers' log lines with their rank. Elsewhere: a line for each epoch. Whatever is
asked for, their warnings are not lost. Notebooks have a view of their own (`notebook`).
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from sparkdl.data.plan import TrainPlan

logger = logging.getLogger(__name__)


class View(Protocol):
    """Where the supervisor shows what it hears. Called on the driver only."""

    def attempt(self, number: int, start_step: int) -> None:
        """A gang starts at ``start_step``; ``number`` counts from 0."""

    def heartbeat(self, rank: int, body: Mapping[str, Any]) -> None:
        """What a rank does now."""

    def epoch(self, record: Mapping[str, float]) -> None:
        """An epoch ended; its history record."""

    def log(self, rank: int, line: str, level: int) -> None:
        """A rank logged or printed a line; ``level`` is logging's."""

    def done(self, steps: int) -> None:
        """Training succeeded after ``steps`` steps in all."""

    def close(self) -> None:
        """The fit ended, one way or the other."""


class SilentView:
    """Shows nothing (``verbose=0``); the workers' warnings become the driver's."""

    def attempt(self, number: int, start_step: int) -> None:
        """Show nothing."""

    def heartbeat(self, rank: int, body: Mapping[str, Any]) -> None:
        """Show nothing."""

    def epoch(self, record: Mapping[str, float]) -> None:
        """Show nothing."""

    def log(self, rank: int, line: str, level: int) -> None:
        """Log a warning."""
        if level >= logging.WARNING:
            logger.log(level, "[rank %d] %s", rank, line)

    def done(self, steps: int) -> None:
        """Show nothing."""

    def close(self) -> None:
        """Show nothing."""


class WatchedView:
    """Another view, of whose epochs somebody else is told as well."""

    def __init__(self, view: View, on_epoch: Callable[[Mapping[str, float]], None]) -> None:
        self._view = view
        self._on_epoch = on_epoch
        self.attempt, self.heartbeat, self.log = view.attempt, view.heartbeat, view.log
        self.done, self.close = view.done, view.close

    def epoch(self, record: Mapping[str, float]) -> None:
        """Show it first."""
        self._view.epoch(record)
        self._on_epoch(record)


class SharedView:
    """A view, and others that are told the same."""

    def __init__(self, *views: View) -> None:
        self._views = views

    def attempt(self, number: int, start_step: int) -> None:
        """Tell all."""
        for view in self._views:
            view.attempt(number, start_step)

    def heartbeat(self, rank: int, body: Mapping[str, Any]) -> None:
        """Tell all."""
        for view in self._views:
            view.heartbeat(rank, body)

    def epoch(self, record: Mapping[str, float]) -> None:
        """Tell all."""
        for view in self._views:
            view.epoch(record)

    def log(self, rank: int, line: str, level: int) -> None:
        """Tell all."""
        for view in self._views:
            view.log(rank, line, level)

    def done(self, steps: int) -> None:
        """Tell all."""
        for view in self._views:
            view.done(steps)

    def close(self) -> None:
        """Tell all."""
        for view in self._views:
            view.close()


class ReportView:
    """What a function reports, line by line, with the workers' warnings or all their lines."""

    def __init__(self, *, shows_logs: bool) -> None:
        self._least = logging.NOTSET if shows_logs else logging.WARNING

    def attempt(self, number: int, start_step: int) -> None:
        """Say that the function is begun again, and where it goes on."""
        if number > 0:
            place = f"from checkpoint {start_step}" if start_step else "from the beginning"
            _write(f"restart {number}, {place}")

    def heartbeat(self, rank: int, body: Mapping[str, Any]) -> None:
        """How far a function has come, only its reports tell."""

    def epoch(self, record: Mapping[str, float]) -> None:
        """Print what was reported."""
        shown = [f"{key} {value:.6g}" for key, value in record.items() if key != "report"]
        _write(f"report {int(record['report'])}: {', '.join(shown)}")

    def log(self, rank: int, line: str, level: int) -> None:
        """Print a worker's line."""
        if level >= self._least:
            _write(f"[rank {rank}] {line}")

    def done(self, steps: int) -> None:
        """Its value says so."""

    def close(self) -> None:
        """Nothing is open."""


class LinesView(ReportView):
    """A line for each epoch of a fit, where stderr is no terminal: a bar would fill a file."""

    def __init__(self, plan: TrainPlan, *, shows_logs: bool) -> None:
        super().__init__(shows_logs=shows_logs)
        self._plan = plan

    def attempt(self, number: int, start_step: int) -> None:
        """Say that the gang is started again, and where it goes on."""
        if number > 0:
            _write(f"restart {number}, from step {start_step}")

    def epoch(self, record: Mapping[str, float]) -> None:
        """Print the epoch's record."""
        _write(_epoch_line(record))

    def done(self, steps: int) -> None:
        """Say whether training ended before its last planned step."""
        early = "stopped early" if steps < self._plan.total_steps else "trained"
        _write(f"{early}: {steps}/{self._plan.total_steps} steps")


def _epoch_line(record: Mapping[str, float]) -> str:
    shown = [
        f"{key} {value:.4f}"
        for key, value in record.items()
        if key not in ("epoch", "steps", "seconds", "learning_rate")
    ]
    return f"epoch {int(record['epoch'])}: {', '.join(shown)}"


def _write(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def on_terminal() -> bool:
    """True if what this process writes to stderr appears on a terminal at once.

    spark-submit starts the driver's Python with a pipe for its output, and copies that to its own,
    so there the JVM's counts, which is the parent process.
    """
    if "PYSPARK_GATEWAY_PORT" not in os.environ:
        return sys.stderr.isatty()
    try:
        output = os.open(f"/proc/{os.getppid()}/fd/1", os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK)
    except OSError:  # a socket, another user's process, or a system without /proc
        return sys.stderr.isatty()
    try:
        return os.isatty(output)
    finally:
        os.close(output)


class Speeds:
    """Rows per second of every rank since it was first heard."""

    def __init__(self) -> None:
        self._first: dict[int, tuple[float, int]] = {}
        self._speeds: dict[int, float] = {}

    def clear(self) -> None:
        """Forget all: the ranks begin to count anew."""
        self._first.clear()
        self._speeds.clear()

    def add(self, rank: int, rows: int) -> None:
        """A rank has trained on so many rows by now."""
        now = time.monotonic()
        since, before = self._first.setdefault(rank, (now, rows))
        if now > since:
            self._speeds[rank] = (rows - before) / (now - since)

    def mean(self) -> float:
        """Over the ranks; 0 as long as nothing is known."""
        return sum(self._speeds.values()) / max(1, len(self._speeds))


class ProgressView:
    """The bar, with the workers' warnings (``verbose=1``) or all their lines (``verbose=2``)."""

    def __init__(self, plan: TrainPlan, *, shows_logs: bool) -> None:
        from tqdm import tqdm

        self._plan = plan
        self._least = logging.NOTSET if shows_logs else logging.WARNING
        self._bar = tqdm(
            total=plan.total_steps,
            unit="step",
            dynamic_ncols=True,
            file=sys.stderr,
            mininterval=0.2,
            bar_format="{desc} {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} steps "
            "[{elapsed}<{remaining}{postfix}]",
            desc="starting",
        )
        self._speeds = Speeds()

    def attempt(self, number: int, start_step: int) -> None:
        """Put the bar where the gang starts."""
        self._speeds.clear()
        self._bar.reset(total=self._plan.total_steps)
        self._bar.initial = start_step
        self._bar.n = start_step
        self._bar.set_description_str("starting" if number == 0 else f"restart {number}")

    def heartbeat(self, rank: int, body: Mapping[str, Any]) -> None:
        """Move the bar with rank 0; remember every rank's speed."""
        if "step" not in body:
            return
        self._speeds.add(rank, int(body["rows"]))
        if rank != 0:
            return
        phase = "" if body["phase"] == "train" else f" ({body['phase']})"
        self._bar.set_description_str(f"epoch {body['epoch']}/{self._plan.epochs}{phase}")
        speed = self._speeds.mean()
        self._bar.set_postfix_str(
            f"loss {body['loss']:.4f}" + f", {speed:,.0f} rows/s per worker" * (speed > 0),
            refresh=False,
        )
        self._bar.update(max(0, int(body["step"]) - self._bar.n))

    def epoch(self, record: Mapping[str, float]) -> None:
        """Print the epoch's record above the bar."""
        self._bar.write(_epoch_line(record), file=sys.stderr)

    def log(self, rank: int, line: str, level: int) -> None:
        """Print a worker's line above the bar."""
        if level >= self._least:
            self._bar.write(f"[rank {rank}] {line}", file=sys.stderr)

    def done(self, steps: int) -> None:
        """Fill the bar; training may have ended before its last planned step."""
        early = steps < self._plan.total_steps
        self._bar.total = steps
        self._bar.update(steps - self._bar.n)
        self._bar.set_description_str("stopped early" if early else "trained")

    def close(self) -> None:
        """Leave the bar on the screen."""
        self._bar.close()
