"""Attributes that are one object, or that show a weight's memory, stay so on all ways."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import torch
from torch import nn

from sparkdl.serialization.travel.attributes import Attributes, come_back
from sparkdl.serialization.travel.packed_module import pack, travelled, unpack
from sparkdl.storage.tensor_tree import snapshot
from sparkdl.storage.tensor_tree import unpack as tree_of


class Net(nn.Module):
    table: torch.Tensor

    pair: Any

    def __init__(self) -> None:
        super().__init__()
        self.layer: Any = nn.Linear(2, 2)
        self.other: Any = nn.Linear(2, 2)
        self.seen: Any = [0]  # type: ignore[assignment]
        self.other.seen = self.seen
        self.pair = [self.seen, ({"bias": self.layer.bias}, self.seen)]
        self.row = self.layer.weight.detach()[1]
        self.turned = self.layer.weight.detach().numpy()[::-1]
        numbers = np.arange(4.0)
        self.register_buffer("table", torch.from_numpy(numbers))
        self.numbers = numbers
        self.mean = torch.zeros(3)
        self.last = {"of": self.mean[2:], "all": self.mean.numpy()}

    def train_a_step(self) -> None:
        with torch.no_grad():
            for tensor in (*self.parameters(), self.table, self.mean):
                tensor += 1
        self.seen.append(1)


def assert_is_whole(net: Any, steps: int) -> None:
    """As a module that never left: each change is seen wherever it was before."""
    weight, bias = net.layer.weight.detach(), net.layer.bias
    assert net.seen == [0] + [1] * steps
    assert net.mean.tolist() == [steps] * 3 and net.last["of"].tolist() == [steps]
    assert net.pair[0] is net.other.seen is net.pair[1][1] is net.seen
    assert net.pair[1][0]["bias"] is bias
    for value in (net.layer.weight, net.table, net.mean):
        with torch.no_grad():
            value.mul_(3)
    assert torch.equal(net.row, weight[1])
    assert np.array_equal(net.turned, weight.flip(0).numpy())
    assert np.array_equal(net.numbers, net.table.numpy())
    assert net.last["of"].tolist() == net.last["all"][2:].tolist() == [3 * steps]
    for value in (net.layer.weight, net.table, net.mean):
        with torch.no_grad():
            value.div_(3)


def resumed(net: nn.Module, held: Attributes, trained: nn.Module) -> Any:
    """As a checkpoint or a round has it: all of it is JSON and tensors on the way."""
    tree = snapshot(held.state_dict())
    state: Any = tree_of(tree.value, tree.tensors)
    assert state["lacks"] == []
    found = travelled(net, copies=True)
    again = Attributes(found, resets=True)
    again.load_state_dict(state)
    found.load_state_dict(trained.state_dict())
    return found, again


def test_they_arrive_at_workers_as_they_were() -> None:
    net = Net()
    assert_is_whole(net, 0)
    assert_is_whole(travelled(net, copies=True), 0)
    packed = pack(net)
    arrived: Any = unpack(packed.skeleton, packed.tensors)
    arrived.train_a_step()
    assert_is_whole(arrived, 1)


def test_they_come_back_as_they_are() -> None:
    net = Net()
    trained: Any = travelled(net, copies=True)
    held = Attributes(trained)
    trained.train_a_step()
    trained.new, trained.array = trained.layer.weight.detach()[0], trained.row.numpy()
    trained.alias = trained.other.seen
    packed = pickle.loads(pickle.dumps(held.packed()))
    back: Any = come_back(net, packed)
    back.load_state_dict(trained.state_dict())
    assert_is_whole(back, 1)
    assert torch.equal(back.new, back.layer.weight[0])
    assert np.shares_memory(back.array, back.row.numpy())
    assert back.alias is back.seen


def test_what_shares_an_object_with_a_new_attribute_still_does() -> None:
    net: Any = Net()
    net.seen = net.pair = None
    trained: Any = travelled(net, copies=True)
    held = Attributes(trained)
    trained.alias = trained.other.seen
    come_back(net, pickle.loads(pickle.dumps(held.packed())))
    assert net.alias is net.other.seen


def test_they_are_so_in_rounds_and_after_a_resume() -> None:
    net = Net()
    trained: Any = travelled(net, copies=True)
    held = Attributes(trained, resets=True)
    trained.train_a_step()
    trained.new, trained.arrays = [trained.layer.weight.detach()[0]], {"row": trained.row.numpy()}
    trained.same = trained.numbers
    found, again = resumed(net, held, trained)
    for steps in (1, 2):
        assert_is_whole(found, steps)
        assert torch.equal(found.new[0], found.layer.weight[0])
        assert np.array_equal(found.arrays["row"], found.layer.weight[1].detach().numpy())
        assert found.same is found.numbers
        found.train_a_step()
    again.load_state_dict(None)
    found.load_state_dict(net.state_dict())
    assert_is_whole(found, 0)
    assert not hasattr(found, "new")
