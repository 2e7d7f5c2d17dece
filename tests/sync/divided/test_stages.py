"""Where a module is cut into stages, what belongs to each, and what cannot be cut."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from sparkdl.data.collate import Arguments
from sparkdl.errors import ConfigError
from sparkdl.mesh import Mesh
from sparkdl.models import LanguageModel, SequenceToSequence, TransformerNet
from sparkdl.sync.divided.pipeline import _Known
from sparkdl.sync.divided.stages import Skeleton, Stages, cut_layers

CPU = torch.device("cpu")


class Net(nn.Module):
    """An encoder of four layers between others, and a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(3, 4)
        self.shift = nn.Parameter(torch.zeros(4))
        self.encoder = nn.Module()
        self.encoder.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.out = nn.Linear(4, 2)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = (x.sum(1, keepdim=True) > -1).to(x.dtype)
        x = self.into(x) + self.shift
        for layer in self.encoder.layers:
            x = torch.tanh(layer(x)) * mask
        return self.out(x)


class Skipping(nn.Module):
    """What its first layer gives goes round the second."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.layers[0](x)
        return self.layers[2](self.layers[1](first)) + first


class Asking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](x)
        return self.layers[1](x if x.sum() > 0 else -x)


def stages_of(net: nn.Module, mesh: Mesh, *inputs: torch.Tensor, **named: torch.Tensor) -> Stages:
    names = (*(None for _ in inputs), *named)
    example = Arguments((*inputs, *named.values()), names)
    return Skeleton(net, CPU).stages(example, cut_layers(mesh, net))


def test_layers_belong_to_the_stage_that_calls_them() -> None:
    mesh = Mesh(pipeline=2, stages=["encoder.layers.0-1", "encoder.layers.2|3"])
    found = stages_of(Net(), mesh, torch.zeros(2, 3))
    assert found.cuts == ("encoder.layers.2",)
    later = {"encoder.layers.2", "encoder.layers.3", "out"}
    assert {name for name, stage in found.layers.items() if stage == 1} == later
    first = {name for name, stage in found.owners.items() if stage == 0}
    assert {"shift", "into.weight", "encoder.layers.1.bias"} <= first
    assert not any(name.startswith(("out", "encoder.layers.3")) for name in first)
    assert (found.owner_of("encoder.layers.3.running"), found.owner_of("seen")) == (1, 0)


def test_a_list_of_layers_is_cut_into_stages_of_nearly_equal_weight() -> None:
    assert cut_layers(Mesh(pipeline=4), Net()) == tuple(f"encoder.layers.{n}" for n in (1, 2, 3))
    heavy = nn.Sequential(nn.Linear(100, 100), *(nn.Linear(100, 100) for _ in range(3)))
    heavy[0] = nn.Linear(300, 100)
    assert cut_layers(Mesh(pipeline=2), heavy) == ("1",)
    two = Mesh(pipeline=2, schedule="interleaved")
    assert cut_layers(two, nn.Sequential(*(nn.Linear(2, 2) for _ in range(8)))) == ("2", "4", "6")


def test_what_is_sent_has_the_shapes_of_these_inputs_and_no_more() -> None:
    net = SequenceToSequence(num_tokens=11, width=12, num_heads=2, feedforward=14)
    cuts = cut_layers(Mesh(pipeline=2), net)
    named = {"source": torch.zeros(3, 5).long(), "target": torch.zeros(3, 4).long()}
    example = Arguments(tuple(named.values()), tuple(named))
    (sent,) = Skeleton(net, CPU).sent(example, cuts)
    shapes = [tuple(value.shape) for value in sent.shapes]
    assert (3, 5, 12) in shapes  # what the decoder looks at, where it is cut in the decoder
    tokens, mask = torch.zeros(2, 6).long(), torch.ones(2, 6).bool()
    others: list[tuple[nn.Module, tuple[torch.Tensor, ...], int]] = [
        (TransformerNet(num_tokens=9, num_outputs=2, width=8), (tokens, mask), 7),
        (LanguageModel(width=8, num_heads=2), (tokens,), 6),
    ]
    for other, inputs, length in others:  # the mask follows from the inputs, which all stages have
        cut = cut_layers(Mesh(pipeline=2), other)
        (sent,) = Skeleton(other, CPU).sent(Arguments(inputs), cut)
        assert [tuple(value.shape) for value in sent.shapes] == [(2, length, 8)]


class Counting(nn.Module):
    """Changes a buffer, a parameter or an attribute: in place, or by another one, or none."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("seen", torch.zeros(3))
        self.steps, self.kept = 0, list[torch.Tensor]()
        self.notes = {"steps": SimpleNamespace(number=0)}
        self.others = [nn.Module()]
        self.others[0].register_buffer("running", torch.ones(3))
        self.shape, self.place = (CPU, torch.Size([3])), CPU
        self.logger = logging.getLogger(__name__)
        self.how = how
        self.eval()  # as many come that were trained before

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "add":
            self.count += 1
        elif self.how == "copy":
            self.seen.copy_(x[0])
        elif self.how == "item":
            self.seen[0] = x[0, 0]
        elif self.how == "replace":
            self.seen = 0.9 * self.seen + x.mean(0)
        elif self.how == "step":
            self.steps += 1
        elif self.how == "keep":
            self.kept.append(x)
        elif self.how == "count":
            self.notes["steps"].number += 1
        elif self.how == "listed":
            self.others[0].running.mul_(0.9)
        elif self.how == "train" and self.training:
            self.count += 1
        elif self.how == "normalize":
            x = nn.functional.batch_norm(x, None, None, training=self.training)
        elif self.how == "teach":
            torch._foreach_mul_([self.layers[1].bias], 0.9)
        elif self.how == "differentiate":
            with torch.enable_grad():
                x = x.detach().requires_grad_()
                (x,) = torch.autograd.grad(x.square().sum(), x)
        else:
            logging.getLogger(f"{__name__}.{id(self)}").debug("forgets which levels are on")
            self.shape, self.place = (x.device, x.shape[1:]), x.device
            x = x + self.seen.add(self.count)
        found: torch.Tensor = self.layers[1](self.layers[0](x))
        return found


