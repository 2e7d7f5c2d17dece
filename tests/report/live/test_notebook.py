"""A cell shows its fits in three outputs, which are drawn again in place and not too often."""

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
from sparkdl.report.live.notebook import Board, Bundle, NotebookView, in_notebook
from sparkdl.report.live.progress import View
from tests.report.live.test_progress import PLAN, Clock, beat

RECORD = {"epoch": 1, "steps": 10, "seconds": 3.0, "learning_rate": 0.1, "loss": 0.5}


class FakeScreen:
    """What stands in each output now, and how often it was drawn."""

    def __init__(self) -> None:
        self.outputs: dict[str, Bundle] = {}
        self.times: dict[str, int] = {}

    def show(self, name: str, bundle: Bundle) -> None:
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
def screen() -> FakeScreen:
    return FakeScreen()


@pytest.fixture
def board(screen: FakeScreen, clock: Clock) -> Board:
    return Board(screen, draw=lambda fits: b"picture")


def view_of(board: Board, *, shows_logs: bool = False) -> View:
    return NotebookView(board, PLAN, shows_logs=shows_logs)


def test_a_fit_from_start_to_end(board: Board, screen: FakeScreen, clock: Clock) -> None:
    view = view_of(board)
    assert screen.text("progress") == "fit 1: starting · 0 of 20 steps"
    view.attempt(0, 0)
    for rank in (0, 1):
        view.heartbeat(rank, beat(2, 20))
    clock.now += 4
    view.heartbeat(1, beat(5, 60))
    view.heartbeat(0, beat(5, 40))
    assert screen.text("progress") == (
        "fit 1: epoch 1 of 2 · 5 of 20 steps, 0:12 left · loss 0.2500 · 8 rows/s per worker"
    )
    assert "<progress value='5' max='20'></progress>" in screen.outputs["progress"]["text/html"]
    view.epoch(RECORD)
    view.done(20)
    view.close()
    assert screen.text("progress").startswith("fit 1: trained · 20 of 20 steps · loss 0.2500")
    assert screen.text("progress").endswith("epoch 1: loss 0.5")


def test_the_curves_come_while_the_fit_runs(board: Board, screen: FakeScreen, clock: Clock) -> None:
    view = view_of(board)
    view.attempt(0, 0)
    view.heartbeat(0, beat(1, 10))
    assert "curves" not in screen.outputs
    clock.now += 1.1
    view.heartbeat(0, beat(2, 20))
    assert base64.b64decode(screen.outputs["curves"]["image/png"]) == b"picture"
    assert screen.text("curves").split() == ["loss", "▁▁", "0.25"]


def test_nothing_is_drawn_more_often_than_somebody_could_look(
    board: Board, screen: FakeScreen, clock: Clock
) -> None:
    view = view_of(board)
    view.attempt(0, 0)
    for step in range(1, 1001):
        clock.now += 0.01
        view.heartbeat(0, beat(step, step))
        view.log(0, "line", logging.INFO)
    assert screen.times["progress"] <= 10 / 0.25 + 2
    assert screen.times["logs"] <= 10 + 2
    assert screen.times["curves"] <= 10 / 2 + 1


def test_slow_drawing_happens_less_often(screen: FakeScreen, clock: Clock) -> None:
    def slow(fits: Any) -> bytes:
        clock.now += 1
        return b""

    view = view_of(Board(screen, draw=slow))
    for step in range(1, 601):
        clock.now += 0.1
        view.heartbeat(0, beat(step, step))
    assert screen.times["curves"] in (3, 4)


def test_the_end_shows_what_was_put_off(board: Board, screen: FakeScreen) -> None:
    view = view_of(board)
    view.attempt(0, 0)
    view.heartbeat(0, beat(1, 10))
    view.log(0, "first", logging.INFO)
    view.log(1, "last", logging.INFO)
    view.close()
    assert screen.text("logs").splitlines()[1:] == ["[rank 0] first", "[rank 1] last"]
    assert "image/png" in screen.outputs["curves"]
    assert screen.text("progress").startswith("fit 1: ended in epoch 1 of 2 · 1 of 20 steps")


