from __future__ import annotations

from typing import Any

import pytest
import torch

from sparkdl.config import TrainConfig
from sparkdl.errors import ConfigError
from sparkdl.sync.apart import ApartSynchronizer
from sparkdl.sync.averaging.mean import merge
from sparkdl.sync.averaging.parameter_averaging import ParameterAveraging
from sparkdl.sync.averaging.period import AutoPeriod, FixedPeriod, RoundReport
from tests.gang import Gang
from tests.sync import apart
from tests.sync.apart import make_net, train_on_rank
from tests.train.runs import but, make_data, run, weights

SGD = but(apart.SGD, epochs=3)
ADAM = but(SGD, optimizer="adam", learning_rate=0.01)
MOMENTUM = but(SGD, optimizer_params={"momentum": 0.9})


@pytest.mark.gang
@pytest.mark.parametrize("rows", [[16, 16], [23, 9], [1, 11], [0, 9]])
def test_period_one_with_plain_sgd_is_allreduce(gang: Gang, rows: list[int]) -> None:
    averaged = but(SGD, sync_strategy=ParameterAveraging(averaging_period=1))
    for (mine, _, _), (expected, _, _) in zip(
        gang.run(train_on_rank, averaged, rows), gang.run(train_on_rank, SGD, rows), strict=True
    ):
        torch.testing.assert_close(mine, expected, rtol=0, atol=1e-12)


@pytest.mark.gang
@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("rows", [[16, 16, 13], [9, 0, 6]])
def test_a_round_is_the_merge_of_replicas(gang3: Gang, rows: list[int], average: bool) -> None:
    strategy = ParameterAveraging(averaging_period=100, average_optimizer_state=average)
    config = but(ADAM, epochs=1, sync_strategy=strategy)
    found = gang3.run(train_apart, config, rows)
    expected = merge([state for state, _ in found], [weight for _, weight in found])
    for _, state, _ in gang3.run(train_on_rank, config, rows, True):
        for name, value in expected["model"].items():
            torch.testing.assert_close(state["model"][name], value, rtol=0, atol=1e-12)
        if not average:
            assert state["optimizer"]["state"] == {}
            continue
        for place, values in expected["optimizer"]["state"].items():
            for key, value in values.items():
                mine = state["optimizer"]["state"][place][key]
                torch.testing.assert_close(mine, value, rtol=0, atol=1e-12)


def train_apart(comm: Any, config: TrainConfig, rows: list[int]) -> tuple[dict[str, Any], float]:
    """The same round without an end: what this rank's replica has come to."""
    net = make_net(norm=True)
    made: list[ApartSynchronizer] = []
    state: dict[str, Any] = {}

    class Endless(ApartSynchronizer):
        buffers_agree = True

        def close_round(self) -> None:
            state["weight"] = self.round_sums[1].item()

    class Apart(ParameterAveraging):
        def setup(self, model: Any, make_optimizer: Any, comm: Any) -> Any:
            made.append(Endless(model, make_optimizer, comm))
            return made[0]

    run(net, but(config, sync_strategy=Apart()), make_data(rows), comm=comm)
    return {
        "model": net.state_dict(),
        "optimizer": made[0].optimizer.state_dict(),
    }, state["weight"]


@pytest.mark.gang
def test_replicas_agree_after_every_round_only(gang: Gang) -> None:
    config = but(MOMENTUM, sync_strategy=ParameterAveraging(averaging_period=3))
    first, second = gang.run(watch_rounds, config, [24, 20])
    agree = [torch.equal(mine, theirs) for mine, theirs in zip(first, second, strict=True)]
    assert agree == [step % 3 == 2 or step == 5 for step in range(6)] * 3


def watch_rounds(comm: Any, config: TrainConfig, rows: list[int]) -> list[torch.Tensor]:
    from sparkdl.sync.averaging.averaging import AveragingSynchronizer

    seen: list[torch.Tensor] = []

    class Watched(AveragingSynchronizer):
        def after_step(self, step: int) -> bool:
            closed = super().after_step(step)
            if step % 6 == 5:
                self.close_round()
            seen.append(weights(self.model))
            return closed

    class Watching(ParameterAveraging):
        def setup(self, model: Any, make_optimizer: Any, comm: Any) -> Any:
            return Watched(model, make_optimizer, comm, strategy=self)

    strategy = Watching(averaging_period=config.sync_strategy.averaging_period)
    run(make_net(), but(config, sync_strategy=strategy), make_data(rows), comm=comm)
    return seen


def test_alone_nothing_changes() -> None:
    plain, averaged = make_net(), make_net()
    run(plain, but(ADAM, sync_strategy=None), make_data([13]))
    run(averaged, but(ADAM, sync_strategy=ParameterAveraging()), make_data([13]))
    assert torch.equal(weights(plain), weights(averaged))


def test_auto_period_finds_the_share() -> None:
    period = AutoPeriod(share=0.1)
    for _ in range(30):
        steps = period.steps(0)
        period.observe(
            RoundReport(
                steps=steps,
                step_seconds=0.01 * steps,
                merge_seconds=0.5,
                loss=1.0,
                learning_rate=0.1,
            )
        )
    assert period.steps(0) == pytest.approx(0.5 * 9 / 0.01, rel=0.05)
    other = AutoPeriod(share=0.1)
    other.load_state_dict(period.state_dict())
    assert other.steps(0) == period.steps(0)
    assert FixedPeriod(3).steps(17) == 3


@pytest.mark.gang
def test_auto_period_runs_and_is_the_same_on_all_ranks(gang: Gang) -> None:
    strategy = ParameterAveraging(averaging_period="auto")
    assert not strategy.deterministic
    first, second = gang.run(train_on_rank, but(SGD, sync_strategy=strategy), [40, 40])
    assert torch.equal(first[0], second[0])


@pytest.mark.parametrize(
    "options",
    [
        {"averaging_period": 0},
        {"averaging_period": "often"},
        {"averaging_period": True},
        {"weighting": "rows"},
        {"target_share": 1.0},
    ],
)
def test_wrong_options(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        ParameterAveraging(**options)
