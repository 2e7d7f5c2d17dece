"""Modules that do something when they change modes, keep batches, or have names that others use.

Each has a loop beside it that a user would write: training, then evaluation, after each epoch.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrize import register_parametrization

from sparkdl.comm.communicator import LocalCommunicator
from sparkdl.comm.file_chunks import gathered
from sparkdl.config import TrainConfig
from sparkdl.data import batches
from sparkdl.data.batches import Batches, sequential_batches
from sparkdl.data.plan import RoundPart, TrainPlan
from sparkdl.data.spool.mapped import MappedRows, ShardData
from sparkdl.serialization.travel.attributes import Attributes
from sparkdl.spark.rounds.averaging_rounds import Averaged
from sparkdl.spark.rounds.round_stages import Merge
from sparkdl.storage.checkpoint_format import decode, encode
from sparkdl.storage.tensor_tree import snapshot
from sparkdl.sync.averaging.averaging import AveragingStrategy
from sparkdl.sync.averaging.block_momentum import BlockMomentum
from sparkdl.sync.averaging.parameter_averaging import ParameterAveraging
from sparkdl.sync.averaging.state_pieces import Pieces
from sparkdl.sync.gradients.allreduce import AllReduce
from sparkdl.sync.module_tensors import tensors_of
from sparkdl.train.callbacks import NullObserver
from sparkdl.train.round_replica import RoundReplica
from sparkdl.worker.round_task import ATTRIBUTES
from tests.gang import Gang
from tests.train.runs import NUM_FEATURES, but, make_data, plan_for, run, seeded

CONFIG = TrainConfig(
    epochs=3, batch_size=5, loss="mse", seed=4, optimizer="sgd", learning_rate=0.05,
    optimizer_params={"momentum": 0.9},
)  # fmt: skip
ROWS, VALIDATION = [14, 23], [6, 5]
Found = tuple[dict[str, Any], list[list[float]]]
"""The tensors in the end, and loss and validation loss of each epoch."""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(NUM_FEATURES, 5), nn.Linear(5, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x).tanh())


class Merging(Net):
    """Merges an update of low rank into a weight in evaluation mode, as loralib does."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Parameter(torch.ones(2, NUM_FEATURES) / 3)
        self.up = nn.Parameter(torch.ones(5, 2) / 4)
        self.body.weight.requires_grad_(False)
        self.is_merged = False

    def train(self, mode: bool = True) -> Any:
        if mode == self.is_merged:
            update = self.up @ self.down
            self.body.weight.data += -update if mode else update
            self.is_merged = not mode
        return super().train(mode)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.body(x)
        if not self.is_merged:
            hidden = hidden + x @ self.down.t() @ self.up.t()
        return self.head(hidden.tanh())


class Swapping(Net):
    """Evaluates with the running mean of a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", self.head.weight.detach().clone())
        self.own: torch.Tensor | None = None

    def train(self, mode: bool = True) -> Any:
        if not mode and self.own is None:
            self.own = self.head.weight.detach().clone()
            self.head.weight.data.copy_(self.mean)
        elif mode and self.own is not None:
            self.head.weight.data.copy_(self.own)
            self.own = None
        return super().train(mode)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.mean.lerp_(self.head.weight.detach(), 0.3)
        return super().forward(x)


class ReturnsNothing(Net):
    """Keeps a norm as it is, and forgets to return itself, as many do."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(NUM_FEATURES)

    def train(self, mode: bool = True) -> Any:
        super().train(mode)
        self.norm.eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.norm(x))


class Fading(nn.Module):
    """Makes a weight smaller each time that it is computed, as spectral_norm changes vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("times", torch.tensor(0))

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        self.times += self.training
        return weight / (1 + 0.01 * self.times)


class Parametrized(Net):
    def __init__(self) -> None:
        super().__init__()
        register_parametrization(self.body, "weight", Fading())


class ShowsItsHead(Net):
    """Shows optimizers its head only, by a method with the arguments of older versions of torch."""

    def named_parameters(self, prefix: str = "", recurse: bool = True) -> Any:  # type: ignore[override]
        for name, parameter in super().named_parameters(prefix, recurse):
            if "body" not in name:
                yield name, parameter


class Bank(Net):
    """Keeps the batches that it has seen, and compares with the oldest."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen.append(x)
        return super().forward(x - self.seen[0].mean(0))


