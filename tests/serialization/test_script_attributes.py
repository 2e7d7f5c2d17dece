"""What scripted and compiled layers keep in attributes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from sparkdl.serialization.travel.attributes import Attributes
from sparkdl.storage.tensor_tree import snapshot
from sparkdl.storage.tensor_tree import unpack as tree_of

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.*` is deprecated:DeprecationWarning")


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.number = 0
        self.seen = [0]
        self.mean = torch.zeros(2)
        self.last = {"of": 0.0}
        self.register_buffer("table", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.number += 1
        self.seen.append(self.number)
        self.mean = self.mean + 1
        self.last["of"] = float(self.number)
        return self.layer(x) + self.mean


class Net(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner: Any = inner
        self.out = nn.Linear(2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.inner(x))


def train_a_step(net: nn.Module) -> None:
    net.eval()
    net.train()
    net(torch.ones(3, 2)).sum().backward()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter += 1


def kept(inner: Any) -> list[Any]:
    return [inner.number, list(inner.seen), inner.mean.tolist(), dict(inner.last)]


def test_what_a_script_counts_goes_on() -> None:
    net = Net(torch.jit.script(Counting()))
    held = Attributes(net, resets=True)
    for _ in range(2):
        train_a_step(net)
    tree = snapshot(held.state_dict())
    state: Any = tree_of(tree.value, tree.tensors)
    assert state["lacks"] == state["layers"] == []

    held.load_state_dict(None)
    assert kept(net.inner) == [0, [0], [0, 0], {"of": 0}]
    held.load_state_dict(state)
    assert kept(net.inner) == [2, [0, 1, 2], [2, 2], {"of": 2}]
    assert net(torch.ones(1, 2)).shape == (1, 1) and net.inner.number == 3


@pytest.mark.parametrize(
    "way",
    [
        "traced",
        pytest.param("compiled", marks=pytest.mark.slow),  # imports torch's compiler
        pytest.param("compiled forward", marks=pytest.mark.slow),
    ],
)
def test_numbers_that_train_are_no_attributes(way: str) -> None:
    inner: Any = nn.Linear(2, 2)
    if way == "traced":
        inner = torch.jit.trace(inner, torch.zeros(3, 2))
    elif way == "compiled":
        inner = torch.compile(inner, backend="eager")
    else:
        inner.compile(backend="eager")
    net = Net(inner)
    held = Attributes(net)
    train_a_step(net)
    state = held.state_dict()
    assert not any(state["values"].values()) and state["lacks"] == state["layers"] == []
