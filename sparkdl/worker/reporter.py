"""Reports to the driver what a worker does, without disturbing it.

A background thread sends heartbeats, progress, log lines and errors. While the driver cannot be
reached they wait, and training goes on; the worker's own log says so once.
"""

from __future__ import annotations

import contextlib
import io
import logging
import math
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, TextIO

from sparkdl.comm.channel import ChannelClient, MessageTooLarge
from sparkdl.comm.worker_environment import SparkTask
from sparkdl.errors import CommunicationError
from sparkdl.runtime.json_values import plain
from sparkdl.worker.watcher import Watcher

logger = logging.getLogger(__name__)

Line = tuple[int, str]
"""Level and text of a log line."""

_LAST_LINES = 20
"""Lines of a stream that are kept, to be shown where a program exits."""
_INTERVAL_SECONDS = 0.25
"""Between two looks at what waits; the driver says how often it is sent."""
_MAX_LINES = 2000
"""Log lines that wait for the driver; the oldest are dropped beyond, and counted."""
_MAX_CHARACTERS = 10_000
"""Characters kept of a line: the last ones."""
_MAX_PAUSE_SECONDS = 2.0
"""Longest time between two attempts to reach a driver that does not answer."""
_SILENT_FAILURES = 5
"""Failures in a row, of a few seconds in all, that are not mentioned."""


