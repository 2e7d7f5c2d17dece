from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from sparkdl.comm.communicator import LocalCommunicator
from sparkdl.config import TrainConfig
from sparkdl.errors import ConfigError
from sparkdl.sync import resolve
from sparkdl.sync.asynchronous.async_sgd import AsyncSGD
from tests.gang import Gang
from tests.sync.apart import assert_equal_bits, bytes_by_pattern, make_net, train_and_resume
from tests.train.runs import Keeper, but, make_data, run, seeded, weights

SGD = TrainConfig(optimizer="sgd", learning_rate=0.05, batch_size=4, epochs=3, loss="mse")
MOMENTUM = but(SGD, optimizer_params={"momentum": 0.9, "weight_decay": 0.01})
ADAM = but(SGD, optimizer="adamw", learning_rate=0.01)
BULK = AsyncSGD(staleness_bound=0)


def train_on_rank(
    comm: Any, config: TrainConfig, rows: list[int], weighted: bool = False
) -> tuple[torch.Tensor, dict[str, Any], int, list[Any]]:
    net = make_net()
    outcome = run(net, config, make_data(rows), comm=comm, weighted=weighted)
    state = outcome.final.shared["optimizer"]
    return weights(net), state, outcome.bytes_sent, outcome.history


def assert_same(tree: Any, expected: Any) -> None:
    torch.testing.assert_close(tree, expected, rtol=0, atol=1e-12)


@pytest.mark.gang
@pytest.mark.parametrize("config", [SGD, MOMENTUM, ADAM], ids=["sgd", "momentum", "adamw"])
@pytest.mark.parametrize("rows", [[16, 16], [23, 9], [1, 11], [0, 9]])
def test_bound_zero_is_allreduce(gang: Gang, config: TrainConfig, rows: list[int]) -> None:
    bulk = gang.run(train_on_rank, but(config, sync_strategy=BULK), rows, True)
    expected = gang.run(train_on_rank, config, rows, True)
    for (mine, state, _, history), (theirs, their_state, _, their_history) in zip(
        bulk, expected, strict=True
    ):
        assert_same(mine, theirs)
        assert_same(state["state"], their_state["state"])
        assert_same([r["loss"] for r in history], [r["loss"] for r in their_history])


@pytest.mark.gang
@pytest.mark.parametrize("rows", [[16, 12, 5], [9, 0, 6]])
def test_bound_zero_is_allreduce_on_three_ranks(gang3: Gang, rows: list[int]) -> None:
    bulk = gang3.run(train_on_rank, but(ADAM, sync_strategy=BULK), rows)
    expected = gang3.run(train_on_rank, ADAM, rows)
    for (mine, *_), (theirs, *_) in zip(bulk, expected, strict=True):
        assert_same(mine, theirs)


def shapes() -> list[tuple[int, ...]]:
    return [tuple(p.shape) for p in make_net().parameters()]


ASYNC = [
    AsyncSGD(),
    AsyncSGD(staleness_bound=1),
    AsyncSGD(staleness_bound=3, pull_period=2),
    AsyncSGD(delay_compensation=0.04),
    AsyncSGD(delay_compensation=2.0, compensation_decay=0.95, pull_period=3),
]


@pytest.mark.gang
@pytest.mark.parametrize("strategy", ASYNC)
@pytest.mark.parametrize("rows", [[24, 24], [30, 7], [0, 9]])
def test_replicas_agree_in_the_end_and_have_learnt(
    gang: Gang, strategy: AsyncSGD, rows: list[int]
) -> None:
    assert not strategy.deterministic
    config = but(SGD, learning_rate=0.02, epochs=4, sync_strategy=strategy)
    first, second = gang.run(train_on_rank, config, rows)
    assert torch.equal(first[0], second[0])
    losses = [record["loss"] for record in first[3]]
    assert losses == [record["loss"] for record in second[3]]
    assert losses[-1] < losses[0]


