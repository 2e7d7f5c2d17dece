"""Embeddings with sparse gradients train as in a plain loop over the same batches."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from sparkdl.config import TrainConfig
from sparkdl.data.batches import Batches
from sparkdl.data.plan import RoundPart
from sparkdl.data.spool.mapped import MappedRows
from sparkdl.sync.averaging.local_sgd import LocalSGD
from sparkdl.sync.averaging.parameter_averaging import ParameterAveraging
from sparkdl.sync.averaging.state_pieces import Pieces
from sparkdl.sync.gradients.allreduce import AllReduce
from sparkdl.sync.module_tensors import tensors_of
from sparkdl.train.callbacks import NullObserver
from sparkdl.train.round_replica import RoundReplica
from tests.gang import Gang
from tests.sync.apart import on_nodes
from tests.train.runs import NUM_FEATURES, but, make_data, plan_for, run, seeded

IDS, WIDTH = 300, 3
CONFIG = TrainConfig(epochs=2, batch_size=5, loss="mse", seed=4)
ROWS = [23, 14]


class Tables(nn.Module):
    """Tables of words, whose ids are made of the features."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(IDS, WIDTH, sparse=True)
        self.bags = nn.EmbeddingBag(IDS, WIDTH, sparse=True, mode="sum")
        self.spare = nn.Embedding(IDS, WIDTH, sparse=True)

    def ids(self, x: torch.Tensor) -> torch.Tensor:
        return (x * 1000).long().abs() % IDS

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ids = self.ids(x)
        return (self.words(ids).sum(1) * self.bags(ids)).sum(1, keepdim=True)


class Mixed(Tables):
    """A dense layer and a large dense one beside them, and ids that come several times."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(WIDTH + NUM_FEATURES, 20)
        self.head = nn.Linear(20, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ids = self.ids(x) % 7
        return self.head(self.body(torch.cat([self.words(ids).mean(1), x], 1)).tanh())


class OnOneRank(Mixed):
    """A table that a batch uses only if its numbers say so, so that one rank does and not both."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = super().forward(x)
        return found + self.spare(self.ids(x)).sum((1, 2)).unsqueeze(1) if x.sum() > 0 else found


class Tied(Mixed):
    """The table's rows are also the weights of a dense layer, in some batches."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = super().forward(x)
        if x.sum() > 0:
            found = found + (x[:, :WIDTH] @ self.words.weight.t()).mean(1, keepdim=True)
        return found


class OwnTable(Mixed):
    """A layer of one's own, with a table for which it says that its gradients are sparse."""

    class Table(nn.Module):
        sparse = True

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(IDS, WIDTH))

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return nn.functional.embedding(ids, self.weight, sparse=True)

    def __init__(self) -> None:
        super().__init__()
        self.words = self.Table()


OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "sgd": ("sgd", {"lr": 0.05}),
    "momentum": ("sgd", {"lr": 0.05, "momentum": 0.9}),
    "nesterov": ("sgd", {"lr": 0.05, "momentum": 0.9, "nesterov": True}),
    "adagrad": ("adagrad", {"lr": 0.05}),
    "sparseadam": ("sparseadam", {"lr": 0.02}),
}
KINDS = {
    "sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad, "sparseadam": torch.optim.SparseAdam,
}  # fmt: skip


def config_of(optimizer: str, **changes: Any) -> TrainConfig:
    name, options = OPTIMIZERS[optimizer]
    return but(CONFIG, optimizer=name, optimizer_params=options, **changes)


def made(make: Any) -> nn.Module:
    return seeded(lambda: make().double())


def batches_of(
    config: TrainConfig, rows: list[int], world_size: int, *, weighted: bool = False
) -> Any:
    """Of each step, the batches of all ranks."""
    shards = make_data(rows)
    plan = plan_for(shards, config, world_size=world_size, weighted=weighted)
    for epoch in range(config.epochs):
        by_rank = [
            Batches(
                [MappedRows(shards[s.shard_id], plan) for s in plan.shards_of(rank)],
                plan, rank, seed=config.seed, epoch=epoch,
            )
            for rank in range(world_size)
        ]  # fmt: skip
        yield from zip(*by_rank, strict=True)


def plain_loop(net: nn.Module, optimizer: str, steps: Any) -> dict[str, Any]:
    """One process, one step on the parts of each global batch."""
    name, options = OPTIMIZERS[optimizer]
    stepped = KINDS[name](net.parameters(), **options)
    for parts in steps:
        stepped.zero_grad()
        weights = [
            torch.ones(part.num_rows).double() if part.weight is None else part.weight
            for part in parts
        ]
        total = sum(float(weight.sum()) for weight in weights)
        for part, weight in zip(parts, weights, strict=True):
            if part.num_rows:
                losses = (net(part.inputs[0]).squeeze(1) - part.target).square()
                ((losses * weight).sum() / total).backward()
        stepped.step()
    return tensors_of(net)


def assert_alike(found: dict[str, Any], expected: dict[str, Any], atol: float = 1e-12) -> None:
    assert list(found) == list(expected)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=atol, msg=name)


def train_on_rank(
    comm: Any, make: Any, config: TrainConfig, rows: list[int], weighted: bool = False
) -> dict[str, Any]:
    net = made(make)
    if getattr(config.sync_strategy, "topology", None) == "shared":
        comm = on_nodes(comm, (0, 0))
    outcome = run(net, config, make_data(rows), comm=comm, weighted=weighted)
    return {**copy.deepcopy(tensors_of(net)), "bytes": outcome.bytes_sent}


CASES = [
    (make, optimizer)
    for optimizer in OPTIMIZERS
    for make in ([Tables] if optimizer == "sparseadam" else [Mixed, OnOneRank, Tied, OwnTable])
    if make is not Tied or optimizer in ("sgd", "adagrad")
]