class Reporter:
    """Sends one worker's reports. Use it as a context manager around the worker's life.

    It is the training loop's observer, whose calls set values that the thread sends. Once the
    driver waits for this work no more, the next step is the last one.
    """

    def __init__(
        self,
        client: ChannelClient | None,
        *,
        attempt: int,
        rank: int,
        task: SparkTask | None = None,
        heartbeat_timeout_seconds: float | None = None,
    ) -> None:
        """Prepare the reports of one rank in one attempt; without a client nothing is sent.

        The first report says which ``task`` of Spark's this is: a rank whose task is lost has
        another process, or none.

        After a silence of ``heartbeat_timeout_seconds`` the driver takes this process for hung; a
        watcher reports in its place while it computes and cannot run Python. None: no watcher.
        """
        self._client = client
        self._watcher: Watcher | None = None
        if client is not None and heartbeat_timeout_seconds is not None:
            self._watcher = Watcher(
                heartbeat_timeout_seconds, address=client.address, attempt=attempt, rank=rank
            )
        self.is_shown = False
        """True if the driver shows what is printed here on the very console that we write to."""
        self._is_over = False
        self.rows = 0
        """Rows this rank has trained on in this attempt."""
        self._attempt = attempt
        self._rank = rank
        self._progress: dict[str, Any] = {"kind": "heartbeat", "phase": "start"}
        self._seconds: Mapping[str, float] = {}
        self._events: deque[dict[str, Any]] = deque()
        self._lines: deque[Line] = deque(maxlen=_MAX_LINES)
        self._num_lines, self._num_taken = 0, 0
        """Lines that were queued, and those that were put into a batch or dropped."""
        self._batch: list[dict[str, Any]] = []
        """Events and lines that are sent until the driver has them."""
        self._number = 0
        """Number of the batch, by which the driver knows it if it comes twice."""
        self._failures = 0
        self._interval, self._due = _INTERVAL_SECONDS, 0.0
        """Seconds between two reports, and when the next one is due."""
        self._most_interval = (heartbeat_timeout_seconds or math.inf) / 4  # else it counts as hung
        self._resources = contextlib.ExitStack()
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="sparkdl-reporter", daemon=True)
        if task is not None:
            self.send({"kind": "task", "task": asdict(task)})

    def __enter__(self) -> Reporter:
        if self._client is not None:
            if self._watcher is not None:
                self._resources.enter_context(self._watcher)
            self._flush()  # from now on the driver notices when this worker falls silent
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=10)
        self._resources.close()

    def step(self, *, epoch: int, step: int, loss: float, rows: int) -> None:
        """After a training step: epoch from 1, steps done, loss, rows of this rank in the step.

        Raises CommunicationError if the driver has ended the run.
        """
        if self._is_over:  # so that Spark need not end this process, which has imported torch
            raise CommunicationError("the driver has ended this run")
        self.rows += rows
        self._progress = {
            **self._progress,
            "epoch": epoch,
            "step": step,
            "loss": loss,
            "rows": self.rows,
        }

    def phase(self, name: str) -> None:
        """Set what the worker does now."""
        self._progress = {**self._progress, "phase": name}

    def clock(self, seconds: Mapping[str, float]) -> None:
        """Set what time is spent on, which grows during training and is sent with every report."""
        self._seconds = seconds

    def epoch(self, record: Mapping[str, float]) -> None:
        """At the end of an epoch: its history record."""
        self.send({"kind": "epoch", "record": dict(record)})

    def confusion(self, epoch: float, counts: Sequence[Sequence[float]]) -> None:
        """Send a classifier's counts of rows by label and prediction; equal on all ranks."""
        if self._rank == 0:
            self.send({"kind": "confusion", "epoch": epoch, "counts": counts})

    def layers(self, step: int, found: Mapping[str, Any]) -> None:
        """Send what was measured in the layers; only rank 0 measures."""
        self.send({"kind": "layers", "step": step, **found})

    def send(self, event: Mapping[str, Any]) -> None:
        """Queue an event; what JSON does not know, such as numbers of NumPy, goes as its text."""
        queued = plain({**event, "time": time.time()})
        with self._lock:
            self._events.append(queued)

    def line(self, text: str, level: int = logging.INFO) -> None:
        """Queue a log line; ``level`` is logging's, and what is printed counts as INFO."""
        with self._lock:
            self._lines.append((level, text[-_MAX_CHARACTERS:]))
            self._num_lines += 1

    def _run(self) -> None:
        while not self._stop.wait(_INTERVAL_SECONDS):
            if self._watcher is not None:
                self._watcher.feed()
            if time.monotonic() >= self._due:
                self._flush_whatever_happens()
        self._flush_whatever_happens()

    def _flush_whatever_happens(self) -> None:
        """Send what waits; no mistake may end the thread: the driver would take that for a hang."""
        try:
            self._flush()
        except Exception:
            self._failures += 1
            if self._failures == 1:
                self._complain(f"a report could not be sent\n{traceback.format_exc()}")
        self._due = time.monotonic() + self._pause() - _INTERVAL_SECONDS / 2

    def _pause(self) -> float:
        """Seconds until the next report: as the driver says; they double with every failure."""
        patience = min(_INTERVAL_SECONDS * 2.0 ** min(self._failures, 10), _MAX_PAUSE_SECONDS)
        return max(min(self._interval, self._most_interval), patience)

    def _flush(self) -> None:
        """Send what waits: what the driver did not get the last time, then what came later."""
        was_left = bool(self._batch)
        if self._send() and was_left:
            self._send()

    def _send(self) -> bool:
        """Send the batch, or a new one, and whether it is sent; else it waits on."""
        assert self._client is not None
        if not self._batch:
            with self._lock:
                dropped = self._num_lines - self._num_taken - len(self._lines)
                self._batch = [*self._events, *_log_event(list(self._lines), dropped)]
                self._num_taken = self._num_lines
                self._events.clear()
                self._lines.clear()
            self._number += 1
        try:
            self.is_shown, self._interval, self._is_over = self._client.report(
                attempt=self._attempt,
                rank=self._rank,
                events=[self._now()],
                queued=self._batch,
                number=self._number,
            )
        except MessageTooLarge as error:  # and would be again, and the worker seem to be silent
            self._complain(f"a report was dropped ({error})")
        except CommunicationError as error:
            self._failures += 1
            if self._failures == _SILENT_FAILURES + 1:
                self._complain(
                    f"the driver does not answer; progress and logs wait for it ({error})"
                )
            return False
        self._failures = 0
        self._batch = []
        return True

    def _complain(self, text: str) -> None:
        """Not by logging: our own handler would send it."""
        if sys.__stderr__ is not None:
            sys.__stderr__.write(f"sparkdl rank {self._rank}: training goes on, but {text}\n")

    def _now(self) -> dict[str, Any]:
        if not self._seconds:
            return self._progress
        spent = {name: round(seconds, 6) for name, seconds in self._seconds.items()}
        return {**self._progress, "seconds": spent}


