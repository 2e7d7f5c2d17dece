from __future__ import annotations

from typing import Any

import pytest
import torch

from sparkdl.errors import ConfigError
from sparkdl.sync.averaging.block_momentum import BlockMomentum
from tests.gang import Gang
from tests.sync.apart import ROWS, SGD, Replicas, assert_close, train_on_rank
from tests.train.runs import but

MOMENTUM = but(SGD, optimizer_params={"momentum": 0.9})


@pytest.mark.gang
@pytest.mark.parametrize("rows", [ROWS, [9, 0, 33]])
@pytest.mark.parametrize(
    ("options", "block_momentum", "block_learning_rate", "nesterov"),
    [
        ({}, 2 / 3, 1.0, True),
        ({"block_momentum": 0.4, "block_learning_rate": 0.8}, 0.4, 0.8, True),
        ({"nesterov": False}, 2 / 3, 1.0, False),
    ],
)
def test_follows_the_paper(
    gang3: Gang,
    rows: list[int],
    options: dict[str, Any],
    block_momentum: float,
    block_learning_rate: float,
    nesterov: bool,
) -> None:
    """Chen & Huo 2016: W(t), its update D(t), and Wg(t), from which the next block begins."""
    reference = Replicas(MOMENTUM, rows, momentum=0.9)
    w = reference.x[0].clone()
    begin, update = w, torch.zeros_like(w)
    for _ in range(3):
        for _ in range(3):
            reference.step()
        gain = reference.mean() - begin
        update = block_momentum * update + block_learning_rate * gain
        w = w + update
        begin = w + block_momentum * update if nesterov else w
        reference.x[:] = begin
        reference.velocity.zero_()
    strategy = BlockMomentum(averaging_period=3, **options)
    for mine, _, _ in gang3.run(train_on_rank, but(MOMENTUM, sync_strategy=strategy), rows):
        assert_close(mine, begin)


def test_default_momentum_follows_from_the_number_of_replicas() -> None:
    """So that momentum alone makes up for the division by the number of replicas."""
    rule = BlockMomentum(nesterov=False).make_outer(4)
    anchor = torch.zeros(1, dtype=torch.float64)
    for _ in range(200):
        mean = anchor + 1
        rule.step([anchor], [mean], 0.1)
        step, anchor = mean - anchor, mean
    assert step.item() == pytest.approx(4)


@pytest.mark.parametrize(
    "options",
    [
        {"averaging_period": 0},
        {"block_momentum": 1.0},
        {"block_momentum": -0.1},
        {"block_learning_rate": 0.0},
        {"optimizer_state": "drop"},
    ],
)
def test_wrong_options(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        BlockMomentum(**options)