class Step(Net):
    """Learns a size of steps, under the name by which torch's optimizers count theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.step = nn.Parameter(torch.full((), 0.5))
        self.register_buffer("changes", torch.zeros(NUM_FEATURES))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.changes.lerp_(x.detach().mean(0), 0.1)
        return super().forward((x - self.changes) * self.step)


class Steps(Step):
    def __init__(self) -> None:
        super().__init__()
        self.step = nn.Parameter(torch.full((NUM_FEATURES,), 0.5))


def made(make: Callable[[], nn.Module]) -> nn.Module:
    return seeded(lambda: make().double())


class Loop:
    """A user's own loop over some shards."""

    def __init__(self, make: Callable[[], nn.Module], rows: list[int]) -> None:
        self.net = made(make)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.05, momentum=0.9)
        self.shards, self.validation = make_data(ROWS), make_data(VALIDATION)
        if len(rows) == 1:
            self.shards, self.validation = make_data(rows), make_data(VALIDATION[:1])
        self.plan = plan_for(
            self.shards, CONFIG, validation=self.validation, world_size=len(self.shards)
        )

    def train(self, epoch: int, ranks: list[int]) -> list[float]:
        """Train on some ranks' rows together; the sum of losses, and the rows."""
        self.net.train()
        parts = [
            Batches([MappedRows(self.shards[i], self.plan)], self.plan, i, seed=4, epoch=epoch)
            for i in ranks
        ]
        sums = [0.0, 0.0]
        for some in zip(*([b.map(torch.clone) for b in part] for part in parts), strict=True):
            x, y = torch.cat([b.inputs[0] for b in some]), torch.cat([b.target for b in some])
            self.optimizer.zero_grad()
            losses = (self.net(x).squeeze(1) - y).square()
            losses.mean().backward()
            self.optimizer.step()
            sums = [sums[0] + losses.sum().item(), sums[1] + len(y)]
        return sums

    def evaluate(self) -> float:
        self.net.eval()
        sums = [0.0, 0.0]
        with torch.no_grad():
            for batch in sequential_batches(
                [MappedRows(one, self.plan) for one in self.validation], self.plan
            ):
                losses = (self.net(batch.inputs[0]).squeeze(1) - batch.target).square()
                sums = [sums[0] + losses.sum().item(), sums[1] + len(losses)]
        self.net.train()
        return sums[0] / sums[1]


def plain_loop(make: Callable[[], nn.Module], rows: list[int]) -> Found:
    loop, history = Loop(make, rows), []
    for epoch in range(CONFIG.epochs):
        loss, count = loop.train(epoch, list(range(len(rows))))
        history.append([loss / count, loop.evaluate()])
    return tensors_of(loop.net), history


def averaging_loop(make: Callable[[], nn.Module]) -> Found:
    """Two loops, one for each shard, that go on from the mean by rows after each epoch."""
    loops, history = [Loop(make, ROWS) for _ in ROWS], []
    shares = [count / sum(ROWS) for count in ROWS]
    for epoch in range(CONFIG.epochs):
        sums = torch.tensor([loop.train(epoch, [i]) for i, loop in enumerate(loops)]).sum(0)
        with torch.no_grad():
            for places in zip(*(kept_by(loop) for loop in loops), strict=True):
                mean = sum(share * place for share, place in zip(shares, places, strict=True))
                for place in places:
                    place.copy_(mean)
        history.append([(sums[0] / sums[1]).item(), loops[0].evaluate()])
    return tensors_of(loops[0].net), history


