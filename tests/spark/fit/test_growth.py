"""When a gang starts again with more workers: numbers in, a reason or none out."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from sparkdl.errors import ClusterError
from sparkdl.spark.cluster import cluster_info
from sparkdl.spark.cluster import slots as slots_module
from sparkdl.spark.cluster.attempt import Attempt
from sparkdl.spark.cluster.slots import wait_for_workers
from sparkdl.spark.fit import gang_fit
from sparkdl.spark.session.settings import Settings


def run_of(total_steps: int) -> Any:
    return SimpleNamespace(plan=SimpleNamespace(first_step=0, total_steps=total_steps))


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


def test_a_gang_takes_what_is_there_after_a_short_wait(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    there = [3]
    for module in (slots_module, cluster_info):
        monkeypatch.setattr(module, "num_slots", lambda *_: there[0])
        monkeypatch.setattr(module, "raise_if_ended", lambda _: None)
        monkeypatch.setattr(module, "is_connect", lambda _: False)
    settings = Settings(elastic_wait_seconds=0.2, queue_timeout_seconds=0.5)
    spark: Any = None
    began = time.monotonic()
    assert wait_for_workers(spark, 3, 1, None, settings, 1) == 3
    assert time.monotonic() - began < 0.1
    assert wait_for_workers(spark, 4, 2, None, settings, 1) == 3
    assert time.monotonic() - began >= 0.2
    assert "the gang has 3 of 4 workers (at least 2)" in caplog.text
    there[0] = 9
    assert wait_for_workers(spark, 4, 2, None, settings, 1) == 4
    there[0] = 1
    told = "only 1 of the 2 slots that minWorkers=2 needs came up within 0.5 s of a loss; lower"
    with pytest.raises(ClusterError, match=told):
        wait_for_workers(spark, 4, 2, None, settings, 1)
