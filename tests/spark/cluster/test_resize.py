"""When a gang starts again because there are slots for more workers."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from sparkdl.errors import ConfigError
from sparkdl.spark.cluster import resize, slots
from sparkdl.spark.cluster.attempt import Attempt
from sparkdl.spark.cluster.resize import Resize


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.slots = 100.0, 1
        monkeypatch.setattr(resize, "num_slots", lambda spark, profile: self.slots)
        monkeypatch.setattr(time, "monotonic", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def launch() -> Any:
    slots = SimpleNamespace(max_workers=3, min_workers=2, profile=None, is_barrier=True)
    settings = SimpleNamespace(elastic_wait_seconds=10.0)
    return SimpleNamespace(spark=None, slots=slots, settings=settings)


def nobody(_: int) -> None:
    raise AssertionError("all have come")


def attempt(workers: int, there: int) -> Attempt:
    return Attempt(
        number=0, world_size=workers, submitted=0.0, last_event=dict.fromkeys(range(there), 0.0)
    )


def test_it_grows_once_slots_have_been_there_for_a_while_and_it_pays(clock: Clock) -> None:
    asked: list[tuple[int, float]] = []

    def pays(_: Attempt, workers: int, since: float) -> str | None:
        asked.append((workers, since))
        return "it pays" if len(asked) == 2 else None

    grows, small = Resize(launch(), pays, nobody), attempt(1, there=1)
    assert grows(small) is None
    clock.slots = 2
    assert grows(small) is None
    clock.now += 9
    clock.slots = 9  # of which it may have three
    assert grows(small) is None
    clock.now += 9.9
    assert grows(small) is None
    assert asked == []
    clock.now += 0.2
    assert grows(small) is None
    assert grows(small) == "there are slots for 3 workers: it pays"
    assert asked == [(3, 119.0)] * 2
    assert grows(attempt(3, there=3)) is None


def test_slots_that_go_again_and_workers_that_are_not_there_yet_do_not_count(clock: Clock) -> None:
    clock.slots = 2
    grows = Resize(launch(), lambda *_: "it pays", nobody)
    assert grows(attempt(1, there=1)) is None
    clock.now += 11
    assert grows(attempt(1, there=0)) is None
    assert grows(attempt(1, there=1)) is None
    clock.now += 9
    clock.slots = 1
    assert grows(attempt(1, there=1)) is None
    clock.slots = 2
    clock.now += 2
    assert grows(attempt(1, there=1)) is None
    clock.now += 11
    assert grows(attempt(1, there=1)) is not None


def test_under_dynamic_allocation_it_starts_with_those_that_have_come(clock: Clock) -> None:
    run, limits = launch(), list[int]()
    run.slots.is_barrier = False
    found = Resize(run, lambda *_: "it pays", limits.append)
    for there in (0, 1, 2):
        assert found(attempt(3, there=there)) is None
        clock.now += 9
        assert found(attempt(3, there=there)) is None
    clock.now += 2
    told = "2 of 3 workers have come; the gang starts with these"
    assert found(attempt(3, there=2)) == told
    assert limits == [2]


def test_it_starts_with_fewer_if_slots_have_gone_before_it_could_begin(clock: Clock) -> None:
    """Spark would wait until all tasks of the barrier stage can begin."""
    limits = list[int]()
    found = Resize(launch(), lambda *_: "it pays", limits.append)
    for clock.slots in (3, 1, 2):
        assert found(attempt(3, there=0)) is None
        clock.now += 11
    assert found(attempt(3, there=3)) is None  # all are there, whatever Spark counts
    assert found(attempt(3, there=0)) is None
    clock.now += 9
    assert found(attempt(3, there=0)) is None
    clock.now += 2
    assert found(attempt(3, there=0)) == "2 of 3 workers have slots; the gang starts with these"
    assert limits == [2]


@pytest.mark.parametrize(("executors", "shards", "fewest"), [(3, None, 4), (3, 2, 3)])
def test_the_fewest_are_no_more_than_an_open_number_comes_to(
    monkeypatch: pytest.MonkeyPatch, executors: int, shards: int | None, fewest: int
) -> None:
    info = SimpleNamespace(dynamic_allocation=False)
    monkeypatch.setattr(slots, "await_executors", lambda *_: info)
    monkeypatch.setattr(slots, "require_gang_support", lambda *_: None)
    monkeypatch.setattr(slots, "choose_num_workers", lambda *_, **__: executors)
    spark: Any = None
    with pytest.raises(ConfigError, match=f"minWorkers={fewest} is more than the {fewest - 1} "):
        slots.plan_slots(
            spark,
            spark,
            num_workers=None,
            cpus_per_worker=None,
            gpus_per_worker=None,
            most_workers=shards,
            min_workers=fewest,
        )