def kept_by(loop: Loop) -> list[torch.Tensor]:
    moments = [state["momentum_buffer"] for state in loop.optimizer.state.values()]
    return [*loop.net.parameters(), *loop.net.buffers(), *moments]


def in_rounds(make: Callable[[], nn.Module], rows: list[int]) -> Found:
    """As the driver does it, with rounds of one epoch."""
    net, loop, history = made(make), Loop(make, rows), []
    shards, plan = loop.shards, loop.plan
    config = but(CONFIG, sync_strategy=ParameterAveraging())
    held = Attributes(net, resets=True)
    replica = RoundReplica(net, config, plan, torch.device("cpu"), None, held)
    state: dict[str, Any] = {"model": copy.deepcopy(tensors_of(net))}
    pieces = Pieces.of(len(shards))
    for epoch in range(config.epochs):
        loss = count = 0.0
        found: dict[str, list[bytes]] = {}
        attributes = []
        for number, shard in enumerate(shards):
            outcome = replica.train(
                copy.deepcopy(state), number, MappedRows(shard, plan), part_of(plan, epoch),
                NullObserver(),
            )  # fmt: skip
            loss, count = loss + outcome.loss_sum, count + outcome.weight
            for name, data in pieces.cut(replica.moving(outcome.state), outcome.weight):
                found.setdefault(name, []).append(data)
            attributes.append(copy.deepcopy(outcome.state["attributes"]))
        mean = pieces.put_together((name, pieces.mean(name, p)) for name, p in found.items())
        model = {**state["model"], **mean["model"]}
        state = {**mean, "model": model, "attributes": attributes[0]}
        history.append([loss / count, validation_loss(replica, state, loop.validation, plan)])
    return state["model"], history


def part_of(plan: TrainPlan, epoch: int) -> RoundPart:
    num_steps = plan.steps_per_epoch
    return RoundPart(epoch=epoch, step_in_epoch=0, step=epoch * num_steps, num_steps=num_steps)


def validation_loss(
    replica: RoundReplica, state: dict[str, Any], shards: list[ShardData], plan: TrainPlan
) -> float:
    measured = [replica.evaluate(copy.deepcopy(state), MappedRows(one, plan))[0] for one in shards]
    loss, count = torch.tensor(measured).sum(0).tolist()
    return float(loss / count)


def on_rank(comm: Any, make: Callable[[], nn.Module], rows: list[int]) -> Found:
    net, config = made(make), but(CONFIG, sync_strategy=AllReduce())
    validation = make_data(VALIDATION[: len(rows)])
    outcome = run(net, config, make_data(rows), validation=validation, comm=comm)
    history = [[record["loss"], record["val_loss"]] for record in outcome.history]
    return copy.deepcopy(tensors_of(net)), history


def assert_found(found: Found, expected: Found) -> None:
    assert found[0].keys() == expected[0].keys()
    for name, value in expected[0].items():
        torch.testing.assert_close(found[0][name], value, rtol=0, atol=1e-12, msg=name)
    torch.testing.assert_close(torch.tensor(found[1]), torch.tensor(expected[1]))


MODES = [Merging, Swapping, ReturnsNothing, Parametrized, ShowsItsHead]


@pytest.mark.parametrize("make", MODES)
def test_alone_evaluation_leaves_training_as_it_was(make: Callable[[], nn.Module]) -> None:
    expected = plain_loop(make, [23])
    assert_found(on_rank(LocalCommunicator(), make, [23]), expected)
    assert_found(in_rounds(make, [23]), expected)


@pytest.mark.parametrize("make", MODES)
def test_in_a_gang_it_does_too(gang: Gang, make: Callable[[], nn.Module]) -> None:
    expected = plain_loop(make, ROWS)
    for found in gang.run(on_rank, make, ROWS):
        assert_found(found, expected)


@pytest.mark.parametrize("make", [Net, Step, Steps, Merging])
def test_two_shards_in_rounds_are_an_averaging_loop(make: Callable[[], nn.Module]) -> None:
    """Whatever the module calls its parameters."""
    assert_found(in_rounds(make, ROWS), averaging_loop(make))


