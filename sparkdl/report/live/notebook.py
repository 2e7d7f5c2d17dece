"""Views in a notebook's cell while workers train: the progress of its runs, and their curves.

Both are outputs that are drawn again in place, and no widgets, so they stay when it is saved.
"""

from __future__ import annotations

import base64
import html
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from tqdm import tqdm

from sparkdl.data.plan import TrainPlan
from sparkdl.errors import SparkDLError
from sparkdl.report.live.learning_curves import Curves, panels_of, picture, sketch
from sparkdl.report.live.progress import Progress, RunView, record_text
from sparkdl.report.record.run_record import add_record

_PROGRESS_SECONDS = 0.25
_CURVES_SECONDS = 2.0
_DRAWING_SHARE = 20
"""Drawing takes at most one part in so many of the driver's time."""
_MOST_RUNS = 12
"""Runs of one cell whose progress is shown; a search may have hundreds."""

Bundle = Mapping[str, str]
"""MIME type -> content, as Jupyter's messages have it."""
Show = Callable[[str, Bundle], None]
"""Shows an output by its name, in place of the one that has the name now."""


class CellOutputs:
    """The outputs of the cell that runs now, in the front end of an IPython kernel."""

    def __init__(self) -> None:
        self._handles: dict[str, Any] = {}

    def __call__(self, name: str, bundle: Bundle) -> None:
        from IPython.display import display

        if name in self._handles:
            self._handles[name].update(dict(bundle), raw=True)
        else:
            shown = display(dict(bundle), raw=True, display_id=True)  # type: ignore[no-untyped-call]
            self._handles[name] = shown


def in_notebook() -> bool:
    """True if this process is the kernel of a front end that shows HTML."""
    return _shell() is not None and not any(name.startswith("SPYDER") for name in os.environ)


def _shell() -> Any:
    ipython = sys.modules.get("IPython")  # a kernel has imported it long ago
    shell = None if ipython is None else ipython.get_ipython()
    return None if getattr(shell, "kernel", None) is None else shell


class NotebookLine(RunView):
    """Shows what is done or waited for, in an output that is empty when it is over."""

    def __init__(self, show: Show) -> None:
        super().__init__()
        self._show = show
        self._shown = ""

    def activity(self, what: str, detail: str) -> None:
        self.phase(what, detail)
        self.tick()

    def tick(self) -> None:
        self._say(with_time(self))

    def close(self) -> None:
        self._say("")

    def _say(self, text: str) -> None:
        if text != self._shown:
            self._shown = text
            self._show("phase", {"text/html": html.escape(text), "text/plain": text})


def with_time(view: RunView) -> str:
    """A run's state, with the time of a phase that takes long."""
    seconds = 0.0 if view.is_training or view.has_ended else view.seconds_in_phase()
    return view.state + f", {tqdm.format_interval(seconds)}" * (seconds >= 1)


class NotebookView(RunView):
    """A fit, or a function's run, on the board of its cell; ``verbose=2`` prints all log lines."""

    def __init__(
        self, board: Board, *, shows_logs: bool, kind: str = "fit", name: str = ""
    ) -> None:
        super().__init__(shows_logs=shows_logs)
        self.kind = kind
        self.curves = Curves(name=name, unit="epoch" if kind == "fit" else "report")
        self._board = board
        board.add(self)

    def activity(self, what: str, detail: str) -> None:
        if self.phase(what, detail):
            self._board.changed("progress")

    def planned(self, plan: TrainPlan) -> None:
        super().planned(plan)
        self.curves.steps_per_epoch = plan.steps_per_epoch
        self._board.changed("progress")

    def tick(self) -> None:
        self._board.changed(*([] if self.is_training else ["progress"]))

    def attempt(self, number: int, start_step: int, workers: int | None = None) -> None:
        super().attempt(number, start_step, workers)
        if self.kind != "fit":
            self.state = f"running, restart {number}" if number else "running"
        self._board.changed("progress")

    def progress(self, rank: int, progress: Progress) -> None:
        before = self.step
        if self.has_moved(rank, progress):
            self.curves.add_step(progress.step, progress.loss)
            self._board.changed("progress", *(["curves"] if self.step != before else []))
        elif not progress.epoch:
            self._board.changed()

    def epoch(self, record: Mapping[str, float]) -> None:
        add_record(self.curves.history, record)
        self._board.changed("progress", "curves")

    def log(self, rank: int, line: str, level: int) -> None:
        if level >= self._least_level:
            name = f"{self.curves.name}, " if len(self._board.views) > 1 else ""
            print(f"[{name}rank {rank}] {line}", flush=True)

    def failed(self, reason: str) -> None:
        self.has_ended, self.state = True, f"failed: {reason}"

    def close(self) -> None:
        if not self.has_ended:
            self.has_ended = True
            state = self.stopped_in or self.state
            self.state = f"ended in {state}" if self.epochs else "ended"
        self._board.changed("progress", "curves", at_once=True)

    def text(self) -> str:
        """Return the progress of the run, in words."""
        parts = [f"{self.curves.name}: {with_time(self)}"]
        if self.total_steps:
            left = self.time_left()
            steps = f"{self.step:,} of {self.total_steps:,} steps"
            parts.append(steps + f", {left} left" * bool(left))
        parts += self.details()
        if self.curves.history:
            parts.append(record_text(self.curves.history[-1]))
        return " · ".join(parts)


