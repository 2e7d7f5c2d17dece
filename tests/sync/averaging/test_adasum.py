from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from sparkdl import sync
from sparkdl.config import TrainConfig
from sparkdl.data.batches import Batches
from sparkdl.data.spool.mapped import MappedRows
from sparkdl.errors import ConfigError
from sparkdl.sync.averaging.adasum import Adasum, adasum, combine
from tests.sync.apart import bytes_by_pattern, make_net
from tests.train.runs import but, make_data, plan_for, run, weights

CONFIG = TrainConfig(
    optimizer="sgd",
    learning_rate=0.05,
    optimizer_params={"momentum": 0.9},
    batch_size=4,
    epochs=3,
    loss="mse",
    sync_strategy=Adasum(),
)


def formula(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The paper's, written down once more."""
    dot = (a * b).sum()
    of_a = 1 if not a.any() else 1 - dot / (2 * (a * a).sum())
    of_b = 1 if not b.any() else 1 - dot / (2 * (b * b).sum())
    return of_a * a + of_b * b


def tree(updates: list[torch.Tensor]) -> torch.Tensor:
    """Pairs of neighbours, after the ranks beyond a power of two were folded into the first."""
    size = 1 << (len(updates).bit_length() - 1)
    left = list(updates[:size])
    for number, extra in enumerate(updates[size:]):
        left[number] = formula(left[number], extra)
    while len(left) > 1:
        left = [formula(a, b) for a, b in zip(left[::2], left[1::2], strict=True)]
    return left[0]


def test_equal_updates_give_their_mean_and_orthogonal_ones_their_sum() -> None:
    a = torch.tensor([[1.0, 2.0], [0.0, -3.0]])
    b = torch.tensor([[-2.0, 1.0], [7.0, 0.0]])
    assert torch.equal(adasum(a, a), a)
    assert torch.equal(adasum(a, b), a + b)
    assert torch.equal(adasum(a, torch.zeros_like(a)), a)
    assert torch.equal(adasum(torch.zeros_like(a), a), a)
    assert not adasum(torch.zeros_like(a), torch.zeros_like(a)).any()
    c = torch.tensor([[3.0, 1.0], [2.0, -1.0]])
    torch.testing.assert_close(adasum(a, c), formula(a, c))
    assert torch.equal(adasum(a, c), adasum(c, a))


def test_the_length_of_a_parallel_update_does_not_matter_twice() -> None:
    a = torch.tensor([2.0, -1.0], dtype=torch.float64)
    # 1 - 3/2 of the shorter one and 1 - 1/6 of the longer: their mean, as for any parallel ones.
    torch.testing.assert_close(adasum(a, 3 * a), 2 * a)


SHAPES = [(3, 5), (7,), (), (2, 2, 3), (1,)]


def updates_of(rank: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    made = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES]
    if rank == 1:
        made[1].zero_()
    return made


def combine_on_rank(comm: Any) -> list[torch.Tensor]:
    mine = updates_of(comm.rank)
    flat = torch.cat([update.flatten() for update in mine])
    combine(flat, [update.numel() for update in mine], comm)
    return list(torch.split(flat, [update.numel() for update in mine]))


@pytest.mark.gang
@pytest.mark.parametrize("fixture", ["gang", "gang3", "gang4"])
def test_ranks_combine_as_a_tree(fixture: str, request: pytest.FixtureRequest) -> None:
    results = request.getfixturevalue(fixture).run(combine_on_rank)
    everyone = [updates_of(rank) for rank in range(len(results))]
    for number in range(len(SHAPES)):
        expected = tree([updates[number] for updates in everyone])
        for result in results:
            torch.testing.assert_close(result[number], expected.flatten(), rtol=0, atol=1e-12)
            assert torch.equal(result[number], results[0][number])


def train_on_rank(
    comm: Any, config: TrainConfig, rows: list[int]
) -> tuple[torch.Tensor, list[float], int]:
    net = make_net()
    outcome = run(net, config, make_data(rows), comm=comm)
    return weights(net), [record["loss"] for record in outcome.history], outcome.bytes_sent


def reference(config: TrainConfig, rows: list[int]) -> tuple[torch.Tensor, list[float]]:
    """One process with a replica per shard."""
    shards = make_data(rows)
    plan = plan_for(shards, config, world_size=len(rows))
    nets = [make_net() for _ in rows]
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9) for net in nets]
    period = config.sync_strategy.averaging_period
    losses = []
    for epoch in range(config.epochs):
        anchor = [p.detach().clone() for p in nets[0].parameters()]
        parts = [
            Batches([MappedRows(shard, plan)], plan, rank, seed=config.seed, epoch=epoch)
            for rank, shard in enumerate(shards)
        ]
        loss_sum = 0.0
        for step, batches in enumerate(zip(*parts, strict=True), 1):
            for net, optimizer, batch in zip(nets, optimizers, batches, strict=True):
                if batch.num_rows:
                    loss = nn.functional.mse_loss(net(batch.inputs[0]).squeeze(1), batch.target)
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                    loss_sum += loss.item() * batch.num_rows
            if step % period and step < plan.steps_per_epoch:
                continue
            with torch.no_grad():
                for begin, *replicas in zip(anchor, *(n.parameters() for n in nets), strict=True):
                    begin += tree([replica - begin for replica in replicas])
                    for replica in replicas:
                        replica.copy_(begin)
        losses.append(loss_sum / sum(rows))
    return weights(nets[0]), losses