@pytest.mark.gang
def test_three_ranks_agree_and_keep_adams_state(gang3: Gang) -> None:
    config = but(ADAM, sync_strategy=AsyncSGD(staleness_bound=2))
    first, second, third = gang3.run(train_on_rank, config, [17, 4, 9])
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[0], third[0])
    torch.testing.assert_close(first[1], second[1], rtol=0, atol=0)
    num_pushes = 3 * (5 + 4 + 5)  # of 5 steps an epoch, rank 1 has one without samples
    assert {entry["step"].item() for entry in first[1]["state"].values()} == {num_pushes}


@pytest.mark.gang
@pytest.mark.parametrize("strategy", ASYNC[:2])
def test_where_nothing_is_late_it_is_allreduce(gang: Gang, strategy: AsyncSGD) -> None:
    """One rank has all samples, so its gradients come one after the other."""
    for config in (MOMENTUM, ADAM):
        scheduled = but(config, scheduler=decay)
        alone = gang.run(train_on_rank, but(scheduled, sync_strategy=strategy), [0, 13])
        expected = gang.run(train_on_rank, scheduled, [0, 13])
        for (mine, state, *_), (theirs, their_state, *_) in zip(alone, expected, strict=True):
            assert_same(mine, theirs)
            assert_same(state["state"], their_state["state"])


