"""The view of a run on the driver's console, and the base of all views.

A terminal has a line in place, and the workers' log lines above it; a file has a line for each
phase that takes a second, and for each epoch. Notebooks have a view of their own (`notebook`).
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
from typing import Any, ClassVar

from tqdm import tqdm

from sparkdl.data.plan import TrainPlan
from sparkdl.report.record.run_record import curve_names, thin
from sparkdl.runtime.activity import FOR_SLOTS, STOPPING

logger = logging.getLogger(__name__)

_USUAL_COLUMNS = 80
"""Columns of a terminal that does not say how many it has."""
_SHORT_SECONDS = 1.0
"""A phase that takes less has no line without a terminal, and no time with one."""
_AGAIN_SECONDS = 60.0
"""A phase that takes longer has another line without a terminal, and one after each such time."""
_LEAST_SECONDS = 2.0
_LEAST_REPORTS = 3
"""Reports of steps, after the first one, before anything is said."""
_MEMORY_SECONDS = 30.0
"""The pace is that of the last seconds, so many at least, and of half the time in a long run."""
_WARM_UP_REPORTS = 20
_WARM_UP_FACTOR = 2.0
"""Steps so many times faster than all before are taken for the end of the warm-up."""
_MOST_REPORTS = 1000


@dataclass(frozen=True, kw_only=True)
class Progress:
    """The progress of one rank."""

    phase: str = "start"
    """Activity of the rank: ``train``, ``evaluate`` ..."""
    epoch: int = 0
    """From 1; 0: training has not begun."""
    step: int = 0
    loss: float = math.nan
    """Loss of the newest step."""
    rows: int = 0
    """Rows on which it has trained in this attempt."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Activity -> time that it has taken since the attempt began."""

    @classmethod
    def of(cls, body: Mapping[str, Any]) -> Progress:
        """The progress in a worker's event, which may have other entries as well."""
        names = [entry.name for entry in dataclasses.fields(cls)]
        return cls(**{name: body[name] for name in names if name in body})