CASES = {
    "two": ("gang", [16, 16], 1),
    "two, uneven": ("gang", [23, 2], 1),
    "two, one without rows": ("gang", [0, 9], 1),
    "three": ("gang3", [9, 13, 11], 1),
    "three, one without rows": ("gang3", [9, 0, 11], 1),
    "four": ("gang4", [9, 13, 11, 3], 1),
    "several local steps": ("gang4", [18, 26, 21, 0], 3),
}


@pytest.mark.gang
@pytest.mark.parametrize("name", CASES)
def test_equals_one_process(name: str, request: pytest.FixtureRequest) -> None:
    fixture, rows, period = CASES[name]
    config = but(CONFIG, sync_strategy=Adasum(averaging_period=period))
    expected, losses = reference(config, rows)
    results = request.getfixturevalue(fixture).run(train_on_rank, config, rows)
    for mine, history, _ in results:
        torch.testing.assert_close(mine, expected, rtol=0, atol=1e-12)
        assert history == pytest.approx(losses, abs=1e-12)
        assert torch.equal(mine, results[0][0])


def test_alone_nothing_changes() -> None:
    plain, combined = make_net(), make_net()
    run(plain, but(CONFIG, sync_strategy=None), make_data([13]))
    run(combined, CONFIG, make_data([13]))
    assert torch.equal(weights(plain), weights(combined))


@pytest.mark.gang
@pytest.mark.parametrize(
    ("fixture", "rows"), [("gang", [16] * 2), ("gang3", [16] * 3), ("gang4", [16] * 4)]
)
@pytest.mark.parametrize("period", [1, 4])
def test_bytes_are_those_of_the_formula(
    fixture: str, rows: list[int], period: int, request: pytest.FixtureRequest
) -> None:
    config = but(CONFIG, sync_strategy=Adasum(averaging_period=period))
    shapes = [tuple(p.shape) for p in make_net().parameters()]
    sent = [
        sent for _, _, sent in request.getfixturevalue(fixture).run(train_on_rank, config, rows)
    ]
    expected = bytes_by_pattern(config.sync_strategy, shapes, len(rows)) * 12
    assert sum(sent) / len(rows) == pytest.approx(expected)
    assert bytes_by_pattern(config.sync_strategy, shapes, 1) == 0


def test_wrong_period() -> None:
    assert sync.resolve("adasum") == Adasum()
    with pytest.raises(ConfigError, match="averaging_period"):
        Adasum(averaging_period=0)
