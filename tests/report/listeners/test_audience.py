"""Listeners can neither end nor delay a run, and all of them hear of its end."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
from torch import nn

from sparkdl.report.listeners import listener as module
from sparkdl.report.listeners.listener import Audience, Listener, RunListener, RunStart
from sparkdl.report.record import RunRecord
from sparkdl.report.recorder import recording
from tests.report.runs import record

START = RunStart(run_id="r", name="Test", folder="f", params={})


@dataclass
class Ear(RunListener):
    seconds: float = 0.0
    fails: bool = False
    heard: list[Any] = field(default_factory=list)

    def _hear(self, what: Any) -> None:
        self.heard.append(what)
        time.sleep(self.seconds)
        if self.fails:
            raise RuntimeError("deaf")

    def step(self, step: int, values: Mapping[str, float]) -> None:
        self._hear(step)

    def epoch(self, step: int, record: Mapping[str, float]) -> None:
        self._hear(record)

    def end(self, record: RunRecord, module: nn.Module | None) -> None:
        self._hear("end")


@dataclass(frozen=True)
class Options(Listener):
    ear: Ear | None

    def start(self, run: RunStart) -> RunListener:
        if self.ear is None:
            raise OSError("no server")
        return self.ear


def audience(*ears: Ear) -> Audience:
    made = Audience()
    made.start(START, [Options(ear) for ear in ears])
    return made


def test_steps_take_a_small_part_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_STEP_SECONDS", 0.2)
    slow, quick = Ear(seconds=0.1), Ear()
    told = audience(slow, quick)
    began = time.monotonic()
    step = 0
    while time.monotonic() - began < 0.9:
        step += 1
        told.step(step, {"loss": 1.0})
        time.sleep(0.001)
    assert slow.heard == [1]
    assert 3 <= len(quick.heard) <= 5
    assert step > 20


def test_who_fails_hears_of_the_end_and_of_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    bad, good = Ear(fails=True), Ear()
    told = audience(bad, good)
    for _ in range(3):
        told.tell(lambda listener: listener.epoch(1, {}))
    told.end(record(), None)
    told.end(record(), None)
    assert bad.heard == [{}, "end"]
    assert good.heard == [{}, {}, {}, "end"]
    assert caplog.text.count("Ear is told no more of this run but its end") == 2


def test_those_that_have_started_hear_of_the_end_if_another_cannot() -> None:
    first = Ear()
    with (
        pytest.raises(OSError, match="no server"),
        recording(
            run_id="r", name="T", params=[], storage=None, listeners=[Options(first), Options(None)]
        ),
    ):
        raise AssertionError("the run must not begin")
    assert first.heard == ["end"]
