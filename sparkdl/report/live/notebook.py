"""What does a notebook's cell show while workers train?

Progress of every fit that the cell has begun, their learning curves in one picture, and the
workers' log lines: three outputs that are drawn again in place, without widgets, so that they look
the same in any front end and stay when the notebook is saved.
"""

from __future__ import annotations

import base64
import html
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from sparkdl.data.plan import TrainPlan
from sparkdl.errors import SparkDLError
from sparkdl.report.live.learning_curves import Curves, panels_of, picture, sketch
from sparkdl.report.live.progress import Speeds

_STATUS_SECONDS = 0.25
_LOGS_SECONDS = 1.0
_CURVES_SECONDS = 2.0
_DRAWING_SHARE = 20
"""Drawing takes at most one part in so many of the driver's time."""
_MOST_LINES = 300
_MOST_WARNINGS = 5
_MOST_FITS = 12
"""Fits of one cell whose progress is shown; a search may have hundreds."""

Bundle = Mapping[str, str]
"""MIME type -> content, as Jupyter's messages have it."""


class Screen(Protocol):
    """Where a cell's outputs go."""

    def show(self, name: str, bundle: Bundle) -> None:
        """Show an output of that name, in place of the one that has it now."""


class CellScreen:
    """The cell that runs now, in the front end of an IPython kernel."""

    def __init__(self) -> None:
        self._handles: dict[str, Any] = {}

    def show(self, name: str, bundle: Bundle) -> None:
        """See `Screen.show`."""
        from IPython.display import display

        if name in self._handles:
            self._handles[name].update(dict(bundle), raw=True)
        else:
            shown = display(dict(bundle), raw=True, display_id=True)  # type: ignore[no-untyped-call]
            self._handles[name] = shown


def in_notebook() -> bool:
    """Whether this process is the kernel of a front end that shows HTML."""
    return _shell() is not None and not any(name.startswith("SPYDER") for name in os.environ)


def _shell() -> Any:
    ipython = sys.modules.get("IPython")  # a kernel has imported it long ago
    shell = None if ipython is None else ipython.get_ipython()
    return None if getattr(shell, "kernel", None) is None else shell


class Panel:
    """One fit's part of the board."""

    def __init__(self, name: str, *, total_steps: int = 0, epochs: int = 0) -> None:
        self.curves = Curves(name=name, unit="epoch" if epochs else "report")
        self.total_steps = total_steps
        self.epochs = epochs
        self.step = 0
        self.state = "starting"
        self.restart = ""
        self.is_open = True
        self.loss = ""
        self.speeds = Speeds()
        self._began = time.monotonic()
        self._first_step = 0

    def begin(self, number: int, start_step: int) -> None:
        """An attempt begins."""
        self._began, self._first_step = time.monotonic(), start_step
        self.step = start_step
        self.restart = f", restart {number}" if number else ""
        self.speeds.clear()

    def text(self) -> str:
        """How far it is, in words."""
        parts = [f"{self.curves.name}: {self.state}{self.restart}"]
        if self.total_steps:
            parts.append(f"{self.step:,} of {self.total_steps:,} steps{self._left()}")
        if self.loss:
            parts.append(f"loss {self.loss}")
        if (speed := self.speeds.mean()) > 0:
            parts.append(f"{speed:,.0f} rows/s per worker")
        if self.curves.records:
            parts.append(_shown(self.curves.records[max(self.curves.records)], self.curves.unit))
        return " · ".join(parts)

    def _left(self) -> str:
        done = self.step - self._first_step
        if not (self.is_open and done and self.step < self.total_steps):
            return ""
        seconds = (time.monotonic() - self._began) / done * (self.total_steps - self.step)
        minutes, seconds = divmod(round(seconds), 60)
        return f", {minutes}:{seconds:02d} left"


def _shown(record: Mapping[str, float], unit: str) -> str:
    left_out = ("epoch", "report", "steps", "seconds", "learning_rate")
    values = [f"{key} {value:.4g}" for key, value in record.items() if key not in left_out]
    return f"{unit} {int(record[unit])}: {', '.join(values)}"


