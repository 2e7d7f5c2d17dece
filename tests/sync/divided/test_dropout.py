"""Dropout between divided layers draws the numbers of one process."""

from __future__ import annotations

import dataclasses
import re
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from sparkdl.comm.communicator import Communicator, LocalCommunicator
from sparkdl.config import CUSTOM, TrainConfig
from sparkdl.errors import ConfigError
from sparkdl.mesh import Mesh
from sparkdl.models import LanguageModel
from tests.gang import Gang
from tests.sync.divided.test_mesh_training import BASE, assert_equal, train_on_rank
from tests.train.runs import NUM_FEATURES

pytestmark = pytest.mark.gang

HEADS = {"q|k|v": "columns", "out": "rows", "mlp.0": "columns", "mlp.3": "rows"}


class Attending(nn.Module):
    """Each number of a row is a place; Dropouts where values are whole, and where they are not."""

    def __init__(self, kind: type[nn.Module] = nn.Dropout) -> None:
        super().__init__()
        linear = partial(nn.Linear, dtype=torch.float64)
        self.into = linear(1, 8)
        self.q, self.k, self.v = (linear(8, 8, bias=False) for _ in range(3))
        self.out, self.weights = linear(8, 8), kind(0.3)
        self.mlp = nn.Sequential(linear(8, 6), nn.Tanh(), nn.Dropout(0.4), linear(6, 8))
        self.last, self.head = nn.Dropout(0.2), linear(8 * NUM_FEATURES, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.into(x.unflatten(-1, (NUM_FEATURES, 1)))
        q, k, v = (
            layer(x).unflatten(-1, (-1, 2)).transpose(1, 2) for layer in (self.q, self.k, self.v)
        )
        weights = self.weights((q @ k.transpose(2, 3)).softmax(3))
        x = x + self.out((weights @ v).transpose(1, 2).flatten(2))
        return self.head(self.last(x + self.mlp(x)).flatten(1))


def train_attending(comm: Communicator, config: TrainConfig) -> Any:
    return train_on_rank(comm, config, make=Attending)


def train_writing(comm: Communicator, config: TrainConfig) -> Any:
    make = partial(
        LanguageModel, num_tokens=11, max_length=8, width=12, num_heads=2, feedforward=14,
        dropout=0.2,
    )  # fmt: skip
    return train_on_rank(comm, config, make=make)


@pytest.mark.parametrize("again", [False, True])
def test_masks_along_tensor_are_those_of_one_process(gang: Gang, again: bool) -> None:
    mesh = Mesh(tensor=2, layout=HEADS)
    config = TrainConfig(**BASE, parallelism=mesh, gradient_accumulation_steps=2)
    alone = dataclasses.replace(config, parallelism=None)
    expected = train_attending(LocalCommunicator(), alone)
    if again:
        config = dataclasses.replace(
            config, parallelism=dataclasses.replace(mesh, activation_checkpointing=True)
        )
    for found in gang.run(train_attending, config):
        assert_equal(found, expected)


def test_a_language_model_drops_the_same_along_tensor(gang: Gang) -> None:
    config = TrainConfig(**{**BASE, "loss": "cross_entropy", "task": CUSTOM, "epochs": 2})
    expected = train_writing(LocalCommunicator(), config)
    along = dataclasses.replace(config, parallelism=Mesh(tensor=2))
    for found in gang.run(train_writing, along):
        assert_equal(found, expected)


def test_masks_along_shard_are_those_of_workers_with_whole_models(gang: Gang) -> None:
    config = TrainConfig(**BASE)
    along = dataclasses.replace(config, parallelism=Mesh(shard=2, smallest_unit=1))
    expected = gang.run(train_attending, config)[0]
    for found in gang.run(train_attending, along):
        assert_equal(found, expected)


def test_what_draws_otherwise_is_refused_between_divided_layers(gang: Gang) -> None:
    config = TrainConfig(**BASE, parallelism=Mesh(tensor=2, layout=HEADS))
    for error in gang.run(error_on_rank, config):
        assert re.search("'weights', a AlphaDropout, .* use nn.Dropout", error), error


def error_on_rank(comm: Communicator, config: TrainConfig) -> str:
    try:
        train_on_rank(comm, config, make=partial(Attending, nn.AlphaDropout))
    except ConfigError as error:
        return str(error)
    return "no error"