def test_the_log_is_folded_unless_asked_for(board: Board, screen: FakeScreen) -> None:
    view_of(board).log(0, "<b> & co", logging.INFO)
    shown = screen.outputs["logs"]["text/html"]
    assert shown.startswith("<details><summary>log of the workers (1 lines)")
    assert "[rank 0] &lt;b&gt; &amp; co" in shown
    view = view_of(board, shows_logs=True)
    view.log(0, "more", logging.INFO)
    view.close()
    assert screen.outputs["logs"]["text/html"].startswith("<details open>")


def test_a_long_log_is_cut_and_says_so(board: Board, screen: FakeScreen) -> None:
    view = view_of(board)
    for number in range(1000):
        view.log(0, f"line {number}", logging.INFO)
    view.close()
    title, *lines = screen.text("logs").splitlines()
    assert title == "log of the workers (1,000 lines, 700 earlier ones are not shown)"
    assert lines == [f"[rank 0] line {number}" for number in range(700, 1000)]


def test_warnings_stand_outside_of_the_log(board: Board, screen: FakeScreen) -> None:
    view = view_of(board)
    view.log(1, "beware", logging.WARNING)
    view.close()
    assert screen.text("progress").splitlines()[1:] == ["[rank 1] beware"]
    assert ">[rank 1] beware<" in screen.outputs["progress"]["text/html"]


def test_a_restart_is_told(board: Board, screen: FakeScreen, clock: Clock) -> None:
    view = view_of(board)
    view.attempt(0, 0)
    view.heartbeat(0, beat(15, 150))
    view.attempt(1, 10)
    clock.now += 1
    view.heartbeat(0, beat(11, 10))
    assert screen.text("progress").startswith("fit 1: epoch 2 of 2, restart 1 · 11 of 20 steps")


def test_only_rank_0_moves_the_bar(board: Board, screen: FakeScreen, clock: Clock) -> None:
    view = view_of(board)
    view.attempt(0, 0)
    view.heartbeat(0, beat(5, 50))
    view.heartbeat(1, beat(9, 90))
    view.close()
    assert "5 of 20 steps" in screen.text("progress")


def test_an_early_stop_fills_the_bar(board: Board, screen: FakeScreen) -> None:
    view = view_of(board)
    view.heartbeat(0, beat(14, 140))
    view.done(14)
    view.close()
    assert screen.text("progress").startswith("fit 1: stopped early · 14 of 14 steps")


def test_fits_of_a_search_share_the_outputs(screen: FakeScreen, clock: Clock) -> None:
    drawn: list[int] = []

    def draw(fits: Any) -> bytes:
        drawn.append(len(fits))
        return b""

    board = Board(screen, draw=draw)

    def search(number: int) -> None:
        for _ in range(5):
            view = view_of(board)
            view.attempt(0, 0)
            view.heartbeat(0, beat(5, 50))
            view.log(0, "hello", logging.INFO)
            view.epoch(RECORD)
            view.done(20)
            view.close()

    threads = [threading.Thread(target=search, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(screen.outputs) == {"progress", "curves", "logs"}
    first, *lines = screen.text("progress").splitlines()
    assert first == "(8 earlier ones are not shown)"
    assert [line.split(":")[0] for line in lines] == [f"fit {number}" for number in range(9, 21)]
    assert drawn[-1] == 20
    assert len(screen.text("logs").splitlines()) == 21
    assert "[fit 20, rank 0] hello" in screen.text("logs")


def test_a_function_is_known_by_its_reports(board: Board, screen: FakeScreen) -> None:
    view: View = NotebookView(board, None, shows_logs=False)
    view.attempt(0, 0)
    view.heartbeat(0, {"kind": "heartbeat", "phase": "start"})
    view.epoch({"report": 1.0, "loss": 0.5})
    view.epoch({"report": 2.0, "loss": 0.25})
    view.close()
    assert screen.text("progress") == "run 1: ended · report 2: loss 0.25"
    assert screen.text("curves").split() == ["loss", "█▁", "0.25"]


def test_without_matplotlib_the_curves_are_text(screen: FakeScreen, clock: Clock) -> None:
    def draw(fits: Any) -> bytes:
        raise SparkDLError("install matplotlib")

    board = Board(screen, draw=draw)
    view = view_of(board)
    view.epoch(RECORD)
    view.epoch({**RECORD, "epoch": 2, "loss": 0.25})
    view.close()
    assert set(screen.outputs["curves"]) == {"text/html", "text/plain"}
    assert screen.text("curves").split() == ["loss", "█▁", "0.25"]
    assert screen.text("logs").splitlines()[1:] == ["[driver] install matplotlib"]


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
