"""Nothing that only shows ends what it shows."""

from __future__ import annotations

import io
import logging
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

from sparkdl.errors import TrainingFailed
from sparkdl.report.live import views as module
from sparkdl.report.live.notebook import Board, NotebookView
from sparkdl.report.live.progress import ConsoleView, EpochCallback, SilentView, View
from sparkdl.report.live.views import choose_view, showing, shows_lines
from sparkdl.report.recorder import recording
from sparkdl.runtime.activity import doing
from tests.report.live.test_notebook import FakeCell
from tests.report.live.test_progress import PLAN

RECORD = {"epoch": 1, "steps": 4, "loss": 2.0}


class Noting(View):
    """Notes what it is told."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.ticked = threading.Event()

    def activity(self, what: str, detail: str) -> None:
        self.calls.append((what, detail))

    def epoch(self, record: Any) -> None:
        self.calls.append(record["epoch"])

    def tick(self) -> None:
        self.ticked.set()

    def close(self) -> None:
        self.calls.append("closed")


class Broken(View):
    """Fails like a front end that has gone away."""

    def epoch(self, record: Any) -> None:
        raise OSError("no front end")


def run(*views: Callable[[], View]) -> Any:
    """A run with these views, of one epoch with a warning."""
    recorded = recording(run_id="r", name="Test", params=[], storage=None, listeners=())
    with recorded as recorder:
        for view in views:
            recorder.show(view)
        recorder.phase("train")
        recorder.epoch(RECORD)
        recorder.log(1, "beware", logging.WARNING)
        recorder.done(4, stopped_early=False)
    return recorder.record()


def test_a_view_that_fails_goes_away(caplog: pytest.LogCaptureFixture) -> None:
    good = Noting()
    assert run(Broken, lambda: good).status == "succeeded"
    assert good.calls[:2] == [("starting workers", ""), 1]
    assert good.calls[-1] == "closed"
    shown = [message for message in caplog.messages if "nothing more is shown" in message]
    assert shown == ["nothing more is shown of this run, which goes on: OSError: no front end"]
    assert "[rank 1] beware" in caplog.messages  # by the driver's log, since no view says it


def test_a_view_that_cannot_be_made_goes_away(caplog: pytest.LogCaptureFixture) -> None:
    def make() -> View:
        raise ImportError("cannot import name 'display' from partially initialized IPython")

    assert run(make).status == "succeeded"
    assert "partially initialized IPython" in caplog.text


@pytest.mark.parametrize("has_bar", [True, False])
def test_a_closed_terminal_ends_nothing(monkeypatch: pytest.MonkeyPatch, has_bar: bool) -> None:
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stderr", closed)
    monkeypatch.setattr(sys, "stdout", closed)
    view = lambda: ConsoleView(has_bar=has_bar, shows_logs=True, name="a")  # noqa: E731
    assert run(view).status == "succeeded"
    written = io.StringIO()
    monkeypatch.setattr(sys, "stderr", written)
    assert run(lambda: ConsoleView(has_bar=False, shows_logs=True, name="b")).status == "succeeded"
    assert "b: " not in written.getvalue()  # it is not one of several


def test_the_user_and_what_may_end_a_run_still_do() -> None:
    class Interrupted(View):
        def epoch(self, record: Any) -> None:
            raise KeyboardInterrupt

    def prune(record: Any) -> None:
        raise TrainingFailed("pruned")

    with pytest.raises(KeyboardInterrupt):
        run(Interrupted)
    with pytest.raises(TrainingFailed, match="pruned"):
        run(lambda: EpochCallback(prune))


def test_tasks_are_shown_where_nothing_better_is_known() -> None:
    view, tasks = Noting(), ["1 of 8 tasks done"]
    with showing("counting", lambda: view, lambda: tasks[-1]):
        doing("sampling", "")
        assert view.ticked.wait(5)
        view.ticked.clear()
        doing("evaluating")
        assert view.ticked.wait(5)
        with showing("writing", Noting):  # a part of what is shown already
            pass
        doing("")
    doing("nobody sees this")
    assert view.calls == [
        ("counting", ""),
        ("sampling", ""),
        ("evaluating", ""),
        ("evaluating", "1 of 8 tasks done"),
        ("writing", ""),
        ("", ""),
        "closed",
    ]


@pytest.mark.parametrize("terminal", [True, False])
def test_on_a_console(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], terminal: bool
) -> None:
    """On a terminal there is a line at once, and of a fit a bar when its steps are known."""
    monkeypatch.setattr(module, "terminal_columns", lambda: 80 if terminal else None)
    for verbose, expected in ((0, SilentView), (1, ConsoleView), (2, ConsoleView)):
        view = choose_view("fit", verbose, run_id="0123456789ab")
        assert type(view) is expected
        view.activity("waiting for slots", "0 of 2 are there")
        is_shown = terminal and verbose > 0
        assert ("slots (0 of 2" in capsys.readouterr().err) == is_shown
        view.planned(PLAN)
        view.close()
        assert ("0/20 [" in capsys.readouterr().err) == is_shown
    assert [shows_lines(n) for n in range(3)] == [False, False, True]


def test_in_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "in_notebook", lambda: True)
    board = Board(FakeCell())
    monkeypatch.setattr(module, "board_of_cell", lambda: board)
    expected = [SilentView, NotebookView, NotebookView]
    assert [type(choose_view("fit", n, run_id="0")) for n in range(3)] == expected
    assert [type(choose_view("run", n, run_id="0")) for n in range(3)] == expected