class View:
    """Shows or records a run; a subclass overrides what it needs. All calls come on the driver."""

    ends_run: ClassVar[bool] = False
    """True if what it raises ends the run; otherwise that ends the view, with a warning."""

    def activity(self, what: str, detail: str) -> None:
        """The driver does or waits for something; see `sparkdl.runtime.activity.doing`."""

    def planned(self, plan: TrainPlan) -> None:
        """The steps of a fit are known."""

    def tick(self) -> None:
        """Called several times a second, from another thread, between the other calls."""

    def attempt(self, number: int, start_step: int, workers: int | None = None) -> None:
        """A gang, or a run in rounds, starts at ``start_step``; ``number`` counts from 0.

        ``workers`` is given where their number may change.
        """

    def begun_again(self, number: int, step: int | None) -> None:
        """A failed attempt or round is started again, for the ``number``-th time in the run.

        Of a gang `attempt` follows; of rounds one is repeated. ``step`` None: it is not known yet.
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

    def done(self, steps: int, *, stopped_early: bool) -> None:
        """Training succeeded after ``steps`` steps in all, maybe before its last epoch ended."""

    def failed(self, reason: str) -> None:
        """The run ended with an error, whose message begins with ``reason``; `close` follows."""

    def close(self) -> None:
        """The run ended, one way or the other."""


class SilentView(View):
    """Shows nothing (``verbose=0``); the workers' warnings become the driver's."""

    def log(self, rank: int, line: str, level: int) -> None:
        if level >= logging.WARNING:
            logger.log(level, "[rank %d] %s", rank, line)


class EpochCallback(View):
    """Calls a function with the record of each epoch."""

    ends_run = True

    def __init__(self, on_epoch: Callable[[Mapping[str, float]], None]) -> None:
        self._on_epoch = on_epoch

    def epoch(self, record: Mapping[str, float]) -> None:
        self._on_epoch(record)


class TimeLeft:
    """Takes reports of how many steps are done.

    The first step is left out, since what is compiled, loaded or connected makes it slow. So are
    all steps before an early report by which the run has become much faster.
    """

    def __init__(self, start_step: int = 0) -> None:
        self._begin = start_step
        self._reports: list[tuple[float, int]] = []
        """Pairs of a time and the number of steps done by then, from the first step on."""
        self._fastest = math.inf
        """Seconds of a step."""

    def take(self, now: float, step: int) -> None:
        """At ``now``, in seconds by any clock, ``step`` steps are done."""
        before, done = self._reports[-1] if self._reports else (-math.inf, self._begin)
        if step <= done or now <= before:
            return
        pace = (now - before) / (step - done)
        if _WARM_UP_FACTOR * pace < self._fastest and len(self._reports) <= _WARM_UP_REPORTS:
            del self._reports[:-1]
        self._fastest = min(self._fastest, pace)
        self._reports.append((now, step))
        thin(self._reports, _MOST_REPORTS)

    def seconds(self, now: float, total_steps: int) -> float | None:
        """Seconds from ``now`` to the last of ``total_steps`` steps; None: not known well yet."""
        if len(self._reports) <= _LEAST_REPORTS:
            return None
        (first, _), (last, step) = self._reports[0], self._reports[-1]
        if last - first < _LEAST_SECONDS or step >= total_steps:
            return None
        newer = max(first, min(last - _MEMORY_SECONDS, (first + last) / 2))
        since, done = next(report for report in reversed(self._reports) if report[0] <= newer)
        return max(0.0, (total_steps - step) * (last - since) / (step - done) - (now - last))


class RunView(View):
    """Puts the progress of a run into words for all views; of a function no steps are known."""

    def __init__(self, *, shows_logs: bool = False) -> None:
        """Without ``shows_logs``, of the workers' lines only warnings are shown."""
        self._least_level = logging.NOTSET if shows_logs else logging.WARNING
        self.epochs = self.total_steps = self.first_step = 0
        self.state = "starting"
        self.stopped_in = ""
        """The state in which the run was when it was stopped; empty: it was not."""
        self.has_ended = self.is_training = self.is_stopping = False
        self.step = 0
        self._loss = ""
        self._restart = ""
        self._phase = self.phase_text = ""
        self._phase_began = 0.0
        self._time_left = TimeLeft()
        self._first: dict[int, tuple[float, int]] = {}
        self._speeds: dict[int, float] = {}

    def planned(self, plan: TrainPlan) -> None:
        self.epochs, self.total_steps = plan.end_epoch, plan.first_step + plan.total_steps
        self.first_step = plan.first_step

    def phase(self, what: str, detail: str) -> bool:
        """Take note of what the driver does; False if training goes on, which says more."""
        self.is_stopping = what == STOPPING
        if self.is_stopping and not self.stopped_in:
            self.stopped_in = self.state
        self.is_training = self.is_training and not self.is_stopping
        if self.is_training:
            return False
        if what != self._phase:
            self._phase, self._phase_began = what, time.monotonic()
        self.phase_text = f"{what} ({detail})" if detail else what
        if not self.has_ended:
            self.state = (self.phase_text or "running") + self._restart
        return True

    def seconds_in_phase(self) -> float:
        """For how long the driver does what it does now."""
        return time.monotonic() - self._phase_began if self._phase else 0.0

    def begun_again(self, number: int, step: int | None) -> None:
        self.is_training = self.is_stopping = False

    def attempt(self, number: int, start_step: int, workers: int | None = None) -> None:
        """Go back to where the gang starts; the ranks count their rows anew."""
        self._restart = f", restart {number}" if number else ""
        self.state, self.step = f"starting{self._restart}", start_step
        self.is_training = self.is_stopping = False
        self._time_left = TimeLeft(start_step)
        self._first.clear()
        self._speeds.clear()

    def has_moved(self, rank: int, progress: Progress) -> bool:
        """Take note of a rank; True if the run's state, which is that of rank 0, is a new one."""
        if not progress.epoch or self.is_stopping:  # then it was on its way when that began
            return False
        now = time.monotonic()
        since, before = self._first.setdefault(rank, (now, progress.rows))
        if now > since:
            self._speeds[rank] = (progress.rows - before) / (now - since)
        if rank != 0:
            return False
        self.is_training = True
        phase = "" if progress.phase == "train" else f" ({progress.phase})"
        self.state = f"epoch {progress.epoch} of {self.epochs}{phase}{self._restart}"
        self._loss = f"loss {progress.loss:.4f}"
        self.step = max(self.step, progress.step)
        self._time_left.take(now, self.step)
        return True

    def done(self, steps: int, *, stopped_early: bool) -> None:
        self.has_ended, self.is_training = True, False
        self.state = ("stopped early" if stopped_early else "trained") + self._restart
        self.step = self.total_steps = steps

    def time_left(self) -> str:
        """Return the time that the steps left will take; empty until it is known well enough."""
        seconds = self._time_left.seconds(time.monotonic(), self.total_steps)
        return "" if seconds is None or self.has_ended else tqdm.format_interval(seconds)

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
    so there the JVM's counts, which is the parent process. A terminal that calls itself dumb, as
    those in editors do, replaces no line.
    """
    if os.environ.get("TERM") == "dumb":
        return None
    if "PYSPARK_GATEWAY_PORT" in os.environ:
        way = os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK
        # Not of a socket, of another user's process, or where there is no /proc.
        with contextlib.suppress(OSError):
            output = os.open(f"/proc/{os.getppid()}/fd/1", way)
            try:
                return _columns(output)
            finally:
                os.close(output)
    if not has_stderr() or not sys.stderr.isatty():
        return None
    return _columns(sys.stderr.fileno())


def has_stderr() -> bool:
    """False in a service, where `sys.stderr` may be None, and after it was closed."""
    return sys.stderr is not None and not sys.stderr.closed


def say(line: str) -> None:
    """Print a line on stderr, where there is one."""
    if has_stderr():
        sys.stderr.write(f"{line}\n")  # at once: others may write, too
        sys.stderr.flush()


def _columns(output: int) -> int | None:
    try:
        return os.get_terminal_size(output).columns or _USUAL_COLUMNS
    except OSError:  # it is no terminal
        return None


class ConsoleView(RunView):
    """A line for each epoch or report and worker's line; in a file phases have lines, too."""

    _open: ClassVar[set[ConsoleView]] = set()
    """Views of this process whose runs go on."""

    def __init__(self, *, has_bar: bool, shows_logs: bool, name: str = "") -> None:
        """On a terminal it has a bar; ``name`` is the run's, which is shown where several go on."""
        super().__init__(shows_logs=shows_logs)
        self._has_bar = has_bar
        self._name = name
        self._is_one_of_several = False
        """True from when another is open beside it to the end, so that a log is unambiguous."""
        self._began = time.monotonic()
        self._bar: Any = None
        """The line in place; it has no bar before the steps are known."""
        self._drawn = "", ""
        self._said: tuple[str, int] | None = None
        """Phase and minute of it that the newest line was for."""
        self._has_said_wait = False
        """True if a line of this phase has said that it waits for slots."""
        if name:
            self._open.add(self)
            if len(self._open) > 1:
                for view in self._open:
                    view._is_one_of_several = True

    def _draw_line(self, bar_format: str, **options: Any) -> None:
        if self._bar is not None:
            self._bar.close()
        self._bar = tqdm(
            ncols=terminal_columns(),
            dynamic_ncols=sys.stderr.isatty(),
            file=sys.stderr,
            mininterval=0.2,
            bar_format=bar_format,
            desc=self._state(),
            **options,
        )

    def _write(self, line: str) -> None:
        line = self._prefix() + line
        if self._bar is None:
            say(line)
        else:
            self._bar.write(line, file=sys.stderr)

    def _prefix(self) -> str:
        return f"{self._name}: " if self._is_one_of_several else ""

    def _state(self) -> str:
        """Return the text of the line in place, which a terminal must not have to break."""
        if self.total_steps and not self.has_ended:
            return self._prefix() + self.state
        seconds = self.seconds_in_phase()
        time_text = f" {tqdm.format_interval(seconds)}" if seconds >= _SHORT_SECONDS else ""
        width = (terminal_columns() or _USUAL_COLUMNS) - 2  # tqdm cuts off all but columns - 1
        text = (self._prefix() + self.phase_text)[: width - len(time_text)] + time_text
        # What others print then begins where the line does; of one width tqdm fills nothing up.
        return f"{text:<{width}}\r"

    def planned(self, plan: TrainPlan) -> None:
        super().planned(plan)
        if self._has_bar:
            # 80 columns have room for it.
            self._draw_line(self._bar_format(), total=self.total_steps, unit="step")

    def _bar_format(self) -> str:
        left = self.time_left()
        times = tqdm.format_interval(time.monotonic() - self._began) + f"<{left}" * bool(left)
        return f"{{desc}} |{{bar}}| {{n_fmt}}/{{total_fmt}} [{times}{{postfix}}]"

    def _redraw(self) -> None:
        has_steps = self.total_steps and not self.has_ended
        bar_format = self._bar_format() if has_steps else "{desc}"
        state = self._state()
        if (state, bar_format) != self._drawn:
            self._drawn = state, bar_format
            self._bar.bar_format = bar_format
            self._bar.set_description_str(state)

    def activity(self, what: str, detail: str) -> None:
        """Say it in place; without a terminal `tick` does, if it takes long enough."""
        if not self.phase(what, detail):
            return
        if self._bar is not None and (what or self.total_steps):
            self._redraw()
        elif self._has_bar and what:
            self._draw_line("{desc}", leave=False)
        else:
            self._end_line()

    def tick(self) -> None:
        if self._bar is not None:
            self._redraw()
            return
        if self._has_bar or self.is_training or not self._phase:
            return
        seconds = self.seconds_in_phase()
        times = int(seconds // _AGAIN_SECONDS)
        saying, waits = (self._phase, times), FOR_SLOTS in self.phase_text
        if self._said is None or self._said[0] != self._phase:
            self._has_said_wait = False
        is_new = saying != self._said or (waits and not self._has_said_wait)
        if is_new and seconds >= _SHORT_SECONDS:
            self._said, self._has_said_wait = saying, self._has_said_wait or waits
            so_far = f", for {tqdm.format_interval(seconds)} so far" if times else ""
            self._write(self.phase_text + so_far)

    def _end_line(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def attempt(self, number: int, start_step: int, workers: int | None = None) -> None:
        """Put the bar where the gang starts, or print where it goes on."""
        super().attempt(number, start_step, workers)
        if self._bar is not None and self.total_steps:
            self._bar.reset(total=self.total_steps)
            self._bar.n = self._bar.initial = start_step
            self._redraw()
        if (number > 0 or start_step) and not (self._has_bar and self.epochs):
            unit = "step" if self.epochs else "checkpoint"
            place = f"from {unit} {start_step}" if start_step else "from the beginning"
            with_whom = "" if workers is None else f", with {workers} worker" + "s" * (workers > 1)
            what = f"restart {number}, {place}" if number > 0 else f"going on {place}"
            self._write(f"{what}{with_whom}")

    def progress(self, rank: int, progress: Progress) -> None:
        if self.has_moved(rank, progress) and self._bar is not None:
            self._bar.set_postfix_str(", ".join(self.details()), refresh=False)
            self._bar.update(max(0, progress.step - self._bar.n))
            self._redraw()

    def epoch(self, record: Mapping[str, float]) -> None:
        self._write(record_text(record))

    def log(self, rank: int, line: str, level: int) -> None:
        if level >= self._least_level:
            self._write(f"[rank {rank}] {line}")

    def done(self, steps: int, *, stopped_early: bool) -> None:
        """Fill the bar, or print the last line.

        Not as many steps as planned may be all of them: epochs before a fit went on had others if
        it had other workers then.
        """
        planned = self.total_steps
        super().done(steps, stopped_early=stopped_early)
        if self._bar is not None and planned:
            self._bar.total = steps
            self._bar.update(steps - self._bar.n)
            self._bar.bar_format = self._bar_format()
            self._bar.set_description_str(self._prefix() + self.state)
            self._end_line()
        elif self.epochs:
            own = f"trained: {steps - self.first_step} steps"
            if self.first_step:
                own += f", {steps} with those of the earlier fit"
            self._write(f"stopped early: {steps}/{planned} steps" if stopped_early else own)

    def close(self) -> None:
        self._open.discard(self)
        self._end_line()
