"""A module that uses a layer's parameters around the layer is refused along a mesh."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from sparkdl.errors import ConfigError
from sparkdl.mesh import Mesh
from sparkdl.sync.divided.outside_uses import OutsideUses

SHARD = Mesh(shard=2, smallest_unit=1)


class Around(nn.Module):
    """Uses the weight of its first layer once more."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.first.weight.shape == (4, 4)
        return F.linear(self.last(self.first(x)), self.first.weight)


class Tied(Around):
    """Has a layer for that."""

    def __init__(self) -> None:
        super().__init__()
        self.again = nn.Linear(4, 4, bias=False)
        self.again.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.again(self.last(self.first(x)))


def used(make: Callable[[], nn.Module], mesh: Mesh, *inputs: torch.Tensor) -> None:
    module = make().eval()
    uses = OutsideUses(module, mesh)
    with torch.no_grad(), uses:
        module(*inputs)
    assert not any(part._forward_pre_hooks or part._forward_hooks for part in module.modules())
    uses.check()


class Freezing(Around):
    """Lets a layer train by turns, within forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.first.weight.requires_grad_(False)
        return self.last(self.first(x))


@pytest.mark.parametrize("mesh", [SHARD, Mesh(shard=2)], ids=str)
def test_a_parameter_that_is_frozen_within_forward(mesh: Mesh) -> None:
    with pytest.raises(ConfigError, match=r"requires_grad of 'first.weight' is set .* a callback"):
        used(Freezing, mesh, torch.ones(2, 4))


@pytest.mark.parametrize("mesh", [SHARD, Mesh(tensor=2, layout={"first": "gathered"})], ids=str)
def test_a_use_outside_the_layer(mesh: Mesh) -> None:
    x = torch.ones(2, 4)
    with pytest.raises(
        ConfigError, match=r"linear uses 'first.weight' outside .* call 'first' its"
    ):
        used(Around, mesh, x)
    used(Around, Mesh(data=2, shard_optimizer=True), x)
    used(Around, Mesh(shard=2), x)  # the module is gathered as a whole
    used(Tied, SHARD, x)


def test_torchs_own_layers() -> None:
    def encoder() -> nn.Module:
        return nn.TransformerEncoderLayer(4, 2, 6, batch_first=True)

    def attention() -> nn.Module:
        return nn.ModuleList([nn.MultiheadAttention(4, 2)])[0]

    def normed() -> nn.Module:
        return nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), nn.ReLU())

    x = torch.ones(2, 3, 4)
    used(encoder, Mesh(tensor=2, layout={"linear1": "columns", "linear2": "rows"}), x)
    used(normed, SHARD, x)
    with pytest.raises(ConfigError, match=r"forward uses 'out_proj.weight' outside"):
        used(attention, Mesh(tensor=2, layout={"out_proj": "rows"}), x, x, x)
