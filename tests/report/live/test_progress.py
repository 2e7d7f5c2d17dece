"""The bar shows what rank 0 does, every rank's speed, and the workers' lines above it."""

from __future__ import annotations

import dataclasses
import fcntl
import io
import logging
import os
import struct
import subprocess
import sys
import termios
from pathlib import Path
from typing import Any

import pytest

from sparkdl.data.plan import Column, Shard, make_plan
from sparkdl.report.live import progress
from sparkdl.report.live.progress import (
    ConsoleView,
    Progress,
    SilentView,
    View,
    terminal_columns,
)
from sparkdl.report.live.views import choose_view
from sparkdl.runtime.activity import STOPPING
from sparkdl.tuning import trial_table
from sparkdl.tuning.study import StudyOptions
from tests.terminal import on_terminal

PLAN = make_plan(
    columns=[Column(name="x", role="feature", dtype="float32", shape=())],
    shards=[
        Shard(
            shard_id=i, host="", path="", num_rows=100, num_validation_rows=0, fingerprint="",
            num_bytes=0,
        )
        for i in range(2)
    ],
    world_size=2,
    batch_size=10,
    epochs=2,
)  # fmt: skip


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(progress.time, "monotonic", clock)
    return clock


class Console:
    """What stands on stderr so far."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys
        self._text = ""

    def text(self) -> str:
        self._text += self._capsys.readouterr().err
        return self._text

    def bar(self) -> str:
        return [part for part in self.text().split("\r") if part][-1]

    def lines(self) -> list[str]:
        return [line.strip() for line in self.text().replace("\r", "\n").splitlines()]


@pytest.fixture
def console(capsys: pytest.CaptureFixture[str]) -> Console:
    return Console(capsys)


def console_view(**options: Any) -> ConsoleView:
    view = ConsoleView(**options)
    view.planned(PLAN)
    return view


def at(step: int, rows: int, phase: str = "train") -> Progress:
    return Progress(phase=phase, epoch=1 + step // 10, step=step, loss=0.25, rows=rows)


def test_a_run_from_start_to_end(console: Console, clock: Clock) -> None:
    view = console_view(has_bar=True, shows_logs=True)
    view.attempt(0, 0)
    view.progress(0, Progress.of({"kind": "heartbeat", "phase": "setup"}))
    for rank in (0, 1):
        view.progress(rank, at(1, 10))
    clock.now += 2
    view.progress(1, at(12, 430))  # this rank runs at 210 rows/s
    view.progress(0, at(12, 130, "evaluate"))  # and this one at 60
    view._bar.refresh()
    shown = console.bar()
    assert "epoch 2 of 2 (evaluate)" in shown
    assert "12/20 [" in shown
    assert "loss 0.2500, 135 rows/s per worker" in shown
    view.progress(0, at(20, 200))
    view.close()
    last = console.bar()
    assert "20/20 [" in last


def test_only_rank_0_moves_the_bar_and_never_backwards(console: Console, clock: Clock) -> None:
    view = console_view(has_bar=True, shows_logs=True)
    view.attempt(0, 0)
    view.progress(0, at(5, 50))
    view.progress(1, at(9, 90))
    view.progress(0, at(4, 40))
    assert view._bar.n == 5
    view.close()


def test_a_restart_begins_at_its_checkpoint(console: Console, clock: Clock) -> None:
    view = console_view(has_bar=True, shows_logs=True)
    view.attempt(0, 0)
    view.progress(0, at(15, 150))
    view.attempt(1, 10)
    view._bar.refresh()
    shown = console.bar()
    assert "restart 1" in shown
    assert "10/20 [" in shown
    view.progress(0, at(11, 10))
    clock.now += 1
    view.progress(0, at(12, 20))  # rows count from the restart: the old speed is forgotten
    view._bar.refresh()
    assert "10 rows/s per worker" in console.bar()
    view.close()


def test_lines_and_epochs_appear_above_the_bar(console: Console, clock: Clock) -> None:
    view = console_view(has_bar=True, shows_logs=True)
    view.attempt(0, 0)
    view.log(1, "hello", logging.INFO)
    view.epoch(
        {"epoch": 1, "steps": 10, "seconds": 3.0, "learning_rate": 0.1, "loss": 0.5, "val_f1": 0.75}
    )
    view.close()
    assert "[rank 1] hello" in console.lines()
    assert "epoch 1: loss 0.5, val_f1 0.75" in console.lines()


@pytest.mark.parametrize(("steps", "shown"), [(20, "trained"), (14, "stopped early")])
def test_the_bar_ends_full(console: Console, clock: Clock, steps: int, shown: str) -> None:
    view = console_view(has_bar=True, shows_logs=True)
    view.attempt(0, 0)
    view.progress(0, at(11, 110))
    view.done(steps, stopped_early=steps < 20)
    view.close()
    assert f"{shown} |" in console.bar()
    assert f"{steps}/{steps} [" in console.bar()


def test_the_silent_view_shows_nothing(console: Console) -> None:
    view: View = SilentView()
    view.attempt(0, 0)
    view.progress(0, at(1, 1))
    view.epoch({"epoch": 1})
    view.log(0, "line", logging.INFO)
    view.done(1, stopped_early=False)
    view.close()
    assert console.text() == ""


def test_without_logs_only_warnings_appear_above_the_bar(console: Console) -> None:
    view = console_view(has_bar=True, shows_logs=False)
    view.log(0, "hello", logging.INFO)
    view.log(1, "beware", logging.WARNING)
    view.close()
    assert [line for line in console.lines() if "rank" in line] == ["[rank 1] beware"]


def test_the_silent_view_passes_warnings_on(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        SilentView().log(0, "hello", logging.INFO)
        SilentView().log(1, "beware", logging.WARNING)
    assert caplog.messages == ["[rank 1] beware"]
    assert caplog.records[0].levelno == logging.WARNING


def test_a_function_has_a_line_for_each_report_and_for_restarts(console: Console) -> None:
    view = ConsoleView(has_bar=False, shows_logs=False)
    view.attempt(0, 0)
    view.attempt(1, 7)
    view.epoch({"report": 2.0, "epoch": 1.0, "loss": 0.5})
    view.log(0, "hello", logging.INFO)
    view.log(1, "beware", logging.WARNING)
    expected = ["restart 1, from checkpoint 7", "report 2: epoch 1, loss 0.5", "[rank 1] beware"]
    assert console.lines() == expected


def test_a_fit_that_goes_on_counts_its_own_steps(console: Console) -> None:
    view = ConsoleView(has_bar=False, shows_logs=False)
    view.planned(dataclasses.replace(PLAN, first_step=30))
    view.attempt(0, 30)
    view.done(50, stopped_early=False)
    last = "trained: 20 steps, 50 with those of the earlier fit"
    assert console.lines() == ["going on from step 30", last]


@pytest.mark.parametrize(
    ("steps", "last"), [(20, "trained: 20 steps"), (14, "stopped early: 14/20 steps")]
)
def test_without_a_terminal_there_is_a_line_for_each_epoch(
    console: Console, steps: int, last: str
) -> None:
    view = console_view(has_bar=False, shows_logs=False)
    view.attempt(0, 0)
    for step in range(steps):
        view.progress(0, at(step, 10 * step))
    view.epoch({"epoch": 1, "steps": 10, "seconds": 3.0, "learning_rate": 0.1, "loss": 0.5})
    view.attempt(1, 10)
    view.log(0, "hello", logging.INFO)
    view.log(1, "beware", logging.WARNING)
    view.epoch({"epoch": 2, "steps": 20, "seconds": 3.0, "learning_rate": 0.1, "loss": 0.25})
    view.done(steps, stopped_early=steps < 20)
    view.close()
    assert console.text().splitlines() == [
        "epoch 1: loss 0.5",
        "restart 1, from step 10",
        "[rank 1] beware",
        "epoch 2: loss 0.25",
        last,
    ]


DRIVER = "from sparkdl.report.live import progress; print(progress.terminal_columns() or 0)"
LINE_IN_PLACE = """
from sparkdl.report.live.progress import ConsoleView
ConsoleView(has_bar=True, shows_logs=False).activity("starting Spark", "")
import os
os.write(2, b"WARNING of the JVM")
os._exit(0)
"""
LAUNCHER = f"""
import subprocess, sys
done = subprocess.run([sys.executable, "-c", {DRIVER!r}], stdout=-1, stderr=-1, text=True)
sys.exit(int(done.stdout))
"""


def statuses(output: int, term: str = "xterm") -> tuple[int, int]:
    """Columns, 0 for no terminal: of a driver by itself, and of one behind spark-submit."""
    direct = (
        "import sys; from sparkdl.report.live.progress import terminal_columns; "
        "sys.exit(terminal_columns() or 0)"
    )
    environment = {**os.environ, "PYSPARK_GATEWAY_PORT": "1", "TERM": term}
    submitted = subprocess.run([sys.executable, "-c", LAUNCHER], stdout=output, env=environment)
    environment.pop("PYSPARK_GATEWAY_PORT")
    alone = subprocess.run([sys.executable, "-c", direct], stderr=output, env=environment)
    return alone.returncode, submitted.returncode


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")
def test_a_terminal_is_known_behind_spark_submit_too(tmp_path: Path) -> None:
    ours, theirs = os.openpty()
    try:
        assert statuses(theirs) == (80, 80)  # it does not say how many
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 61, 0, 0))
        assert statuses(theirs) == (61, 61)
        assert statuses(theirs, "dumb") == (0, 0)  # lines of its own, as in a file
    finally:
        os.close(ours)
        os.close(theirs)
    with (tmp_path / "log").open("w") as file:
        assert statuses(file.fileno()) == (0, 0)


def test_what_others_print_begins_where_the_line_in_place_does() -> None:
    shown = on_terminal(LINE_IN_PLACE, columns=61).split("\r")
    assert [part.strip() for part in shown][-2:] == ["", "WARNING of the JVM"]
    assert "starting Spark" in shown[1]


def test_a_pipe_is_no_terminal() -> None:
    assert statuses(subprocess.PIPE) == (0, 0)


def test_phases_stand_in_one_line_of_a_terminal(console: Console, clock: Clock) -> None:
    view = ConsoleView(has_bar=True, shows_logs=False)
    view.activity("checking", "")
    view.activity("waiting for slots", "0 of 2 are there")
    clock.now += 65
    for _ in range(8):
        view.tick()
    long = "a long text of many words " * 5
    view.activity("waiting for slots", long)
    view.activity("writing", "1 of 4 tasks done")
    text = console.text()
    assert "\n" not in text
    assert text.count("01:05") == 2  # time goes by, and nothing is written that stands there
    assert max(len(part) for part in text.split("\r")) < 80
    view.planned(PLAN)
    view.attempt(0, 0)
    view.activity("starting workers", "1 of 2 are there")
    assert "starting workers (1 of 2 are there) |" in console.bar()
    assert "0/20 [01:05]" in console.bar()
    view.progress(0, at(3, 30))
    view.activity("waiting for slots", "")  # of another round: training says more
    view.tick()
    assert "epoch 1 of 2 |" in console.bar()
    view.activity(STOPPING, "")
    assert "stopping |" in console.bar()
    view.progress(0, at(3, 30))
    view.done(20, stopped_early=False)
    view.activity("cleaning up", "")
    assert console.bar().strip() == "cleaning up"
    view.close()
    assert console.bar().strip() == ""


def test_what_was_on_its_way_when_a_run_is_stopped_does_not_say_that_it_trains(
    console: Console, clock: Clock
) -> None:
    view = console_view(has_bar=True, shows_logs=False)
    view.attempt(0, 0)
    view.progress(0, at(3, 30))
    view.activity(STOPPING, "")
    for step in (4, 5):
        view.progress(0, at(step, 10 * step))
        view.tick()
    assert "stopping |" in console.bar()
    assert not view.is_training
    view.close()
    assert "epoch" not in console.bar()


@pytest.mark.parametrize("has_attempt", [True, False])
def test_what_was_stopped_to_begin_again_says_that_it_trains(
    console: Console, clock: Clock, *, has_attempt: bool
) -> None:
    view = console_view(has_bar=True, shows_logs=False)
    view.attempt(0, 0)
    view.activity(STOPPING, "")
    view.begun_again(1, 0)
    if has_attempt:  # of a gang
        view.attempt(1, 0)
    view.progress(0, at(3, 30))
    assert "epoch 1 of 2" in console.bar()
    view.close()


@pytest.mark.parametrize("is_closed", [True, False])
def test_without_stderr_a_view_shows_nothing_and_raises_nothing(
    monkeypatch: pytest.MonkeyPatch, clock: Clock, *, is_closed: bool
) -> None:
    stream = io.StringIO()
    stream.close()
    monkeypatch.setattr(sys, "stderr", stream if is_closed else None)
    monkeypatch.setattr(sys, "stdout", None)
    assert terminal_columns() is None
    view = choose_view("fit", 2, run_id="1234567")
    view.planned(PLAN)
    view.activity("writing", "")
    clock.now += 5
    view.tick()
    view.attempt(1, 0)
    view.progress(0, at(3, 30))
    view.epoch({"epoch": 1.0, "loss": 0.5})
    view.log(0, "a line", logging.INFO)
    view.done(20, stopped_early=False)
    view.close()
    table = trial_table.make_table(StudyOptions(), verbose=1)
    assert table._write is not None
    table._write("a line")


def test_in_a_file_each_phase_that_takes_long_has_one_line(console: Console, clock: Clock) -> None:
    view = ConsoleView(has_bar=False, shows_logs=False)
    view.activity("checking", "")
    view.tick()
    view.activity("waiting for slots", "0 of 2 are there")
    for number in range(100):
        clock.now += 0.25
        view.activity("waiting for slots", f"{number // 60} of 2 are there")
        view.tick()
    view.activity("writing the rows", "")
    clock.now += 2
    view.tick()
    view.planned(PLAN)
    view.progress(0, at(1, 10))
    view.tick()
    view.close()
    assert console.lines() == ["waiting for slots (0 of 2 are there)", "writing the rows"]


def test_in_a_file_a_wait_for_slots_is_said_and_each_minute_of_a_phase(
    console: Console, clock: Clock
) -> None:
    view = ConsoleView(has_bar=False, shows_logs=False)
    for second in range(130):
        detail = "waiting for slots" if 5 <= second < 20 or second > 30 else "0 of 2 tasks done"
        view.activity("checking the executors", detail)
        view.tick()
        clock.now += 1
    view.close()
    assert console.lines() == [
        "checking the executors (0 of 2 tasks done)",
        "checking the executors (waiting for slots)",
        "checking the executors (waiting for slots), for 01:00 so far",
        "checking the executors (waiting for slots), for 02:00 so far",
    ]


def test_lines_of_several_threads_do_not_run_together(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []

    class Stderr:
        closed = False

        def write(self, text: str) -> None:
            written.append(text)

        def flush(self) -> None:
            pass

    monkeypatch.setattr(progress.sys, "stderr", Stderr())
    progress.say("a line")
    assert written == ["a line\n"]


@pytest.mark.parametrize("has_bar", [True, False])
def test_lines_say_whose_they_are_once_there_are_several(console: Console, has_bar: bool) -> None:
    first = console_view(has_bar=has_bar, shows_logs=False, name="deep")
    first.epoch({"epoch": 1, "loss": 0.5})
    second = console_view(has_bar=has_bar, shows_logs=False, name="1f0c9a")
    for view in (first, second):
        view.epoch({"epoch": 2, "loss": 0.25})
        view.log(0, "beware", logging.WARNING)
        view.activity("starting workers", "")
    assert ("deep: starting workers |" in console.text()) == has_bar
    second.close()
    first.epoch({"epoch": 3, "loss": 0.125})
    first.close()
    lines = [line.removeprefix("\x1b[A") for line in console.lines()]  # tqdm goes to the other bar
    found = [line for line in lines if line.endswith(("beware", "5"))]
    assert found == [
        "epoch 1: loss 0.5",
        "deep: epoch 2: loss 0.25",
        "deep: [rank 0] beware",
        "1f0c9a: epoch 2: loss 0.25",
        "1f0c9a: [rank 0] beware",
        "deep: epoch 3: loss 0.125",
    ]
