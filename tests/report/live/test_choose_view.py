"""Silent if asked for, a notebook's view in a kernel, a console's elsewhere."""

from __future__ import annotations

import pytest

from sparkdl.report.live import choose_view as module
from sparkdl.report.live.choose_view import choose_view, shows_lines
from sparkdl.report.live.notebook import Board, NotebookView
from sparkdl.report.live.progress import ConsoleView, SilentView
from tests.report.live.test_notebook import FakeCell
from tests.report.live.test_progress import PLAN


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
