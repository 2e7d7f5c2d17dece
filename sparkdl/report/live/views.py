"""The views of one run, or of other work of the driver: which there are, and what calls them."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator

from sparkdl.report.live.notebook import (
    CellOutputs,
    NotebookLine,
    NotebookView,
    board_of_cell,
    in_notebook,
)
from sparkdl.report.live.progress import ConsoleView, SilentView, View, terminal_columns
from sparkdl.runtime.activity import doing, is_shown, shown_by

logger = logging.getLogger(__name__)

_LETTERS = 6
"""Letters of a run's id that stand for its name."""
_TICK_SECONDS = 0.25
_PATIENCE_SECONDS = 2.0
"""Longest wait, at the end, for what asks Spark."""


def choose_view(kind: str, verbose: int, *, run_id: str, name: str = "") -> View:
    """A view that shows nothing, a notebook's curves, a terminal's bar, or lines.

    ``kind`` is ``fit``, or ``run`` of a function; a console tells a run by its name or id.
    """
    if not verbose:
        return SilentView()
    shows_logs = shows_lines(verbose)
    if in_notebook():
        return NotebookView(board_of_cell(), shows_logs=shows_logs, kind=kind, name=name)
    has_bar = terminal_columns() is not None
    return ConsoleView(has_bar=has_bar, shows_logs=shows_logs, name=name or run_id[:_LETTERS])


def activity_view(*, has_lines: bool = True) -> View:
    """A view of phases without steps, of which nothing stays; ``has_lines``: in a file, too."""
    if in_notebook():
        return NotebookLine(CellOutputs())
    has_bar = terminal_columns() is not None
    return ConsoleView(has_bar=has_bar, shows_logs=False) if has_bar or has_lines else SilentView()


def shows_lines(verbose: int) -> bool:
    """True if the view shows all that workers print."""
    return verbose > 1


class Views:
    """Passes calls on to views. Thread-safe.

    An error of a view is logged once, and ends the view alone, unless it has `View.ends_run`.
    """

    def __init__(self, ask_tasks: Callable[[], str] | None = None) -> None:
        """``ask_tasks`` gives how far Spark's tasks are, in words; called while one is open."""
        self._views: list[View] = []
        self._lock = threading.RLock()
        self._ask_tasks = ask_tasks
        self._activity: tuple[str, str | None] = "", ""
        self._tasks = ""
        self._is_over = threading.Event()
        self._ticker: threading.Thread | None = None

    def open(self, make: Callable[[], View]) -> None:
        """Show the run in one more view."""
        view: View = SilentView()
        try:
            view = make()
        except Exception as error:  # whatever a front end or a terminal raises
            _say(error)
        with self._lock:
            self._views.append(view)
        if self._ticker is None:
            self._ticker = threading.Thread(target=self._tick, name="sparkdl-view", daemon=True)
            self._ticker.start()

    def call(self, what: Callable[[View], None]) -> None:
        """Have ``what`` called with each view."""
        with self._lock:
            for place, view in enumerate(self._views):
                try:
                    what(view)
                except Exception as error:
                    if view.ends_run:
                        raise
                    self._views[place] = SilentView()  # warnings of the workers are still said
                    _say(error)
                    with contextlib.suppress(Exception):  # it is broken, but others may know of it
                        view.close()

    def activity(self, what: str, detail: str | None = None) -> None:
        """Show what the driver does now; see `sparkdl.runtime.activity.doing`."""
        with self._lock:
            if (what, detail) != self._activity:  # some say it again and again while they wait
                if what != self._activity[0]:
                    self._tasks = ""
                self._activity = what, detail
                self._show_activity()

    def _show_activity(self) -> None:
        what, detail = self._activity
        shown = self._tasks if detail is None else detail
        self.call(lambda view: view.activity(what, shown))

    def close(self) -> None:
        """The run has ended."""
        self._is_over.set()
        if self._ticker is not None:
            self._ticker.join(_PATIENCE_SECONDS)
        self.call(lambda view: view.close())
        with self._lock:
            self._views.clear()

    def _tick(self) -> None:
        while not self._is_over.wait(_TICK_SECONDS):
            found = "" if self._ask_tasks is None else self._ask_tasks()
            with self._lock:
                if self._is_over.is_set():
                    return
                if found != self._tasks and self._activity[1] is None:
                    self._tasks = found
                    self._show_activity()
                self.call(lambda view: view.tick())


def _say(error: Exception) -> None:
    """Log why a view has gone away."""
    # The log may go to the terminal that is broken: then there is no place to say anything.
    with contextlib.suppress(Exception):
        logger.warning(
            "nothing more is shown of this run, which goes on: %s: %s", type(error).__name__, error
        )


@contextlib.contextmanager
def showing(
    what: str,
    make: Callable[[], View] = activity_view,
    ask_tasks: Callable[[], str] | None = None,
) -> Iterator[None]:
    """Show ``what`` the block does, then what `doing` says; ``ask_tasks`` is as for `Views`."""
    if is_shown():
        doing(what)
        yield
        return
    views = Views(ask_tasks)
    views.open(make)
    try:
        with shown_by(views.activity):
            views.activity(what)
            yield
    finally:
        views.close()
