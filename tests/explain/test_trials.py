"""What one worker tries before a fit, on rows in memory, and what is chosen by it."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from sparkdl.config import TrainConfig
from sparkdl.explain import trials
from sparkdl.explain.measure_worker import StepTimer, for_measuring
from sparkdl.explain.trials import (
    NUM_RATES,
    BatchSizes,
    BatchTrial,
    TriedBatch,
    batch_sizes,
    choose_rate,
    rate_at,
)
from sparkdl.train.optimizers.warmup import warmup
from tests.explain.test_measure_worker import Kept
from tests.train.runs import NUM_FEATURES, plan_for

CPU = torch.device("cpu")


def steps(module: nn.Module | None = None, **changes: Any) -> StepTimer:
    source = Kept([512])
    config = TrainConfig(batch_size=16, learning_rate=1e-3, **{"optimizer": "adam", **changes})
    plan = plan_for(source.data, config)
    if module is None:
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(NUM_FEATURES, 16), nn.ReLU(), nn.Linear(16, 1))
    return StepTimer(module, for_measuring(config), plan, plan.shards_of(0), source, CPU, 0.01)


def trained(module: nn.Module, rate: float, **changes: Any) -> float:
    """The loss after some epochs at a rate."""
    from tests.train.runs import run

    config = TrainConfig(
        batch_size=16, learning_rate=rate, epochs=4, **{"optimizer": "adam", **changes}
    )
    return run(copy.deepcopy(module), config, Kept([512]).data).history[-1]["loss"]


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_the_rate_that_is_found_trains_well(optimizer: str) -> None:
    timer = steps(optimizer=optimizer)
    rate = choose_rate(trials.try_rates(timer, 16)).value
    losses = {one: trained(timer.module, one, optimizer=optimizer) for one in (1e-4, rate)}
    assert losses[rate] < 0.7 * losses[1e-4]


def test_equal_trials_give_equal_losses_and_the_weights_stay() -> None:
    timer = steps()
    before = copy.deepcopy(timer.module.state_dict())
    first, second = (trials.try_rates(timer, 16) for _ in range(2))
    assert first == second
    assert 20 < len(first) <= NUM_RATES
    torch.testing.assert_close(timer.module.state_dict(), before, rtol=0, atol=0)
    other = replace(timer, config=replace(timer.config, seed=1))
    assert trials.try_rates(other, 16) != first


def test_a_schedule_is_left_out_and_groups_keep_their_rates() -> None:
    plain = trials.try_rates(steps(), 16)
    assert trials.try_rates(steps(scheduler=warmup(steps=10)), 16) == plain
    grouped = trials.try_rates(steps(parameter_groups={"2.*": {"lr": 0.0}}), 16)
    assert grouped[0] == plain[0]
    assert grouped != plain
    everything = {"0.*": {"lr": 0.0}, "2.*": {"lr": 0.0}}
    still = trials.try_rates(steps(parameter_groups=everything), 16)
    assert len(still) == NUM_RATES
    assert choose_rate(still).value is None


def test_a_loss_that_runs_away_or_is_not_finite_ends_it() -> None:
    wild = trials.try_rates(steps(optimizer="sgd"), 16)
    assert len(wild) < NUM_RATES
    assert all(abs(loss) < float("inf") for loss in wild)

    class Bad(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(NUM_FEATURES, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x) * torch.inf

    assert trials.try_rates(steps(Bad()), 16) == []


def test_batches_of_every_size_are_trained_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "free_bytes", lambda _: 1 << 40)
    sizes = BatchSizes(first=8, least=64, most=64)
    trial = trials.try_batches(steps(), sizes, workers_per_machine=2)
    assert [one.rows for one in trial.tried] == [8, 16, 32, 64]
    assert all(one.rows_per_second > 0 for one in trial.tried)
    assert trial.limit_bytes == 1 << 38  # half of a half
    assert trial.best.rows == 64


class Hungry(nn.Module):
    """Keeps 4 MiB for each row of a batch until the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(NUM_FEATURES, 1 << 20)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).tanh().sum(1, keepdim=True)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux tells the peak")
def test_memory_is_measured_and_never_taken_beyond_the_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(trials, "free_bytes", lambda _: 800 << 20)
    sizes = BatchSizes(first=2, least=64, most=64)
    trial = trials.try_batches(steps(Hungry(), optimizer="sgd"), sizes, workers_per_machine=1)
    assert 2 <= trial.best.rows <= 32
    assert trial.tried[-1].num_bytes > trial.tried[-1].rows * (4 << 20)
    assert all(one.num_bytes < 1.3 * trial.limit_bytes for one in trial.tried)
    assert "would take about" in trial.choice().reason


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux tells the peak")
def test_memory_that_was_free_in_the_process_counts_as_taken() -> None:
    blocks = [torch.zeros(16 << 10) for _ in range(4000)]  # 64 KiB each, so of the heap
    kept = blocks[::1000]
    del blocks
    sizes = BatchSizes(first=2, least=2, most=2)
    timer = steps(Hungry(), optimizer="sgd")
    [one] = trials.try_batches(timer, sizes, workers_per_machine=1).tried
    num_bytes = sum(parameter.nbytes for parameter in timer.module.parameters())
    assert one.num_bytes > 2 * num_bytes + one.rows * (4 << 20)  # a copy and its gradients
    assert len(kept) == 4


