"""Manual optimization: the training step steps several optimizers; two ranks do as one does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from sparkdl.comm.communicator import LocalCommunicator
from sparkdl.config import TrainConfig
from sparkdl.errors import ConfigError
from sparkdl.sync.averaging.parameter_averaging import ParameterAveraging
from sparkdl.sync.gradients.allreduce import AllReduce
from sparkdl.train.objective.manual import ManualBackward, SeveralOptimizers, check_manual
from tests.gang import Gang
from tests.train.runs import NUM_FEATURES, Keeper, but, make_data, run, seeded, weights

CONFIG = TrainConfig(epochs=2, batch_size=4, optimizer="auto", seed=4)


class Two(nn.Module):
    """Two layers, each with a loss, an optimizer and a schedule of its own."""

    automatic_optimization = False
    log: Any
    optimizers: Any
    lr_schedulers: Any
    manual_backward: Any
    clip_gradients: Any

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(NUM_FEATURES, 3, dtype=torch.float64)
        self.second = nn.Linear(3, 1, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x)).squeeze(1)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        one, other = self.optimizers()
        loss = self.first(x).square().mean()
        self.manual_backward(loss)
        self.clip_gradients(one, gradient_clip_val=0.3, gradient_clip_algorithm="norm")
        one.step()
        one.zero_grad()
        own = (self(x) - y).square().mean()
        self.manual_backward(own)
        other.step()
        other.zero_grad()
        one.zero_grad()
        self.log_dict({"first": loss, "second": own})
        self.lr_schedulers()[1].step()

    def validation_step(self, batch: Any) -> None:
        self.log("val_loss", (self(batch[0]) - batch[1]).abs().mean())

    def configure_optimizers(self) -> Any:
        one = torch.optim.SGD(self.first.parameters(), lr=0.05, momentum=0.9)
        other = torch.optim.Adam(self.second.parameters(), lr=0.02)
        kind = torch.optim.lr_scheduler.ExponentialLR
        return [one, other], [kind(one, 0.9), kind(other, 0.9)]


def by_hand(batches: list[Any], make: Any = Two) -> torch.Tensor:
    net: Any = seeded(make)
    optimizers, schedules = net.configure_optimizers()
    net.optimizers, net.lr_schedulers = lambda: optimizers, lambda: schedules
    net.manual_backward, net.log_dict = lambda loss: loss.backward(), lambda values: None
    net.clip_gradients = lambda optimizer, **options: nn.utils.clip_grad_norm_(
        optimizer.param_groups[0]["params"], options["gradient_clip_val"]
    )
    for number, batch in enumerate(batches):
        net.training_step(batch, number)
    return weights(net)


class Noted(Two):
    def __init__(self) -> None:
        super().__init__()
        self.batches: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.batches.append(batch)
        super().training_step(batch, batch_idx)


def test_it_trains_as_a_loop_by_hand() -> None:
    net: Any = seeded(Noted)
    outcome = run(net, CONFIG, make_data([18]), validation=make_data([7]))
    assert torch.equal(weights(net), by_hand(net.batches))
    for record in outcome.history:
        assert record["loss"] == pytest.approx(record["first"] + record["second"])
        assert 0 < record["val_loss"] < 10
        assert record["learning_rate"] == 0.05
    assert outcome.history[1]["first"] < outcome.history[0]["first"]


@pytest.mark.parametrize("step", [1, 4, 5, 8])
def test_it_resumes_bit_for_bit(step: int) -> None:
    sink = Keeper(steps=tuple(range(1, 100)))
    whole, resumed = seeded(Two), seeded(Two, seed=99)
    run(whole, CONFIG, make_data([18]), sink=sink)
    run(resumed, CONFIG, make_data([18]), resume=sink.points[step])
    assert torch.equal(weights(whole), weights(resumed))


def in_gang(comm: Any, strategy: Any) -> Any:
    net = seeded(Two)
    config = but(CONFIG, sync_strategy=strategy, batch_size=9)
    outcome = run(net, config, make_data([9, 5]), comm=comm)
    return weights(net), [record["second"] for record in outcome.history]


class WithTable(Two):
    """Its first optimizer steps a table, whose gradients are sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Table()

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for _ in range(2):  # gradients of several backward passes add up
            self.manual_backward((self(batch[0]) - batch[1]).square().mean())
        for optimizer in self.optimizers():
            optimizer.step()
            optimizer.zero_grad()


