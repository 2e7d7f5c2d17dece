"""Which layers of a module are computed again in the backward pass, and what that keeps."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sparkdl.comm.communicator import LocalCommunicator
from sparkdl.mesh import Mesh
from sparkdl.sync.divided.dividing import divide, recomputed
from sparkdl.sync.divided.mesh_ranks import MeshRanks


def block(*layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 6), *layers, nn.Linear(6, 6))


class Net(nn.Module):
    """Two blocks in a list, one of which has a BatchNorm, and a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Deep(block(nn.Tanh(), nn.Dropout(0.5))),
                                     Deep(block(nn.BatchNorm1d(6)))])  # fmt: skip
        self.head = nn.Linear(6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.blocks:
            x = part(x)
        return self.head(x)


class Deep(nn.Module):
    """Counts how often it computes."""

    def __init__(self, within: nn.Module) -> None:
        super().__init__()
        self.within = within
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.within(x)


def gradients(net: nn.Module) -> list[torch.Tensor]:
    torch.manual_seed(3)
    net(torch.randn(8, 6)).square().sum().backward()
    return [parameter.grad for parameter in net.parameters() if parameter.grad is not None]


def test_a_layer_without_layers_or_with_a_batch_norm_is_not_computed_again() -> None:
    net = Net()
    assert recomputed(net) == [net.blocks[0]]
    assert not recomputed(nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 1)))


@pytest.mark.parametrize("again", [True, False])
def test_what_is_computed_again_draws_the_same_numbers(again: bool) -> None:
    torch.manual_seed(0)
    net, other = Net(), Net()
    other.load_state_dict(net.state_dict())
    mesh = Mesh(activation_checkpointing=again)
    divide(net, MeshRanks.of(mesh, LocalCommunicator(), torch.device("cpu")))
    for own, expected in zip(gradients(net), gradients(other), strict=True):
        assert torch.equal(own, expected)
    assert [part.calls for part in net.blocks] == [1 + again, 1]
    for own, expected in zip(net.buffers(), other.buffers(), strict=True):
        assert torch.equal(own, expected)
