"""A gang that lacks workers gives back the slots that it has, at no restart's cost."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from sparkdl.errors import ClusterError
from sparkdl.spark.cluster import let_go
from sparkdl.spark.cluster.attempt import Attempt
from sparkdl.spark.cluster.cluster_info import ClusterInfo
from sparkdl.spark.cluster.let_go import LetGo
from sparkdl.spark.cluster.slots import Slots
from sparkdl.spark.session.settings import Settings

DYNAMIC = ClusterInfo(
    master="spark://h:7077", num_executors=1, cores_per_executor=1, dynamic_allocation=True
)


def seq(*values: Any) -> Any:
    """A Scala sequence."""
    return SimpleNamespace(size=lambda: len(values), apply=lambda number: values[number])


class FakeSpark:
    """Three executors, of which the busy one has a task until it was asked twice."""

    def __init__(self) -> None:
        self.killed: list[Any] = []
        self.asked = 0
        backend = SimpleNamespace(killExecutors=self._kill)
        store = SimpleNamespace(executorList=self._executors)
        scala = SimpleNamespace(statusStore=lambda: store, schedulerBackend=lambda: backend)
        self.sparkContext = SimpleNamespace(
            appName="nightly",
            _jsc=SimpleNamespace(sc=lambda: scala),
            _jvm=SimpleNamespace(PythonUtils=SimpleNamespace(toSeq=list)),
        )

    def _executors(self, only_active: bool) -> Any:
        self.asked += 1
        tasks = {"driver": 0, "1": 0, "2": int(self.asked < 3)}
        return seq(
            *(
                SimpleNamespace(id=lambda name=name: name, activeTasks=lambda n=number: n)
                for name, number in tasks.items()
            )
        )

    def _kill(self, ids: list[str], *flags: bool) -> Any:
        assert flags == (False, False, False)
        self.killed += ids
        return seq(*ids)


def changes(spark: Any, *, slots: Slots | None = None, queue_timeout: float = 60.0) -> list[LetGo]:
    default = Slots(num_workers=2, threads=1, cluster=DYNAMIC)
    settings = Settings(start_timeout_seconds=0.4, queue_timeout_seconds=queue_timeout)
    return LetGo.of(spark, slots or default, settings)


@pytest.fixture(autouse=True)
def classic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(let_go, "is_connect", lambda spark: False)
    monkeypatch.setattr(let_go, "_HOLD", 0.5)
    yield


def waiting(*ranks: int) -> Attempt:
    """Two workers are wanted; these have come just now."""
    now = time.monotonic()
    attempt = Attempt(number=0, world_size=2, submitted=now)
    attempt.first_event, attempt.last_event = now, dict.fromkeys(ranks, now)
    return attempt


def test_slots_are_kept_for_a_while_and_then_given_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    spark = FakeSpark()
    (change,) = changes(spark)
    attempt = waiting(1)
    assert change(attempt) is None
    change.end()
    assert spark.killed == []  # nothing was to be given back
    attempt.first_event -= 0.3  # more than half of startTimeout
    with caplog.at_level(logging.WARNING):
        text = change(attempt)
    assert text is not None and text.startswith("1 of 2 workers have had slots for 0 s")
    assert "'nightly' gives its slots back" in caplog.text
    began = time.monotonic()
    change.end()
    assert 0.1 <= time.monotonic() - began < 5
    assert spark.killed == ["1", "2"]
    change.end()
    assert spark.killed == ["1", "2"]


def test_a_worker_that_has_just_come_shows_that_more_may_come() -> None:
    (change,) = changes(FakeSpark())
    attempt = waiting(0)
    attempt.world_size = 3
    assert change(attempt) is None
    attempt.last_event[1] = time.monotonic()
    attempt.first_event -= 100
    assert change(attempt) is None
    time.sleep(0.25)
    assert "2 of 3 workers" in str(change(attempt))


def test_neither_a_gang_of_which_nobody_is_there_nor_a_whole_one_gives_anything_back() -> None:
    (change,) = changes(FakeSpark())
    for attempt in (waiting(), waiting(0, 1)):
        attempt.first_event -= 100
        attempt.submitted -= 100
        assert change(attempt) is None


def test_it_ends_when_all_attempts_together_have_waited_for_too_long() -> None:
    (change,) = changes(FakeSpark(), queue_timeout=30.0)
    for waited, ends in ((20, False), (40, True)):
        attempt = waiting(0)
        attempt.submitted -= waited if not ends else 0
        attempt.first_event -= 1
        if ends:
            assert change._since is not None
            change._since -= 20
            with pytest.raises(ClusterError, match="no 2 workers had slots at the same time with"):
                change(attempt)
        else:
            assert change(attempt) is not None


def test_only_gangs_that_need_all_workers_of_a_plain_stage_do_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fixed = ClusterInfo(master="local", num_executors=1, cores_per_executor=2)
    for slots in (
        Slots(num_workers=2, threads=1, cluster=fixed),  # a barrier stage
        Slots(num_workers=2, threads=1, cluster=DYNAMIC, is_gang=False),
        Slots(num_workers=2, threads=1, cluster=DYNAMIC, min_workers=1, max_workers=2),
    ):
        assert changes(FakeSpark(), slots=slots) == []
    monkeypatch.setattr(let_go, "is_connect", lambda spark: True)
    assert changes(FakeSpark()) == []


def test_executors_that_cannot_be_given_back_go_by_themselves() -> None:
    spark = FakeSpark()
    spark.sparkContext._jsc = None
    (change,) = changes(spark)
    attempt = waiting(0)
    attempt.first_event -= 1
    assert change(attempt) is not None
    change.end()