class Table(nn.Embedding):
    def __init__(self) -> None:
        super().__init__(40, 3, sparse=True, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward((x * 1000).long().abs() % 40).sum(1)


def with_table(comm: Any) -> torch.Tensor:
    net = seeded(WithTable)
    run(net, but(CONFIG, batch_size=9), make_data([9, 5]), comm=comm)
    return weights(net)


@pytest.mark.slow
def test_sparse_gradients_of_two_ranks_are_those_of_one(gang: Gang) -> None:
    united = make_data([9, 5])
    whole = [torch.cat([s.columns[key] for s in united]) for key in ("feature x", "label y")]
    expected = by_hand([tuple(whole)] * 2, WithTable)
    for found in gang.run(with_table):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


class Careless(Two):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(self.first(batch[0]).mean())
        one, _ = self.optimizers()
        one.zero_grad()
        self(batch[0]).mean().backward()
        one.step()


def careless(comm: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        run(seeded(Careless), CONFIG, make_data([9, 9]), comm=comm)
    return str(caught.value)


class Unmoved(LocalCommunicator):
    """The communicator of two ranks, one of which adds nothing."""

    world_size = 2

    def all_reduce(self, tensor: torch.Tensor) -> None:
        pass


def test_a_gradient_in_the_memory_of_a_summed_one_is_refused() -> None:
    net = nn.Linear(3, 1)
    step = torch.optim.SGD(net.parameters(), lr=0.1)
    manual = ManualBackward(net, lambda name, optimizer: None)
    manual.join(SeveralOptimizers([step]), Unmoved())
    manual.begin(1, 2)
    manual(net(torch.ones(3)).sum())
    step.step()
    summed = id(net.bias.grad)
    step.zero_grad()
    others: list[torch.Tensor] = []  # kept, so that each lies elsewhere
    while id(net.bias.grad) != summed and len(others) < 100_000:
        others.append(torch.ones(1))
        net.bias.grad = others[-1]
    assert id(net.bias.grad) == summed
    with pytest.raises(ConfigError, match="not summed over the ranks"):
        step.step()


@pytest.mark.slow
def test_two_ranks_train_as_one(gang: Gang) -> None:
    first, second = gang.run(in_gang, None)
    assert torch.equal(first[0], second[0])
    assert first[1] == second[1]
    united = make_data([9, 5])
    whole = {key: torch.cat([shard.columns[key] for shard in united]) for key in united[0].columns}
    batch = whole["feature x"], whole["label y"]
    torch.testing.assert_close(first[0], by_hand([batch] * 2), rtol=1e-10, atol=1e-12)
    apart, other = gang.run(in_gang, ParameterAveraging(averaging_period=1))
    assert torch.equal(apart[0], other[0])
    assert not torch.equal(apart[0], first[0])
    assert all("self.manual_backward(loss) in place" in text for text in gang.run(careless))


@pytest.mark.parametrize(
    "changes",
    [
        {"gradient_clip_norm": 1.0},
        {"gradient_accumulation_steps": 2},
        {"precision": "fp16"},
        {"optimizer": "adam"},
    ],
)
def test_what_the_training_step_does_itself_is_refused(changes: dict[str, Any]) -> None:
    check_manual(CONFIG, AllReduce(), "Two")
    with pytest.raises(ConfigError, match="leave out"):
        check_manual(but(CONFIG, **changes), AllReduce(), "Two")


@pytest.mark.parametrize(
    "strategy", [AllReduce(double_buffering=True), ParameterAveraging(compression="top_k")]
)
def test_strategies_that_sum_otherwise_are_refused(strategy: Any) -> None:
    with pytest.raises(ConfigError, match="goes together with AllReduce"):
        check_manual(CONFIG, strategy, "Two")


def test_what_is_missing_is_named() -> None:
    class Idle(Two):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            pass

    with pytest.raises(ConfigError, match=r"must call self.manual_backward"):
        run(seeded(Idle), CONFIG, make_data([18]))
    net = nn.Linear(2, 2)
    with pytest.raises(ConfigError, match="belongs to two"):
        SeveralOptimizers([torch.optim.SGD(net.parameters(), lr=1) for _ in range(2)])
