"""Weights that are recorded have the bits that the factory alone would have given them."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from sparkdl.models import (
    FCNR,
    GAN,
    MLP,
    AlexNetR,
    Autoencoder,
    LanguageModel,
    LeNet5,
    LSTMNet,
    ResNet20,
    ResNet50,
    SequenceToSequence,
    TransformerNet,
)
from sparkdl.serialization.recorded.lending import lent
from sparkdl.serialization.recorded.recipe import NotRecorded, RecordedWeights, give_memory
from sparkdl.serialization.recorded.recording import recorded

Make = Callable[[], nn.Module]


def initialized(make: Make, init: Callable[[nn.Module], Any]) -> nn.Module:
    return make().apply(init)


def by_kind(part: nn.Module) -> None:
    """As torchvision's and timm's networks do."""
    if isinstance(part, nn.Conv2d):
        nn.init.kaiming_normal_(part.weight, mode="fan_out", nonlinearity="relu")
    elif isinstance(part, nn.BatchNorm2d):
        nn.init.constant_(part.weight, 1)
        nn.init.constant_(part.bias, 0)
    elif isinstance(part, nn.Linear):
        nn.init.trunc_normal_(part.weight, std=0.02)
        nn.init.zeros_(part.bias)


class Inits(nn.Module):
    """Each initialization of torch's."""

    def __init__(self) -> None:
        super().__init__()
        ways: dict[str, Callable[[torch.Tensor], Any]] = {
            "uniform": nn.init.uniform_, "normal": nn.init.normal_, "eye": nn.init.eye_,
            "xavier": nn.init.xavier_normal_, "kaiming": nn.init.kaiming_uniform_,
            "trunc": partial(nn.init.trunc_normal_, std=0.3), "orthogonal": nn.init.orthogonal_,
            "sparse": partial(nn.init.sparse_, sparsity=0.3),
            "bernoulli": lambda x: x.bernoulli_(0.3), "exponential": lambda x: x.exponential_(),
            "random": lambda x: x.random_(0, 10), "cauchy": lambda x: x.cauchy_(),
        }  # fmt: skip
        for name, way in ways.items():
            parameter = nn.Parameter(torch.empty(13, 7))
            with torch.no_grad():
                way(parameter)
            self.register_parameter(name, parameter)
        self.conv = nn.Conv1d(6, 6, 3, groups=3)
        nn.init.dirac_(self.conv.weight, groups=3)