def decay(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


@pytest.mark.gang
@pytest.mark.parametrize("strategy", [AsyncSGD(), AsyncSGD(staleness_bound=4, pull_period=3)])
def test_together_pushes_go_as_far_as_synchronous_steps(gang3: Gang, strategy: AsyncSGD) -> None:
    """With gradients that do not depend on the weights, lateness makes no difference."""
    config = but(SGD, loss=product, scheduler=decay)
    late = gang3.run(train_linear, but(config, sync_strategy=strategy), [24, 9, 13])
    for mine, theirs in zip(late, gang3.run(train_linear, config, [24, 9, 13]), strict=True):
        assert_same(mine, theirs)


def product(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return output.squeeze(1) * target


def train_linear(comm: Any, config: TrainConfig, rows: list[int]) -> torch.Tensor:
    net = seeded(lambda: torch.nn.Linear(4, 1).double())
    run(net, but(config, divergence_factor=None), make_data(rows), comm=comm)
    return weights(net)


@pytest.mark.gang
def test_bound_zero_takes_synchronized_batch_norm(gang: Gang) -> None:
    config = but(MOMENTUM, sync_batch_norm=True)
    bulk = gang.run(train_normed, but(config, sync_strategy=BULK), [16, 7])
    for mine, theirs in zip(bulk, gang.run(train_normed, config, [16, 7]), strict=True):
        assert_same(mine, theirs)


def train_normed(comm: Any, config: TrainConfig, rows: list[int]) -> torch.Tensor:
    net = make_net(norm=True)
    run(net, config, make_data(rows), comm=comm)
    return torch.cat([value.flatten() for value in net.state_dict().values()])


@pytest.mark.gang
def test_schedules_act_on_the_servers(gang: Gang) -> None:
    config = but(MOMENTUM, scheduler=decay)
    expected = gang.run(train_on_rank, config, [16, 9])
    bulk = gang.run(train_on_rank, but(config, sync_strategy=BULK), [16, 9])
    for (mine, *_), (theirs, *_) in zip(bulk, expected, strict=True):
        assert_same(mine, theirs)


@pytest.mark.gang
def test_bytes_are_those_of_the_formula(gang: Gang, gang3: Gang) -> None:
    config = but(SGD, sync_strategy=BULK)
    for ranks, rows in ((gang, [16, 15]), (gang3, [16, 15, 13])):
        sent = sum(one[2] for one in ranks.run(train_on_rank, config, rows))
        expected = bytes_by_pattern(BULK, shapes(), len(rows))
        assert sent == pytest.approx(3 * 4 * len(rows) * expected)
    strategy = AsyncSGD(pull_period=2)
    sent = sum(o[2] for o in gang.run(train_on_rank, but(config, sync_strategy=strategy), [16, 15]))
    expected = bytes_by_pattern(strategy, shapes(), 2)
    num_bytes = 8 * sum(torch.Size(shape).numel() for shape in shapes())
    assert sent == 3 * (4 * 2 * expected + num_bytes)  # and one pull at the end of each epoch


@pytest.mark.gang
@pytest.mark.parametrize("strategy", [BULK, AsyncSGD(delay_compensation=1, compensation_decay=0.9)])
def test_resumed_run_has_the_same_bits(gang: Gang, strategy: AsyncSGD) -> None:
    """With gradients of one rank only, so that even the asynchronous course is always the same."""
    config = but(ADAM, sync_strategy=strategy, scheduler=decay)
    rows = [22, 17] if strategy.deterministic else [0, 17]
    for step, whole, resumed in gang.run(train_and_resume, config, rows, 3):
        assert step == 3
        assert_equal_bits(whole, resumed)


@pytest.mark.gang
def test_the_number_of_ranks_may_change(gang: Gang, gang3: Gang) -> None:
    """What two ranks have come to is taken up by one, by three, and by all-reduce."""
    config = but(MOMENTUM, epochs=2, sync_strategy=BULK)
    point, _ = gang.run(keep_first_epoch, config)
    point = dataclasses.replace(point, rank_state=None)
    rows = [10, 9, 3]
    expected = gang3.run(go_on, but(config, sync_strategy=None), rows, point)
    for mine, theirs in zip(gang3.run(go_on, config, rows, point), expected, strict=True):
        assert_same(mine, theirs)
    alone = go_on(LocalCommunicator(), but(config, sync_strategy=AsyncSGD()), [13], point)
    assert_same(alone, go_on(LocalCommunicator(), but(config, sync_strategy=None), [13], point))


def keep_first_epoch(comm: Any, config: TrainConfig) -> Any:
    sink = Keeper(steps=(4,))
    run(make_net(), config, make_data([16, 13]), comm=comm, sink=sink)
    return sink.points[4]


def go_on(comm: Any, config: TrainConfig, rows: list[int], point: Any) -> torch.Tensor:
    net = make_net()
    run(net, config, make_data(rows), comm=comm, resume=point)
    return weights(net)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("strategy", [BULK, AsyncSGD(pull_period=2, delay_compensation=0.04)])
def test_alone_nothing_changes(strategy: AsyncSGD, precision: Any) -> None:
    plain, served = make_net(), make_net()
    config = but(MOMENTUM, gradient_clip_norm=0.5, precision=precision, scheduler=decay)
    run(plain, but(config, sync_strategy=None), make_data([13]), weighted=True)
    run(served, but(config, sync_strategy=strategy), make_data([13]), weighted=True)
    assert_same(weights(served), weights(plain))


def test_late_gradients_need_a_learning_rate() -> None:
    class Own(torch.optim.Optimizer):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, {"speed": 3})

    class Two(LocalCommunicator):
        world_size = 2

    with pytest.raises(ConfigError, match="or staleness_bound=0"):
        AsyncSGD().setup(make_net(), Own, Two())
    BULK.setup(make_net(), Own, Two()).close()


def test_the_name_is_known() -> None:
    assert resolve("async_sgd") == AsyncSGD()
    assert BULK.deterministic
    assert not BULK.trains_apart
    assert "at every step" in (BULK.why_not_rounds() or "")


@pytest.mark.parametrize(
    "options",
    [
        {"staleness_bound": -1},
        {"staleness_bound": True},
        {"pull_period": 0},
        {"pull_period": 3, "staleness_bound": 1},
        {"delay_compensation": -0.1},
        {"delay_compensation": float("nan")},
        {"delay_compensation": 0.1, "staleness_bound": 0},
        {"compensation_decay": 1.0, "delay_compensation": 0.1},
        {"compensation_decay": 0.9},
    ],
)
def test_wrong_options(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        AsyncSGD(**options)
