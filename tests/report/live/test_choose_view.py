"""Silent if asked for, a notebook's view in a kernel, a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import pytest

from sparkdl.report.live import choose_view
from sparkdl.report.live.choose_view import fit_view, function_view, shows_lines
from sparkdl.report.live.notebook import Board, NotebookView
from sparkdl.report.live.progress import LinesView, ProgressView, ReportView, SilentView
from tests.report.live.test_notebook import FakeScreen
from tests.report.live.test_progress import PLAN


@pytest.mark.parametrize(("terminal", "shown"), [(True, ProgressView), (False, LinesView)])
def test_on_a_console(monkeypatch: pytest.MonkeyPatch, terminal: bool, shown: type) -> None:
    monkeypatch.setattr(choose_view, "on_terminal", lambda: terminal)
    for verbose, expected in ((0, SilentView), (1, shown), (2, shown)):
        view = fit_view(PLAN, verbose)
        view.close()
        assert type(view) is expected
    assert [type(function_view(n)) for n in range(3)] == [SilentView, ReportView, ReportView]
    assert [shows_lines(n) for n in range(3)] == [False, False, True]


def test_in_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose_view, "in_notebook", lambda: True)
    board = Board(FakeScreen())
    monkeypatch.setattr(choose_view, "board_of_cell", lambda: board)
    expected = [SilentView, NotebookView, NotebookView]
    assert [type(fit_view(PLAN, n)) for n in range(3)] == expected
    assert [type(function_view(n)) for n in range(3)] == expected
    assert [shows_lines(n) for n in range(3)] == [False, True, True]