class Handmade(nn.Module):
    """Views, arithmetic, numbers that are looked at, and copies of other parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(11, 6, padding_idx=3)
        self.first = nn.Linear(6, 6)
        self.second = copy.deepcopy(self.first)
        self.scale = nn.Parameter(torch.randn(6) / 3)
        self.joined = nn.Parameter(torch.cat([torch.ones(2, 3), torch.rand(2, 3)]))
        with torch.no_grad():
            self.first.weight[1:3].mul_(2).add_(self.second.weight[:2].t().sum())
            self.first.bias.copy_(self.second.bias.flip(0))
            self.second.weight.data = torch.randperm(36).view(6, 6).float()
            if self.scale.abs().max() > 0.1:
                self.scale.div_(self.scale.norm().item())
            self.joined += torch.tensor([1.0, 2.0, 3.0])
            self.joined[0, 1] = 7
        rates = [x.item() for x in torch.linspace(0, 0.5, 3)]
        self.drops = nn.ModuleList(nn.Dropout(rate) for rate in rates)
        self.register_buffer("mask", torch.full((4, 4), float("-inf")).triu(1))
        self.register_buffer("not_kept", self.first.weight.detach().sum(0), persistent=False)
        self.plain = torch.arange(3) * 2
        self.to(torch.device("cpu"))
        by_numpy = self.scale.detach().numpy().sum()
        self.offset = nn.Parameter(torch.full((2,), float(by_numpy)))
        self.shape = nn.Parameter(torch.zeros(2, device=self.scale.device).to("cpu").fill_(0.5))
        self.listed = nn.ParameterList([torch.rand(3), torch.rand(2, 2)])


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(9, 5)
        self.out = nn.Linear(5, 9, bias=False)
        self.out.weight = self.tokens.weight
        nn.init.normal_(self.out.weight, std=0.1)


def own_generator() -> nn.Module:
    generator = torch.Generator().manual_seed(5)
    layer = nn.Linear(40, 30)
    nn.init.normal_(layer.weight, generator=generator)
    nn.init.uniform_(layer.bias, generator=generator)
    return layer


def seeded_inside() -> nn.Module:
    first = nn.Linear(5, 4)
    torch.manual_seed(3)
    with torch.random.fork_rng(devices=[]):
        second = nn.Linear(4, 4)
    return nn.Sequential(first, second, nn.Linear(4, 4).double())


def from_numpy() -> nn.Module:
    layer = nn.Linear(3, 2)
    layer.weight = nn.Parameter(torch.from_numpy(np.ones((2, 3), np.float32)))
    return layer


def parametrized(*, is_kept: bool = False) -> nn.Module:
    layers = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 5), nn.Linear(5, 5))
    parametrizations.weight_norm(layers[0])
    parametrizations.spectral_norm(layers[1])
    parametrizations.orthogonal(layers[2])
    for layer in () if is_kept else layers:
        parametrize.remove_parametrizations(layer, "weight")
    return layers


NETWORKS: dict[str, Make] = {
    "MLP": partial(MLP, sizes=[5, 17], num_outputs=3),
    "FCNR": partial(FCNR, sizes=(9, 8, 7)),
    "Autoencoder": partial(Autoencoder, sizes=[6, 4]),
    "LeNet5": LeNet5,
    "AlexNetR": AlexNetR,
    "GAN": partial(GAN, num_features=3),
    "LanguageModel": LanguageModel,
    "SequenceToSequence": SequenceToSequence,
    "LSTMNet": partial(LSTMNet, num_outputs=2, num_tokens=20, num_layers=2),
    "ResNet20": ResNet20,
    "ResNet50": partial(ResNet50, width=8),
    "TransformerNet": partial(TransformerNet, num_outputs=2, num_tokens=30),
    "torch's Transformer": partial(nn.Transformer, 8, 2, 2, 2, 16, batch_first=True),
    "attention": partial(nn.MultiheadAttention, 8, 2),
    "by kind": partial(initialized, ResNet20, by_kind),
    "each way": Inits,
    "handmade": Handmade,
    "tied": Tied,
    "own generator": own_generator,
    "seeded inside": seeded_inside,
    "parametrized": parametrized,
    "numbers from elsewhere": from_numpy,
    "double": lambda: nn.Sequential(nn.Linear(7, 3, dtype=torch.float64), nn.BatchNorm1d(3)),
    "half": lambda: nn.Linear(7, 30).to(torch.bfloat16),
    "channels last": lambda: nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last),
    "bilinear, recurrent": lambda: nn.ModuleList([nn.Bilinear(2, 3, 4), nn.GRU(3, 5, 2)]),
}


def both(make: Make) -> tuple[nn.Module, nn.Module, RecordedWeights]:
    """The module as it is made alone, and recorded; the generator ends alike."""
    torch.manual_seed(11)
    alone = make()
    end = torch.random.get_rng_state()
    torch.manual_seed(11)
    module, weights = recorded(make)
    assert torch.equal(torch.random.get_rng_state(), end)
    return alone, module, weights


def assert_same(made: torch.Tensor | None, alone: torch.Tensor, name: str = "") -> None:
    assert made is not None, name
    assert (made.dtype, made.stride()) == (alone.dtype, alone.stride()), name
    assert torch.equal(made, alone), name


@pytest.mark.parametrize("name", NETWORKS)
def test_the_bits_are_those_of_the_factory_alone(name: str) -> None:
    alone, module, weights = both(NETWORKS[name])
    named = dict(alone.named_parameters(remove_duplicate=False))
    found = dict(module.named_parameters(remove_duplicate=False))
    assert found.keys() == named.keys()
    for key, parameter in found.items():
        assert parameter.is_meta
        assert parameter.requires_grad == named[key].requires_grad
        assert_same(weights.of(parameter), named[key], key)
    assert len({id(p) for p in found.values()}) == len({id(p) for p in named.values()})
    buffers = dict(module.named_buffers())
    for key, buffer in alone.named_buffers():
        assert_same(buffers[key], buffer, key)
    assert module.state_dict().keys() == alone.state_dict().keys()


def test_tensors_beside_parameters_and_buffers_are_there() -> None:
    alone, module, _ = both(Handmade)
    assert isinstance(module, Handmade)
    assert isinstance(alone, Handmade)
    assert torch.equal(module.plain, alone.plain)
    assert [drop.p for drop in module.drops] == [drop.p for drop in alone.drops]  # type: ignore[union-attr]


@pytest.mark.parametrize("name", ["MLP", "LSTMNet", "LanguageModel", "parametrized", "attention"])
def test_a_module_computes_with_weights_that_it_is_lent(name: str) -> None:
    alone, module, weights = both(NETWORKS[name])
    inputs = {
        "MLP": (torch.rand(2, 5),), "parametrized": (torch.rand(2, 6),),
        "attention": (torch.rand(3, 2, 8),) * 3,
        "LSTMNet": (torch.arange(6).view(2, 3), torch.ones(2, 3, dtype=torch.bool)),
        "LanguageModel": (torch.arange(6).view(2, 3),),
    }[name]  # fmt: skip
    with torch.no_grad():
        expected = alone.eval()(*inputs)
        with lent(weights):
            found = module.eval()(*inputs)
    for own, other in zip(*([value] if torch.is_tensor(value) else value
                            for value in (found, expected)), strict=True):  # fmt: skip
        assert torch.equal(own, other)
    assert all(parameter.is_meta for parameter in module.parameters())


def by_memory() -> nn.Module:
    layer = nn.Linear(3, 2)
    assert layer.weight.data_ptr() != layer.bias.data_ptr()
    return layer


def through_numpy() -> nn.Module:
    layer = nn.Linear(3, 2)
    layer.weight.detach().numpy()[0] = 1.0
    return layer


def changed_beside_numpy() -> nn.Module:
    layer = nn.Linear(3, 2)
    array = layer.weight.detach().numpy()
    nn.init.ones_(layer.weight)
    layer.bias.data.fill_(float(array.sum()))
    return layer


def resized() -> nn.Module:
    layer = nn.Linear(3, 2)
    torch.add(layer.bias.detach(), 1, out=(out := torch.empty(0)))
    layer.bias.data.copy_(out)
    return layer


def catches() -> nn.Module:
    layer = nn.Linear(3, 2)
    try:
        layer.weight.untyped_storage()
    except Exception:
        return layer
    return layer


def loaded() -> nn.Module:
    layer = nn.Linear(3000, 2000)
    layer.load_state_dict({"weight": given, "bias": given[:, 0]})
    return layer


given = torch.from_numpy(np.ones((2000, 3000), np.float32))


kept = nn.Linear(3, 2)


class Viewed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.first = self.layer.weight.detach()[0]


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: kept, "weight is not made by torch"),
        (partial(parametrized, is_kept=True), "pickled"),
        (by_memory, "memory"),
        (catches, "memory"),
        (resized, "size of a tensor"),
        (changed_beside_numpy, "NumPy array shares"),
        (loaded, "of a file"),
        (Viewed, "view of a parameter"),
        (partial(nn.LazyLinear, 2), "shape from the first rows"),
    ],
)
def test_what_cannot_be_done_again_is_refused(make: Make, reason: str) -> None:
    with pytest.raises(NotRecorded, match=reason):
        recorded(make)


def test_numbers_cannot_be_changed_behind_torch() -> None:
    with pytest.raises(ValueError, match="read-only"):
        recorded(through_numpy)


def test_parameters_that_get_memory_stay_what_weak_references_find() -> None:
    """Recurrent layers and torch's tracers have such, with which torch's own swap fails."""
    with torch.device("meta"):
        net = nn.GRU(2, 3).requires_grad_(False)
    net.weight_hh_l0.requires_grad_(True)
    found = [weakref.ref(parameter) for parameter in net.parameters()]
    give_memory(net, torch.device("cpu"))
    assert all(ref() is one for ref, one in zip(found, net.parameters(), strict=True))
    assert [one.requires_grad for one in net.parameters()] == [False, True, False, False]
    assert not any(one.is_meta for one in net.parameters())
    net(torch.zeros(1, 1, 2))[0].sum().backward()
    assert net.weight_hh_l0.grad is not None


def test_what_the_factory_raises_is_raised() -> None:
    with pytest.raises(RuntimeError, match="shape"):
        recorded(lambda: nn.Linear(2, torch.ones(3).view(2, 2).shape[0]))
