from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from sparkdl.comm.compression.topk import TopKCompression, read, write
from sparkdl.config import TrainConfig
from sparkdl.errors import ConfigError
from tests.comm.compression.ranks import Threads, make, random_share

SHAPES = [(20, 30), (30,), (5, 8), ()]


@pytest.mark.parametrize(
    "options",
    [
        TopKCompression(density=0.05),
        TopKCompression(density=0.05, momentum=0.9),
        TopKCompression(density=0.05, momentum=0.5, clip_norm=3.0, warmup_steps=4),
    ],
    ids=["plain", "momentum", "all"],
)
@pytest.mark.parametrize("world_size", [1, 3])
def test_the_rule_of_the_paper(options: TopKCompression, world_size: int) -> None:
    ours = Threads(world_size).run(exchange_some, options)
    velocity = torch.zeros(world_size, 671, dtype=torch.float64)
    residual = torch.zeros_like(velocity)
    bias_velocity = torch.zeros(671, dtype=torch.float64)
    for step in range(6):
        expected = torch.zeros(671, dtype=torch.float64)
        biases = torch.zeros(671, dtype=torch.float64)
        for rank in range(world_size):
            share = ours[rank][0][step]
            for part in (slice(0, 600), slice(630, 670)):
                gradient = share[part]
                if options.clip_norm is not None:
                    limit = options.clip_norm / math.sqrt(world_size)
                    gradient = gradient * min(1.0, limit / gradient.norm().item())
                velocity[rank, part] = options.momentum * velocity[rank, part] + gradient
                residual[rank, part] += velocity[rank, part]
                waiting = residual[rank, part].abs()
                num_sent = max(1, round(options.density_at(step) * len(waiting)))
                sent = waiting >= waiting.sort(descending=True).values[num_sent - 1]
                expected[part] += residual[rank, part] * sent
                residual[rank, part] *= ~sent
                velocity[rank, part] *= ~sent
            for part in (slice(600, 630), slice(670, 671)):
                biases[part] += share[part]
        bias_velocity = options.momentum * bias_velocity + biases
        expected += bias_velocity
        torch.testing.assert_close(ours[0][1][step], expected, rtol=0, atol=1e-13)


def exchange_some(
    comm: Any, options: TopKCompression
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    compressor, numel = make(comm, options, SHAPES, torch.float64)
    shares, estimates = [], []
    for step in range(6):
        flat = random_share(comm, step, numel, torch.float64)
        shares.append(flat.clone())
        compressor.start(flat).wait()
        estimates.append(flat)
    return shares, estimates


def test_the_density_falls_to_its_value() -> None:
    options = TopKCompression(density=0.001, warmup_steps=8)
    found = [options.density_at(step) for step in (0, 1, 2, 4, 6, 7, 8, 100)]
    # Of the paper: 25, 6.25, 1.5625, 0.4 and 0.1 percent.
    assert found == pytest.approx([0.25, 0.25, 0.0625, 0.0156, 0.004, 0.004, 1e-3, 1e-3], rel=0.02)
    assert TopKCompression().density_at(0) == 0.001


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("num_sent", [1, 2, 5])
def test_messages(dtype: torch.dtype, num_sent: int) -> None:
    values = torch.arange(1.0, num_sent + 1).to(dtype)
    places = torch.arange(num_sent).mul_(1000)
    message = write(values, places)
    assert len(message) == -(-num_sent * (dtype.itemsize + 4) // 8) * 8
    found, where = read(message, dtype)
    assert torch.equal(found, values) and torch.equal(where.long(), places)


def test_bytes() -> None:
    # 64 of 6400 values with their places, and an all-reduce of ten biases.
    expected = 2 * 64 * 8 + 2 * 2 * 40 // 3
    assert TopKCompression(density=0.01).wire_bytes([(64, 100), (10,)], 4, 3) == expected


@pytest.mark.parametrize(
    "config",
    [
        TrainConfig(optimizer="SGD", optimizer_params={"momentum": 0.9}),
        TrainConfig(optimizer=torch.optim.SGD, optimizer_params={"momentum": 0.9}),
        TrainConfig(optimizer="adam"),
        TrainConfig(optimizer=torch.optim.AdamW),
        TrainConfig(optimizer="rmsprop", optimizer_params={"momentum": 0.1}),
    ],
    ids=lambda config: str(config.optimizer),
)
def test_two_momenta_are_refused(config: TrainConfig) -> None:
    with pytest.raises(ConfigError, match="twice"):
        TopKCompression(momentum=0.9).check(config, 2)
    TopKCompression().check(config, 2)


@pytest.mark.parametrize(
    "config",
    [
        TrainConfig(optimizer="sgd"),
        TrainConfig(optimizer="adam", optimizer_params={"betas": (0.0, 0.99)}),
        TrainConfig(optimizer="adagrad"),
        TrainConfig(optimizer=lambda parameters: torch.optim.SGD(parameters, 0.1)),
    ],
    ids=["sgd", "adam without", "adagrad", "callable"],
)
def test_one_momentum_is_not(config: TrainConfig) -> None:
    TopKCompression(momentum=0.9).check(config, 2)


@pytest.mark.parametrize(
    "options",
    [
        {"density": 0.0},
        {"density": 0.5},
        {"momentum": 1.0},
        {"momentum": -0.1},
        {"clip_norm": 0.0},
        {"clip_norm": math.inf},
        {"warmup_steps": -1},
    ],
)
def test_options(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        TopKCompression(**options)
