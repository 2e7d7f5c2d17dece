"""Modules of many kinds, given as instances and made by functions, train as in a plain loop."""

from __future__ import annotations

import copy
import re
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, prune

from sparkdl import TorchRegressor
from sparkdl.errors import ConfigError, WorkerError
from sparkdl.mesh import Mesh
from sparkdl.sync.averaging.parameter_averaging import ParameterAveraging
from sparkdl.train.callbacks import Callback, CallbackState
from tests.serialization.programs import program

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.gang, pytest.mark.slow]

ROWS, STEPS = 24, 3
X = torch.linspace(-1, 1, ROWS * 4).reshape(ROWS, 4).sin()
Y = X.sum(1).cos()


@pytest.fixture(scope="module")
def df(spark: SparkSession) -> DataFrame:
    rows = [(x.tolist(), y.item()) for x, y in zip(X, Y, strict=True)]
    return spark.createDataFrame(rows, "features array<float>, label float").cache()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.first(x)))


def weight_norm() -> nn.Module:
    net = Net()
    parametrizations.weight_norm(net.first)
    return net


def pruned() -> nn.Module:
    net = Net()
    prune.l1_unstructured(net.first, "weight", 0.5)
    net(X).sum().backward()  # it was tried by hand
    return net


def scripted() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)))


def masked() -> nn.Module:
    net = Net()
    mask = torch.tensor([[1.0], [0.0], [1.0], [0.0]])
    net.first.weight.register_hook(lambda gradient: gradient * mask)
    net.last.weight.register_post_accumulate_grad_hook(halve)
    return net


