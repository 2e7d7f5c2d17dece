from __future__ import annotations

import os
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from sparkdl.comm.communicator import LocalCommunicator
from sparkdl.config import TrainConfig
from sparkdl.data.batches import Batches
from sparkdl.data.spool.mapped import MappedRows
from sparkdl.errors import CommunicationError, ConfigError
from sparkdl.sync.gradients.allreduce import AllReduce
from sparkdl.sync.gradients.backup_workers import (
    MAX_LAG,
    BackupWorkersSynchronizer,
    Readiness,
    is_quorum,
    report_delay,
)
from sparkdl.sync.strategy import Reduced
from tests.gang import Gang, started_gang
from tests.train.runs import Keeper, but, make_data, plan_for, run, seeded, weights

CONFIG = TrainConfig(
    optimizer="adam",
    learning_rate=0.01,
    batch_size=4,
    epochs=2,
    loss="mse",
    sync_strategy=AllReduce(num_backup_workers=1, bucket_bytes=64),
)


class Net(nn.Module):
    """Waits in the forward passes that it is told to wait in."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 5, dtype=torch.float64)
        self.last = nn.Linear(5, 1, dtype=torch.float64)
        self.num_calls = 0
        self.seconds: dict[int, float] = {}
        self.always = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            time.sleep(self.seconds.get(self.num_calls, self.always))
            self.num_calls += 1
        return self.last(torch.tanh(self.first(x)))


def make_net(always: float = 0.0, **seconds: float) -> Net:
    net = seeded(Net)
    assert isinstance(net, Net)
    net.always = always
    net.seconds = {int(name.removeprefix("call")): value for name, value in seconds.items()}
    return net


class Watched(BackupWorkersSynchronizer):
    """Writes down who was used in each step, and when it was over."""

    log: ClassVar[list[tuple[tuple[int, ...] | None, float]]] = []

    def reduce_gradients(self, sums: torch.Tensor, divisor: float) -> Reduced:
        reduced = super().reduce_gradients(sums, divisor)
        self.log.append((reduced.ranks, time.monotonic()))
        return reduced


class Watching(AllReduce):
    def setup(self, model: Any, make_optimizer: Any, comm: Any) -> Watched:
        Watched.log = []
        options = {"bucket_bytes": self.bucket_bytes, "num_backup_workers": self.num_backup_workers}
        return Watched(model, make_optimizer, comm, **options)


def train_on_rank(
    comm: Any, config: TrainConfig, rows: list[int], slow: dict[int, dict[str, float]]
) -> dict[str, Any]:
    net = make_net(**slow.get(comm.rank, {}))
    strategy = Watching(num_backup_workers=1, bucket_bytes=64)
    outcome = run(net, but(config, sync_strategy=strategy), make_data(rows), comm=comm)
    return {
        "weights": weights(net),
        "losses": [record["loss"] for record in outcome.history],
        "rows": outcome.rows,
        "calls": net.num_calls,
        "used": [ranks for ranks, _ in Watched.log],
        "times": [seconds for _, seconds in Watched.log],
    }


def reference(
    config: TrainConfig, rows: list[int], used: list[tuple[int, ...] | None]
) -> tuple[torch.Tensor, list[float], int]:
    """One process that is fed the united batches of the ranks that were used."""
    shards = make_data(rows)
    plan = plan_for(shards, config, world_size=len(rows))
    net = make_net()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    losses, num_rows, step = [], 0, 0
    for epoch in range(config.epochs):
        parts = [
            Batches([MappedRows(shard, plan)], plan, rank, seed=config.seed, epoch=epoch)
            for rank, shard in enumerate(shards)
        ]
        loss_sum, count = 0.0, 0
        for batches in zip(*parts, strict=True):
            ranks = used[step] or range(len(rows))
            x = torch.cat([batches[rank].inputs[0] for rank in ranks])
            y = torch.cat([batches[rank].target for rank in ranks])
            loss = nn.functional.mse_loss(net(x).squeeze(1), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            loss_sum, count, step = loss_sum + loss.item() * len(x), count + len(x), step + 1
        losses.append(loss_sum / count)
        num_rows += count
    return weights(net), losses, num_rows


CASES: dict[str, tuple[list[int], dict[int, dict[str, float]]]] = {
    "nobody waits": ([24, 24, 24], {}),
    "one is slow at times": ([24, 24, 24], {1: {"call2": 0.2, "call4": 0.2}}),
    "one is always slow": ([40, 40, 40], {2: {"always": 0.1}}),
    "all are slow": ([24, 24, 24], {rank: {"always": 0.02} for rank in range(3)}),
    "uneven": ([24, 9, 17], {0: {"always": 0.05}}),
    "one without rows": ([24, 0, 17], {2: {"always": 0.05}}),
    "one with rows": ([0, 0, 21], {}),
}


@pytest.mark.gang
@pytest.mark.parametrize("name", CASES)
def test_equals_one_process_with_the_ranks_that_were_used(gang3: Gang, name: str) -> None:
    rows, slow = CASES[name]
    results = gang3.run(train_on_rank, CONFIG, rows, slow)
    used = results[0]["used"]
    expected, losses, num_rows = reference(CONFIG, rows, used)
    for result in results:
        assert result["used"] == used
        assert torch.equal(result["weights"], results[0]["weights"])
        torch.testing.assert_close(result["weights"], expected, rtol=0, atol=1e-12)
        assert result["losses"] == pytest.approx(losses, abs=1e-12)
        assert result["rows"] == num_rows
    assert all(ranks is None or len(ranks) >= 2 for ranks in used)


@pytest.mark.slow
@pytest.mark.gang
def test_nobody_waits_for_the_slowest(gang3: Gang) -> None:
    config = but(CONFIG, epochs=1)
    results = gang3.run(train_on_rank, config, [120, 120, 120], {2: {"always": 0.3}})
    steps = len(results[0]["used"])
    assert steps == 30
    assert results[2]["calls"] <= steps / 2
    assert results[0]["times"][-1] - results[0]["times"][0] < steps * 0.3 / 2
    assert results[0]["rows"] < 360


@pytest.mark.gang
def test_a_late_rank_is_waited_for_when_it_is_far_behind(gang3: Gang) -> None:
    config = but(CONFIG, epochs=1)
    results = gang3.run(train_on_rank, config, [60, 60, 60], {2: {"call3": 1.5}})
    times = results[0]["times"]
    gaps = [after - before for before, after in pairwise(times)]
    resumed = gaps.index(max(gaps)) + 1
    assert max(gaps) > 0.7
    assert results[0]["used"][resumed - MAX_LAG : resumed] == [(0, 1)] * MAX_LAG
    assert results[2]["calls"] <= 15 - (MAX_LAG - 1)


@pytest.mark.gang
def test_threads_end_with_training(gang3: Gang) -> None:
    gang3.run(train_on_rank, CONFIG, [9, 9, 9], {})
    assert gang3.run(threads_left) == [[], [], []]


def threads_left(comm: Any) -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("sparkdl backup")]


@pytest.mark.gang
def test_checkpoints_are_equal_on_all_ranks_and_can_be_gone_on_from(gang3: Gang) -> None:
    slow = {1: {"always": 0.03}}
    results = gang3.run(train_and_resume, [40, 40, 40], slow)
    for saved, finished, rows, steps in results:
        assert torch.equal(saved, results[0][0])
        assert torch.equal(finished, results[0][1])
        assert (rows, steps) == (results[0][2], 20)


def train_and_resume(comm: Any, rows: list[int], slow: Any) -> tuple[Any, ...]:
    sink = Keeper(steps=(7,))
    run(make_net(**slow.get(comm.rank, {})), CONFIG, make_data(rows), comm=comm, sink=sink)
    point = sink.points[7]
    net = make_net(**slow.get(comm.rank, {}))
    outcome = run(net, CONFIG, make_data(rows), comm=comm, resume=point)
    saved = torch.cat([value.flatten() for value in point.shared["model"].values()])
    return saved, weights(net), outcome.rows, outcome.steps


class Failing(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.num_calls == 3:
            raise ZeroDivisionError("of the user's")
        return super().forward(x)


@pytest.mark.gang
def test_an_error_of_one_rank_ends_all(gang3: Gang) -> None:
    found = gang3.run(fail_on_rank, 1)
    assert found[1] == "ZeroDivisionError: of the user's"
    assert [found[0], found[2]] == ["CommunicationError: rank 1 has left the gang"] * 2


def fail_on_rank(comm: Any, rank: int) -> str:
    net = seeded(Failing) if comm.rank == rank else make_net()
    try:
        run(net, CONFIG, make_data([40, 40, 40]), comm=comm)
    except (ZeroDivisionError, CommunicationError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


@pytest.mark.gang
@pytest.mark.slow
def test_the_death_of_one_rank_ends_all(tmp_path: Path) -> None:
    with started_gang(tmp_path, 3) as gang:
        started = time.monotonic()
        with pytest.raises(EOFError):
            gang.run(die_on_rank, 1)
        for rank in (0, 2):
            assert gang.answer_of(rank) == "CommunicationError"
        assert time.monotonic() - started < 20


def die_on_rank(comm: Any, rank: int) -> str:
    class Dying(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.num_calls == 3:
                os._exit(1)
            return super().forward(x)

    net = seeded(Dying) if comm.rank == rank else make_net()
    try:
        run(net, CONFIG, make_data([400, 400, 400]), comm=comm)
    except CommunicationError as error:
        if comm.rank != rank:
            time.sleep(0.5)  # the test hears of the death first
        return type(error).__name__
    return "nothing"


@pytest.mark.gang
def test_gradients_can_be_sent_in_half_precision(gang3: Gang) -> None:
    strategy = AllReduce(num_backup_workers=1, compression="bf16")
    results = gang3.run(train_plainly, but(CONFIG, sync_strategy=strategy), [40, 40, 40])
    for held, losses in results:
        assert torch.equal(held, results[0][0])
        assert losses[-1] < losses[0]


def train_plainly(
    comm: Any, config: TrainConfig, rows: list[int]
) -> tuple[torch.Tensor, list[float]]:
    net = make_net(always=0.02 * comm.rank)
    outcome = run(net, config, make_data(rows), comm=comm)
    return weights(net), [record["loss"] for record in outcome.history]


def test_alone_it_is_all_reduce() -> None:
    plain, backed = make_net(), make_net()
    run(plain, but(CONFIG, sync_strategy=None), make_data([13]))
    run(backed, CONFIG, make_data([13]), comm=LocalCommunicator())
    assert torch.equal(weights(plain), weights(backed))


def test_when_a_step_is_concluded() -> None:
    no, yes, empty, full = Readiness.NOT_READY, Readiness.READY, Readiness.EMPTY, Readiness.FULL
    assert not is_quorum([yes, no, no], 2)
    assert is_quorum([yes, no, yes], 2)
    assert is_quorum([yes, empty, no], 2)
    assert not is_quorum([empty, empty, no], 2)
    assert is_quorum([empty, empty, empty], 2)
    assert not is_quorum([yes, yes, full], 2)


def test_when_a_rank_says_that_it_is_not_ready() -> None:
    assert report_delay(0.0, 0.0) == 0.001
    assert report_delay(0.02, 0.1) == pytest.approx(0.06)  # until 0.8 of a usual step
    assert report_delay(0.09, 0.1) == pytest.approx(0.009)  # from then on a tenth longer
    assert report_delay(20.0, 0.1) == report_delay(0.0, 20.0) == 0.1


@pytest.mark.parametrize(
    ("changes", "world_size", "message"),
    [
        ({}, 2, "at most 0, or numWorkers to at least 3"),
        ({"sync_strategy": AllReduce(num_backup_workers=3)}, 4, "at most 2"),
        ({"device": "cuda"}, 3, "CPU workers"),
        (
            {"sync_strategy": AllReduce(num_backup_workers=1, topology="shared")},
            3,
            "use topology 'ring'",
        ),
        ({"sync_batch_norm": True}, 3, "syncBatchNorm"),
        (
            {"sync_strategy": AllReduce(num_backup_workers=1, compression="onebit")},
            3,
            "for the next step",
        ),
    ],
)
def test_what_does_not_go_together(changes: dict[str, Any], world_size: int, message: str) -> None:
    config = but(CONFIG, **changes)
    with pytest.raises(ConfigError, match=message):
        config.sync_strategy.check(config, world_size)


def test_options() -> None:
    CONFIG.sync_strategy.check(CONFIG, 3)
    assert not CONFIG.sync_strategy.deterministic
    assert AllReduce().deterministic
    with pytest.raises(ConfigError, match="num_backup_workers"):
        AllReduce(num_backup_workers=-1)