def _log_event(lines: list[Line], dropped: int) -> list[dict[str, Any]]:
    if dropped:
        lines = [(logging.INFO, f"({dropped} earlier log lines were dropped)"), *lines]
    return [{"kind": "log", "lines": lines}] if lines else []


class _Handler(logging.Handler):
    def __init__(self, reporter: Reporter) -> None:
        super().__init__()
        self._reporter = reporter
        self.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._reporter.line(self.format(record), record.levelno)
        except Exception:  # logging's contract: a bad format string must not end the program
            self.handleError(record)


class _Tee(io.TextIOBase):
    """Writes on to the original stream, if that is another place, and whole lines to the driver."""

    def __init__(self, original: TextIO, reporter: Reporter) -> None:
        super().__init__()
        self.original = original
        self._reporter = reporter
        self._partial = ""
        self._last: deque[str] = deque(maxlen=_LAST_LINES)
        self._writing = threading.Lock()

    def last_lines(self) -> list[str]:
        """Return the lines that were written last, the unfinished line too."""
        with self._writing:
            return [*self._last, *([self._partial] if self._partial else [])]

    def write(self, text: str) -> int:
        with self._writing:
            if not self._reporter.is_shown:
                self.original.write(text)
            *lines, partial = (self._partial + text).split("\n")
            # A progress bar draws over its line again and again: only the last drawing is kept.
            self._partial = _drawn(partial)[-_MAX_CHARACTERS:]
            drawn = [_drawn(line.rstrip("\r"))[-_MAX_CHARACTERS:] for line in lines]
            self._last.extend(drawn)
            for line in drawn:
                self._reporter.line(line)
        return len(text)

    def flush(self) -> None:
        self.original.flush()

    def drain(self) -> None:
        """Send an unfinished last line."""
        with self._writing:
            line, self._partial = self._partial.rstrip("\r"), ""
        if line:
            self._reporter.line(line)

    def fileno(self) -> int:
        return self.original.fileno()

    def writable(self) -> bool:
        return True

    def __getattr__(self, name: str) -> Any:
        return getattr(self.original, name)  # such as buffer


def _drawn(line: str) -> str:
    """Return what a console shows of a line with carriage returns; one at its end is kept."""
    end = line.rstrip("\r")
    return end.rpartition("\r")[2] + line[len(end) :]


@contextlib.contextmanager
def captured_output(reporter: Reporter) -> Iterator[Callable[[], list[str]]]:
    """Send prints and log records of this process to the driver, for the time of the block.

    Rank 0 speaks at INFO, the others at WARNING. Yields what gives the last lines of stderr.
    """
    root = logging.getLogger()
    handler, level = _Handler(reporter), root.level
    own = logging.getLogger("sparkdl")
    own_level = own.level
    out, err = (_Tee(stream or io.StringIO(), reporter) for stream in (sys.stdout, sys.stderr))
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        root.addHandler(handler)
        own.setLevel(logging.INFO if reporter._rank == 0 else logging.WARNING)
        try:
            with _working_basic_config(handler):
                yield err.last_lines
        finally:
            root.removeHandler(handler)
            root.setLevel(level)
            own.setLevel(own_level)
            out.drain()
            err.drain()


@contextlib.contextmanager
def _working_basic_config(handler: logging.Handler) -> Iterator[None]:
    """Let `logging.basicConfig` take effect, which does nothing where there is a handler.

    What it logs to a stream that we pass on goes to the original: the driver has it from us.
    """
    root, original = logging.getLogger(), logging.basicConfig

    def configure(**options: Any) -> None:
        root.removeHandler(handler)
        try:
            original(**options)
        finally:
            root.addHandler(handler)
        for other in root.handlers:
            if isinstance(other, logging.StreamHandler) and isinstance(other.stream, _Tee):
                other.setStream(other.stream.original)

    logging.basicConfig = configure
    try:
        yield
    finally:
        logging.basicConfig = original