def halve(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(0.5)


class Transposed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(4, 3, bias=False), nn.Linear(3, 4, bias=False)
        self.decoder.weight.data = self.encoder.weight.data.t()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decoder(torch.tanh(self.encoder(x))).sum(1, keepdim=True)


class Edges(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("edges", torch.eye(4).roll(1, 0).to_sparse())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward((self.edges @ x.t()).t())


class Graph(Edges):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor([0.5]).expand(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x - self.mean)


class Decayed(Net):
    """Says which of its parameters have no weight decay."""

    def __init__(self) -> None:
        super().__init__()
        self.first.weight._no_weight_decay = True


def decaying(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """With weight decay, unless a parameter says otherwise."""
    groups = [
        {"params": [p], "weight_decay": 0.0 if hasattr(p, "_no_weight_decay") else 0.5}
        for p in parameters
    ]
    return torch.optim.AdamW(groups, lr=0.05)


class Slope(Net):
    """Takes the slope of what it computes, and makes a tensor of the default dtype."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_(True)
            (slope,) = torch.autograd.grad(F.silu(self.first(x)).sum(), x, create_graph=True)
        return (slope @ torch.eye(4)) @ self.last.weight.t()


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def plain_loop(module: nn.Module, make: Any, x: torch.Tensor = X) -> list[float]:
    """The losses of the steps that a fit takes."""
    module.train()
    optimizer, losses = make(module.parameters()), []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = F.mse_loss(module(x).squeeze(1), Y.to(x.dtype))
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
    module.eval()
    return losses


CASES: dict[str, tuple[Callable[[], nn.Module], Any, dict[str, Any]]] = {
    "weight norm": (weight_norm, sgd, {}),
    "weight norm in rounds": (
        weight_norm, sgd,
        {"syncStrategy": ParameterAveraging(averaging_period=2), "executionMode": "rounds"},
    ),
    "pruned": (pruned, sgd, {}),
    "scripted": (scripted, sgd, {}),
    "scripted in rounds": (
        scripted, sgd,
        {"syncStrategy": ParameterAveraging(averaging_period=1), "executionMode": "rounds"},
    ),
    "compiled": (lambda: torch.compile(Net(), backend="eager"), sgd, {}),
    "masked": (masked, sgd, {}),
    "transposed": (Transposed, sgd, {}),
    "sparse and expanded buffers": (Graph, sgd, {}),
    "sparse buffers in rounds": (
        Edges, sgd,
        {"syncStrategy": ParameterAveraging(averaging_period=2), "executionMode": "rounds"},
    ),
    "attributes of parameters": (Decayed, decaying, {}),
    "slope": (Slope, sgd, {}),
}  # fmt: skip


@pytest.mark.parametrize("kind", CASES)
def test_it_learns_what_a_plain_loop_learns(df: DataFrame, kind: str) -> None:
    make, optimizer, params = CASES[kind]
    torch.manual_seed(3)
    given = make()
    torch.manual_seed(3)
    expected = make()
    before = copy.deepcopy(dict(given.state_dict()))
    losses = plain_loop(expected, optimizer)
    model = TorchRegressor(
        module=given, optimizer=optimizer, epochs=STEPS, batchSize=ROWS, numWorkers=1, loss="mse",
        verbose=0, maxRestarts=0, device="cpu", **params,
    ).fit(df)  # fmt: skip
    history = [epoch["loss"] for epoch in model.summary.history]
    assert history == pytest.approx(losses, rel=1e-4)
    trained = model.module.state_dict()
    for name, value in expected.state_dict().items():
        found = trained[name]
        assert found.layout is value.layout
        assert torch.allclose(found.to_dense(), value.to_dense(), atol=1e-5), name
        assert torch.equal(given.state_dict()[name].to_dense(), before[name].to_dense())
    predicted = {tuple(r.features): r.prediction for r in model.transform(df).collect()}
    wanted = expected(X).detach().squeeze(1)
    found = torch.tensor([predicted[tuple(x.tolist())] for x in X])
    assert torch.allclose(found, wanted, atol=1e-4)


@pytest.fixture
def double() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def test_the_default_dtype_of_the_program_is_that_of_workers(df: DataFrame, double: None) -> None:
    torch.manual_seed(3)
    given = Slope()
    expected = copy.deepcopy(given)
    losses = plain_loop(expected, sgd, X.double())
    model = TorchRegressor(
        module=given, optimizer=sgd, epochs=STEPS, batchSize=ROWS, numWorkers=1, verbose=0,
        device="cpu",
    ).fit(df)  # fmt: skip
    assert [e["loss"] for e in model.summary.history] == pytest.approx(losses, rel=1e-9)
    assert model.transform(df).count() == ROWS
    assert model.evaluate(df)["rmse"] > 0


def test_a_copy_of_a_used_model_predicts(df: DataFrame) -> None:
    large = nn.Sequential(nn.Linear(4, 70_000), nn.Linear(70_000, 1))  # travels in a broadcast
    model = TorchRegressor(module=large, maxSteps=1, numWorkers=1, verbose=0, device="cpu").fit(df)
    expected = [row.prediction for row in model.transform(df).collect()]
    copied = copy.deepcopy(model)
    assert [row.prediction for row in copied.transform(df).collect()] == expected


class Stats:
    """A running statistic of a user's own class."""

    def __init__(self) -> None:
        self.count, self.total = 0, torch.zeros(4)

    def see(self, x: torch.Tensor) -> None:
        self.count += len(x)
        self.total = self.total + x.sum(0)


class Remembers(Net):
    """Keeps what it has seen outside of parameters and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.inited, self.steps, self.mean = False, 0, 0.0
        self.center, self.seen, self.stats = torch.zeros(4), [], Stats()
        self.layers = [self.first, self.last]
        self.noise = np.random.default_rng(5)
        self.once = "once"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.inited:
            self.scale, self.inited = 1 / (x.std(0) + 1e-3), True
            del self.once
        if self.training:
            self.steps += 1
            self.mean = 0.9 * self.mean + 0.1 * x.mean().item()
            self.center.mul_(0.5).add_(x.mean(0), alpha=0.5)
            self.seen.append((self.steps, x.shape))
            self.stats.see(x)
            self.first.last_input = x
            self.noise.normal()
        return super().forward((x - self.center) * self.scale) + self.mean


class Counts(Net):
    """Keeps plain values only, which tasks of rounds hand on."""

    def __init__(self) -> None:
        super().__init__()
        self.steps, self.center, self.seen = 0, torch.zeros(4), [0.0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.steps += 1
            self.center = 0.5 * self.center + 0.5 * x.mean(0)
            self.seen.append(x.mean().item())
        return super().forward(x - self.center) / self.steps


class ScriptedCounts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.steps, self.center = nn.Linear(4, 1), 0, torch.zeros(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.steps += 1
            self.center = 0.5 * self.center + 0.5 * x.mean(0)
        return self.layer(x - self.center)


def scripted_counts() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.script(ScriptedCounts())


class Locks(Net):
    """Makes a lock when it is first needed."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "lock"):
            self.lock = threading.Lock()
        self.steps = getattr(self, "steps", 0) + 1
        with self.lock:
            return super().forward(x)


class Own(Net):
    """Has its own idea of its state."""

    def __init__(self) -> None:
        super().__init__()
        self.lock, self.steps = threading.Lock(), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with self.lock:
            self.steps += 1
            return super().forward(x)

    def __getstate__(self) -> dict[str, Any]:
        return {**{k: v for k, v in vars(self).items() if k != "lock"}, "saved": True}

    def __setstate__(self, state: dict[str, Any]) -> None:
        assert state.pop("saved") and "_parameters" in state
        super().__setstate__(state)
        self.lock = threading.Lock()


class Empty(Net):
    """Counts what it does not have, so that Python takes it for false."""

    def __len__(self) -> int:
        return 0


class Changes(Callback):
    """Changes the module at the ends of epochs."""

    def on_epoch_end(self, state: CallbackState, record: Any) -> None:
        self.change(state.model, state.epoch)

    def change(self, model: Any, epoch: int) -> None:
        raise NotImplementedError


class Prunes(Changes):
    def change(self, model: Any, epoch: int) -> None:
        if epoch == 1:
            prune.l1_unstructured(model.first, "weight", 0.5)


class Replaces(Changes):
    def change(self, model: Any, epoch: int) -> None:
        if epoch == 2:
            torch.manual_seed(8)
            model.last = nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 1))


class Sets(Changes):
    def change(self, model: Any, epoch: int) -> None:
        model.steps, model.first.note = 10 * epoch, {"epoch": epoch}


class Hooks(Changes):
    def change(self, model: Any, epoch: int) -> None:
        if epoch == 1:
            model.first.register_forward_hook(doubled)


def doubled(layer: nn.Module, given: Any, output: torch.Tensor) -> torch.Tensor:
    return output * 2


class Thaws(Changes):
    def change(self, model: Any, epoch: int) -> None:
        model.first.requires_grad_(epoch == 1)


ROUNDS = {"syncStrategy": ParameterAveraging(averaging_period=1), "executionMode": "rounds"}
KEPT: dict[str, tuple[Callable[[], nn.Module], Changes | None]] = {
    "in rounds: attributes": (Counts, None),
    "in rounds: scripted": (scripted_counts, None),
    "in rounds: what cannot be sent": (Locks, None),
    "in rounds: set by a callback": (Net, Sets()),
    "attributes": (Remembers, None),
    "what cannot be sent": (Locks, None),
    "scripted": (scripted_counts, None),
    "a state of its own": (Own, None),
    "set by a callback": (Net, Sets()),
    "pruned by a callback": (Net, Prunes()),
    "pruned, of no length": (Empty, Prunes()),
    "a layer of a callback": (Net, Replaces()),
    "a hook of a callback": (Net, Hooks()),
    "frozen by a callback": (Net, Thaws()),
}


def plain(value: Any) -> Any:
    """An attribute as something that can be compared; Spark gives rows in another order."""
    if isinstance(value, nn.Module):
        return repr(value)
    if isinstance(value, np.random.Generator):
        return value.normal()
    if isinstance(value, torch.Tensor):
        return sorted(round(number, 4) for number in value.flatten().tolist())
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    if isinstance(value, Stats):
        return plain([value.count, value.total])
    return round(value, 4) if isinstance(value, float) else value


@pytest.mark.parametrize("kind", KEPT)
def test_what_training_leaves_besides_weights_comes_back(
    df: DataFrame, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    make, callback = KEPT[kind]
    torch.manual_seed(3)
    given = make()
    torch.manual_seed(3)
    expected = make()
    optimizer = sgd(expected.parameters())
    for epoch in range(STEPS):
        optimizer.zero_grad()
        F.mse_loss(expected(X).squeeze(1), Y).backward()
        optimizer.step()
        if callback is not None:
            callback.change(expected, epoch + 1)
    module = TorchRegressor(
        module=given, optimizer=sgd, epochs=STEPS, batchSize=ROWS, numWorkers=1, loss="mse",
        verbose=0, maxRestarts=0, device="cpu", callbacks=[callback] if callback else [],
        **(ROUNDS if "rounds" in kind else {}),
    ).fit(df).module  # fmt: skip
    layers, wanted = dict(module.named_modules()), dict(expected.named_modules())
    assert list(layers) == list(wanted)
    for name, layer in wanted.items() if "scripted" not in kind else ():
        own = vars(layer).keys() - vars(nn.Module()).keys() - {"lock"}
        assert vars(layers[name]).keys() - vars(nn.Module()).keys() - {"lock"} == own
        for key in own:
            found = vars(layers[name])[key]
            assert plain(found) == plain(vars(layer)[key]), (name, key)
    assert {n: p.requires_grad for n, p in module.named_parameters()} == {
        n: p.requires_grad for n, p in expected.named_parameters()
    }
    if "scripted" in kind:
        assert module.steps == STEPS
        assert torch.allclose(module.center, expected.center)
    with torch.no_grad():
        assert torch.allclose(module(X), expected.eval()(X), atol=1e-4)
    if "in rounds: what" in kind:
        return  # tasks of rounds make it anew each
    told = [record.message for record in caplog.records if "cannot be sent back" in record.message]
    assert len(told) == (kind == "what cannot be sent")
    if kind == "attributes":
        assert module.layers[0] is module.first


@pytest.mark.parametrize(
    ("make", "callback", "message"),
    [
        (Net, Prunes(), "changed layers of the module (first)"),
        (Remembers, None, "changed attributes of the module (stats, a Stats, noise, a Generator)"),
    ],
)
def test_rounds_refuse_what_tasks_cannot_hand_on(
    df: DataFrame, make: Callable[[], nn.Module], callback: Changes | None, message: str
) -> None:
    estimator = TorchRegressor(
        module=make(), optimizer=sgd, epochs=STEPS, batchSize=ROWS, numWorkers=1, loss="mse",
        verbose=0, maxRestarts=0, device="cpu", callbacks=[callback] if callback else [], **ROUNDS,
    )  # fmt: skip
    with pytest.raises((ConfigError, WorkerError), match=re.escape(message)):
        estimator.fit(df)


NOTEBOOK = """
from torch import nn

KEPT = {}

def hook(layer, inputs, output):
    KEPT["of"] = output

def loss(output, target):
    return (output.squeeze(1) - target) ** 2 + KEPT["of"].pow(2).mean(1)
"""


def test_a_loss_finds_the_globals_that_hooks_of_a_divided_module_leave(df: DataFrame) -> None:
    with program(NOTEBOOK) as made:
        torch.manual_seed(3)
        given = Net()
        given.first.register_forward_hook(made.hook)
        expected = copy.deepcopy(given)
        optimizer = sgd(expected.parameters())
        for _ in range(STEPS):
            optimizer.zero_grad()
            made.loss(expected(X), Y).mean().backward()
            optimizer.step()
        module = TorchRegressor(
            module=given, optimizer=sgd, epochs=STEPS, batchSize=ROWS, loss=made.loss, verbose=0,
            parallelism=Mesh(shard=2), maxRestarts=0, device="cpu",
        ).fit(df).module  # fmt: skip
    for found, wanted in zip(module.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)
