"""A cell shows its runs in two outputs, which are drawn again in place and not too often."""

from __future__ import annotations

import base64
import logging
import sys
import threading
import types
from typing import Any

import pytest

from sparkdl.errors import SparkDLError
from sparkdl.report.live import notebook, progress
from sparkdl.report.live.notebook import Board, Bundle, NotebookLine, NotebookView, in_notebook
from sparkdl.report.live.progress import Progress, View
from sparkdl.runtime.activity import STOPPING
from tests.report.live.test_progress import PLAN, Clock, at

RECORD = {"epoch": 1, "steps": 10, "seconds": 3.0, "learning_rate": 0.1, "loss": 0.5}


class FakeCell:
    """What stands in each output now, and how often it was drawn."""

    def __init__(self) -> None:
        self.outputs: dict[str, Bundle] = {}
        self.times: dict[str, int] = {}

    def __call__(self, name: str, bundle: Bundle) -> None:
        self.outputs[name] = bundle
        self.times[name] = self.times.get(name, 0) + 1

    def text(self, name: str) -> str:
        return self.outputs[name]["text/plain"]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(notebook.time, "monotonic", clock)
    assert progress.time.monotonic is clock
    return clock


@pytest.fixture
def cell() -> FakeCell:
    return FakeCell()


@pytest.fixture
def board(cell: FakeCell, clock: Clock) -> Board:
    return Board(cell, draw=lambda fits: b"picture")


def view_of(board: Board, *, shows_logs: bool = False) -> View:
    view = NotebookView(board, shows_logs=shows_logs)
    view.planned(PLAN)
    return view


def test_a_fit_from_start_to_end(board: Board, cell: FakeCell, clock: Clock) -> None:
    view = NotebookView(board, shows_logs=False)
    clock.now += 0.3
    view.activity("waiting for slots", "0 of 2 are there")
    assert cell.text("progress") == "fit 1: waiting for slots (0 of 2 are there)"
    clock.now += 5
    view.tick()
    assert cell.text("progress").endswith("slots (0 of 2 are there), 00:05")
    view.planned(PLAN)
    view.attempt(0, 0)
    for rank in (0, 1):
        view.progress(rank, at(2, 20))
    clock.now += 4
    view.progress(1, at(9, 60))  # only rank 0 moves the bar
    view.progress(0, at(3, 40))
    assert cell.text("progress") == (
        "fit 1: epoch 1 of 2 · 3 of 20 steps · loss 0.2500 · 8 rows/s per worker"
    )
    for step in (4, 5):
        clock.now += 4
        view.progress(0, at(step, 20 * step))
    assert "5 of 20 steps, 01:00 left" in cell.text("progress")
    assert "<progress value='5' max='20'></progress>" in cell.outputs["progress"]["text/html"]
    view.epoch(RECORD)
    view.done(20, stopped_early=False)
    view.close()
    assert cell.text("progress").startswith("fit 1: trained · 20 of 20 steps · loss 0.2500")
    assert cell.text("progress").endswith("epoch 1: loss 0.5")


def test_the_curves_come_while_the_fit_runs(board: Board, cell: FakeCell, clock: Clock) -> None:
    view = view_of(board)
    view.attempt(0, 0)
    view.progress(0, at(1, 10))
    assert "curves" not in cell.outputs
    clock.now += 1.1
    view.progress(0, at(2, 20))
    assert base64.b64decode(cell.outputs["curves"]["image/png"]) == b"picture"
    assert cell.text("curves").split() == ["loss", "▁▁", "0.25"]


def test_nothing_is_drawn_more_often_than_somebody_could_look(
    board: Board, cell: FakeCell, clock: Clock
) -> None:
    view = view_of(board)
    view.attempt(0, 0)
    for step in range(1, 1001):
        clock.now += 0.01
        view.progress(0, at(step, step))
    assert cell.times["progress"] <= 10 / 0.25 + 2
    assert cell.times["curves"] <= 10 / 2 + 1


def test_slow_drawing_happens_less_often(cell: FakeCell, clock: Clock) -> None:
    def slow(fits: Any) -> bytes:
        clock.now += 1
        return b""

    view = view_of(Board(cell, draw=slow))
    for step in range(1, 601):
        clock.now += 0.1
        view.progress(0, at(step, step))
    assert cell.times["curves"] in (3, 4)


def test_the_end_shows_what_was_put_off(board: Board, cell: FakeCell) -> None:
    view = view_of(board)
    view.attempt(0, 0)
    view.progress(0, at(1, 10))
    view.close()
    assert "image/png" in cell.outputs["curves"]
    assert cell.text("progress").startswith("fit 1: ended in epoch 1 of 2 · 1 of 20 steps")


def test_a_fit_that_was_stopped_says_in_what(board: Board, cell: FakeCell) -> None:
    view = view_of(board)
    view.attempt(0, 0)
    view.progress(0, at(1, 10))
    for what in (STOPPING, "cleaning up", "waiting for listeners"):
        view.activity(what, "")
    view.close()
    assert cell.text("progress").startswith("fit 1: ended in epoch 1 of 2 · 1 of 20 steps")


def test_a_fit_that_has_failed_says_why(board: Board, cell: FakeCell) -> None:
    view = view_of(board)
    view.progress(0, at(1, 10))
    view.failed("the loss is NaN in epoch 1")
    view.activity("waiting for listeners", "")
    view.close()
    shown = cell.text("progress")
    assert shown.startswith("fit 1: failed: the loss is NaN in epoch 1 · 1 of 20 steps")


