"""The default number of workers does not depend on how soon executors register."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from sparkdl.spark.cluster import slots as module
from sparkdl.spark.cluster.slots import await_executors, settle
from sparkdl.spark.session.settings import Settings


class World:
    """A clock, and executors that register at the times given."""

    def __init__(self, *arrivals: float) -> None:
        self.arrivals = arrivals
        self.now = 0.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def count(self) -> int:
        return sum(at <= self.now for at in self.arrivals)


@pytest.mark.parametrize(
    ("arrivals", "still", "found", "until"),
    [
        ((0, 1, 3, 5), 3, 4, 8),
        ((4,), 3, 1, 7),  # none at first
        ((0, 0, 9), 3, 2, 3),  # too late
        ((0, 0), 0, 2, 0),  # an old application
        ((2,), 0, 1, 2),
        ((), 3, 0, 20),
        (tuple(range(100)), 3, 21, 20),  # time is up
    ],
)
def test_a_count_is_taken_when_it_stands_still(
    arrivals: tuple[float, ...], still: float, found: int, until: float
) -> None:
    world = World(*arrivals)
    settle(
        world.count,
        still_seconds=still,
        timeout_seconds=20,
        clock=lambda: world.now,
        sleep=world.sleep,
    )
    assert world.count() == pytest.approx(found, abs=1)
    assert world.now == pytest.approx(until, abs=0.25)


@pytest.mark.parametrize(
    ("entries", "age", "waits"),
    [
        ({"spark.master": "spark://h:7077"}, 1, 3.0),
        ({"spark.master": "spark://h:7077"}, 100, 0.0),
        ({"spark.master": "spark://h:7077", "spark.executor.instances": "2"}, 1, None),
        ({"spark.master": "spark://h:7077", "spark.dynamicAllocation.enabled": "true"}, 1, None),
        ({"spark.master": "yarn"}, 1, None),
        ({"spark.master": "local[2]"}, 1, None),
    ],
)
def test_only_new_applications_of_unknown_size_are_waited_for(
    entries: dict[str, str], age: float, waits: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[float] = []

    def note(count: Any, *, still_seconds: float, timeout_seconds: float) -> None:
        assert timeout_seconds == 9
        asked.append(still_seconds)

    monkeypatch.setattr(module, "settle", note)
    monkeypatch.setattr(module, "inspect_cluster", lambda spark: "all there")
    spark: Any = SimpleNamespace(
        conf=entries,
        sparkContext=SimpleNamespace(startTime=1000 * (time.time() - age)),
    )
    assert await_executors(spark, Settings(start_timeout_seconds=9)) == "all there"
    assert asked == ([] if waits is None else [waits])