@pytest.mark.parametrize(
    ("how", "name"),
    [
        ("add", "count"), ("copy", "seen"), ("item", "seen"), ("replace", "seen"), ("read", None),
        ("teach", "layers.1.bias"), ("step", "steps"), ("keep", "kept"), ("train", "count"),
        ("count", "notes"), ("listed", "others"),
    ],
)  # fmt: skip
def test_a_module_that_changes_what_it_holds_has_no_stages(how: str, name: str | None) -> None:
    mesh, x = Mesh(pipeline=2, stages=["layers.0", "layers.1"]), torch.zeros(2, 3)
    if name is None:
        stages_of(Counting(how), mesh, x)
        return
    with pytest.raises(ConfigError, match=f"changes '{name}' when it computes"):
        stages_of(Counting(how), mesh, x)


def test_a_module_that_takes_gradients_has_no_stages() -> None:
    mesh, x = Mesh(pipeline=2, stages=["layers.0", "layers.1"]), torch.zeros(2, 3)
    with pytest.raises(ConfigError, match=r"autograd.grad is called .*; use the axis data"):
        stages_of(Counting("differentiate"), mesh, x)


def test_a_module_that_normalizes_by_the_batch_has_no_stages() -> None:
    mesh, x = Mesh(pipeline=2, stages=["layers.0", "layers.1"]), torch.zeros(2, 3)
    with pytest.raises(ConfigError, match=r"rows of a batch \(batch_norm\).* use GroupNorm"):
        stages_of(Counting("normalize"), mesh, x)


def tied() -> nn.Module:
    net = Net()
    net.encoder.layers[3].weight = net.encoder.layers[0].weight
    return net


def frozen() -> nn.Module:
    net = Net()
    net.out.requires_grad_(False)
    return net


TWO = ["encoder.layers.0-1", "encoder.layers.2-3"]


@pytest.mark.parametrize(
    ("net", "stages", "remedy"),
    [
        (Net(), ["encoder.layers.0", "encoder.layrs.1"], "did you mean|there are"),
        (Net(), TWO[::-1], "in the order of the layers"),
        (Net(), ["encoder.layers.0-2", "encoder.layers.2-3"], "each layer once"),
        (Skipping(), ["layers.0", "layers.1"], "besides those"),
        (Skipping(), ["layers.0-1", "layers.2"], "besides those"),
        (Asking(), ["layers.0", "layers.1"], "asks for values"),
        (tied(), TWO, "let both uses lie in one stage"),
        (frozen(), ["into", "out"], "no parameter that trains"),
        (Net(), ["into", "encoder"], "never calls"),
        (nn.Sequential(nn.Linear(3, 3)), "auto", "name the layers of each stage"),
    ],
)
def test_what_cannot_be_cut_is_refused(net: nn.Module, stages: Any, remedy: str) -> None:
    with pytest.raises(ConfigError, match=remedy):
        stages_of(net, Mesh(pipeline=2, stages=stages), torch.zeros(2, 3))


def test_what_comes_of_values_without_contents_is_remembered() -> None:
    known, fakes = _Known(), FakeTensorMode(allow_non_fake_inputs=True)
    value = fakes.from_tensor(torch.ones(2, 3))
    with known.until_left():
        first = torch.relu(value)
        assert torch.relu(value) is first
        assert torch.cat([first, value], dim=1).shape == (2, 6)
        assert torch.cat([first, value], dim=0).shape == (4, 3)
        assert torch.relu(torch.ones(2, 3)).sum() == 6  # contents are never replaced
        first.add_(1)
        assert torch.relu(value) is first
        first.t_()
        assert torch.relu(value).shape == (2, 3)
        with torch.device("cpu"):
            known.leave()
            assert torch.relu(value) is torch.relu(value)
        known.leave()
        assert torch.relu(value) is not torch.relu(value)


def test_a_layer_that_is_called_twice_begins_no_stage() -> None:
    once = nn.Linear(3, 3)
    net = nn.Sequential(nn.Linear(3, 3), once, once)
    with pytest.raises(ConfigError, match="called more than once"):
        stages_of(net, Mesh(pipeline=2, stages=["0", "1"]), torch.zeros(2, 3))