class Board:
    """All that one cell shows of its runs, which may go on at the same time. Thread-safe."""

    def __init__(self, show: Show, draw: Callable[..., bytes] = picture) -> None:
        self._show = show
        self._draw: Callable[..., bytes] | None = draw
        self._lock = threading.RLock()
        self.views: list[NotebookView] = []
        self._due = {"progress": 0.0, "curves": 0.0}
        self._progress: Bundle = {}
        self._old: set[str] = set()
        """Outputs that no longer show what is known."""

    def add(self, view: NotebookView) -> None:
        """Begin to show another run."""
        with self._lock:
            self.views.append(view)
            view.curves.name = view.curves.name or f"{view.kind} {len(self.views)}"
            # A first curve of a few steps would be drawn for nothing.
            self._due["curves"] = max(self._due["curves"], time.monotonic() + 1.0)
            self.changed("progress")

    def changed(self, *outputs: str, at_once: bool = False) -> None:
        """Show these outputs anew as soon as it is their time, or ``at_once``."""
        with self._lock:
            self._old.update(outputs)
            now = time.monotonic()
            for output in ("progress", "curves"):
                if output in self._old and (at_once or now >= self._due[output]):
                    self._old.discard(output)
                    pause = self._show_progress() if output == "progress" else self._show_curves()
                    self._due[output] = now + pause

    def _show_progress(self) -> float:
        """Returns for how many seconds it shall stay as it is."""
        hidden = len(self.views) - _MOST_RUNS
        lines = [f"({hidden} earlier ones are not shown)"] if hidden > 0 else []
        rows = [f"<div>{line}</div>" for line in lines]
        for view in self.views[-_MOST_RUNS:]:
            lines.append(view.text())
            step, total = view.step, view.total_steps
            bar = f"<progress value='{step}' max='{total}'></progress> " if total else ""
            rows.append(f"<div>{bar}{html.escape(lines[-1])}</div>")
        bundle = {"text/html": "".join(rows), "text/plain": "\n".join(lines)}
        if bundle != self._progress:
            self._progress = bundle
            self._show("progress", bundle)
        return _PROGRESS_SECONDS

    def _show_curves(self) -> float:
        """Returns for how many seconds they shall stay as they are."""
        began = time.monotonic()
        runs = [view.curves for view in self.views]
        if panels_of(runs):
            text = sketch(runs)
            self._show("curves", {**self._drawn(runs, text), "text/plain": text})
        return max(_CURVES_SECONDS, _DRAWING_SHARE * (time.monotonic() - began))

    def _drawn(self, runs: list[Curves], text: str) -> Bundle:
        if self._draw is not None:
            try:
                return {"image/png": base64.b64encode(self._draw(runs)).decode()}
            except Exception as error:  # such as what a half imported matplotlib raises
                self._draw = None
                is_ours = isinstance(error, SparkDLError)
                why = f"the curves are text from now on: {type(error).__name__}: "
                print(f"[driver] {'' if is_ours else why}{error}", flush=True)
        return {"text/html": f"<pre>{html.escape(text)}</pre>"}


_boards: dict[str, Board] = {}
"""The board of the newest cell, by its message's id."""
_making = threading.Lock()


def board_of_cell() -> Board:
    """The board of the cell that runs now; in threads that of the newest cell."""
    cell = str(_shell().get_parent().get("header", {}).get("msg_id", ""))
    with _making:
        if cell not in _boards:
            _boards.clear()
            _boards[cell] = Board(CellOutputs())
        return _boards[cell]
