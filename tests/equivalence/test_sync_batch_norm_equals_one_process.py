"""Training with syncBatchNorm on several ranks equals one process with the united batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from sparkdl.config import TrainConfig
from sparkdl.data.batches import Batches
from sparkdl.data.plan import batch_bounds
from sparkdl.data.spool.mapped import MappedRows
from sparkdl.inference.regression import REGRESSION
from sparkdl.sync.gradients.allreduce import AllReduce
from tests.gang import Gang
from tests.train.runs import NUM_FEATURES, Keeper, make_data, plan_for, run, seeded

pytestmark = pytest.mark.gang

BASE = {
    "task": REGRESSION,
    "optimizer": "sgd",
    "learning_rate": 0.05,
    "optimizer_params": {"momentum": 0.9},
    "epochs": 3,
    "sync_batch_norm": True,
}


class Net(nn.Module):
    """A vector, a sequence and a picture are normalized; one layer after the last rows' loss."""

    def __init__(self) -> None:
        super().__init__()
        exact = {"dtype": torch.float64}
        self.first = nn.Linear(NUM_FEATURES, 12, **exact)
        self.norm = nn.BatchNorm1d(12, **exact)
        self.convolution = nn.Conv2d(3, 4, 2, padding=1, **exact)
        self.norm2d = nn.BatchNorm2d(4, momentum=None, **exact)
        self.last = nn.Linear(36, 1, **exact)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.norm(self.first(x))).view(-1, 3, 2, 2)
        return self.last(torch.relu(self.norm2d(self.convolution(x))).flatten(1))


def make_net() -> nn.Module:
    return seeded(Net)


def train_on_rank(
    comm: Any, options: dict[str, Any], rows: list[int], weighted: bool
) -> tuple[dict[str, torch.Tensor], list[float], set[str]]:
    net = make_net()
    outcome = run(
        net,
        TrainConfig(**{**BASE, **options}),  # type: ignore[arg-type]
        make_data(rows),
        validation=make_data([5] * len(rows)),
        comm=comm,
        weighted=weighted,
    )
    losses = [record[key] for record in outcome.history for key in ("loss", "val_loss")]
    return net.state_dict(), losses, set(vars(net.norm))


def united_reference(
    options: dict[str, Any], rows: list[int], weighted: bool
) -> dict[str, torch.Tensor]:
    """A plain loop over the micro-batches of all ranks, joined, with plain BatchNorm."""
    config = TrainConfig(**{**BASE, **options})  # type: ignore[arg-type]
    shards = make_data(rows)
    world_size, num_parts = len(rows), config.gradient_accumulation_steps
    plan = plan_for(shards, config, world_size=world_size, weighted=True)
    net = make_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    for epoch in range(config.epochs):
        ranks = [
            Batches([MappedRows(shards[r], plan)], plan, r, seed=config.seed, epoch=epoch)
            for r in range(world_size)
        ]
        for batches in zip(*ranks, strict=True):
            optimizer.zero_grad()
            total = sum(float(b.weight.sum()) if weighted else b.num_rows for b in batches)
            for part in range(num_parts):
                parts = [b.rows(*batch_bounds(b.num_rows, num_parts, part)) for b in batches]
                x, y, w = (
                    torch.cat(values)
                    for values in zip(
                        *((p.inputs[0], p.target, p.weight) for p in parts), strict=True
                    )
                )
                if len(x):
                    losses = (net(x).squeeze(1) - y) ** 2
                    ((losses * (w if weighted else 1.0)).sum() / total).backward()
            optimizer.step()
    return net.state_dict()


