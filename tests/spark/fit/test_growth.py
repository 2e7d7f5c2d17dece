"""How a gang is submitted, and when it starts again with more workers."""

from __future__ import annotations

import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from sparkdl.data.plan import Column, Shard, make_plan
from sparkdl.data.spool.spool_source import SpoolSource
from sparkdl.errors import ClusterError
from sparkdl.spark.cluster import cluster_info
from sparkdl.spark.cluster import slots as slots_module
from sparkdl.spark.cluster.attempt import Attempt
from sparkdl.spark.cluster.slots import wait_for_workers
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


def shard(number: int, path: str = "at first") -> Shard:
    return Shard(
        shard_id=number, path=path, num_rows=4, num_validation_rows=0, fingerprint=str(number)
    )


def gang_run(*, wish: Any = None) -> Any:
    return SimpleNamespace(
        table=SimpleNamespace(reader=SpoolSource()),
        plan=make_plan(
            columns=[Column(name="x", role="feature", dtype="float32", shape=())],
            shards=[shard(number) for number in range(3)], world_size=2, batch_size=4, epochs=1,
        ),
        link=SimpleNamespace(send=lambda *_, **__: b""),
        packed=SimpleNamespace(pieces=None, recipe=b"", tensors={}), config=SimpleNamespace(
            parallelism=None,
            device="cpu", sync_strategy=AllReduce(work_shares=wish)
        ),
        run_key="k", begins_from=None, keeps_state=False, looks=None,
        gang_order=lambda kind, **work: SimpleNamespace(**work),
        gang_job=lambda df, work, order, *, num_workers: (df, order, num_workers),
    )  # fmt: skip


class Placement:
    """Remembers the submissions."""

    holding = "here"

    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []

    def start(self, attempt: int, num_workers: int) -> tuple[list[Any], str]:
        self.asked.append((attempt, num_workers))
        return [SimpleNamespace(shard=shard(number, "found")) for number in range(3)], "rows"


@pytest.mark.parametrize(
    ("workers", "wish", "speeds", "holding"),
    [
        (2, None, {}, "here"),
        (2, None, {"far": 3.0}, "near"),
        (2, {"gpu-*": 3}, {}, "near"),
        (3, {"gpu-*": 3}, {"far": 3.0}, "here"),  # with one shard each nothing can be done
    ],
)
def test_a_submission_has_the_shards_where_they_are_by_the_speeds_of_hosts(
    workers: int, wish: Any, speeds: dict[str, float], holding: str
) -> None:
    run: Any = gang_run(wish=wish)
    attempts: Any = SimpleNamespace(
        begin=lambda *_: None, passed_over=set(), lease=None, speeds=speeds
    )
    placement: Any = Placement()
    made = Attempt(number=1, world_size=workers, submitted=0)
    job: Any = gang_fit._submit(run, placement, attempts, b"", None, None, made)
    rows, order, num_workers = job
    assert (rows, num_workers, placement.asked) == ("rows", workers, [(1, workers)])
    assert {one.path for one in order.plan.shards} == {"found"}
    lengths = [len(own) for own in order.plan.shards_by_rank]
    assert lengths == {2: [1, 2], 3: [1, 1, 1]}[workers]
    assert (order.holding, order.speeds) == (holding, speeds)


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
