"""Runs that would train differently have different keys; the same run has its own, always."""

from __future__ import annotations

import collections
import copy
import importlib
import subprocess
import sys
import types
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm
from torchmetrics.classification import BinaryAccuracy, MulticlassF1Score

from sparkdl.config import TrainConfig
from sparkdl.data.plan import Column
from sparkdl.spark.run.resume import run_key
from sparkdl.sync.averaging.parameter_averaging import ParameterAveraging

SCRIPT = """
import torch
from functools import partial
from torch import nn

SCALE = {scale}

def scaled(x):
    return x * SCALE

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.kinds = {{"a", "b", "c"}}
        self.inner.register_forward_hook(lambda module, inputs, output: output + 1)
    def forward(self, x):
        return {forward}

torch.manual_seed(1)
from tests.serialization.test_identity import key
print(key(Net(), loss=partial(lambda a, b, p: (a - b).abs().pow(p).mean(), p=2)))
"""


def key(module: nn.Module, **options: Any) -> str:
    column = Column(name="x", role="feature", dtype="float32", shape=(2,))
    return run_key(module, [column], TrainConfig(**options), "content")


def net(activation: nn.Module | None = None, *, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(2, 2), activation or nn.ReLU(), nn.Dropout(0.5))


def test_the_same_fit_has_the_same_key() -> None:
    assert key(net()) == key(net()) == key(copy.deepcopy(net()).eval())
    assert key(net(), epochs=3, max_steps=7) == key(net())
    metrics = {"f1": partial(MulticlassF1Score, num_classes=3), "accuracy": BinaryAccuracy()}
    assert key(net(), metrics=metrics) == key(net(), metrics=copy.deepcopy(metrics))
    assert key(weight_norm(nn.Linear(2, 2))) != key(nn.Linear(2, 2))


def frozen() -> nn.Module:
    module = net()
    next(module.parameters()).requires_grad_(False)
    return module


def tied() -> nn.Module:
    one = nn.Linear(2, 2)
    return nn.Sequential(one, one)


def apart() -> nn.Module:
    one = nn.Linear(2, 2)
    return nn.Sequential(one, copy.deepcopy(one))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (net(nn.ReLU()), net(nn.Tanh())),
        (net(nn.LeakyReLU(0.1)), net(nn.LeakyReLU(0.2))),
        (net(seed=1), net(seed=2)),
        (net(), frozen()),
        (tied(), apart()),
    ],
    ids=["activations", "arguments", "weights", "frozen", "tied"],
)
def test_other_modules_have_other_keys(one: nn.Module, other: nn.Module) -> None:
    assert key(one) != key(other)


def decaying() -> Callable[..., Any]:
    def schedule(optimizer: Any, gamma: float) -> Any:
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma)

    return schedule


