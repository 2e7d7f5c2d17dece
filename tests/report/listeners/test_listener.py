"""Listeners can neither end nor delay a run, and `end` of each is called."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
from torch import nn

from sparkdl.report.listeners import listener as module
from sparkdl.report.listeners.listener import Listener, Listeners, RunListener, RunStart
from sparkdl.report.record.run_record import RunRecord
from sparkdl.report.recorder import recording
from tests.report.runs import record

START = RunStart(run_id="r", name="Test", folder="f", params={})


@dataclass
class Noted(RunListener):
    seconds: float = 0.0
    fails: bool | type[BaseException] = False
    calls: list[Any] = field(default_factory=list)

    def _note(self, what: Any) -> None:
        self.calls.append(what)
        time.sleep(self.seconds)
        if self.fails:
            raise (RuntimeError if self.fails is True else self.fails)("broken")

    def step(self, step: int, values: Mapping[str, float]) -> None:
        self._note(step)

    def epoch(self, step: int, record: Mapping[str, float]) -> None:
        self._note(record)

    def end(self, record: RunRecord, module: nn.Module | None) -> None:
        self._note("end")


@dataclass(frozen=True)
class Options(Listener):
    listener: Noted | None

    def start(self, run: RunStart) -> RunListener:
        if self.listener is None:
            raise OSError("no server")
        return self.listener


def started(*listeners: Noted) -> Listeners:
    made = Listeners()
    made.start(START, [Options(listener) for listener in listeners])
    return made


def test_steps_take_a_small_part_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_STEP_SECONDS", 0.2)
    slow, quick = Noted(seconds=0.1), Noted()
    told = started(slow, quick)
    began = time.monotonic()
    step = 0
    while time.monotonic() - began < 0.9:
        step += 1
        told.step(step, {"loss": 1.0})
        time.sleep(0.001)
    told.end(record(), None)
    assert slow.calls == [1, "end"]
    assert 3 <= len(quick.calls) <= 6
    assert step > 20


def test_a_listener_that_fails_is_only_told_the_end(caplog: pytest.LogCaptureFixture) -> None:
    bad, good = Noted(fails=True), Noted()
    told = started(bad, good)
    for _ in range(3):
        told.call(lambda listener: listener.epoch(1, {}))
    told.end(record(), None)
    told.end(record(), None)
    assert bad.calls == [{}, "end"]
    assert good.calls == [{}, {}, {}, "end"]
    assert caplog.text.count("Noted has failed; it is told nothing more of this run") == 2
    assert __file__ in caplog.text and "listeners/listener.py" not in caplog.messages[0]


def test_those_that_have_started_are_told_the_end_if_another_cannot_start() -> None:
    first = Noted()
    with (
        pytest.raises(OSError, match="no server"),
        recording(
            run_id="r", name="T", params=[], storage=None, listeners=[Options(first), Options(None)]
        ),
    ):
        raise AssertionError("the run must not begin")
    assert first.calls == ["end"]


@dataclass
class Stuck(RunListener):
    """Its server answers only when the test is over."""

    answer: threading.Event = field(default_factory=threading.Event)
    calls: list[Any] = field(default_factory=list)

    def epoch(self, step: int, record: Mapping[str, float]) -> None:
        self.calls.append(step)
        self.answer.wait(30)

    def end(self, record: RunRecord, module: nn.Module | None) -> None:
        self.calls.append("end")


def test_a_listener_that_blocks_holds_up_neither_the_run_nor_the_others(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "_MOST_CALLS", 3)
    monkeypatch.setattr(module, "_END_SECONDS", 0.3)
    stuck, good = Stuck(), Noted()
    told = Listeners()
    told.start(START, [Lasting(stuck), Options(good)])
    began = time.monotonic()
    for step in range(10):
        told.call(lambda listener, step=step: listener.epoch(step, {}))  # type: ignore[misc]
        time.sleep(0.02)
    told.end(record(), None)
    assert time.monotonic() - began < 5
    assert good.calls == [{}] * 10 + ["end"]
    assert stuck.calls == [0]
    assert caplog.text.count("Stuck does not keep up with the run, which goes on without it") == 1
    assert "Stuck has not ended within 0 s; the run is over all the same" in caplog.text
    stuck.answer.set()
    deadline = time.monotonic() + 10
    while "end" not in stuck.calls:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert stuck.calls == [0, 1, 2, 3, "end"]  # those beyond were left out


@dataclass(frozen=True)
class Lasting(Listener):
    listener: RunListener

    def start(self, run: RunStart) -> RunListener:
        return self.listener


def test_a_listener_that_ends_its_thread_is_not_waited_for(
    caplog: pytest.LogCaptureFixture,
) -> None:
    failing = Noted(fails=SystemExit)
    listeners = started(failing)
    listeners.call(lambda listener: listener.epoch(1, {}))
    began = time.monotonic()
    listeners.end(record(), None)
    assert time.monotonic() - began < 5
    assert failing.calls == [{}, "end"]
    assert "Noted has failed" in caplog.text
