from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

from sparkdl.config import TrainConfig
from sparkdl.data.batches import Batches
from sparkdl.data.spool.mapped import MappedRows, ShardData
from sparkdl.errors import ConfigError
from sparkdl.storage.checkpoint_format import decode, encode
from sparkdl.storage.tensor_tree import snapshot
from sparkdl.sync.gradients.allreduce import AllReduce
from tests.gang import Gang
from tests.sync.apart import gradient_bytes, make_net
from tests.train.runs import Keeper, but, make_data, plan_for, run, weights

CONFIG = TrainConfig(
    optimizer="adamw",
    learning_rate=0.02,
    optimizer_params={"weight_decay": 0.1},
    batch_size=4,
    epochs=3,
    loss="mse",
    sync_strategy=AllReduce(double_buffering=True, bucket_bytes=64),
)


def train_on_rank(
    comm: Any, config: TrainConfig, rows: list[int]
) -> tuple[torch.Tensor, list[float], int]:
    net = make_net()
    outcome = run(net, config, make_data(rows), comm=comm, weighted=True)
    return weights(net), [record["loss"] for record in outcome.history], outcome.bytes_sent


def reference(config: TrainConfig, rows: list[int]) -> tuple[torch.Tensor, list[float]]:
    """A plain loop over the united batches that applies each gradient a step later."""
    shards = make_data(rows)
    plan = plan_for(shards, config, world_size=len(rows), weighted=True)
    net = make_net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.02, weight_decay=0.1)
    waiting: list[torch.Tensor] | None = None
    losses = []
    for epoch in range(config.epochs):
        parts = [
            Batches([MappedRows(shard, plan)], plan, rank, seed=config.seed, epoch=epoch)
            for rank, shard in enumerate(shards)
        ]
        loss_sum = weight_sum = 0.0
        for batches in zip(*parts, strict=True):
            x = torch.cat([batch.inputs[0] for batch in batches])
            y = torch.cat([batch.target for batch in batches])
            w = torch.cat([batch.weight for batch in batches])
            weighted = (net(x).squeeze(1) - y) ** 2 * w
            gradients = torch.autograd.grad(weighted.sum() / w.sum(), list(net.parameters()))
            loss_sum, weight_sum = loss_sum + weighted.sum().item(), weight_sum + w.sum().item()
            if waiting is not None:
                for parameter, gradient in zip(net.parameters(), waiting, strict=True):
                    parameter.grad = gradient
                if config.gradient_clip_norm is not None:
                    nn.utils.clip_grad_norm_(net.parameters(), config.gradient_clip_norm)
                optimizer.step()
            waiting = list(gradients)
        losses.append(loss_sum / weight_sum)
    return weights(net), losses


@pytest.mark.gang
@pytest.mark.parametrize("rows", [[12, 12], [23, 7], [0, 9], [11, 1]])
def test_equals_one_process_that_is_a_step_late(gang: Gang, rows: list[int]) -> None:
    config = but(CONFIG, gradient_clip_norm=0.5, gradient_accumulation_steps=2)
    expected, losses = reference(config, rows)
    for mine, history, _ in gang.run(train_on_rank, config, rows):
        torch.testing.assert_close(mine, expected, rtol=0, atol=1e-12)
        assert history == pytest.approx(losses, abs=1e-12)


def test_alone_it_is_the_same_algorithm() -> None:
    net = make_net()
    outcome = run(net, CONFIG, make_data([13]), weighted=True)
    expected, losses = reference(CONFIG, [13])
    torch.testing.assert_close(weights(net), expected, rtol=0, atol=1e-12)
    assert [record["loss"] for record in outcome.history] == pytest.approx(losses, abs=1e-12)


def test_the_first_step_updates_nothing_but_the_schedule() -> None:
    net = make_net()
    config = but(
        CONFIG, max_steps=1, scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 1, gamma=0.5)
    )
    outcome = run(net, config, make_data([13]))
    assert torch.equal(weights(net), weights(make_net()))
    assert outcome.final.shared["optimizer"]["state"] == {}
    assert outcome.history[-1]["learning_rate"] == 0.01


