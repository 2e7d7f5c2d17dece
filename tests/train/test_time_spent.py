from __future__ import annotations

import time

import pytest

from sparkdl.comm.communicator import LocalCommunicator
from sparkdl.train.time_spent import SPENT_ON, Clock


def test_every_moment_is_counted_once() -> None:
    began = time.perf_counter()
    clock = Clock()
    time.sleep(0.02)
    clock.lap("data")
    time.sleep(0.01)
    clock.lap("compute")
    clock.lap("data")
    total = time.perf_counter() - began

    assert list(clock.seconds) == list(SPENT_ON)
    assert clock.seconds["data"] >= 0.02
    assert clock.seconds["compute"] >= 0.01
    assert sum(clock.seconds.values()) == pytest.approx(total, abs=0.05)


class Waiting(LocalCommunicator):
    waited_seconds = 0.0


def test_waiting_is_taken_from_whatever_it_was_part_of() -> None:
    comm = Waiting()
    began = time.perf_counter()
    clock = Clock(comm)
    time.sleep(0.03)
    comm.waited_seconds += 0.02
    clock.lap("communication")

    assert clock.seconds["waiting"] == pytest.approx(0.02)
    assert 0.01 <= clock.seconds["communication"] <= time.perf_counter() - began - 0.02
