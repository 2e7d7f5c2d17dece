"""When a gang starts again because there are slots for more workers."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, call

import pytest

from sparkdl.errors import ConfigError
from sparkdl.spark.cluster import resize, scouts, slots
from sparkdl.spark.cluster.attempt import Attempt
from sparkdl.spark.cluster.cluster_info import ClusterInfo
from sparkdl.spark.cluster.resize import Resize


class Job:
    """In place of the job of the scouts; ``found`` is what Spark says when it is asked."""

    def __init__(self, spark: Any, work: Any, *, tag: str, name: str) -> None:
        self.tag, self.is_cancelled, self.has_begun = tag, False, False
        self.error: Exception | None = None
        self.is_over = threading.Event()
        self.found = 0
        self.progress = SimpleNamespace(seconds_without=self._ask, num_running=0)

    def _ask(self) -> float:
        self.progress.num_running = self.found
        return 0.0

    def begin(self) -> None:
        assert not self.is_over.is_set()
        self.has_begun = True

    def fail(self) -> None:
        self.error = OSError("no more nodes")
        self.is_over.set()

    def cancel(self) -> None:
        self.is_cancelled = True
        self.is_over.set()
        self.found = 0

    def end(self) -> None:
        self.is_over.set()


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.slots = 100.0, 1
        self.jobs: list[Job] = []

        def job(*args: Any, **options: Any) -> Job:
            self.jobs.append(Job(*args, **options))
            return self.jobs[-1]

        monkeypatch.setattr(scouts, "BackgroundJob", job)
        monkeypatch.setattr(scouts, "conf", lambda spark, key: self.most_executors)
        self.most_executors: str | None = None
        monkeypatch.setattr(resize, "num_slots", lambda spark, profile: self.slots)
        monkeypatch.setattr(time, "monotonic", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def launch() -> Any:
    slots = SimpleNamespace(max_workers=3, min_workers=2, profile=None, is_barrier=True)
    settings = SimpleNamespace(elastic_wait_seconds=10.0)
    return SimpleNamespace(run_id="r", spark=MagicMock(), slots=slots, settings=settings)


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
    clock.now += 11
    assert grows(attempt(3, there=3)) is None
    assert len(asked) == 2


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
    for there, wait in ((0, 11), (1, 11), (3, 11), (2, 9)):  # one of three is lost again
        assert found(attempt(3, there=there)) is None
        clock.now += wait
        assert found(attempt(3, there=there)) is None
    clock.now += 2
    told = "2 of 3 workers have come; the gang starts with these"
    assert found(attempt(3, there=2)) == told
    assert limits == [2]


@pytest.fixture
def alone() -> Attempt:
    """A gang of one worker of three, with a checkpoint."""
    found = attempt(1, there=1)
    found.steps, found.saved = (9, 90.0), (5, 80.0)
    return found


def elastic() -> Any:
    run = launch()
    run.slots.is_barrier = False
    run.slots.min_workers, run.slots.cpus_per_worker, run.slots.gpus_per_worker = 1, 1, None
    run.slots.cluster = ClusterInfo(
        master="yarn", num_executors=1, cores_per_executor=1, dynamic_allocation=True
    )
    return run


def test_scouts_look_for_slots_while_more_workers_would_pay(clock: Clock, alone: Attempt) -> None:
    limits, asked = list[int](), list[tuple[int, Any]]()

    def pays(attempt: Attempt, workers: int, since: float) -> str:
        asked.append((workers, attempt.saved))
        return "it pays"

    run = elastic()
    grows = Resize(run, pays, limits.append)
    assert grows(replace(alone, saved=None)) is None
    assert not clock.jobs, "before the first checkpoint it cannot start again"
    clock.now += 10
    assert grows(alone) is None
    assert asked == [(3, (9, clock.now))], "as if a checkpoint had just been written"
    assert [(job.tag, job.has_begun) for job in clock.jobs] == [("sparkdl-r-scouts-0", True)]
    assert run.spark.range.call_args == call(0, 2, 1, 2), "a task for each"
    (scout, _), options = run.spark.range.return_value.mapInArrow.call_args
    assert scout.seconds > 242 and options == {"profile": run.slots.profile}
    clock.now += 500  # no executor comes: they wait on
    assert grows(alone) is None and not clock.jobs[0].is_cancelled
    clock.jobs[0].found = 1
    assert grows(alone) is None
    clock.now += 10
    assert grows(alone) == "there are slots for 2 workers: it pays"
    assert asked[-1] == (2, (5, 80.0)), "from the checkpoint that there is"
    assert clock.jobs[0].is_cancelled, "the gang needs their slots"
    assert limits == [2], "it does not wait for the third"
    grows.end()
    assert grows(alone) is None and len(clock.jobs) == 2, "the next gang may need more at once"
    assert clock.jobs[1].tag == "sparkdl-r-scouts-1"
    grows.end()
    whole = replace(alone, world_size=3, last_event=dict.fromkeys(range(3), 0.0))
    assert grows(whole) is None and len(clock.jobs) == 2


def test_a_gang_waits_for_scouts_that_still_leave(clock: Clock, alone: Attempt) -> None:
    """Spark ends a task of Python's seconds after it was told to."""
    limits = list[int]()
    grows = Resize(elastic(), lambda *_: "it pays", limits.append)
    grows(alone)
    clock.jobs[0].found = 2
    clock.now += 11
    assert grows(alone) is None
    clock.now += 11
    assert grows(alone) is not None
    grows.end()
    begins = attempt(3, there=2)
    clock.jobs[0].found = 1
    for _ in range(3):
        clock.now += 11
        assert grows(begins) is None, "the third has no slot as long as a scout keeps one"
    clock.jobs[0].found = 0
    clock.now += 9
    assert grows(begins) is None
    clock.now += 2
    assert grows(begins) == "2 of 3 workers have come; the gang starts with these"


