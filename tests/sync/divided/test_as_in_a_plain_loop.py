"""Along each axis a module learns what a plain loop over the same rows of each worker learns."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from sparkdl.comm.communicator import Communicator
from sparkdl.config import TrainConfig
from sparkdl.errors import ConfigError
from sparkdl.inference.regression import REGRESSION
from sparkdl.mesh import Mesh
from sparkdl.train.callbacks import Callback, CallbackState
from tests.gang import Gang
from tests.sync.divided.test_mesh_training import train_on_rank
from tests.train.runs import make_data, plan_for, seeded

pytestmark = pytest.mark.gang

ROWS = (23, 7, 16, 11)
DATA, OPTIMIZER = Mesh(data=2), Mesh(data=2, shard_optimizer=True)
SHARD, UNITS = Mesh(shard=2), Mesh(shard=2, smallest_unit=1)
Make = Callable[[], nn.Module]
MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.05, weight_decay=0.3)


def config_for(mesh: Mesh | None, optimizer: MakeOptimizer, **other: Any) -> TrainConfig:
    """All rows in one batch."""
    return TrainConfig(
        loss="mse", task=REGRESSION, epochs=3, batch_size=64, optimizer=optimizer,
        learning_rate=None, parallelism=mesh, **other,
    )  # fmt: skip


def plain_loop(
    make: Make, optimizer: MakeOptimizer, rows: Sequence[int], ranks: int,
    after: Callable[[nn.Module], None] | None = None,
) -> dict[str, torch.Tensor]:  # fmt: skip
    """The weights after three steps, where each rank's rows go through the module by themselves."""
    data = make_data(rows)
    plan = plan_for(data, config_for(None, optimizer), world_size=ranks)
    module = seeded(make).double()
    stepping = optimizer(list(module.parameters()))
    total = sum(shard.columns["weight w"].sum() for shard in data)
    for _ in range(3):
        stepping.zero_grad()
        for rank in range(ranks):
            own = [data[shard.shard_id].columns for shard in plan.shards_of(rank)]
            x, y, w = (torch.cat([columns[key] for columns in own])
                       for key in ("feature x", "label y", "weight w"))  # fmt: skip
            if len(x):
                ((module(x).squeeze(1) - y).square() * w).sum().div(total).backward()
        stepping.step()
        if after is not None:
            after(module)
    return {name: parameter.detach() for name, parameter in module.named_parameters()}


def train_rows(comm: Communicator, config: TrainConfig, make: Make, rows: Sequence[int]) -> Any:
    try:
        return train_on_rank(comm, config, make=make, rows=rows)[0]
    except ConfigError as error:
        return str(error)


def assert_as_plain(
    gang: Gang, mesh: Mesh, make: Make, *, optimizer: MakeOptimizer = sgd,
    rows: Sequence[int] = ROWS, ranks: int = 2,
) -> None:  # fmt: skip
    expected = plain_loop(make, optimizer, rows, ranks)
    for weights in gang.run(train_rows, config_for(mesh, optimizer), make, rows):
        for name, value in expected.items():
            assert torch.allclose(weights[name], value, rtol=1e-10, atol=1e-10), name


class OfSums(nn.Module):
    """Has as many numbers as the sums of a step, or many more."""

    def __init__(self, width: int = 1) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(1, width), nn.Linear(width, 1)
        self.last.requires_grad_(width > 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x.sum(1, keepdim=True)))


class Wide(OfSums):
    def __init__(self) -> None:
        super().__init__(40)


@pytest.mark.parametrize("make", [OfSums, Wide])
@pytest.mark.parametrize("rows", [(5, 0), (0, 3), (9, 2, 1)])
def test_a_replica_without_rows_sums_in_the_same_order(
    gang: Gang, make: Make, rows: Sequence[int]
) -> None:
    assert_as_plain(gang, DATA, make, rows=rows)


class Choosing(nn.Module):
    """Lets the rows of a batch decide which layer they go through; one is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(4, 8), nn.Linear(8, 1)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.never = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen = self.first if len(x) and x.mean() > 0 else self.second
        return self.out(torch.tanh(chosen(self.into(x))))


class Experts(nn.Module):
    """Calls more layers on some workers than on others."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(4, 8), nn.Linear(8, 1)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.into(x)
        found = torch.zeros_like(inner)
        for number, expert in enumerate(self.experts):
            if len(x) and x.mean() * 10 > number - 1:
                found = found + expert(inner)
        return self.out(torch.tanh(found))