@pytest.mark.gang
@pytest.mark.parametrize(
    ("step", "compression"), [(1, None), (3, None), (6, None), (3, "onebit"), (4, "powersgd")]
)
def test_checkpoints_change_nothing_and_resume_has_the_same_bits(
    gang: Gang, step: int, compression: str | None
) -> None:
    strategy = AllReduce(double_buffering=True, compression=compression)
    config = but(CONFIG, sync_strategy=strategy)
    for undisturbed, watched, resumed in gang.run(train_and_resume, config, step, [22, 17]):
        assert torch.equal(undisturbed, watched)
        assert torch.equal(undisturbed, resumed)


def train_and_resume(
    comm: Any, config: TrainConfig, step: int, rows: list[int]
) -> tuple[torch.Tensor, ...]:
    plain, watched, resumed = make_net(), make_net(), make_net()
    run(plain, config, make_data(rows), comm=comm)
    sink = Keeper(steps=(step,))
    run(watched, config, make_data(rows), comm=comm, sink=sink)
    point = sink.points[step]
    written = decode(b"".join(encode(snapshot(point.shared))), "checkpoint")
    point = dataclasses.replace(point, shared=written)
    run(resumed, config, make_data(rows), comm=comm, resume=point)
    return weights(plain), weights(watched), weights(resumed)


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
def test_stable_learning_rates_are_those_of_the_formula(momentum: float) -> None:
    """On (w x)^2 with x = 1, of curvature 2."""
    for factor, is_stable in ((0.95, True), (1.05, False)):
        net = nn.Linear(1, 1, bias=False, dtype=torch.float64)
        nn.init.ones_(net.weight)
        config = but(
            CONFIG,
            optimizer="sgd",
            optimizer_params={"momentum": momentum},
            learning_rate=factor * (1 - momentum) / 2,
            epochs=1,
            batch_size=1,
            divergence_factor=None,
        )
        columns = {"feature x": torch.ones(1000, 1).double(), "label y": torch.zeros(1000).double()}
        run(net, config, [ShardData("one", columns)])
        assert (net.weight.abs().item() < 1) == is_stable


def test_a_longer_run_continues_a_finished_one() -> None:
    straight, twice = make_net(), make_net()
    run(straight, CONFIG, make_data([13]))
    first = run(twice, but(CONFIG, epochs=1), make_data([13]))
    run(twice, CONFIG, make_data([13]), resume=first.final)
    assert torch.equal(weights(straight), weights(twice))


@pytest.mark.gang
def test_resumes_on_another_number_of_workers(gang: Gang) -> None:
    """The waiting gradients are the gang's, whoever applies them."""
    sink = Keeper(steps=(4,))
    run(make_net(), CONFIG, make_data([16]), sink=sink)
    point = sink.points[4]
    held = gang.run(resume_elsewhere, point.shared)
    assert torch.equal(held[0], held[1])
    net = make_net()
    net.load_state_dict(point.shared["model"])
    assert not torch.equal(held[0], weights(net))


def resume_elsewhere(comm: Any, shared: Any) -> torch.Tensor:
    from sparkdl.train.rank_state import ResumePoint

    net = make_net()
    point = ResumePoint(step=4, shared=shared, rank_state=None)
    run(net, but(CONFIG, max_steps=5), make_data([8, 8]), comm=comm, resume=point)
    return weights(net)


@pytest.mark.gang
def test_bytes_are_those_of_the_formula(gang: Gang) -> None:
    shapes = [tuple(p.shape) for p in make_net().parameters()]
    steps = 3 * 4
    expected = gradient_bytes(CONFIG.sync_strategy, shapes, 2) * steps
    assert [sent for _, _, sent in gang.run(train_on_rank, CONFIG, [16, 15])] == [expected] * 2


def test_what_does_not_go_together() -> None:
    with pytest.raises(ConfigError, match="loss scale"):
        CONFIG.sync_strategy.check(but(CONFIG, precision="fp16"), 2)
    CONFIG.sync_strategy.check(CONFIG, 2)
    assert CONFIG.sync_strategy.topology == "ring"
    with pytest.raises(ConfigError, match="while it is waited for"):
        AllReduce(double_buffering=True, topology="shared").check(CONFIG, 2)
    with pytest.raises(ConfigError, match="exclude each other"):
        AllReduce(double_buffering=True, num_backup_workers=1)