CASES: dict[str, tuple[dict[str, Any], list[int], bool]] = {
    "even": ({"batch_size": 4}, [12, 12], False),
    "uneven weighted": ({"batch_size": 4}, [23, 7], True),
    "one row": ({"batch_size": 5}, [15, 1], False),
    "empty first": ({"batch_size": 4}, [0, 12], False),
    "accumulated": ({"batch_size": 6, "gradient_accumulation_steps": 3}, [18, 13], True),
    "accumulated with few rows": (
        {"batch_size": 12, "gradient_accumulation_steps": 3},
        [36, 2],
        False,
    ),
    "more parts than rows": ({"batch_size": 4, "gradient_accumulation_steps": 4}, [2, 2], False),
    "many buckets": (
        {"batch_size": 4, "sync_strategy": AllReduce(bucket_bytes=64)},
        [14, 3],
        False,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_two_ranks(gang: Gang, name: str) -> None:
    check(gang, *CASES[name])


@pytest.mark.parametrize("rows", [[9, 2, 5], [0, 8, 0]])
def test_three_ranks(gang3: Gang, rows: list[int]) -> None:
    check(gang3, {"batch_size": 4}, rows, True)


def check(gang: Gang, options: dict[str, Any], rows: list[int], weighted: bool) -> None:
    results = gang.run(train_on_rank, options, rows, weighted)
    expected = united_reference(options, rows, weighted)
    for state, losses, attributes in results:
        assert list(state) == list(expected)
        assert losses == results[0][1]
        assert "forward" not in attributes
        for key, value in expected.items():
            assert torch.equal(state[key], results[0][0][key]), key
            torch.testing.assert_close(state[key], value, rtol=0, atol=1e-12)
    assert expected["norm.num_batches_tracked"] > 1


def test_the_option_makes_the_difference(gang: Gang) -> None:
    options = {"batch_size": 4}
    with_it = gang.run(train_on_rank, options, [12, 12], False)[0][0]
    without = gang.run(train_on_rank, {**options, "sync_batch_norm": False}, [12, 12], False)[0][0]
    assert not torch.allclose(with_it["last.weight"], without["last.weight"], atol=1e-4)


def test_one_rank_trains_as_without_the_option() -> None:
    states = []
    for is_set in (True, False):
        net = make_net()
        config = TrainConfig(**{**BASE, "sync_batch_norm": is_set, "batch_size": 4})  # type: ignore[arg-type]
        run(net, config, make_data([12]))
        states.append(net.state_dict())
    for key, value in states[0].items():
        assert torch.equal(value, states[1][key])


def test_a_resumed_run_ends_with_the_bits_of_the_uninterrupted_one(gang: Gang) -> None:
    assert gang.run(resume_on_rank) == [True, True]


def resume_on_rank(comm: Any) -> bool:
    config = TrainConfig(**{**BASE, "batch_size": 4})  # type: ignore[arg-type]
    keeper, straight, resumed = Keeper(steps=(4,)), make_net(), make_net()
    run(straight, config, make_data([11, 3]), comm=comm, sink=keeper)
    run(resumed, config, make_data([11, 3]), comm=comm, resume=keeper.points[4])
    pairs = zip(straight.state_dict().values(), resumed.state_dict().values(), strict=True)
    return all(torch.equal(one, other) for one, other in pairs)


@pytest.mark.parametrize("loss", ["mse", "own mean"])
def test_losses_of_a_rank_without_rows_do_not_count(gang: Gang, loss: str) -> None:
    """The mean over no rows is NaN; the rank with rows alone makes the loss."""
    losses = gang.run(train_alone, loss)
    assert losses[0] == losses[1]
    assert all(value == value for value in losses[0])


def train_alone(comm: Any, loss: str) -> list[float]:
    net = make_net()
    options = {**BASE, "batch_size": 4, "loss": mean_loss if loss == "own mean" else loss}
    outcome = run(net, TrainConfig(**options), make_data([0, 12]), comm=comm)  # type: ignore[arg-type]
    assert all(bool(torch.isfinite(value).all()) for value in net.state_dict().values())
    return [record["loss"] for record in outcome.history]


def mean_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return ((output.squeeze(1) - target) ** 2).mean()


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_narrow_precision_trains_alike_on_all_ranks(gang: Gang, precision: str) -> None:
    first, second = gang.run(train_narrow, precision)
    for key, value in first.items():
        assert torch.equal(value, second[key])
        assert torch.isfinite(value).all()


def train_narrow(comm: Any, precision: str) -> dict[str, torch.Tensor]:
    net = make_net().float()
    config = TrainConfig(**{**BASE, "batch_size": 4, "precision": precision})  # type: ignore[arg-type]
    run(net, config, make_data([12, 7], dtype=torch.float32), comm=comm)
    return net.state_dict()