def normed() -> nn.Module:
    made = parametrizations.weight_norm(nn.Linear(8, 8))
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), made, nn.Linear(8, 1))


def orthogonal() -> nn.Module:
    made = parametrizations.orthogonal(nn.Linear(8, 8))
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), made, nn.Linear(8, 1))


@pytest.mark.parametrize("make", [normed, orthogonal])
@pytest.mark.parametrize("mesh", [SHARD, UNITS, OPTIMIZER], ids=str)
def test_layers_with_parametrizations(gang: Gang, mesh: Mesh, make: Make) -> None:
    assert_as_plain(gang, mesh, make)


@pytest.mark.parametrize("make", [Choosing, Experts])
@pytest.mark.parametrize("mesh", [SHARD, OPTIMIZER], ids=str)
def test_workers_may_use_different_layers(gang: Gang, mesh: Mesh, make: Make) -> None:
    assert_as_plain(gang, mesh, make)
    # what nobody uses has no gradient, so weights do not decay
    assert_as_plain(gang, mesh, make, optimizer=adamw)


@pytest.mark.parametrize(("make", "layer"), [(Choosing, "first"), (Experts, "experts.1")])
def test_layers_that_only_some_workers_call_are_not_gathered_by_themselves(
    gang: Gang, make: Make, layer: str
) -> None:
    for found in gang.run(train_rows, config_for(UNITS, sgd), make, ROWS):
        assert repr(layer) in found
        size = re.search(r"smallest_unit=(\d+)", found)
        assert size is not None
    assert_as_plain(gang, Mesh(shard=2, smallest_unit=int(size[1])), make)


class PartlyFrozen(nn.Module):
    """Has layers that do not train, without parameters, without gradients, or for evaluation."""

    def __init__(self, frozen: Sequence[str]) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(4, 6), nn.Linear(6, 1)
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))
        self.teacher, self.judge = nn.Sequential(nn.Linear(4, 6), nn.Tanh()), nn.Linear(4, 1)
        for name in frozen:
            self.get_submodule(name).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            taught = self.teacher(x)
        found = self.out(self.net(self.into(x) + taught))
        return found if self.training else found + self.judge(x)


@pytest.mark.parametrize("mesh", [SHARD, UNITS, OPTIMIZER], ids=str)
@pytest.mark.parametrize(
    "frozen", [(), ("into",), ("out",), ("net.0",), ("teacher", "net", "judge")], ids=str
)
def test_layers_may_be_frozen(gang: Gang, mesh: Mesh, frozen: Sequence[str]) -> None:
    assert_as_plain(gang, mesh, partial(PartlyFrozen, frozen), optimizer=adamw)


@pytest.mark.parametrize("frozen", [("net.0",), ("into", "net.2")], ids=str)
@pytest.mark.parametrize(
    "mesh",
    [Mesh(pipeline=2), Mesh(tensor=2, layout={"net.0": "columns", "net.2": "rows"})],
    ids=str,
)
def test_frozen_layers_may_be_divided_otherwise(
    gang: Gang, mesh: Mesh, frozen: Sequence[str]
) -> None:
    assert_as_plain(gang, mesh, partial(PartlyFrozen, frozen), optimizer=adamw, ranks=1)


class Sized(nn.Module):
    """Has parameters of which parts are as large as others whole."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            [nn.Sequential(nn.Linear(4, 20), nn.Tanh()), nn.Sequential(nn.Linear(20, 1))]
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def by_size(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Decays large ones, and lets vectors learn faster."""
    found = list(parameters)
    large = [p for p in found if p.numel() > 60]
    vectors = [p for p in found if p.dim() < 2 and len(p) > 12]
    rest = [p for p in found if not any(p is other for other in (*large, *vectors))]
    groups = [{"params": large, "weight_decay": 0.5}, {"params": vectors, "lr": 0.1}]
    return torch.optim.Adagrad([*groups, {"params": rest}], lr=0.05)


class Tagged(Sized):
    """Says of its parameters how they train, as many models do."""

    def __init__(self) -> None:
        super().__init__()
        for parameter in self.parameters():
            parameter.decays = parameter.ndim == 2  # type: ignore[attr-defined]


