"""The reporter tells the driver everything, and cannot break training whatever the driver does."""

from __future__ import annotations

import dataclasses
import logging
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sparkdl.comm import channel
from sparkdl.comm.channel import Answer, ChannelClient, ChannelServer, Event, Hub
from sparkdl.comm.worker_environment import SparkTask
from sparkdl.errors import CommunicationError
from sparkdl.worker import reporter as module
from sparkdl.worker.reporter import Reporter, captured_output


class FakeClient:
    """A driver that can be switched off."""

    def __init__(self) -> None:
        self.events: list[Any] = []
        self.sent: list[tuple[int, list[Any]]] = []
        self.reports = 0
        self.is_there = True
        self.shows_lines = self.is_over = False
        self.pause = 0.25
        self.address = "127.0.0.1:9"

    def report(self, *, attempt: int, rank: int, events: Any, queued: Any, number: int) -> Answer:
        self.reports += 1
        self.sent.append((number, list(queued)))
        if not self.is_there:
            raise CommunicationError("nobody there")
        self.events.extend([*events, *queued])
        return Answer(self.shows_lines, self.pause, self.is_over)

    def bodies(self, kind: str) -> list[Any]:
        return [event for event in self.events if event["kind"] == kind]

    def lines(self) -> list[str]:
        return [line for event in self.bodies("log") for _, line in event["lines"]]


@pytest.fixture
def client() -> FakeClient:
    return FakeClient()


@pytest.fixture
def reporter(client: FakeClient) -> Reporter:
    return Reporter(client, attempt=2, rank=0)  # type: ignore[arg-type]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_INTERVAL_SECONDS", 0.01)
    monkeypatch.setattr(module, "_MAX_PAUSE_SECONDS", 0.01)


