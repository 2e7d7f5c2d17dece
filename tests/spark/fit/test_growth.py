"""How a gang is submitted, and when it starts again with more workers."""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from sparkdl.data.plan import Column, Shard, make_plan
from sparkdl.data.spool.spool_source import SpoolSource
from sparkdl.errors import ClusterError
from sparkdl.spark.cluster import cluster_info
from sparkdl.spark.cluster import slots as slots_module
from sparkdl.spark.cluster.attempt import Attempt
from sparkdl.spark.cluster.cluster_info import ClusterInfo
from sparkdl.spark.cluster.slots import Slots, wait_for_workers
from sparkdl.spark.cluster.supervisor import GangResult
from sparkdl.spark.fit import gang_fit
from sparkdl.spark.session.settings import Settings
from sparkdl.sync.gradients.allreduce import AllReduce


def run_of(total_steps: int, first_step: int = 0) -> Any:
    return SimpleNamespace(plan=SimpleNamespace(first_step=first_step, total_steps=total_steps))


def attempt(*, step: int = 110, saved: int | None = 100, workers: int = 2) -> Attempt:
    """It took 5 s to the first step, number 10, and 10 steps take a second."""
    now = time.monotonic()
    began = now - (step - 10) / 10
    return Attempt(
        number=0, world_size=workers, submitted=began - 5, first_step=(10, began),
        steps=(step, now), saved=None if saved is None else (saved, now),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("there", "changes", "total_steps", "grows"),
    [
        (4, {}, 1000, True),  # 89 s to go, of which two more workers save half
        (4, {"saved": None}, 1000, False),  # it would begin at the beginning
        (4, {}, 200, False),  # 9 s to go: starting again costs 5
        (4, {"step": 500, "saved": 1}, 1000, False),  # 50 s of work would be lost
        (4, {"saved": 150}, 200, False),  # it is not known yet that some of the 9 s are done
        (3, {}, 400, False),  # 29 s to go, of which one worker more saves a third
    ],
)
def test_a_gang_grows_where_that_pays(
    there: int, changes: Any, total_steps: int, grows: bool
) -> None:
    reason = gang_fit._pays(run_of(total_steps), attempt(**changes), there, 0.0)
    assert (reason is not None) == grows
    if reason is not None:
        assert reason.startswith("the gang of 2 starts again")
        assert "step 100, which saves about 38 s" in reason


def test_before_the_first_step_nothing_is_known() -> None:
    found = Attempt(number=0, world_size=2, submitted=0, saved=(3, 0.0))
    assert gang_fit._pays(run_of(1000), found, 4, 0.0) is None
    first = replace(attempt(), steps=(10, 0.0))
    assert gang_fit._pays(run_of(1000), first, 4, 0.0) is None


def test_a_fit_that_goes_on_from_another_has_its_own_steps_to_go() -> None:
    assert gang_fit._pays(run_of(300), attempt(), 4, 0.0) is None
    assert gang_fit._pays(run_of(300, first_step=700), attempt(), 4, 0.0) is not None


class Table:
    """Remembers what was asked of it."""

    reader = SpoolSource()
    df = "the table"

    def __init__(self, *, owns_partitions: bool, is_kept: bool) -> None:
        self.owns_partitions, self.is_kept, self.asked = owns_partitions, is_kept, list[Any]()
        self.spare = False

    def collect(self) -> list[Any]:
        self.asked.append("collect")
        return self._found("as before")

    def is_scattered(self, num_workers: int) -> bool:
        return self.spare

    def restore(self, num_workers: int) -> tuple[list[Any], str]:
        self.asked.append(num_workers)
        return self._found("restored"), "restored table"

    def rebuild(self) -> None:
        self.asked.append("rebuild")

    def remake(self, missing: Collection[int]) -> None:
        self.asked.append(list(missing))

    def _found(self, path: str) -> list[Any]:
        return [SimpleNamespace(shard=shard(number, path)) for number in range(3)]


def shard(number: int, path: str = "at first") -> Shard:
    return Shard(
        shard_id=number, path=path, num_rows=4, num_validation_rows=0, fingerprint=str(number)
    )


