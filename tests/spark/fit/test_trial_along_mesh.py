"""What workers along a mesh cannot do as in a plain loop is seen when the driver tries the step."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel

from sparkdl.data.plan import Column
from sparkdl.errors import ConfigError
from sparkdl.inference.regression import REGRESSION
from sparkdl.mesh import Mesh
from sparkdl.spark.fit.begin_module import begin_module
from sparkdl.spark.fit.example import Example
from sparkdl.spark.fit.trial import try_module
from sparkdl.train.objective.training_step import objective_of
from tests.spark.fit.requests import request

X = Column(name="x", role="feature", dtype="float32", shape=(8,))
Y = Column(name="y", role="label", dtype="float32", shape=())
PAIR = Mesh(tensor=2, layout={"a": "columns", "b": "rows"})
SHARD, UNITS = Mesh(shard=2), Mesh(shard=2, smallest_unit=1)
OPTIMIZER, DATA = Mesh(data=2, shard_optimizer=True), Mesh(data=2)
Between = Callable[[torch.Tensor], torch.Tensor]


def tried(module: nn.Module | Callable[[], nn.Module], mesh: Mesh, **changes: Any) -> None:
    """Try a module, or what a factory makes on the meta device."""
    torch.manual_seed(2)
    asked = request(module, parallelism=mesh, loss="mse", task=REGRESSION, **changes)
    begun = begin_module(asked)
    module, weights = begun.module, begun.weights
    assert weights is None or all(parameter.is_meta for parameter in module.parameters())
    assert (weights is None) == isinstance(asked.module, nn.Module)
    checked: Any = SimpleNamespace(
        module=module, weights=weights, objective=objective_of(asked.config, module), request=asked,
        config=asked.config, float_dtype="float32",
    )  # fmt: skip
    rows = {X.key: torch.randn(4, 8), Y.key: torch.randn(4)}
    before = {} if weights else {name: v.clone() for name, v in module.state_dict().items()}
    try_module(checked, Example(columns=(X, Y), rows=rows))
    assert all(torch.equal(value, module.state_dict()[name]) for name, value in before.items())


class Pair(nn.Module):
    """Has something between a layer by columns and one by rows."""

    def __init__(self, between: Between = torch.tanh, *, scale: float = 1.0) -> None:
        super().__init__()
        self.a, self.b, self.out = nn.Linear(8, 12), nn.Linear(12, 8), nn.Linear(8, 1)
        self.between = between
        with torch.no_grad():
            self.b.weight.mul_(scale)
            self.b.bias.mul_(scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(x + self.b(self.between(self.a(x))))


class Scale(nn.Module):
    def __init__(self, *, learns: bool = True) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.ones(()), requires_grad=learns)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.by.exp()


class PerHead(nn.Module):
    """Treats each of four heads by itself."""

    def __init__(self, of_head: nn.Module) -> None:
        super().__init__()
        self.of_head = of_head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.of_head(x.view(len(x), -1, 3)).flatten(1)


class Gated(Pair):
    """Multiplies parts by something that is whole."""

    def __init__(self, detached: bool) -> None:
        super().__init__()
        self.gate, self.detached = nn.Linear(8, 1), detached

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate = torch.sigmoid(self.gate(x))
        return self.out(self.b(self.a(x) * (gate.detach() if self.detached else gate)))


class NormedInTraining(Pair):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.a(x)
        if self.training:
            inner = F.layer_norm(inner, inner.shape[1:])
        return self.out(self.b(F.dropout(inner, 0.5, self.training)))


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: Pair(nn.PReLU()), "between.weight"),
        (lambda: Pair(nn.PReLU(12)), "between.weight"),
        (lambda: Pair(Scale()), "between.by"),
        (lambda: Pair(PerHead(nn.LayerNorm(3))), "between.of_head.weight"),
        (lambda: Pair(PerHead(nn.Linear(3, 3))), "between.of_head.weight"),
        (lambda: Pair(nn.Linear(12, 12)), "between.weight"),
        (lambda: Gated(detached=False), "gate.weight"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_parameters_between_columns_and_rows(make: Callable[[], nn.Module], name: str) -> None:
    with pytest.raises(ConfigError, match=f"computes with '{name}'.* 'a' gives.*out of the layout"):
        tried(make(), PAIR)


@pytest.mark.parametrize("scale", [1.0, 1e-4, 0.0])
def test_functions_that_mix_parts(scale: float) -> None:
    """Whatever the layer by rows weighs."""
    for between in (nn.Softmax(1), lambda x: x - x.mean(1, keepdim=True), lambda x: x.flip(1)):
        with pytest.raises(ConfigError, match="something else: 'b' does not get a part"):
            tried(Pair(between, scale=scale), PAIR)
    with pytest.raises(ConfigError, match="something else: 'b'"):
        tried(NormedInTraining(), PAIR)
    with pytest.raises(ConfigError, match="cannot compute with this layout: shape"):
        tried(Pair(lambda x: x.view(len(x), 12), scale=scale), PAIR)


def test_layouts_that_give_the_same_are_taken() -> None:
    kept = Pair(Scale(learns=False))
    for net in (
        Pair(nn.GELU()), Pair(scale=0.0), Pair(nn.Dropout(0.5)), kept, Gated(detached=True),
        Pair(PerHead(nn.Softmax(2))),
        Pair(PerHead(nn.LayerNorm(3, elementwise_affine=False))),
    ):  # fmt: skip
        tried(net, PAIR)


class Teacher(Pair):
    """Changes other weights when it computes."""

    def __init__(self, by: str) -> None:
        super().__init__()
        self.by = by
        self.teacher = nn.Linear(8, 12).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            if self.by == "function":
                self.teacher.weight.mul_(0.9).add_(self.a.weight, alpha=0.1)
            elif self.by == "view":
                self.teacher.weight.view(-1).mul_(0.9)
            elif self.by == "data":
                self.teacher.weight.data.mul_(0.9)
            elif self.by == "other data":
                self.teacher.weight.data = self.teacher.weight.data * 0.9
            else:
                torch._foreach_mul_([self.teacher.weight, self.teacher.bias], 0.9)
        return super().forward(x) + self.teacher(x).sum(1, keepdim=True)


@pytest.mark.parametrize("by", ["function", "view", "data", "other data", "foreach"])
def test_parameters_that_forward_changes(by: str) -> None:
    for mesh in (SHARD, UNITS, OPTIMIZER):
        with pytest.raises(ConfigError, match=r"changes its parameter 'teacher.weight'.*a buffer"):
            tried(Teacher(by), mesh)
    for mesh in (DATA, *[PAIR] * (by != "function")):  # which has its own part of a.weight
        tried(Teacher(by), mesh)


class Averaging(nn.Module):
    """Keeps a mean of its own weights, and counts in a buffer how often it took it."""

    def __init__(self) -> None:
        super().__init__()
        self.pair = Pair()
        self.average = AveragedModel(self.pair)
        self.average.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.average.update_parameters(self.pair)
        output: torch.Tensor = self.pair(x) + 0.1 * self.average(x)
        return output


def test_a_mean_of_weights_that_forward_takes_is_refused() -> None:
    for mesh in (SHARD, UNITS, OPTIMIZER):
        for module in (Averaging(), Averaging):
            with pytest.raises(ConfigError, match=r"changes its parameter 'average.*a buffer"):
                tried(module, mesh)
    tried(Averaging(), DATA)


def penalized(module: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x = x.requires_grad_()
    output = module(x).squeeze(1)
    (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    return (output - y).square() + slope.square().sum(1)


def by_parts(module: Pair, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (module.out(x).squeeze(1) - y).square()


def decayed(module: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    losses = (module(x).squeeze(1) - y).square()
    return losses + sum(p.square().sum() for p in module.parameters())


def test_steps_that_do_not_call_the_module() -> None:
    for mesh in (SHARD, UNITS, OPTIMIZER, PAIR):
        with pytest.raises(ConfigError, match=r"autograd.grad is called .*; use the axis data"):
            tried(Pair(), mesh, training_step=penalized)
    for mesh in (SHARD, OPTIMIZER):
        with pytest.raises(ConfigError, match=r"'out.weight' outside .* call the module itself"):
            tried(Pair(), mesh, training_step=by_parts)
    for mesh in (SHARD, UNITS):
        with pytest.raises(ConfigError, match=r"'a.weight' outside"):
            tried(Pair(), mesh, training_step=decayed)
    for mesh, step in ((DATA, penalized), (DATA, by_parts), (PAIR, by_parts), (OPTIMIZER, decayed)):
        tried(Pair(), mesh, training_step=step)


@pytest.mark.parametrize(
    ("make", "mesh", "step", "what"),
    [
        (lambda: Pair(nn.PReLU()), PAIR, None, "computes with 'between.weight'"),
        (lambda: Pair(nn.Softmax(1), scale=0.0), PAIR, None, "'b' does not get a part"),
        (lambda: Teacher("function"), SHARD, None, "changes its parameter 'teacher.weight'"),
        (Pair, SHARD, by_parts, "'out.weight' outside"),
        (Pair, PAIR, None, ""),
        (Pair, OPTIMIZER, decayed, ""),
    ],
)
def test_weights_that_the_driver_does_not_have(
    make: Callable[[], nn.Module], mesh: Mesh, step: Any, what: str
) -> None:
    if not what:
        tried(make, mesh, training_step=step)
        return
    with pytest.raises(ConfigError, match=what):
        tried(make, mesh, training_step=step)


class Drawing(Pair):
    """Leaves out a layer by chance, of any generator."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            if random.random() + np.random.rand() + float(torch.rand(())) > 1:
                x = x + self.b(torch.tanh(self.a(x)))
        return self.out(x)


def test_layers_that_are_left_out_by_chance_are_compared_with_the_same_ones() -> None:
    for seed in range(5):
        tried(Drawing(), PAIR, seed=seed)