def powered(power: float) -> Callable[..., Any]:
    return lambda output, target: (output - target).abs().pow(power).mean()


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"loss": lambda a, b: (a - b) ** 2}, {"loss": lambda a, b: (a - b).abs()}),
        ({"loss": powered(1)}, {"loss": powered(2)}),
        ({"loss": nn.HuberLoss(delta=1.0)}, {"loss": nn.HuberLoss(delta=2.0)}),
        (
            {"optimizer": lambda p: torch.optim.SGD(p, lr=1.0)},
            {"optimizer": lambda p: torch.optim.SGD(p, lr=0.1)},
        ),
        (
            {"scheduler": partial(decaying(), gamma=0.1)},
            {"scheduler": partial(decaying(), gamma=0.9)},
        ),
        (
            {"sync_strategy": ParameterAveraging(averaging_period=2)},
            {"sync_strategy": ParameterAveraging(averaging_period=3)},
        ),
        ({"seed": 1}, {"seed": 2}),
    ],
)
def test_other_configurations_have_other_keys(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert key(net(), **one) != key(net(), **other)


def bound(factor: float) -> nn.Module:
    module = net()
    body = {1.0: lambda self, x: self[0](x), 2.0: lambda self, x: self[0](x) * 2}[factor]
    module.forward = types.MethodType(body, module)  # type: ignore[method-assign]
    return module


def made_by_exec(factor: float) -> Any:
    space: dict[str, Any] = {}
    exec(f"def scaled(x): return x * {factor}", space)
    return space["scaled"]


def class_made_by_exec(factor: float) -> Any:
    space: dict[str, Any] = {}
    exec(f"class Scaled:\n    def __call__(self, a, b): return (a - b).mean() * {factor}", space)
    return space["Scaled"]()


def of_metaclass(factor: float) -> Any:
    class Meta(type):
        def __getitem__(cls, key: str) -> float:
            return factor

    class Table(metaclass=Meta):
        pass

    return lambda output, target: (output - target).abs().mean() * Table["a"]


def of_default(factor: float) -> Any:
    table: dict[str, float] = collections.defaultdict(lambda: factor)
    return lambda output, target: (output - target).abs().mean() * table["a"]


@pytest.mark.parametrize(
    "make",
    [
        lambda factor: key(bound(factor)),
        lambda factor: key(net(), loss=made_by_exec(factor)),
        lambda factor: key(net(), loss=class_made_by_exec(factor)),
        lambda factor: key(net(), loss=of_metaclass(factor)),
        lambda factor: key(net(), loss=of_default(factor)),
    ],
    ids=["bound method", "exec", "class of exec", "metaclass", "defaultdict"],
)
def test_code_that_is_reached_otherwise_counts(make: Callable[[float], str]) -> None:
    assert make(1.0) == make(1.0) != make(2.0)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_code_of_ones_own_counts_and_is_the_same_in_another_process() -> None:
    scripts = [
        SCRIPT.format(forward="scaled(self.inner(x))", scale=2),
        SCRIPT.format(forward="torch.relu(self.inner(x))", scale=2),
        SCRIPT.format(forward="scaled(self.inner(x))", scale=3),
    ]
    # With `exec` the classes have no file, as in a notebook.
    command = [sys.executable, "-W", "ignore", "-c", f"for text in {scripts!r}: exec(text)"]
    running = [
        subprocess.Popen(command, cwd=Path(__file__).parents[2], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    first, again = (process.communicate()[0].split() for process in running)
    assert first == again
    assert len(set(first)) == 3


OWN = """
import math
LIMITS = {"low": 1.0, "high": [2.0, 3.0]}
def scaled(x):
    return x * LIMITS["low"] + math.pi
"""
USES = """
from torch import nn
import torch, functools, own_numbers_{n}
WEIGHTS = (1.0, 1.0)
TABLE = {{"a": [1.0, 2.0]}}
class Net(nn.Linear):
    shifts = (0.5, [1.0])
    def forward(self, x):
        return super().forward(own_numbers_{n}.scaled(x)) + self.shifts[0]
def loss(output, target):
    import own_numbers_{n} as numbers
    return WEIGHTS[0] * (output - target).abs() * TABLE["a"][0] * factor() * numbers.LIMITS["low"]
@functools.cache
def factor():
    return 2.0
net = Net(2, 2)
nn.init.ones_(net.weight), nn.init.ones_(net.bias)
"""
CHANGES = {
    "a tuple": ("USES", "WEIGHTS = (1.0, 1.0)", "WEIGHTS = (5.0, 1.0)"),
    "inside a dict": ("USES", "[1.0, 2.0]", "[1.0, 3.0]"),
    "a class attribute": ("USES", "(0.5, [1.0])", "(0.5, [2.0])"),
    "a cached function": ("USES", "return 2.0", "return 3.0"),
    "a function of an own module": ("OWN", "+ math.pi", "- math.pi"),
    "a value of an own module": ("OWN", '"low": 1.0', '"low": 4.0'),
    "deep in a value of an own module": ("OWN", "[2.0, 3.0]", "[2.0, 4.0]"),
    "nothing": ("OWN", "x * LIMITS", "x * LIMITS"),
}


@pytest.mark.parametrize("what", CHANGES)
def test_whatever_own_code_reads_counts(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    part, before, after = CHANGES[what]
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # which tells files by their seconds
    keys = []
    for old, new in ((before, before), (before, after)):
        texts = {"OWN": OWN, "USES": USES.format(n=0)}
        assert old in texts[part]
        texts[part] = texts[part].replace(old, new)
        (tmp_path / "own_numbers_0.py").write_text(texts["OWN"])
        for name in ("own_numbers_0", "own_program"):
            sys.modules.pop(name, None)
        importlib.invalidate_caches()
        program = types.ModuleType("own_program")
        exec(compile(texts["USES"], "own_program", "exec"), vars(program))
        monkeypatch.setitem(sys.modules, "own_program", program)
        keys.append(key(program.net, loss=program.loss))
    assert (keys[0] == keys[1]) is (what == "nothing")
    sys.modules.pop("own_numbers_0", None)


def test_attributes_of_any_name_and_scripts_are_described() -> None:
    traced = torch.fx.symbolic_trace(net())
    traced.forward_hooks = []
    assert key(traced) == key(traced)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        scripts = [torch.jit.script(net(kind)) for kind in (nn.ReLU(), nn.ReLU(), nn.Tanh())]
    assert key(scripts[0]) == key(scripts[1]) != key(scripts[2])
