"""Values between the layers of a stack are divided along the sequence, and nothing else changes."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from sparkdl.comm.communicator import Communicator
from sparkdl.config import CUSTOM, TrainConfig
from sparkdl.errors import ConfigError
from sparkdl.mesh import Mesh
from sparkdl.models import LanguageModel
from sparkdl.sync.divided.dividing import divide
from sparkdl.sync.divided.layout import divided_layers
from sparkdl.sync.divided.mesh_ranks import MeshRanks
from tests.gang import Gang
from tests.sync.divided.test_mesh_training import BASE, alone_with, assert_equal, train_made

LAYOUT = {
    "*.attention.q|k|v": "columns", "*.attention.out": "rows", "*.mlp.0": "columns",
    "*.mlp.2": "rows",
}  # fmt: skip
SEQUENCE = {**LAYOUT, "blocks": "sequence"}
MESH = Mesh(tensor=2, layout=SEQUENCE)
TEXT = {
    **BASE, "loss": "cross_entropy", "task": CUSTOM, "gradient_clip_norm": 0.5, "epochs": 2,
}  # fmt: skip


def make(dropout: float = 0.0, num_layers: int = 2) -> LanguageModel:
    return LanguageModel(num_tokens=12, max_length=8, width=12, num_heads=2, feedforward=14,
                         num_layers=num_layers, dropout=dropout)  # fmt: skip


@pytest.mark.gang
@pytest.mark.parametrize("dropout", [0.0, pytest.param(0.3, marks=pytest.mark.slow)])
def test_a_language_model_learns_what_one_process_learns(gang: Gang, dropout: float) -> None:
    config = TrainConfig(**TEXT, parallelism=MESH)
    expected = alone_with(config, partial(make, dropout))
    for found in gang.run(train_made, config, partial(make, dropout)):
        assert_equal(found, expected)


@pytest.mark.gang
@pytest.mark.slow
def test_beside_another_axis(gang4: Gang) -> None:
    text = {**TEXT, "epochs": 1}
    expected = alone_with(TrainConfig(**text), make)
    for more in (
        {"shard": 2, "smallest_unit": 1},
        {"shard": 2, "activation_checkpointing": True},
        {"data": 2},
    ):
        config = TrainConfig(**text, parallelism=Mesh(tensor=2, layout=SEQUENCE, **more))
        for found in gang4.run(train_made, config, make):
            assert_equal(found, expected)


def kept_bytes(comm: Communicator, mesh: Mesh) -> int:
    """What a rank keeps of a forward pass for the backward pass, besides parameters."""
    net = make(num_layers=4)
    divide(net, MeshRanks.of(mesh, comm, torch.device("cpu")))
    parameters = {id(getattr(p, "_local_tensor", p).untyped_storage()) for p in net.parameters()}
    found: dict[int, int] = {}

    def keep(value: Any) -> Any:
        storage = getattr(value, "_local_tensor", value).untyped_storage()
        if id(storage) not in parameters:
            found[storage.data_ptr()] = storage.nbytes()
        return value

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda value: value):
        kept = net(torch.zeros(64, 8, dtype=torch.long))
    assert kept.requires_grad
    return sum(found.values())


@pytest.mark.gang
def test_less_is_kept_for_the_backward_pass(gang: Gang) -> None:
    whole = max(gang.run(kept_bytes, Mesh(tensor=2, layout=LAYOUT)))
    part = max(gang.run(kept_bytes, MESH))
    assert part < 0.9 * whole


def positions() -> nn.Module:
    """Layers that are not of the kinds that can have a part of the sequence."""
    return nn.ModuleDict({"blocks": nn.Sequential(nn.Linear(4, 4), nn.PReLU(), nn.Linear(4, 4))})


def nested() -> nn.Module:
    return nn.ModuleDict({"blocks": nn.Sequential(nn.Sequential(nn.LayerNorm(4)))})


@pytest.mark.parametrize(
    ("net", "layout", "remedy"),
    [
        (make, {"block": "sequence"}, "no nn.ModuleList .* fits 'block' .*did you mean 'blocks'"),
        (make, {"blocks": "sequence"}, r"in it 'blocks.0.attention.q', a Linear, is neither"),
        (positions, {"*.0": "columns", "*.2": "rows", "blocks": "sequence"}, "'blocks.1', a PReLU"),
        (nested, {"blocks*": "sequence"}, "'blocks.0' by sequence, and 'blocks', which it is part"),
    ],
)
def test_what_cannot_be_divided_so_is_refused(
    net: Callable[[], nn.Module], layout: Any, remedy: str
) -> None:
    with pytest.raises(ConfigError, match=remedy):
        divided_layers(Mesh(tensor=2, layout=layout), net())


def test_a_pipeline_sends_whole_values() -> None:
    with pytest.raises(ConfigError, match="leave 'sequence' out"):
        Mesh(tensor=2, pipeline=2, layout=SEQUENCE)


class Shortened(LanguageModel):
    """Looks at all but the last token."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        short = super().forward(tokens[:, :-1])
        return torch.cat([short, short[..., -1:]], dim=-1)


def shortened() -> nn.Module:
    return Shortened(num_tokens=12, max_length=8, width=12, num_heads=2, feedforward=14)


class Averaged(LanguageModel):
    """Has an operation on the whole sequence between the layers."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        states = self.embedding(tokens)
        for block in self.blocks:
            states = block(states - states.mean(1, keepdim=True))
        logits: torch.Tensor = self.head(self.norm(states))
        return logits.transpose(1, 2)


def averaged() -> nn.Module:
    return Averaged(num_tokens=12, max_length=8, width=12, num_heads=2, feedforward=14)


class ByKeyword(LanguageModel):
    """Calls a layer by keyword, which torch does not expect of a divided one."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(input=self.embedding(tokens))
        return logits.transpose(1, 2)


def by_keyword() -> nn.Module:
    return ByKeyword(num_tokens=12, max_length=8, width=12, num_heads=2, feedforward=14)


@pytest.mark.gang
@pytest.mark.parametrize(
    ("net", "layout", "told"),
    [
        (shortened, SEQUENCE, "of the length 7, which tensor=2"),
        (averaged, SEQUENCE, "computes something else"),
        (by_keyword, {"head": "gathered"}, "'head' of the layout is called by keyword"),
        (make, {"*.0.mlp.0": "columns"}, "the layer 'blocks.0.mlp.2' cannot compute with this"),
    ],
)
def test_what_the_workers_cannot_compute_so_ends_before_the_first_step(
    gang: Gang, net: Callable[[], nn.Module], layout: Any, told: str
) -> None:
    mesh = Mesh(tensor=2, layout=layout)
    for error in gang.run(error_with, TrainConfig(**TEXT, parallelism=mesh), net):
        assert re.search(told, error), error


def error_with(comm: Communicator, config: TrainConfig, net: Callable[[], nn.Module]) -> str:
    """Both ranks fail alike, so the gang is as good as before."""
    try:
        train_made(comm, config, net)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"