def test_scouts_leave_slots_of_which_nothing_comes(clock: Clock, alone: Attempt) -> None:
    would = True

    def pays(attempt: Attempt, workers: int, since: float) -> str | None:
        return "it pays" if would and workers == 3 else None

    grows = Resize(elastic(), pays, nobody)
    grows(alone)
    clock.jobs[0].found = 1
    for seconds, is_cancelled in ((11, False), (110, False), (60, False), (61, True)):
        clock.now += seconds
        assert grows(alone) is None
        assert clock.jobs[0].is_cancelled is is_cancelled
    clock.now += 119
    assert grows(alone) is None and len(clock.jobs) == 1
    clock.now += 2
    assert grows(alone) is None and len(clock.jobs) == 2, "they are sent again after a while"
    would = False  # in the last part of a run
    clock.now += 121
    assert grows(alone) is None and clock.jobs[1].is_cancelled
    clock.now += 121
    assert grows(alone) is None and len(clock.jobs) == 2


def test_whether_scouts_pay_is_asked_once_in_a_while(clock: Clock, alone: Attempt) -> None:
    asked = list[int]()
    grows = Resize(elastic(), lambda _, workers, since: asked.append(workers), nobody)
    for seconds in (0, 9, 2):
        clock.now += seconds
        assert grows(alone) is None
    assert asked == [3, 3]


def test_no_scouts_where_spark_may_ask_for_nothing_more(clock: Clock, alone: Attempt) -> None:
    clock.most_executors = "1"
    grows = Resize(elastic(), lambda *_: "it pays", nobody)
    assert grows(alone) is None and not clock.jobs
    clock.most_executors, clock.now = "2", clock.now + 10
    assert grows(alone) is None and len(clock.jobs) == 1
    grows.end()
    assert clock.jobs[0].is_over.is_set()


@pytest.mark.parametrize(
    "changes",
    [{"cores_per_executor": 2}, {"cores_per_executor": None}, {"dynamic_allocation": False}],
)
def test_scouts_where_it_may_have_slots_for_more(
    clock: Clock, alone: Attempt, changes: dict[str, Any]
) -> None:
    """The only executor has two, it is not known how many, or their number is of no matter."""
    clock.most_executors, run = "1", elastic()
    run.slots.cluster = replace(run.slots.cluster, **changes)
    assert Resize(run, lambda *_: "it pays", nobody)(alone) is None and len(clock.jobs) == 1


def test_scouts_that_spark_has_ended_are_told_of(
    clock: Clock, alone: Attempt, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "sparkdl")
    grows = Resize(elastic(), lambda *_: "it pays", nobody)
    for _ in range(2):
        assert grows(alone) is None
        clock.jobs[-1].fail()
        clock.now += 121
    assert [job.is_over.is_set() for job in clock.jobs] == [True, True]
    assert caplog.text.count("has ended the tasks that asked for more slots: no more nodes") == 1
    grows(alone)
    clock.jobs[-1].fail()
    clock.jobs[-1].is_cancelled = True  # what Spark says then is of no interest
    grows.end()
    assert caplog.text.count("no more nodes") == 2


def test_a_scout_keeps_its_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    slept = list[float]()
    monkeypatch.setattr(time, "sleep", slept.append)
    assert list(scouts.Scout(7.0)(iter([]))) == [] and slept == [7.0]


@pytest.mark.parametrize("on_connect", [False, True])
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("most", [None, 3])
def test_a_gang_is_a_plain_stage_where_slots_come_and_go_or_are_not_known(
    on_connect: bool, dynamic: bool, most: int | None
) -> None:
    cluster = replace(elastic().slots.cluster, dynamic_allocation=dynamic)
    found = slots.Slots(
        num_workers=3, threads=1, cluster=cluster, max_workers=most, on_connect=on_connect
    )
    assert found.is_barrier is not (dynamic or (on_connect and most is not None))


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
    monkeypatch.setattr(slots, "require_gang_support", lambda *_, **__: None)
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
