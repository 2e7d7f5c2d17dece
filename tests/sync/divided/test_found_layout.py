"""Which layers are divided without a layout of the user's, and that results stay the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from sparkdl.comm.communicator import Communicator
from sparkdl.errors import ConfigError
from sparkdl.mesh import Mesh
from sparkdl.models import (
    MLP,
    CifarResNet,
    LanguageModel,
    SequenceToSequence,
    TransformerNet,
)
from sparkdl.sync.divided.dividing import divide
from sparkdl.sync.divided.layout import divided_layers
from sparkdl.sync.divided.mesh_ranks import MeshRanks
from tests.gang import Gang

PAIR = {"0": "columns", "2": "rows"}
softmax, first = nn.Softmax(-1), nn.Linear(4, 4)
tied = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
tied[2].weight = tied[0].weight


def chain(between: nn.Module, hidden: int = 6) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, hidden), between, nn.Linear(hidden, 3))


class Own(nn.Sequential):
    tensor_layout: ClassVar = {"0": "columns", "2": "rows"}


def test_chains_are_paired() -> None:
    mesh = Mesh(tensor=2)
    assert divided_layers(mesh, chain(nn.GELU()).eval()) == PAIR
    assert divided_layers(mesh, nn.Sequential(*chain(nn.Tanh()), nn.LayerNorm(3))) == PAIR
    deep = nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 8), nn.Dropout(), nn.Linear(8, 50))
    assert divided_layers(mesh, deep) == {"1": "columns", "3": "rows"}  # most of the weights
    own = nn.ModuleDict({"a": Own(*chain(nn.Softplus())), "b": chain(nn.Softmax(-1))})
    assert divided_layers(mesh, own) == {"a.0": "columns", "a.2": "rows"}
    assert divided_layers(Mesh(), own) == {}
    net = LanguageModel(width=12, num_heads=3, feedforward=14)
    assert net.tensor_layout(2) == {"blocks.*.mlp.0": "columns", "blocks.*.mlp.2": "rows"}


@pytest.mark.parametrize(
    "net",
    [
        nn.Linear(4, 4), chain(nn.LayerNorm(6)), chain(nn.Softmax(-1)), chain(nn.PReLU()),
        chain(nn.ReLU(inplace=True)), chain(nn.Tanh(), 7), tied,
        nn.Sequential(first, nn.Tanh(), first), nn.Conv2d(1, 1, 1),
        nn.Sequential(nn.Linear(4, 4), softmax, nn.Linear(4, 4), softmax, nn.Linear(4, 4)),
    ],
    ids=repr,
)  # fmt: skip
def test_what_cannot_be_divided_is_refused(net: nn.Module) -> None:
    with pytest.raises(ConfigError, match=r"nothing is found in .* can divide"):
        divided_layers(Mesh(tensor=2), net)


def sequences() -> dict[str, torch.Tensor]:
    return {"source": torch.arange(10).view(2, 5), "target": torch.arange(8).view(2, 4)}


def residual(*, is_bottleneck: bool) -> nn.Module:
    net = CifarResNet(blocks=(1, 2), width=2, in_channels=1, is_bottleneck=is_bottleneck)
    for part in net.modules():
        if isinstance(part, nn.BatchNorm2d):  # else blocks begin as their shortcuts
            nn.init.uniform_(part.weight, 0.5, 1.5)
    return net


IMAGES = {"images": torch.arange(128.0).cos().view(2, 1, 8, 8).double()}
SIZES = {"num_tokens": 11, "width": 12, "num_heads": 2, "feedforward": 14}
NETS: dict[str, tuple[Callable[[], nn.Module], dict[str, torch.Tensor]]] = {
    "chain": (lambda: chain(nn.Tanh()), {"input": torch.ones(3, 4).cumsum(0).double()}),
    "mlp": (lambda: MLP(sizes=(4, 6, 8, 10), num_outputs=3), {"features": torch.eye(4)}),
    "language": (lambda: LanguageModel(**SIZES), {"tokens": torch.arange(10).view(2, 5)}),
    "both": (lambda: SequenceToSequence(**SIZES), sequences()),
    "encoder": (lambda: TransformerNet(num_outputs=2, dropout=0.0, **SIZES),
                {"values": torch.arange(10).view(2, 5), "mask": torch.ones(2, 5).bool()}),
    "residual": (lambda: residual(is_bottleneck=False), IMAGES),
    "bottleneck": (lambda: residual(is_bottleneck=True), IMAGES),
}  # fmt: skip


def computed(comm: Communicator | None, name: str) -> list[torch.Tensor]:
    """Outputs, then gradients."""
    torch.manual_seed(0)
    make, inputs = NETS[name]
    net = make().double()
    if comm is not None:
        divide(net, MeshRanks.of(Mesh(tensor=2), comm, torch.device("cpu")))
        assert any(isinstance(parameter, DTensor) for parameter in net.parameters())
    outputs = net(**inputs)
    outputs.square().sum().backward()
    grads = [p.grad for p in net.parameters() if p.grad is not None]
    whole = [grad.full_tensor() if isinstance(grad, DTensor) else grad for grad in grads]
    return [outputs.detach(), *whole]


@pytest.mark.gang
@pytest.mark.parametrize("name", NETS)
def test_two_ranks_compute_what_one_process_computes(gang: Gang, name: str) -> None:
    expected = computed(None, name)
    for found in gang.run(computed, name):
        for own, other in zip(found, expected, strict=True):
            assert torch.allclose(own, other, rtol=1e-12, atol=1e-12)


def test_a_layout_to_paste_is_told_where_a_chain_has_a_forward_of_its_own() -> None:
    class Own(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = super().forward(x)
            return found

    net = Own(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    with pytest.raises(ConfigError, match=r"set layout=\{'0': 'columns', '2': 'rows'\}; its"):
        divided_layers(Mesh(tensor=2), net)
    assert divided_layers(Mesh(tensor=2, layout={"0": "columns", "2": "rows"}), net)
