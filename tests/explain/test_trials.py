"""What one worker tries before a fit, on rows in memory."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from sparkdl.config import TrainConfig
from sparkdl.explain import trials
from sparkdl.explain.choose import NUM_RATES, BatchSizes, choose_rate
from sparkdl.explain.measure_worker import StepTimer, for_measuring
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
        trials.try_batches(steps(), replace(sizes, first=32), workers_per_machine=1)