class Tied(nn.Module):
    """Has one weight under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.back = nn.Linear(NUM_FEATURES, 4), nn.Linear(4, NUM_FEATURES)
        self.head = nn.Linear(NUM_FEATURES, 1)
        self.back.weight = self.into.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.back(self.into(x).tanh()))


class Shards:
    """Trains each shard where the driver would ask its tasks to."""

    def __init__(self, loop: Loop, replica: RoundReplica) -> None:
        self.loop, self.replica = loop, replica

    def run_on_all(self, part: RoundPart, state: Any, merge: Merge) -> list[tuple[int, str, bytes]]:
        found: dict[str, list[bytes]] = {}
        rows = []
        for number, shard in enumerate(self.loop.shards):
            outcome = self.replica.train(
                decode(state(), "a state"), number, MappedRows(shard, self.loop.plan), part,
                NullObserver(),
            )  # fmt: skip
            moving = self.replica.moving(outcome.state)
            for name, data in merge.pieces.cut(moving, outcome.weight):
                found.setdefault(name, []).append(data)
            told = {"weight": outcome.weight, "bytes_sent": 0, **self.replica.odd(moving)}
            rows.append((number, "result", json.dumps(told).encode()))
            held = gathered(encode(snapshot(outcome.state["attributes"])))
            rows.append((number, ATTRIBUTES, held))
        return rows + [(0, name, merge.pieces.mean(name, data)) for name, data in found.items()]


def by_driver(make: Callable[[], nn.Module], strategy: AveragingStrategy) -> dict[str, Any]:
    net, loop, config = made(make), Loop(make, ROWS), but(CONFIG, sync_strategy=strategy)
    held = Attributes(net, resets=True)
    replica = RoundReplica(made(make), config, loop.plan, torch.device("cpu"), None, held)
    run: Any = SimpleNamespace(plan=loop.plan, module=net, config=config)
    jobs: Any = Shards(loop, replica)
    averaged = Averaged(run, strategy, jobs)
    for epoch in range(CONFIG.epochs):
        averaged.train(part_of(loop.plan, epoch))
    return averaged.model()


def block_momentum_loop(make: Callable[[], nn.Module]) -> dict[str, Any]:
    """Two loops that go on from their mean and a third of the last change of it, each epoch."""
    loops, shares = [Loop(make, ROWS) for _ in ROWS], [count / sum(ROWS) for count in ROWS]
    change = [torch.zeros_like(parameter) for parameter in loops[0].net.parameters()]
    for epoch in range(CONFIG.epochs):
        begin = [parameter.detach().clone() for parameter in loops[0].net.parameters()]
        for number, loop in enumerate(loops):
            loop.train(epoch, [number])
            loop.optimizer.state.clear()
        with torch.no_grad():
            for place, each in enumerate(
                zip(*(loop.net.parameters() for loop in loops), strict=True)
            ):
                mean = sum(share * one for share, one in zip(shares, each, strict=True))
                change[place] = change[place] / 3 + mean - begin[place]
                for one in each:
                    one.copy_(begin[place] + change[place])
    return tensors_of(loops[0].net)


@pytest.mark.parametrize("make", [Net, Tied])
def test_what_follows_the_mean_moves_a_weight_of_two_names(make: Callable[[], nn.Module]) -> None:
    strategy = BlockMomentum(averaging_period=99, block_momentum=1 / 3, nesterov=False)
    found, expected = by_driver(make, strategy), block_momentum_loop(make)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-12, msg=name)


def test_batches_that_a_module_keeps_stay_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "GATHER_BYTES", 1)  # as where a step has millions of bytes
    expected = plain_loop(Bank, [50])
    assert_found(on_rank(LocalCommunicator(), Bank, [50]), expected)
    assert_found(in_rounds(Bank, [50]), expected)
