from __future__ import annotations

from typing import Any

import pytest
import torch

from sparkdl.errors import ConfigError
from sparkdl.sync.averaging.diloco import DiLoCo
from tests.gang import Gang
from tests.sync.apart import ROWS, SGD, Replicas, assert_close, train_on_rank
from tests.train.runs import but

MOMENTUM = but(SGD, optimizer_params={"momentum": 0.9})
ADAM = but(SGD, optimizer="adam", learning_rate=0.01, epochs=2)


@pytest.mark.gang
@pytest.mark.parametrize("rows", [ROWS, [9, 0, 33]])
def test_follows_the_paper(gang3: Gang, rows: list[int]) -> None:
    """Douillard et al. 2023: Nesterov's momentum on the mean of what replicas have moved."""
    reference = Replicas(MOMENTUM, rows, momentum=0.9)
    begin, velocity = reference.x[0].clone(), torch.zeros_like(reference.x[0])
    for _ in range(3):
        for _ in range(3):
            reference.step()
        gradient = begin - reference.mean()
        velocity = 0.9 * velocity + gradient
        begin = begin - 0.7 * (gradient + 0.9 * velocity)
        reference.x[:] = begin
    config = but(MOMENTUM, sync_strategy=DiLoCo(averaging_period=3))
    for mine, _, _ in gang3.run(train_on_rank, config, rows):
        assert_close(mine, begin)


def test_mixing_is_half_where_steps_overlap() -> None:
    assert DiLoCo().kept == 0
    assert not DiLoCo().is_streaming
    assert DiLoCo(overlap_steps=1).kept == 0.5
    assert DiLoCo(overlap_steps=1, mixing=0.2).kept == 0.2
    assert DiLoCo(mixing=0.2).is_streaming


def test_it_needs_a_gang() -> None:
    assert DiLoCo().why_not_rounds() is not None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"averaging_period": 0}, "averaging_period"),
        ({"outer_optimizer": "sdg"}, "outer_optimizer"),
        ({"outer_params": {"betas": 1}}, "refused"),
        ({"outer_params": {"lr": 1.0}}, "outer_learning_rate instead"),
        ({"outer_learning_rate": 0.0}, "outer_learning_rate"),
        ({"num_fragments": 0}, "num_fragments"),
        ({"averaging_period": 3, "num_fragments": 4}, "at most one fragment"),
        ({"averaging_period": 3, "overlap_steps": 3}, "overlap_steps"),
        ({"overlap_steps": -1}, "overlap_steps"),
        ({"mixing": 1.0}, "never agree"),
    ],
)
def test_wrong_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DiLoCo(**options)