def soon(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


def drain(hub: Hub) -> list[Event]:
    events = []
    while not hub.events.empty():
        events.append(hub.events.get())
    return events


@pytest.fixture
def hub() -> Hub:
    return Hub()


@pytest.fixture
def server(hub: Hub) -> Iterator[ChannelServer]:
    server = ChannelServer(hub, bind="127.0.0.1", announce="127.0.0.1")
    yield server
    server.shutdown()


def test_the_driver_hears_a_whole_life(hub: Hub, server: ChannelServer) -> None:
    hub.begin(2)
    client = ChannelClient(server.address.of_rank(1))
    task = SparkTask(stage_id=3, partition=1, attempt_id=9)
    with Reporter(client, attempt=2, rank=1, task=task) as reporter:
        first = drain(hub)
        reporter.phase("train")
        reporter.step(epoch=1, step=1, loss=0.5, rows=10)
        reporter.step(epoch=1, step=2, loss=0.25, rows=7)
        reporter.line("a line")
        reporter.epoch({"epoch": 1, "loss": 0.25})
        reporter.send({"kind": "done"})
    client.close()
    assert [event.body["kind"] for event in first] == ["heartbeat", "task"]
    assert first[0].body["phase"] == "start"
    assert SparkTask(**first[1].body["task"]) == task
    events = drain(hub)
    assert {(event.attempt, event.rank) for event in events} == {(2, 1)}
    last = [event.body for event in events if event.body["kind"] == "heartbeat"][-1]
    assert (last["phase"], last["epoch"], last["step"]) == ("train", 1, 2)
    assert (last["loss"], last["rows"]) == (0.25, 17)
    others = {event.body["kind"]: event.body for event in events}
    assert others["log"]["lines"] == [[logging.INFO, "a line"]]
    assert others["epoch"]["record"] == {"epoch": 1, "loss": 0.25}
    assert abs(others["done"]["time"] - time.time()) < 60
    assert not [t for t in threading.enumerate() if t.name == "sparkdl-reporter"]


def test_heartbeats_come_although_nothing_happens(
    client: FakeClient, reporter: Reporter, quick: None
) -> None:
    with reporter:
        soon(lambda: client.reports > 5)
    assert {event["kind"] for event in client.events} == {"heartbeat"}


def test_a_dead_driver_is_no_error(
    server: ChannelServer, capfd: pytest.CaptureFixture[str], quick: None
) -> None:
    absent = ChannelClient(dataclasses.replace(server.address, port=1), timeout_seconds=1)
    with Reporter(absent, attempt=0, rank=3) as reporter:
        reporter.step(epoch=1, step=1, loss=0.5, rows=10)
        reporter.send({"kind": "done"})
        soon(lambda: reporter._failures > module._SILENT_FAILURES + 2)
    absent.close()
    err = capfd.readouterr().err
    assert err.count("training goes on, but the driver does not answer") == 1
    assert err.startswith("sparkdl rank 3:")


def test_a_client_closed_too_early_is_no_error(server: ChannelServer, quick: None) -> None:
    client = ChannelClient(server.address.of_rank(0))
    with Reporter(client, attempt=0, rank=0) as reporter:
        client.close()
        soon(lambda: reporter._failures > 2)
        reporter.send({"kind": "done"})


def test_without_a_client_nothing_is_sent() -> None:
    with Reporter(None, attempt=0, rank=0) as reporter:
        reporter.step(epoch=1, step=1, loss=0.5, rows=10)
        assert reporter.rows == 10
        assert not [t for t in threading.enumerate() if t.name == "sparkdl-reporter"]


def test_what_a_short_absence_swallowed_comes_later_in_order(
    client: FakeClient, reporter: Reporter, quick: None
) -> None:
    with reporter:
        client.is_there = False
        reporter.send({"kind": "epoch", "record": {"epoch": 1}})
        reporter.line("first")
        reports = client.reports
        soon(lambda: client.reports > reports + 2)
        reporter.send({"kind": "done"})
        reporter.line("second")
        client.is_there = True
    assert [event["kind"] for event in client.events if event["kind"] in ("epoch", "done")] == [
        "epoch",
        "done",
    ]
    assert client.lines() == ["first", "second"]


def test_a_driver_that_comes_back_late_hears_everything(
    client: FakeClient, reporter: Reporter, quick: None, capfd: pytest.CaptureFixture[str]
) -> None:
    with reporter:
        client.is_there = False
        reporter.line("said meanwhile")
        reports = client.reports
        soon(lambda: client.reports > reports + 30)
        client.is_there = True
        soon(lambda: client.lines() == ["said meanwhile"])
        soon(lambda: client.reports > reports + 40)
    assert capfd.readouterr().err.count("the driver does not answer") == 1


def test_a_report_that_is_too_large_is_dropped_and_the_worker_goes_on_speaking(
    hub: Hub, server: ChannelServer, monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(channel, "_MOST_BYTES", 10_000)
    hub.begin(2)
    reporter = Reporter(ChannelClient(server.address.of_rank(0)), attempt=2, rank=0)
    reporter.send({"kind": "epoch", "record": {"loss": "a" * 10_000}})
    reporter._flush()
    assert drain(hub) == []
    assert (
        "training goes on, but a report was dropped (channel request 'report'"
        in capfd.readouterr()[1]
    )
    reporter.line("later")
    reporter._flush()
    assert [event.body["kind"] for event in drain(hub)] == ["heartbeat", "log"]


def test_the_last_characters_of_an_endless_line_are_kept(
    client: FakeClient, reporter: Reporter
) -> None:
    reporter.line("a" * 10**6 + "b")
    reporter._flush()
    assert client.lines() == ["a" * (module._MAX_CHARACTERS - 1) + "b"]


def test_an_absent_driver_is_asked_less_and_less_often(
    client: FakeClient, reporter: Reporter
) -> None:
    client.is_there = False
    pauses = []
    for _ in range(5):
        pauses.append(reporter._pause())
        reporter._flush()
    assert pauses == [0.25, 0.5, 1.0, 2.0, 2.0]
    client.is_there = True
    reporter._flush()
    assert reporter._pause() == 0.25
    client.pause = 5.0  # as it says where there are many
    reporter._flush()
    assert reporter._pause() == 5.0
    impatient: Any = client
    reporter = Reporter(impatient, attempt=0, rank=0, heartbeat_timeout_seconds=8.0)
    reporter._flush()
    assert reporter._pause() == 2.0  # or the driver would take it for hung


def test_values_that_are_not_json_do_not_silence_the_worker(
    hub: Hub, server: ChannelServer, quick: None
) -> None:
    client = ChannelClient(server.address.of_rank(0))
    with Reporter(client, attempt=0, rank=0) as reporter:
        reporter.epoch({"loss": np.float32(0.5)})  # type: ignore[dict-item]
        reporter.line("broken \udcff text")
        soon(lambda: any(event.body["kind"] == "log" for event in drain(hub)))
        soon(lambda: drain(hub))  # and the heart still beats
    client.close()


def test_a_flood_of_lines_is_bounded_and_counted(
    client: FakeClient, reporter: Reporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_INTERVAL_SECONDS", 3600)
    with reporter:
        for number in range(module._MAX_LINES + 5):
            reporter.line(str(number))
    lines = client.lines()
    assert lines[0] == "(5 earlier log lines were dropped)"
    assert lines[1] == "5"
    assert lines[-1] == str(module._MAX_LINES + 4)
    assert len(lines) == module._MAX_LINES + 1


def test_lines_dropped_during_an_absence_are_counted(
    client: FakeClient, reporter: Reporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_INTERVAL_SECONDS", 3600)
    with reporter:
        for number in range(module._MAX_LINES):
            reporter.line(str(number))
        client.is_there = False
        reporter._flush()
        for number in range(module._MAX_LINES + 3):
            reporter.line(f"new {number}")
        reporter._flush()
        client.is_there = True
    lines = client.lines()
    assert lines[module._MAX_LINES :][:2] == ["(3 earlier log lines were dropped)", "new 3"]
    assert lines[0] == "0" and lines[-1] == f"new {module._MAX_LINES + 2}"


def test_what_is_sent_again_has_its_number_again(
    client: FakeClient, reporter: Reporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_INTERVAL_SECONDS", 3600)
    with reporter:
        reporter.line("one")
        client.is_there = False
        reporter._flush()  # which the driver may have got: only its answer did not come
        reporter.line("two")
        reporter._flush()
        client.is_there = True
    first, again, last, later = (sent for sent in client.sent if sent[1])
    assert first == again == last and first[0] < later[0]
    assert client.lines() == ["one", "two"]


def test_prints_go_both_ways_line_by_line(
    client: FakeClient, reporter: Reporter, capsys: pytest.CaptureFixture[str]
) -> None:
    with reporter, captured_output(reporter):
        print("one\ntwo")
        print("half", end="")
        print(" and half")
        print("problem", file=sys.stderr)
        print("unfinished", end="")
    assert client.lines() == ["one", "two", "half and half", "problem", "unfinished"]
    shown = capsys.readouterr()
    assert shown.out == "one\ntwo\nhalf and half\nunfinished"
    assert shown.err == "problem\n"


def test_of_a_progress_bar_only_the_last_drawing_is_sent(
    client: FakeClient, reporter: Reporter
) -> None:
    with reporter, captured_output(reporter):
        for percent in range(1000):
            sys.stdout.write(f"\r{percent:3d} % " + "#" * 1000)
        assert len(sys.stdout._partial) < 2000  # type: ignore[attr-defined]
        sys.stdout.write("\rdone\r\n")
        sys.stdout.write("x" * 50_000)
        assert len(sys.stdout._partial) <= module._MAX_CHARACTERS  # type: ignore[attr-defined]
        sys.stdout.write("\r")
        sys.stdout.write("last")
    assert client.lines() == ["done", "last"]


def test_once_nobody_waits_for_the_work_a_step_is_the_last_one(
    client: FakeClient, reporter: Reporter, quick: None
) -> None:
    with reporter:
        reporter.step(epoch=1, step=1, loss=0.5, rows=4)
        client.is_over = True
        seen = client.reports
        soon(lambda: client.reports > seen + 1)
        with pytest.raises(CommunicationError, match="the driver has ended this run"):
            reporter.step(epoch=1, step=2, loss=0.5, rows=4)


def test_what_the_driver_shows_on_this_very_console_is_not_written_twice(
    client: FakeClient, reporter: Reporter, capsys: pytest.CaptureFixture[str]
) -> None:
    client.shows_lines = True
    with reporter, captured_output(reporter):
        print("once")
    assert capsys.readouterr().out == ""
    assert client.lines() == ["once"]


def test_the_stream_can_still_be_used_as_a_file(reporter: Reporter) -> None:
    with captured_output(reporter):
        assert sys.stdout.writable()
        assert not sys.stdout.isatty()
        sys.stdout.flush()
        assert sys.stdout.buffer is not None


@pytest.mark.parametrize(
    ("rank", "expected"),
    [
        (0, ["INFO sparkdl.x: info", "WARNING sparkdl.x: warning", "ERROR theirs: theirs"]),
        (1, ["WARNING sparkdl.x: warning", "ERROR theirs: theirs"]),
    ],
)
def test_rank_0_speaks_at_info_the_others_at_warning(
    client: FakeClient, rank: int, expected: list[str]
) -> None:
    reporter = Reporter(client, attempt=0, rank=rank)  # type: ignore[arg-type]
    with reporter, captured_output(reporter):
        logger = logging.getLogger("sparkdl.x")
        logger.debug("debug")
        logger.info("info")
        logger.warning("%s", "warning")
        logging.getLogger("theirs").error("theirs")
    assert client.lines() == expected
    levels = [level for event in client.bodies("log") for level, _ in event["lines"]]
    assert levels == [getattr(logging, line.split()[0]) for line in expected]


def test_a_wrong_log_call_does_not_end_the_program(
    client: FakeClient, reporter: Reporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging, "raiseExceptions", False)
    with reporter, captured_output(reporter):
        logging.getLogger("sparkdl").warning("%d", "not a number")
        logging.getLogger("sparkdl").warning("next")
    assert client.lines() == ["WARNING sparkdl: next"]


def test_streams_loggers_and_levels_are_restored(reporter: Reporter) -> None:
    root, own = logging.getLogger(), logging.getLogger("sparkdl")
    before = (sys.stdout, sys.stderr, list(root.handlers), root.level, own.level, own.propagate)
    with pytest.raises(KeyError), captured_output(reporter):
        root.setLevel(logging.DEBUG)  # as a user's module might
        raise KeyError
    after = (sys.stdout, sys.stderr, list(root.handlers), root.level, own.level, own.propagate)
    assert after == before


def test_threads_may_print_at_the_same_time(client: FakeClient, reporter: Reporter) -> None:
    def speak(name: str) -> None:
        for number in range(200):
            print(f"{name} {number}")

    with reporter, captured_output(reporter):
        threads = [threading.Thread(target=speak, args=(name,)) for name in "abc"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=20)
    # Their lines may mix, as on any console, but nothing is lost and nothing comes twice.
    said = Counter("".join(client.lines()))
    assert said == Counter("".join(f"{name} {n}" for name in "abc" for n in range(200)))


@pytest.mark.parametrize("to_file", [False, True])
def test_basic_config_works_and_nothing_comes_twice(
    client: FakeClient, reporter: Reporter, tmp_path: Path, *, to_file: bool
) -> None:
    root, level, configure = logging.getLogger(), logging.root.level, logging.basicConfig
    others, root.handlers = root.handlers, []  # pytest's own
    try:
        with reporter, captured_output(reporter):
            options = {"filename": str(tmp_path / "log")} if to_file else {}
            logging.basicConfig(level=logging.DEBUG, **options)
            logging.getLogger("mine").debug("hello")
            for handler in list(root.handlers):
                handler.close()
    finally:
        root.handlers = others
    assert [line for line in client.lines() if "hello" in line] == ["DEBUG mine: hello"]
    assert (tmp_path / "log").exists() == to_file
    assert (logging.root.level, logging.basicConfig) == (level, configure)


def test_the_last_lines_of_stderr_are_kept(reporter: Reporter) -> None:
    with captured_output(reporter) as last_lines:
        for number in range(30):
            print(number, file=sys.stderr)
        print("usage", end="", file=sys.stderr)
        assert last_lines() == [*map(str, range(10, 30)), "usage"]


def test_whatever_is_reported_goes_as_plain_values(hub: Hub, server: ChannelServer) -> None:
    """A key that JSON does not know has ended the thread, and so the fit."""
    client = ChannelClient(server.address)
    with Reporter(client, attempt=0, rank=0) as reporter:
        reporter.epoch({np.int64(3): np.float32(0.5), (1, 2): {Path("a"): [b"x"]}})  # type: ignore[dict-item]
        reporter.send({"kind": "done"})
    client.close()
    bodies = {event.body["kind"]: event.body for event in drain(hub)}
    assert bodies["epoch"]["record"] == {"3": "0.5", "(1, 2)": {"a": ["b'x'"]}}
    assert "done" in bodies


def test_no_mistake_ends_the_thread(
    client: FakeClient, reporter: Reporter, quick: None, capfd: pytest.CaptureFixture[str]
) -> None:
    with reporter:
        answer = client.report

        def fail(**_: Any) -> bool:
            client.reports += 1
            raise RuntimeError("a mistake of ours")

        client.report = fail  # type: ignore[method-assign]
        before = client.reports
        soon(lambda: client.reports > before + 2)
        client.report = answer  # type: ignore[method-assign]
        reporter.send({"kind": "done"})
    assert len(client.bodies("done")) == 1
    assert capfd.readouterr().err.count("RuntimeError: a mistake of ours") == 1