def gang_run(*, most: int | None, owns: bool, kept: bool = False, wish: Any = None) -> Any:
    cluster = ClusterInfo(master="spark://h:7077", num_executors=1, cores_per_executor=2)
    return SimpleNamespace(
        table=Table(owns_partitions=owns, is_kept=kept),
        plan=make_plan(
            columns=[Column(name="x", role="feature", dtype="float32", shape=())],
            shards=[shard(number) for number in range(3)], world_size=2, batch_size=4, epochs=1,
        ),
        slots=Slots(num_workers=2, threads=1, cluster=cluster, max_workers=most),
        spark=SimpleNamespace(range=lambda *rows: rows),
        link=SimpleNamespace(send=lambda *_, **__: b""),
        packed=SimpleNamespace(pieces=None, recipe=b"", tensors={}), config=SimpleNamespace(
            parallelism=None,
            device="cpu", sync_strategy=AllReduce(work_shares=wish)
        ),
        run_key="k", begins_from=None, keeps_state=False, looks=None,
        gang_order=lambda kind, **work: SimpleNamespace(**work),
        gang_job=lambda df, work, order, *, num_workers: (df, order, num_workers),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("most", "owns", "kept", "number", "workers", "df", "asked", "path"),
    [
        (None, False, False, 0, 2, "the table", [], "at first"),
        (None, False, False, 1, 2, "the table", ["collect"], "as before"),
        (None, True, False, 1, 2, "restored table", [2], "restored"),
        (None, False, True, 0, 2, "the table", [], "at first"),
        (None, False, True, 1, 2, "restored table", [2], "restored"),
        (3, False, False, 0, 2, "the table", [], "at first"),
        (3, False, False, 1, 2, "restored table", [2], "restored"),
        (3, True, False, 1, 3, "restored table", [3], "restored"),
    ],
)
@pytest.mark.parametrize("wish", [None, {"gpu-*": 3}])
def test_a_submission_finds_the_shards_where_they_are(
    most: int | None, owns: bool, kept: bool, number: int, workers: int, df: Any,
    asked: list[Any], path: str, wish: Any,
) -> None:  # fmt: skip
    run: Any = gang_run(most=most, owns=owns, kept=kept, wish=wish)
    speeds = {} if wish else {"far": 3.0}
    attempts: Any = SimpleNamespace(
        begin=lambda *_: None, passed_over=set(), lease=None, speeds=speeds
    )
    job: Any = gang_fit._submit(
        run, attempts, b"", None, None, Attempt(number=number, world_size=workers, submitted=0)
    )
    rows, order, num_workers = job
    assert (rows, num_workers, run.table.asked) == (df, workers, asked)
    assert {one.path for one in order.plan.shards} == {path}
    lengths = [len(own) for own in order.plan.shards_by_rank]
    assert lengths == {2: [1, 2], 3: [1, 1, 1]}[workers]
    # What was dealt to the ranks' own tasks stays, unless hosts differ in speed.
    assert not order.is_placed
    assert not order.is_assigned
    assert order.speeds == speeds


def test_scattered_shards_are_restored_before_the_first_submission() -> None:
    """As own partitions are that more executors have spooled than there are workers."""
    run: Any = gang_run(most=None, owns=True)
    run.table.spare = True
    attempts: Any = SimpleNamespace(begin=lambda *_: None, passed_over=set(), lease=None, speeds={})
    attempt = Attempt(number=0, world_size=2, submitted=0)
    rows, order, _ = cast(Any, gang_fit._submit(run, attempts, b"", None, None, attempt))
    assert (rows, {one.path for one in order.plan.shards}) == ("restored table", {"restored"})


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize(
    ("most", "workers", "wish", "in_tasks", "keep"),
    [
        (None, 2, None, True, True),
        (None, 3, {"gpu-*": 3}, True, True),  # with one shard each nothing can be done
        (3, 2, None, True, False),  # workers come and go
        (None, 2, None, False, True),  # a source's, which are in no task
    ],
)
def test_ranks_of_equal_speed_keep_the_shards_that_the_plan_gives_them(
    kept: bool, most: int | None, workers: int, wish: Any, in_tasks: bool, keep: bool
) -> None:
    run: Any = gang_run(most=most, owns=False, kept=kept, wish=wish)
    if not in_tasks:
        run.table.reader = object()
    attempts: Any = SimpleNamespace(begin=lambda *_: None, passed_over=set(), lease=None, speeds={})
    job: Any = gang_fit._submit(
        run, attempts, b"", None, None, Attempt(number=0, world_size=workers, submitted=0)
    )
    is_placed, is_assigned = job[1].is_placed, job[1].is_assigned
    assert (is_placed, is_assigned) == (keep and in_tasks and not kept, keep and kept)


@pytest.mark.parametrize(
    ("most", "owns", "missing", "asked"),
    [
        (None, False, {1}, "rebuild"),
        (None, True, {1}, [1]),
        (3, False, {1}, [1]),
        (3, False, set(), [0, 1, 2]),
    ],
)
def test_lost_shards_are_written_anew(
    most: int | None, owns: bool, missing: set[int], asked: Any
) -> None:
    run: Any = gang_run(most=most, owns=owns)
    gang_fit._rebuild(run, missing)
    assert run.table.asked == [asked]


def test_the_summary_tells_the_last_gang() -> None:
    said = {"history": [], "steps": 9, "seconds": {}, "rows_per_second": 1.0, "bytes_sent": 0}
    result = GangResult(rows=[], restarts=1, sizes=[(0, 2), (5, 3)])
    summary = gang_fit._summary(result, {0: said})
    assert (summary.world_size, summary.gang_sizes) == (3, [[0, 2], [5, 3]])


def test_a_gang_takes_what_is_there_after_a_short_wait(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    there = [3]
    for module in (slots_module, cluster_info):
        monkeypatch.setattr(module, "num_slots", lambda *_: there[0])
        monkeypatch.setattr(module, "raise_if_ended", lambda _: None)
        monkeypatch.setattr(module, "is_connect", lambda _: False)
    settings = Settings(elastic_wait_seconds=0.2, queue_timeout_seconds=30)
    spark: Any = None
    began = time.monotonic()
    assert wait_for_workers(spark, 3, 1, None, settings, 1) == 3
    assert time.monotonic() - began < 0.1
    assert wait_for_workers(spark, 4, 2, None, settings, 1) == 3
    assert 0.2 <= time.monotonic() - began < 20
    assert "the gang has 3 of 4 workers (at least 2)" in caplog.text
    there[0] = 9
    assert wait_for_workers(spark, 4, 2, None, settings, 1) == 4
    there[0] = 1
    settings = Settings(elastic_wait_seconds=0.1, queue_timeout_seconds=0.2)
    told = "only 1 of the 2 slots that minWorkers=2 needs came up within 0.2 s of a loss; lower"
    with pytest.raises(ClusterError, match=told):
        wait_for_workers(spark, 4, 2, None, settings, 1)
