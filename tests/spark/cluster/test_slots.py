"""The default number of workers does not depend on how soon executors register."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from sparkdl.errors import ClusterError
from sparkdl.spark.cluster import slots as module
from sparkdl.spark.cluster.cluster_info import ClusterInfo
from sparkdl.spark.cluster.slots import (
    await_executors,
    plan_slots,
    settle,
    wait_again,
    wait_for_workers,
)
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


@pytest.mark.parametrize(
    ("dynamic", "fewest", "workers", "most", "waited", "again"),
    [
        (False, None, 4, None, [4], 4),
        (False, 2, 3, 4, [2, 3], 3),
        (True, None, 4, None, [], 4),
        (True, 2, 4, 4, [], 4),
    ],
)
def test_workers_of_a_gang_as_it_begins_and_begins_again(
    dynamic: bool, fewest: int | None, workers: int, most: int | None, waited: list[int],
    again: int, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    waits: list[int] = []
    asked: list[None] = []

    def inspect(_: Any) -> ClusterInfo:
        asked.append(None)
        return ClusterInfo(
            master="spark://h:7077", num_executors=1 if len(asked) == 1 else 3,
            cores_per_executor=6, dynamic_allocation=dynamic,
        )  # fmt: skip

    monkeypatch.setattr(module, "inspect_cluster", inspect)
    monkeypatch.setattr(module, "require_gang_support", lambda *_, **__: None)
    monkeypatch.setattr(module, "is_connect", lambda _: False)
    monkeypatch.setattr(module, "raise_if_ended", lambda _: None)
    monkeypatch.setattr(module, "num_slots", lambda *_: 3)
    monkeypatch.setattr(module, "choose_num_workers", lambda _, workers, **__: workers)
    monkeypatch.setattr(module, "wait_for_slots", lambda _, count, *__, **___: waits.append(count))
    spark: Any = None
    settings = Settings(elastic_wait_seconds=0.01)
    slots = plan_slots(
        spark, settings, num_workers=4, cpus_per_worker=None, gpus_per_worker=None,
        min_workers=fewest,
    )  # fmt: skip
    assert (slots.num_workers, slots.max_workers, waits) == (workers, most, waited)
    assert slots.may_move == (dynamic or fewest is not None)
    assert slots.threads == (6 if waited == [2, 3] else 1)  # of those that came meanwhile
    waits.clear()
    assert wait_again(spark, slots, settings) == again
    assert waits == waited[:1]


def test_the_short_wait_for_workers_ends_with_the_session(monkeypatch: pytest.MonkeyPatch) -> None:
    def end(_: Any) -> None:
        raise ClusterError("the session has ended")

    monkeypatch.setattr(module, "num_slots", lambda *_: 0)
    monkeypatch.setattr(module, "raise_if_ended", end)
    spark: Any = None
    with pytest.raises(ClusterError, match="has ended"):
        wait_for_workers(spark, 2, 1, None, Settings())