@pytest.mark.parametrize("shows_logs", [False, True])
def test_warnings_are_printed_and_other_lines_if_asked_for(
    board: Board, capsys: pytest.CaptureFixture[str], shows_logs: bool
) -> None:
    view = view_of(board, shows_logs=shows_logs)
    view.log(0, "hello", logging.INFO)
    view.log(1, "beware", logging.WARNING)
    second = view_of(board)
    second.log(1, "beware", logging.WARNING)
    assert capsys.readouterr().out.splitlines() == [
        *(["[rank 0] hello"] * shows_logs), "[rank 1] beware", "[fit 2, rank 1] beware"
    ]  # fmt: skip


def test_a_restart_and_an_early_stop_are_told(board: Board, cell: FakeCell, clock: Clock) -> None:
    view = view_of(board)
    view.attempt(0, 0)
    view.progress(0, at(15, 150))
    view.attempt(1, 10)
    clock.now += 1
    view.progress(0, at(11, 10))
    assert cell.text("progress").startswith("fit 1: epoch 2 of 2, restart 1 · 11 of 20 steps")
    view.done(14, stopped_early=True)
    view.close()
    assert cell.text("progress").startswith("fit 1: stopped early, restart 1 · 14 of 14 steps")


def test_fits_of_a_search_share_the_outputs(cell: FakeCell, clock: Clock) -> None:
    drawn: list[int] = []

    def draw(fits: Any) -> bytes:
        drawn.append(len(fits))
        return b""

    board = Board(cell, draw=draw)

    def search(number: int) -> None:
        for _ in range(5):
            view = view_of(board)
            view.attempt(0, 0)
            view.progress(0, at(5, 50))
            view.epoch(RECORD)
            view.done(20, stopped_early=False)
            view.close()

    threads = [threading.Thread(target=search, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(cell.outputs) == {"progress", "curves"}
    first, *lines = cell.text("progress").splitlines()
    assert first == "(8 earlier ones are not shown)"
    assert [line.split(":")[0] for line in lines] == [f"fit {number}" for number in range(9, 21)]
    assert drawn[-1] == 20


def test_a_function_is_known_by_its_reports(board: Board, cell: FakeCell) -> None:
    view: View = NotebookView(board, shows_logs=False, kind="run", name="mine")
    view.attempt(0, 0)
    view.progress(0, Progress())
    view.epoch({"report": 1.0, "loss": 0.5})
    view.epoch({"report": 2.0, "loss": 0.25})
    view.close()
    assert cell.text("progress") == "mine: ended · report 2: loss 0.25"
    assert cell.text("curves").split() == ["loss", "█▁", "0.25"]


def test_without_matplotlib_the_curves_are_text(
    cell: FakeCell, clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    def draw(fits: Any) -> bytes:
        raise SparkDLError("install matplotlib")

    board = Board(cell, draw=draw)
    view = view_of(board)
    view.epoch(RECORD)
    view.epoch({**RECORD, "epoch": 2, "loss": 0.25})
    view.close()
    assert set(cell.outputs["curves"]) == {"text/html", "text/plain"}
    assert cell.text("curves").split() == ["loss", "█▁", "0.25"]
    assert capsys.readouterr().out == "[driver] install matplotlib\n"


def test_a_plain_process_is_no_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "IPython", raising=False)
    assert not in_notebook()


@pytest.mark.parametrize(
    ("shell", "expected"),
    [(None, False), (types.SimpleNamespace(), False), (types.SimpleNamespace(kernel=1), True)],
)
def test_a_kernel_is_a_notebook_and_a_console_is_none(
    monkeypatch: pytest.MonkeyPatch, shell: Any, expected: bool
) -> None:
    fake = types.SimpleNamespace(get_ipython=lambda: shell)
    monkeypatch.setitem(sys.modules, "IPython", fake)
    assert in_notebook() is expected
    monkeypatch.setenv("SPYDER_ARGS", "[]")
    assert not in_notebook()


def test_a_cell_has_one_board(monkeypatch: pytest.MonkeyPatch) -> None:
    header: dict[str, str] = {}
    shell = types.SimpleNamespace(kernel=1, get_parent=lambda: {"header": header})
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: shell))
    header["msg_id"] = "a"
    first = notebook.board_of_cell()
    assert notebook.board_of_cell() is first
    header["msg_id"] = "b"
    assert notebook.board_of_cell() is not first


def test_a_picture_that_cannot_be_drawn_is_replaced_by_text(
    cell: FakeCell, clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    """As after an interrupted import of matplotlib, which leaves a module without attributes."""

    def draw(fits: Any) -> bytes:
        raise AttributeError(
            "partially initialized module 'matplotlib' has no attribute 'rcParams'"
        )

    view = view_of(Board(cell, draw=draw))
    view.epoch(RECORD)
    clock.now += 5
    view.epoch({**RECORD, "epoch": 2})
    view.close()
    assert cell.text("curves").split()[0] == "loss"
    printed = capsys.readouterr().out
    assert printed.count("the curves are text from now on: AttributeError") == 1


def test_a_line_is_gone_when_the_work_is_over(cell: FakeCell, clock: Clock) -> None:
    line = NotebookLine(cell)
    line.activity("counting rows", "1 of 8 tasks done")
    assert cell.text("phase") == "counting rows (1 of 8 tasks done)"
    for _ in range(4):
        line.tick()
    assert cell.times["phase"] == 1
    clock.now += 2
    line.tick()
    assert cell.text("phase").endswith("done), 00:02")
    line.close()
    assert cell.text("phase") == ""