class Board:
    """All that one cell shows of its fits, which may run at the same time. Thread-safe."""

    def __init__(self, screen: Screen, draw: Callable[..., bytes] = picture) -> None:
        self._screen = screen
        self._draw: Callable[..., bytes] | None = draw
        self._lock = threading.RLock()
        self._panels: list[Panel] = []
        self._lines: deque[str] = deque(maxlen=_MOST_LINES)
        self._num_lines = 0
        self._warnings: deque[str] = deque(maxlen=_MOST_WARNINGS)
        self._due = {"progress": 0.0, "curves": 0.0, "logs": 0.0}
        self._old: set[str] = set()
        """Outputs that no longer show what is known."""
        self._shows_logs = False

    def add(self, *, shows_logs: bool, total_steps: int = 0, epochs: int = 0) -> Panel:
        """Begin to show another fit."""
        with self._lock:
            kind = "fit" if epochs else "run"
            name = f"{kind} {len(self._panels) + 1}"
            panel = Panel(name, total_steps=total_steps, epochs=epochs)
            self._panels.append(panel)
            self._shows_logs |= shows_logs
            # A first curve of a few steps would be drawn for nothing.
            self._due["curves"] = max(self._due["curves"], time.monotonic() + 1.0)
            self.changed("progress")
            return panel

    def log(self, rank: int, line: str, level: int, panel: Panel) -> None:
        """A worker's line."""
        with self._lock:
            name = f"{panel.curves.name}, " if len(self._panels) > 1 else ""
            text = f"[{name}rank {rank}] {line}"
            self._lines.append(text)
            self._num_lines += 1
            if level >= logging.WARNING:
                self._warnings.append(text)
                self.changed("progress")
            self.changed("logs")

    def changed(self, *outputs: str, at_once: bool = False) -> None:
        """Show these outputs anew as soon as it is their time, or ``at_once``."""
        with self._lock:
            self._old.update(outputs)
            now = time.monotonic()
            for output in ("progress", "curves", "logs"):  # drawing may add to the log
                if output in self._old and (at_once or now >= self._due[output]):
                    self._old.discard(output)
                    self._due[output] = now + self._show(output)

    def _show(self, output: str) -> float:
        """Returns how many seconds that shall last."""
        if output == "progress":
            self._screen.show(output, self._progress())
            return _STATUS_SECONDS
        if output == "logs":
            self._screen.show(output, self._logs())
            return _LOGS_SECONDS
        began = time.monotonic()
        if panels_of([panel.curves for panel in self._panels]):
            self._screen.show(output, self._curves())
        return max(_CURVES_SECONDS, _DRAWING_SHARE * (time.monotonic() - began))

    def _progress(self) -> Bundle:
        hidden = len(self._panels) - _MOST_FITS
        shown = self._panels[-_MOST_FITS:]
        first = [f"({hidden} earlier ones are not shown)"] if hidden > 0 else []
        rows = [f"<div>{html.escape(text)}</div>" for text in first]
        for panel in shown:
            bar = ""
            if panel.total_steps:
                bar = f"<progress value='{panel.step}' max='{panel.total_steps}'></progress> "
            rows.append(f"<div>{bar}{html.escape(panel.text())}</div>")
        rows += [
            f"<div style='color:#b45309;white-space:pre-wrap'>{html.escape(line)}</div>"
            for line in self._warnings
        ]
        plain = [*first, *(panel.text() for panel in shown), *self._warnings]
        return {"text/html": "".join(rows), "text/plain": "\n".join(plain)}

    def _curves(self) -> Bundle:
        fits = [panel.curves for panel in self._panels]
        if self._draw is not None:
            try:
                data = base64.b64encode(self._draw(fits)).decode()
                return {"image/png": data, "text/plain": sketch(fits)}
            except SparkDLError as error:
                self._draw = None
                self._lines.append(f"[driver] {error}")
                self._old.add("logs")
        text = sketch(fits)
        return {"text/html": f"<pre>{html.escape(text)}</pre>", "text/plain": text}

    def _logs(self) -> Bundle:
        text = "\n".join(self._lines)
        missing = self._num_lines - len(self._lines)
        earlier = f", {missing:,} earlier ones are not shown" if missing > 0 else ""
        title = f"log of the workers ({self._num_lines:,} lines{earlier})"
        is_open = " open" if self._shows_logs else ""
        return {
            "text/html": f"<details{is_open}><summary>{title}</summary>"
            f"<pre style='max-height:20em;overflow:auto'>{html.escape(text)}</pre></details>",
            "text/plain": f"{title}\n{text}",
        }


class NotebookView:
    """A fit, or a function's run, on the board of its cell; ``verbose=2`` leaves the log open."""

    def __init__(self, board: Board, plan: TrainPlan | None, *, shows_logs: bool) -> None:
        self._board = board
        if plan is None:
            self._panel = board.add(shows_logs=shows_logs)
        else:
            self._panel = board.add(
                shows_logs=shows_logs, total_steps=plan.total_steps, epochs=plan.epochs
            )
            self._panel.curves.per_unit = plan.steps_per_epoch

    def attempt(self, number: int, start_step: int) -> None:
        """Go back to where the gang starts."""
        self._panel.begin(number, start_step)
        if not self._panel.epochs:
            self._panel.state = "running"
        self._board.changed("progress")

    def heartbeat(self, rank: int, body: Mapping[str, Any]) -> None:
        """Move the bar with rank 0; remember every rank's speed."""
        panel = self._panel
        if "step" not in body:
            self._board.changed()
            return
        panel.speeds.add(rank, int(body["rows"]))
        if rank != 0:
            return
        phase = "" if body["phase"] == "train" else f" ({body['phase']})"
        panel.state = f"epoch {body['epoch']} of {panel.epochs}{phase}"
        panel.loss = f"{body['loss']:.4f}"
        step = int(body["step"])
        is_new = step != panel.step
        panel.step = max(panel.step, step)
        panel.curves.add_step(step, float(body["loss"]))
        self._board.changed("progress", *(["curves"] if is_new else []))

    def epoch(self, record: Mapping[str, float]) -> None:
        """Go on with the curves."""
        self._panel.curves.add_record(record)
        self._board.changed("progress", "curves")

    def log(self, rank: int, line: str, level: int) -> None:
        """Show a worker's line in the log, and a warning outside of it, too."""
        self._board.log(rank, line, level, self._panel)

    def done(self, steps: int) -> None:
        """Fill the bar; training may have ended before its last planned step."""
        panel = self._panel
        panel.state = "trained" if steps >= panel.total_steps else "stopped early"
        panel.step = panel.total_steps = steps

    def close(self) -> None:
        """Show everything once more, and leave it there."""
        panel = self._panel
        panel.is_open = False
        if panel.state not in ("trained", "stopped early"):
            panel.state = f"ended in {panel.state}" if panel.epochs else "ended"
        self._board.changed("progress", "curves", at_once=True)


_boards: dict[str, Board] = {}
"""The board of the newest cell, by its message's id."""
_making = threading.Lock()


def board_of_cell() -> Board:
    """The board of the cell that runs now; in threads that of the newest cell."""
    cell = str(_shell().get_parent().get("header", {}).get("msg_id", ""))
    with _making:
        if cell not in _boards:
            _boards.clear()
            _boards[cell] = Board(CellScreen())
        return _boards[cell]