@pytest.mark.parametrize(("make", "optimizer"), CASES)
def test_alone_it_trains_as_in_a_plain_loop(make: Any, optimizer: str) -> None:
    config = config_of(optimizer)
    expected = plain_loop(made(make), optimizer, batches_of(config, [23], 1))
    for strategy in (AllReduce(), ParameterAveraging(averaging_period=2)):
        net = made(make)
        run(net, but(config, sync_strategy=strategy), make_data([23]))
        assert_alike(tensors_of(net), expected)


@pytest.mark.parametrize(("make", "optimizer"), CASES)
def test_in_a_gang_it_does_too(gang: Gang, make: Any, optimizer: str) -> None:
    config = config_of(optimizer, sync_strategy=AllReduce())
    expected = plain_loop(made(make), optimizer, batches_of(config, ROWS, 2))
    for found in gang.run(train_on_rank, make, config, ROWS):
        found.pop("bytes")
        assert_alike(found, expected)


VARIANTS: dict[str, dict[str, Any]] = {
    "ring": {"sync_strategy": AllReduce(topology="ring")},
    "shared": {"sync_strategy": AllReduce(topology="shared")},
    "small buckets": {"sync_strategy": AllReduce(bucket_bytes=16)},
    "accumulated": {"sync_strategy": AllReduce(), "gradient_accumulation_steps": 3},
    "period of one": {"sync_strategy": ParameterAveraging(averaging_period=1)},
    "warm-up": {"sync_strategy": LocalSGD(averaging_period=1, warmup_steps=4)},
}


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_however_ranks_agree(gang: Gang, variant: str, weighted: bool) -> None:
    """Plain SGD, of which the mean of replicas after each step is a step with the mean gradient."""
    config = config_of("sgd", **VARIANTS[variant])
    make = Mixed if variant == "accumulated" else OnOneRank  # whose sums are of whole batches
    expected = plain_loop(made(make), "sgd", batches_of(config, ROWS, 2, weighted=weighted))
    for found in gang.run(train_on_rank, make, config, ROWS, weighted):
        found.pop("bytes")
        assert_alike(found, expected)


@pytest.mark.parametrize("optimizer", ["momentum", "nesterov", "adagrad", "sparseadam"])
def test_averaged_states_are_those_of_replicas_by_themselves(gang: Gang, optimizer: str) -> None:
    """In a gang and in rounds; also momenta that are sparse, of other rows in each replica."""
    make = Tables if optimizer == "sparseadam" else Mixed
    averaging = ParameterAveraging(averaging_period=2)
    config = config_of(optimizer, epochs=1, max_steps=4, sync_strategy=averaging)
    expected = averaged_by_hand(make, optimizer, config)
    for found in gang.run(train_on_rank, make, config, ROWS):
        found.pop("bytes")
        assert_alike(found, expected)
    assert_alike(in_rounds(make, config), expected)


def averaged_by_hand(make: Any, optimizer: str, config: TrainConfig) -> dict[str, Any]:
    """Two plain loops, whose weights and states are averaged after each second step."""
    name, options = OPTIMIZERS[optimizer]
    nets = [made(make), made(make)]
    stepped = [KINDS[name](net.parameters(), **options) for net in nets]
    counts = [0, 0]
    for number, parts in enumerate(batches_of(config, ROWS, 2)):
        for place, part in enumerate(parts):
            stepped[place].zero_grad()
            errors = nets[place](part.inputs[0]).squeeze(1) - part.target
            errors.square().mean().backward()
            stepped[place].step()
            counts[place] += part.num_rows
        if number % 2 == 0:
            continue
        shares = [count / sum(counts) for count in counts]
        counts = [0, 0]
        for one, other in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
            mean = shares[0] * one.detach() + shares[1] * other.detach()
            one.data, other.data = mean.clone(), mean.clone()
            states = stepped[0].state[one], stepped[1].state[other]
            for key in states[0].keys() - {"step"}:
                mean = shares[0] * states[0][key] + shares[1] * states[1][key]
                states[0][key], states[1][key] = mean.clone(), mean.clone()
        if number == 3:
            break
    return tensors_of(nets[0])


def in_rounds(make: Any, config: TrainConfig) -> dict[str, Any]:
    """The tensors after two rounds of two steps, whose states went in pieces."""
    shards = make_data(ROWS)
    plan, pieces = plan_for(shards, config, world_size=2), Pieces.of(2)
    replica = RoundReplica(made(make), config, plan, torch.device("cpu"))
    state: dict[str, Any] = {"model": tensors_of(made(make))}
    for step in (0, 2):
        part = RoundPart(epoch=0, step_in_epoch=step, step=step, num_steps=2)
        sent: dict[str, list[bytes]] = {}
        for number, shard in enumerate(shards):
            rows = MappedRows(shard, plan)
            began = copy.deepcopy(state)
            outcome = replica.train(began, number, rows, part, NullObserver())
            for name, data in pieces.cut(replica.moving(outcome.state), outcome.weight):
                sent.setdefault(name, []).append(data)
        state = pieces.put_together(
            (name, pieces.mean(name, found)) for name, found in sent.items()
        )
    return state["model"]


class Large(Tables):
    """A table of 2.4 MB, of which a batch of 5 rows uses at most 20 rows of 24 bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(100_000, WIDTH, sparse=True)
        self.bags = self.spare = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.words(self.ids(x)).sum((1, 2)).unsqueeze(1)


def test_a_step_sends_what_its_rows_are(gang: Gang) -> None:
    config = config_of("sgd", sync_strategy=AllReduce(), max_steps=4)
    for found in gang.run(train_on_rank, Large, config, ROWS):
        assert found["bytes"] < 4 * 20 * (24 + 8) + 1000