class Gained(nn.Linear):
    """Reads what its parameters are said to have, as layers with a scale of their own do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * getattr(self.weight, "gain", 1.0)


class Scaled(Tagged):
    """Reads it in its layers and, of these, by itself."""

    def __init__(self) -> None:
        super().__init__()
        for number, block in enumerate(self.blocks):
            block[0] = Gained(block[0].in_features, block[0].out_features)
            block[0].weight.gain = 0.5 + number  # type: ignore[attr-defined]


class ScaledOutside(Scaled):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gains = [getattr(block[0].weight, "gain", 1.0) for block in self.blocks]
        return super().forward(x * sum(gains))


def by_tags(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    groups = [
        {"params": [one], "weight_decay": 0.5 if getattr(one, "decays", False) else 0.0}
        for one in parameters
    ]
    return torch.optim.SGD(groups, lr=0.05)


@pytest.mark.parametrize(
    ("make", "optimizer"), [(Sized, by_size), (Tagged, by_tags), (Scaled, by_tags)]
)
@pytest.mark.parametrize(
    "mesh",
    [
        SHARD, OPTIMIZER, Mesh(pipeline=2),
        Mesh(tensor=2, layout={"blocks.0.0": "columns", "blocks.1.0": "rows"}),
    ],
    ids=str,
)  # fmt: skip
def test_an_optimizer_that_tells_parameters_by_sizes_or_attributes(
    gang: Gang, mesh: Mesh, make: Make, optimizer: MakeOptimizer
) -> None:
    assert_as_plain(gang, mesh, make, optimizer=optimizer, ranks=mesh.num_readers)


@pytest.mark.parametrize("mesh", [SHARD, UNITS, OPTIMIZER], ids=str)
def test_forward_that_reads_attributes_of_parameters_elsewhere(gang: Gang, mesh: Mesh) -> None:
    assert_as_plain(gang, mesh, ScaledOutside, optimizer=by_tags, ranks=2)


class Transposed(nn.Module):
    """Keeps a weight as someone else has stored it, and calls a layer of what only holds layers."""

    def __init__(self) -> None:
        super().__init__()
        self.held = nn.Module()
        self.held.layers = nn.ModuleList([nn.Linear(4, 8), nn.Linear(8, 1)])
        weight = self.held.layers[0].weight.detach()
        self.held.layers[0].weight = nn.Parameter(weight.t().contiguous().t())
        self.factors = nn.ParameterList([torch.ones(8)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, last = self.held.layers
        return last(torch.tanh(first(x)) * self.factors[0])


@pytest.mark.parametrize("mesh", [SHARD, UNITS, OPTIMIZER], ids=str)
def test_weights_may_be_transposed_and_layers_held_by_what_is_not_called(
    gang: Gang, mesh: Mesh
) -> None:
    assert_as_plain(gang, mesh, Transposed, ranks=1)


class Looking(nn.Module):
    """Looks at exact numbers in what it gets: ids, and what lies around 1000."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.norm = nn.Embedding(2000, 4), nn.BatchNorm1d(4)
        self.around, self.out = nn.Linear(4, 4), nn.Linear(4, 1)

    def double(self) -> Looking:
        return self.float()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.float()
        return self.out(self.norm(self.within((x * 400 + 1000).round()))).double()

    def within(self, x: torch.Tensor) -> torch.Tensor:
        return self.rows(x[:, 0].long().clamp(0, 1999)) + self.around((x - 1000) / 400)


class Inner(nn.Module):
    """Gets such numbers in a layer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Looking()
        self.net.forward = self.net.within  # type: ignore[method-assign]

    def double(self) -> Inner:
        return self.float()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.net((x.float() * 400 + 1000).round())
        return found.sum(1, keepdim=True).double()


@pytest.mark.parametrize("make", [Looking, Inner])
def test_bf16_rounds_no_inputs(gang: Gang, make: Make) -> None:
    losses = {}
    for mesh in (None, DATA, SHARD, UNITS, OPTIMIZER):
        config = config_for(mesh, sgd, precision="bf16")
        losses[str(mesh)] = [one[1][-1]["val_loss"] for one in gang.run(train_all, config, make)]
    for found in losses.values():
        assert found == pytest.approx(losses["data=2"], rel=0.02)


def train_all(comm: Communicator, config: TrainConfig, make: Make) -> Any:
    return train_on_rank(comm, config, make=make)


class Limiting(nn.Module):
    """Limits gradients between its layers, which are those of the weighted mean."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(4, 8), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.into(x)
        if inner.requires_grad:
            inner.register_hook(lambda gradient: gradient.clamp(-0.005, 0.005))
        return self.out(torch.tanh(inner))


