"""Compiled layers of a divided module learn what others do."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from sparkdl.config import TrainConfig
from sparkdl.mesh import Mesh
from sparkdl.sync.divided.dividing import compiled_layers
from tests.gang import Gang
from tests.sync.divided.test_mesh_training import (
    BASE,
    Net,
    one_process,
    resume_on_rank,
    train_on_rank,
)


def test_what_is_compiled() -> None:
    net = Net()
    assert compiled_layers(net) == list(net.blocks)
    chain = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
    assert compiled_layers(chain) == [chain[0], chain[2]]


def assert_close(found: Any, expected: Any) -> None:
    for name, value in expected[0].items():
        torch.testing.assert_close(found[0][name], value, rtol=1e-9, atol=1e-9)
    for own, other in zip(found[1], expected[1], strict=True):
        assert own["val_loss"] == pytest.approx(other["val_loss"], rel=1e-9)


@pytest.mark.gang
@pytest.mark.slow
def test_blocks_along_shard(gang: Gang, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gang, "timeout_seconds", 300)
    config = TrainConfig(**BASE, parallelism=Mesh(shard=2, smallest_unit=1), compile=True)
    whole = gang.run(partial(train_on_rank, save_at=4), config)
    for found in whole:
        assert_close(found, one_process(dataclasses.replace(config, compile=False)))
    again = gang.run(resume_on_rank, config, [found[2][4] for found in whole])
    for own, other in zip(whole, again, strict=True):
        assert all(torch.equal(own[0][name], value) for name, value in other[0].items())
