"""What losses keep from call to call is as in a plain loop, after restarts and in rounds too."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from sparkdl.data.batches import Batches
from sparkdl.data.plan import RoundPart
from sparkdl.data.spool.mapped import MappedRows
from sparkdl.serialization.travel.attributes import Attributes
from sparkdl.storage.checkpoint_format import decode, encode
from sparkdl.storage.tensor_tree import snapshot
from sparkdl.sync.module_tensors import tensors_of
from sparkdl.train.callbacks import Callback, CallbackState, NullObserver
from sparkdl.train.round_replica import RoundReplica
from tests.train.optimizers.test_stepping import config_of, make_net
from tests.train.runs import Keeper, but, make_data, plan_for, run, weights


class Annealed(nn.Module):
    """Counts its calls in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.seen = 0, dict[str, list[int]]()

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.seen.setdefault("calls", []).append(self.calls)
        share = min(1.0, len(self.seen["calls"]) / 6)
        return share * (output.squeeze(-1) - target).square()


class Scaled(nn.Module):
    """Follows the mean of its losses in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Module()
        self.inner.register_buffer("mean", torch.ones((), dtype=torch.float64))

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        losses = (output.squeeze(-1) - target).square()
        self.inner.mean.mul_(0.5).add_(losses.detach().mean(), alpha=0.5)
        return losses / self.inner.mean


class Counting:
    """No module: an object that is called."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return (output.squeeze(-1) - target).square() * (1 + self.calls % 3)


class Stepping(Counting):
    """The same as a training step."""

    def __call__(self, module: Any, x: Any, target: Any) -> torch.Tensor:  # type: ignore[override]
        return super().__call__(module(x), target)


KINDS: list[Any] = [Annealed, Scaled, Counting, Stepping]


def config(kind: Any) -> Any:
    what = "training_step" if kind is Stepping else "loss"
    return but(config_of("sgd", learning_rate=0.05), **{what: kind()})


def plain_loop(kind: Any) -> torch.Tensor:
    net, (shard,), loss = make_net(), make_data([23]), kind()
    plan, optimizer = plan_for([shard], config(kind)), torch.optim.SGD(net.parameters(), lr=0.05)
    for epoch in range(2):
        for batch in Batches([MappedRows(shard, plan)], plan, 0, seed=4, epoch=epoch):
            optimizer.zero_grad()
            (x,), y = batch.inputs, batch.target
            (loss(net, x, y) if kind is Stepping else loss(net(x), y)).mean().backward()
            optimizer.step()
    return weights(net)


@pytest.mark.parametrize("kind", KINDS)
def test_alone_and_after_a_restart(kind: Any) -> None:
    whole, resumed, sink = make_net(), make_net(), Keeper(steps=(4,))
    run(whole, config(kind), make_data([23]), sink=sink)
    (point,) = sink.points.values()
    for name in ("shared", "rank_state"):
        tree = decode(b"".join(encode(snapshot(getattr(point, name)))), name)
        object.__setattr__(point, name, tree)
    run(resumed, config(kind), make_data([23]), resume=point)
    for found in (whole, resumed):
        torch.testing.assert_close(weights(found), plain_loop(kind), rtol=0, atol=1e-10)


class Weighted(nn.Module):
    """A loss with a weight that a callback lowers."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = 1.0

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return self.factor * (output.squeeze(-1) - target).square()


class OfTorch(nn.MSELoss):
    """The same with a reduction, which the callback sees as it was given."""

    factor = 1.0

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return self.factor * super().forward(output, target)


class Lowers(Callback):
    def __init__(self, loss: Any) -> None:
        self.loss = loss

    def on_epoch_end(self, state: CallbackState, record: Any) -> None:
        self.loss.factor /= 2
        assert getattr(self.loss, "reduction", "mean") == "mean"


@pytest.mark.parametrize("kind", [Weighted, OfTorch])
def test_a_callback_that_holds_the_loss_changes_it(kind: Any) -> None:
    net, (shard,), loss = make_net(), make_data([23]), kind()
    asked = but(config_of("sgd", learning_rate=0.05), loss=loss, callbacks=(Lowers(loss),))
    plan, optimizer = plan_for([shard], asked), torch.optim.SGD(net.parameters(), lr=0.05)
    for epoch in range(2):
        for batch in Batches([MappedRows(shard, plan)], plan, 0, seed=4, epoch=epoch):
            optimizer.zero_grad()
            (
                0.5**epoch * (net(batch.inputs[0]).squeeze(-1) - batch.target).square()
            ).mean().backward()
            optimizer.step()
    found = make_net()
    run(found, asked, make_data([23]))
    torch.testing.assert_close(weights(found), weights(net), rtol=0, atol=1e-10)
    assert loss.factor == 0.25


class Noise:
    """An augmentation that draws from a generator of its own."""

    def __init__(self) -> None:
        self.generator = np.random.default_rng(3)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.from_numpy(self.generator.normal(size=tuple(x.shape)))


def test_an_augmentation_goes_on_drawing_where_it_was() -> None:
    whole, resumed, sink = make_net(), make_net(), Keeper(steps=(4,))
    made = config_of("sgd", learning_rate=0.05)
    run(whole, but(made, augmentation=Noise()), make_data([23]), sink=sink)
    run(resumed, but(made, augmentation=Noise()), make_data([23]), resume=sink.points[4])
    assert torch.equal(weights(whole), weights(resumed))


@pytest.mark.parametrize("kind", KINDS)
def test_in_rounds(kind: Any) -> None:
    shards, replicas = make_data([23]), []
    plan = plan_for(shards, config(kind), world_size=1)
    for _ in range(2):
        net = make_net()
        held = Attributes(net, resets=True)
        replicas.append(RoundReplica(net, config(kind), plan, torch.device("cpu"), None, held))
    state: Any = {"model": tensors_of(make_net())}
    for number in range(10):  # in turns, as tasks meet processes
        part = RoundPart(epoch=number // 5, step_in_epoch=number % 5, step=number, num_steps=1)
        rows = MappedRows(shards[0], plan)
        found = replicas[number % 2].train(state, 0, rows, part, NullObserver()).state
        state = decode(b"".join(encode(snapshot(found))), "a state")
    last = torch.cat([value.flatten() for value in state["model"].values()])
    torch.testing.assert_close(last, plain_loop(kind), rtol=0, atol=1e-10)
