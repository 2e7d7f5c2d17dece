"""Hosts of unequal speed: what the user says of them, and what a gang measures."""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from sparkdl.config import TrainConfig
from sparkdl.data.plan import Column, Shard, TrainPlan, assign_near, assign_shards, make_plan
from sparkdl.errors import ConfigError
from sparkdl.spark.cluster.attempt import Attempt
from sparkdl.spark.fit import fit as module
from sparkdl.spark.fit import gang_fit
from sparkdl.spark.fit.gang_fit import Redeal
from sparkdl.spark.run.resume import run_key
from sparkdl.sync.gradients.allreduce import AllReduce


def plan(*rows: int, epochs: int = 1) -> TrainPlan:
    shards = [
        Shard(shard_id=number, num_rows=count, num_validation_rows=0, fingerprint="f")
        for number, count in enumerate(rows)
    ]
    columns = [Column(name="x", role="feature", dtype="float32", shape=(2,))]
    return make_plan(
        columns=columns, shards=shards, world_size=len(rows), batch_size=10, epochs=epochs
    )


@pytest.mark.parametrize(
    ("rows", "is_told"),
    [((600, 300), False), ((900, 100), True), ((10, 0), False)],  # one step; nobody waits for long
)
def test_skew_is_told(
    rows: tuple[int, ...], is_told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    slots: Any = SimpleNamespace(threads=1)
    with caplog.at_level(logging.WARNING, "sparkdl"):
        module._log_plan(plan(*rows), slots)
    assert ("stay together" in caplog.text) == is_told


def test_what_is_wished_for_changes_neither_the_result_nor_the_run() -> None:
    net, columns = nn.Linear(2, 1), plan(9, 9).columns
    config = TrainConfig(sync_strategy=AllReduce())
    wished = replace(config, sync_strategy=AllReduce(work_shares={"a": 2}))
    keys = {run_key(net, columns, one, "content") for one in (config, wished)}
    other = replace(config, sync_strategy=AllReduce(bucket_bytes=9))
    assert len(keys) == 1 and run_key(net, columns, other, "content") not in keys


@pytest.mark.parametrize(
    "wrong",
    [
        {}, (2, 1), {"a": 0}, {"a": -1.0}, {"a": math.nan}, {"a": math.inf}, {"a": 1e-308},
        {"a": 10**400}, {"a": True}, {3: 1}, {"a": "2"}, {"a": 1, "b": 0},
    ],
)  # fmt: skip
def test_wishes_are_checked(wrong: Any) -> None:
    with pytest.raises(ConfigError, match="work_shares must map patterns of host names to speeds"):
        AllReduce(work_shares=wrong)
    AllReduce(work_shares={"slowest": 1e-6, "fastest": 1e6})


# --- speeds that a gang has measured ------------------------------------------------------------


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(gang_fit.time, "monotonic", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def redeal_of(plan: TrainPlan, config: TrainConfig | None = None, **known: float) -> Redeal:
    settings = SimpleNamespace(elastic_wait_seconds=10.0)
    run: Any = SimpleNamespace(plan=plan, config=config or TrainConfig(), settings=settings)
    attempts: Any = SimpleNamespace(speeds=known)
    return Redeal(run, attempts)


def gang(*speeds: float | None, held: Sequence[Sequence[int]] = ((0, 1), (2, 3))) -> Attempt:
    """Of one rank on each of the hosts a, b ...; it took 5 s to step 10, and 90 s to step 100."""
    return Attempt(
        number=0, world_size=len(speeds), submitted=0.0, first_step=(10, 5.0), steps=(100, 95.0),
        saved=(100, 95.0), held=held, hosts=dict(enumerate("abcdef"[: len(speeds)])),
        speeds={rank: speed for rank, speed in enumerate(speeds) if speed is not None},
    )  # fmt: skip


FOUR = plan(100, 100, 100, 100, epochs=100)
"""An epoch has 10 steps."""


@pytest.mark.parametrize(
    ("speeds", "held", "is_worth"),
    [
        ((30.0, 10.0), ((0, 1), (2, 3)), True),  # 10 s an epoch in place of 20
        ((30.0, 10.0), ((0, 1, 3), (2,)), False),  # it cannot be better
        ((12.0, 10.0), ((0, 1), (2, 3)), False),  # hardly differ
        ((12.0, 10.0), ((0, 1, 3), (2,)), True),  # what the user has said was wrong
        ((15.0, 10.0), ((0, 1), (2, 3)), False),  # 20 s in any case, since shards are whole
        ((30.0, None), ((0, 1), (2, 3)), False),
        ((30000.0, 10000.0), ((0, 1), (2, 3)), False),  # 1 s in all
    ],
)
def test_shards_are_dealt_again_where_that_pays(
    speeds: tuple[float | None, ...], held: Any, is_worth: bool, clock: Clock
) -> None:
    redeal, attempt = redeal_of(FOUR), gang(*speeds, held=held)
    assert redeal(attempt) is None
    clock.now += 10
    found = redeal(attempt)
    assert (found is not None) == is_worth
    if speeds == (30.0, 10.0) and found is not None:  # 900 steps, 1 s less each, less 5 s
        assert found == (
            "its workers differ in speed: the gang starts again from the checkpoint of step 100, "
            "which saves about 895 s"
        )


def test_speeds_must_stay_as_they_are_for_a_while(clock: Clock) -> None:
    redeal = redeal_of(plan(*[100] * 8, epochs=100))
    held = assign_shards(8, 2)
    for speeds in ((30.0, 10.0), (70.0, 10.0), (30.0, 10.0), (31.0, 10.0)):
        assert redeal(gang(*speeds, held=held)) is None
        clock.now += 9
    clock.now += 1
    assert redeal(gang(30.0, 10.0, held=held)) is not None


def test_it_happens_once_for_the_same_hosts(clock: Clock) -> None:
    for known, is_worth in ({"a": 10.0, "b": 30.0}, False), ({"a": 10.0}, True):
        redeal = redeal_of(FOUR, **known)
        redeal(gang(30.0, 10.0))
        clock.now += 10
        assert (redeal(gang(30.0, 10.0)) is not None) == is_worth


@pytest.mark.parametrize(
    "changes", [{"hosts": {}}, {"hosts": {0: "a"}}, {"saved": None}, {"held": ((0,), (1,))}]
)
def test_it_does_not_happen(changes: Any, clock: Clock) -> None:
    """On GPUs, whose hosts are not told; without a checkpoint; with one shard each."""
    redeal = redeal_of(plan(100, 100, epochs=100) if "held" in changes else FOUR)
    for _ in range(2):
        assert redeal(replace(gang(30.0, 10.0), **changes)) is None
        clock.now += 10


def test_what_earlier_gangs_have_measured_counts_too(clock: Clock) -> None:
    redeal = redeal_of(FOUR, a=30.0)
    redeal(gang(None, 10.0))
    clock.now += 10
    assert redeal(gang(None, 10.0)) is not None
    redeal.end()
    assert redeal(gang(None, 10.0)) is None, "the next gang is watched as long"


def test_speeds_that_hardly_differ_are_as_good_as_equal(clock: Clock) -> None:
    redeal, held = redeal_of(plan(*[100] * 18, epochs=100)), assign_shards(18, 2)
    for _ in range(2):
        assert redeal(gang(12.4, 10.0, held=held)) is None
        clock.now += 10


def test_equal_bits_are_kept(clock: Clock) -> None:
    for elasticity, is_worth in ("rounding", False), ("bits", True):
        redeal = redeal_of(FOUR, TrainConfig(deterministic=True, elasticity=elasticity))
        redeal(gang(30.0, 10.0))
        clock.now += 10
        assert (redeal(gang(30.0, 10.0)) is not None) == is_worth


def test_steps_never_get_slower_where_part_of_their_time_is_fixed() -> None:
    """Speeds are of all of a rank's time, so that a shard less is thought to save too much."""
    rng, num_better = random.Random(3), 0
    for _ in range(300):
        ranks = rng.randint(2, 4)
        costs = [(rng.uniform(0, 30), rng.choice([1.0, 2.0, 5.0])) for _ in range(ranks)]
        held = assign_shards(rng.randint(ranks + 1, 4 * ranks), ranks)

        def seconds(held: Any, costs: Any = costs) -> list[float]:
            return [fixed + each * len(own) for (fixed, each), own in zip(costs, held, strict=True)]

        before = seconds(held)
        speeds = [len(own) / spent for own, spent in zip(held, before, strict=True)]
        rows = [1] * sum(map(len, held))
        better = assign_near(rows, [set(own) for own in held], speeds)
        thought = max(len(own) / speed for own, speed in zip(better, speeds, strict=True))
        if thought < max(before):
            assert max(seconds(better)) <= max(before) + 1e-9
            num_better += 1
    assert num_better > 50