@pytest.mark.parametrize("mesh", [DATA, SHARD, OPTIMIZER], ids=str)
def test_hooks_see_gradients_of_the_weighted_mean(gang: Gang, mesh: Mesh) -> None:
    assert_as_plain(gang, mesh, Limiting)


class Branching(nn.Module):
    """Lets its rows decide about one pair of divided layers, and never uses another."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 4)
        self.never, self.neither = nn.Linear(4, 8), nn.Linear(8, 4)
        self.out = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) and x.mean() > 0:
            x = x + self.second(torch.tanh(self.first(x)))
        return self.out(x)


@pytest.mark.slow
@pytest.mark.parametrize("axis", ["data", "shard"])
def test_divided_layers_that_some_workers_use(gang4: Gang, axis: str) -> None:
    layout = {"first": "columns", "second": "rows", "never": "columns", "neither": "rows"}
    mesh = Mesh(tensor=2, layout=layout, **{axis: 2})  # type: ignore[arg-type]
    assert_as_plain(gang4, mesh, Branching, optimizer=adamw)
    assert_as_plain(gang4, Mesh(data=2, shard=2), Branching, optimizer=adamw, ranks=4)


class SeesGradients(nn.Module):
    """Looks for gradients, of which a plain loop has none yet."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(4, 8), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.out(torch.tanh(self.into(x)))
        return found if self.out.weight.grad is None else 2 * found


@pytest.mark.parametrize("mesh", [DATA, SHARD, OPTIMIZER], ids=str)
def test_forward_finds_no_gradients_when_a_step_begins(gang: Gang, mesh: Mesh) -> None:
    assert_as_plain(gang, mesh, SeesGradients, ranks=1)


class Pair(SeesGradients):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.tanh(self.into(x)))


class Acts(Callback):
    """Halves a weight after each epoch, or gives the layer another one."""

    def __init__(self, way: str) -> None:
        self.way = way

    def on_epoch_end(self, state: CallbackState, record: Any) -> None:
        self.change(state.model)

    def change(self, module: Any) -> None:
        layer = module.out
        with torch.no_grad():
            if self.way == "in place":
                layer.weight.mul_(0.5)
            elif self.way == "computes":  # all workers do, and torch gathers the weights
                module(torch.ones(2, 4, dtype=torch.float64))
            elif self.way == "computes and changes":
                layer.weight.mul_(module(torch.ones(2, 4, dtype=torch.float64)).abs().mean())
            elif self.way == "a copy":
                layer.weight.detach().clone()[0].zero_()
            elif self.way == "by data":
                layer.bias.data = layer.bias.data * 0.5
            elif self.way == "a row":
                module.into.weight[0].zero_()
            elif self.way == "rows of data":
                module.into.weight.data[1:3].mul_(0.5)
            elif self.way == "gradients":
                with torch.enable_grad():
                    module(torch.ones(2, 4, dtype=torch.float64)).sum().backward()
            else:
                layer.bias = nn.Parameter(torch.zeros(1, dtype=torch.float64))


@pytest.mark.parametrize("mesh", [DATA, SHARD, UNITS, OPTIMIZER], ids=str)
@pytest.mark.parametrize("way", ["in place", "computes", "computes and changes", "a copy"])
def test_callbacks_change_weights(gang: Gang, mesh: Mesh, way: str) -> None:
    """After an evaluation, which gathers weights."""
    callback = Acts(way)
    expected = plain_loop(Pair, sgd, ROWS, 1, after=callback.change)
    config = config_for(mesh, sgd, callbacks=(callback,))
    for weights in gang.run(train_rows, config, Pair, ROWS):
        for name, value in expected.items():
            assert torch.allclose(weights[name], value, rtol=1e-10, atol=1e-10), name


@pytest.mark.parametrize("mesh", [SHARD, UNITS, OPTIMIZER], ids=str)
@pytest.mark.parametrize(
    ("way", "said"),
    [
        ("by data", "a callback has given out.bias another tensor"),
        ("another", "all of it in place, as by state.model.out.bias.mul_(...)"),
        ("a row", "a callback has given into.weight another tensor, or changed rows of it"),
        ("rows of data", "a callback has given into.weight another tensor, or changed rows"),
        ("gradients", "a callback has called backward, which sums the gradients"),
    ],
)
def test_callbacks_that_replace_weights_are_refused(
    gang: Gang, mesh: Mesh, way: str, said: str
) -> None:
    config = config_for(mesh, sgd, callbacks=(Acts(way),))
    for told in gang.run(train_rows, config, Pair, ROWS):
        assert said in told