def test_a_gpu_that_is_full_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    real = StepTimer.measure

    def full(self: StepTimer, batch_size: int, expected: float) -> dict[str, Any]:
        if batch_size > 16:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB.")
        return real(self, batch_size, expected)

    monkeypatch.setattr(StepTimer, "measure", full)
    sizes = BatchSizes(first=8, least=32, most=64)
    trial = trials.try_batches(steps(), sizes, workers_per_machine=1)
    assert trial.best.rows == 16
    assert trial.refused == "CUDA out of memory"
    with pytest.raises(torch.OutOfMemoryError):  # not even the first
        trials.try_batches(steps(), sizes._replace(first=32), workers_per_machine=1)


@pytest.mark.parametrize(
    ("rows", "num_parts", "first", "least", "most"),
    [
        (1, 1, 1, 1, 1),
        (5, 1, 4, 4, 4),
        (60, 1, 8, 32, 32),
        (10_000, 1, 8, 32, 256),
        (10_000_000, 1, 8, 32, 4096),
        (10_000, 24, 32, 32, 256),
        (5, 64, 64, 64, 64),
    ],
)
def test_sizes_leave_an_epoch_its_steps(
    rows: int, num_parts: int, first: int, least: int, most: int
) -> None:
    assert batch_sizes(rows, num_parts) == BatchSizes(first=first, least=least, most=most)


def tried(rates: list[float], row_bytes: int = 1000, limit: int = 1 << 30) -> BatchTrial:
    """A trial that goes on as long as it wants to; the rows per second of each size."""
    trial = BatchTrial(sizes=BatchSizes(first=8, least=32, most=512), limit_bytes=limit)
    for rate in rates:
        rows = trial.next_rows
        if rows is None:
            break
        size = TriedBatch(rows=rows, rows_per_second=rate, num_bytes=rows * row_bytes)
        trial.tried.append(size)
    return trial


def test_batches_grow_while_a_worker_becomes_faster() -> None:
    trial = tried([100.0, 101.0, 102.0, 180.0, 300.0, 320.0, 1000.0])
    assert [one.rows for one in trial.tried] == [8, 16, 32, 64, 128, 256]  # 8 and 16 do not count
    assert trial.best.rows == 128
    choice = trial.choice()
    assert (choice.param, choice.value) == ("batchSize", 128)
    assert "300 rows/s with 128 rows (180 with 64, 320 with 256)" in choice.reason
    assert "256 is faster by less than 10%" in choice.reason


def test_batches_end_where_an_epoch_would_have_few_steps() -> None:
    trial = tried([2.0**i for i in range(10)])
    assert trial.best.rows == 512
    assert "with 1024 an epoch would have fewer than 32 steps" in trial.choice().reason


def test_the_next_size_is_not_begun_if_it_would_take_more_than_it_may() -> None:
    trial = tried([2.0**i for i in range(10)], limit=100_000)
    assert trial.best.rows == 64
    assert trial.next_rows is None
    assert "128 would take about 125 KiB" in trial.choice().reason
    first = tried([1.0, 2.0], row_bytes=1 << 20, limit=8 << 20)
    assert [one.rows for one in first.tried] == [8]
    assert first.best.rows == 8  # smaller than is chosen for speed


def test_two_sizes_that_seem_to_take_the_same_hide_no_growth() -> None:
    trial = BatchTrial(sizes=BatchSizes(first=2, least=64, most=64), limit_bytes=400 << 20)
    for rows, mebibytes in [(2, 160), (4, 236), (8, 267), (16, 303), (32, 335)]:
        size = TriedBatch(rows=rows, rows_per_second=float(rows), num_bytes=mebibytes << 20)
        trial.tried.append(size)
    assert trial.next_rows is None
    assert "64 would take about 521.7 MiB" in trial.choice().reason


def test_what_has_taken_too_much_is_not_chosen() -> None:
    trial = tried([1.0, 2.0])
    trial.tried.append(TriedBatch(rows=32, rows_per_second=4.0, num_bytes=2 << 30))
    assert trial.best.rows == 16
    refused = replace(tried([1.0, 2.0, 4.0, 8.0]), refused="CUDA out of memory")
    assert refused.next_rows is None
    assert (
        refused.best.rows,
        "128 did not fit: CUDA out of memory" in refused.choice().reason,
    ) == (
        64,
        True,
    )


def curve(lowest: float, noise: float) -> list[float]:
    """Losses that fall to the step of a rate, then rise."""
    generator = np.random.default_rng(0)
    place = min(range(NUM_RATES), key=lambda i: abs(math.log(rate_at(i) / lowest)))
    falls = 1 / (1 + np.exp((np.arange(NUM_RATES) - place + 12) / 3))
    rises = np.maximum(0, np.arange(NUM_RATES) - place) * 0.05
    return list(0.5 + falls + rises + noise * generator.standard_normal(NUM_RATES))


@pytest.mark.parametrize("lowest", [1e-3, 0.03, 0.5])
def test_the_rate_is_a_tenth_of_that_of_the_lowest_loss(lowest: float) -> None:
    choice = choose_rate(curve(lowest, noise=0.05))
    assert choice.param == "learningRate"
    assert lowest / 25 < choice.value < lowest / 4
    assert choice.value == float(f"{choice.value:.2g}")
    assert "the loss fell from 1.5" in choice.reason


def test_where_nothing_is_learnt_the_default_is_left() -> None:
    flat = list(1 + 0.1 * np.random.default_rng(1).standard_normal(NUM_RATES))
    for losses in (flat, [1.0] * 20, [1.0], []):
        choice = choose_rate(losses)
        assert choice.value is None
        assert "no rate from 1e-07 to 10 lowered the loss" in choice.reason


def test_rates_grow_exponentially() -> None:
    rates = [rate_at(number) for number in range(NUM_RATES)]
    assert (rates[0], rates[-1]) == (1e-7, pytest.approx(10.0))
    assert np.ptp(np.diff(np.log(rates))) < 1e-9
