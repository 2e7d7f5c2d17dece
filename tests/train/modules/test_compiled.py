"""Compiled modules train as others do, to rounding; one piece of code serves all sizes."""

from __future__ import annotations

import copy
import itertools
import sysconfig
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor import cpp_builder

from sparkdl.config import TrainConfig
from sparkdl.data.collate import Arguments
from sparkdl.data.plan import RoundPart
from sparkdl.data.spool.mapped import MappedRows
from sparkdl.errors import ClusterError
from sparkdl.train.callbacks import NullObserver
from sparkdl.train.modules.compiled import compile_in_place
from sparkdl.train.modules.restore import restored
from sparkdl.train.round_replica import RoundReplica
from tests.train.runs import NUM_FEATURES, Keeper, but, make_data, plan_for, run, seeded, weights

pytestmark = [
    pytest.mark.slow,  # torch's compiler is imported
    # torch does not show these of its compiler either.
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]
CPU = torch.device("cpu")


def make_net() -> nn.Sequential:
    """A container of torch's own, with a layer as wide as a batch."""
    return nn.Sequential(
        nn.Linear(NUM_FEATURES, 6, bias=False),
        nn.BatchNorm1d(6),
        nn.Tanh(),
        nn.Dropout(0.25),
        nn.Linear(6, 1),
    )


def compilations() -> int:
    """Since the last call."""
    number: int = counters["frames"]["ok"]
    counters.clear()
    return number


def test_trains_as_without_and_resumes_with_the_same_bits() -> None:
    config = TrainConfig(
        epochs=3, batch_size=6, optimizer="adam", learning_rate=0.02, seed=4, compile=True
    )
    data, validation = make_data([23], dtype=torch.float32), make_data([9], dtype=torch.float32)
    plain, whole = seeded(make_net), seeded(make_net)
    expected = run(plain, but(config, compile=False), data, validation=validation)
    sink = Keeper(steps=tuple(range(1, 12)))
    compilations()
    got = run(whole, config, data, validation=validation, sink=sink)
    assert compilations() == 2  # batches of 5 and 6 rows; evaluations of 6 and 3
    names = list(plain.state_dict())
    assert list(whole.state_dict()) == list(sink.points[1].shared["model"]) == names
    torch.testing.assert_close(weights(whole), weights(plain), rtol=1e-4, atol=1e-5)
    for mine, other in zip(got.history, expected.history, strict=True):
        assert mine["val_loss"] == pytest.approx(other["val_loss"], rel=1e-4)
    for step in (4, 7):  # at the end of an epoch, and within one
        torch._dynamo.reset()  # as in another process
        resumed = seeded(make_net, seed=99)
        run(resumed, config, data, validation=validation, resume=sink.points[step])
        assert compilations() > 0
        for a, b in zip(whole.state_dict().values(), resumed.state_dict().values(), strict=True):
            assert torch.equal(a, b)
    assert whole._compiled_call_impl is not None
    assert copy.deepcopy(whole)._compiled_call_impl is None


@dataclass
class Meter:
    """As users write them: an object with other objects and containers in it."""

    counts: dict[str, list[int]] = field(default_factory=lambda: {"calls": [0]})
    random: np.random.Generator = field(default_factory=lambda: np.random.default_rng(1))
    numbers: Any = field(default_factory=itertools.count)
    last: Meter | None = None


class Slotted:
    __slots__ = ("noise", "total")

    def __init__(self) -> None:
        self.total = np.zeros(NUM_FEATURES)


class Remembers(nn.Module):
    """Sets itself up from the first batch, and keeps what it has seen in attributes."""

    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.inited, self.seen = nn.Linear(NUM_FEATURES, 1), False, [0.0]
        self.center = torch.zeros(NUM_FEATURES)
        self.meter, self.slotted = Meter(), Slotted()
        self.layer.meter = self.meter
        self.kept: Any = ({"means": deque([torch.zeros(1)], maxlen=9)}, [[0.0]])

    @torch.compiler.disable
    def look(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            if not self.inited:
                self.scale, self.inited = x.std(0), True
                self.register_buffer("first", x[:1].clone())
                self.meter.last = Meter()
            type(self).calls += 1
            self.center.mul_(0.5).add_(x.mean(0))
            self.seen.append(x.mean().item())
            self.meter.counts["calls"].append(next(self.meter.numbers))
            self.meter.counts[str(len(self.seen))] = [1]
            self.slotted.total += x.numpy().sum(0)
            self.slotted.noise = self.meter.random.normal()
            self.kept[0]["means"].append(self.kept[0]["means"][-1] + x.mean())
            self.kept[0]["means"][0].add_(x.mean())
            self.kept[1][0][0] += float(x.mean())
            with torch.no_grad():
                self.layer.weight.clamp_(-0.3, 0.3)
        return (x - self.center) * self.scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(self.look(x))
        return out


def test_attributes_are_those_of_the_batches_alone() -> None:
    config = TrainConfig(epochs=2, batch_size=6, optimizer="sgd", learning_rate=0.02, seed=4)
    data = make_data([12], dtype=torch.float32)
    nets, calls = [seeded(Remembers), seeded(Remembers)], []
    for net, is_compiled in zip(nets, (False, True), strict=True):
        Remembers.calls = 0
        run(net, but(config, compile=is_compiled), data)
        calls.append(Remembers.calls)
    plain, compiled = nets
    assert calls == [4, 4]
    assert compiled.seen == plain.seen
    assert compiled.meter.counts == plain.meter.counts
    assert compiled.layer.meter is compiled.meter
    assert compiled.slotted.noise == plain.slotted.noise
    assert np.array_equal(compiled.slotted.total, plain.slotted.total)
    assert compiled.kept == plain.kept
    assert torch.equal(compiled.first, plain.first)  # type: ignore[arg-type]
    assert torch.equal(compiled.scale, plain.scale)  # type: ignore[arg-type]
    assert torch.equal(compiled.center, plain.center)  # type: ignore[arg-type]
    torch.testing.assert_close(weights(compiled), weights(plain), rtol=1e-4, atol=1e-5)


def test_parameters_are_not_what_an_example_makes_of_them() -> None:
    module = nn.Embedding(4, 2, max_norm=0.5)
    before = module.weight.detach().clone()
    with restored(module):
        module(torch.tensor([1, 3]))
        assert not torch.equal(module.weight, before)
    assert torch.equal(module.weight, before)


class Parts(nn.Module):
    """As a GAN: nobody calls the module itself."""

    def __init__(self) -> None:
        super().__init__()
        self.maker, self.judge = nn.Linear(NUM_FEATURES, 3), nn.Linear(3, 1)


def judged(module: Parts, inputs: torch.Tensor, target: torch.Tensor) -> Any:
    return (module.judge(module.maker(inputs).tanh()).squeeze(1) - target).square()


def test_a_training_step_calls_compiled_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = torch.compile
    monkeypatch.setattr(torch, "compile", lambda call, options: compiled(call, backend="eager"))
    config = TrainConfig(batch_size=6, learning_rate=0.1, training_step=judged, compile=True)
    plain, module = seeded(Parts), seeded(Parts)
    data = make_data([23], dtype=torch.float32)
    run(plain, but(config, compile=False), data)
    compilations()
    run(module, config, data)
    assert compilations() == 2  # maker and judge
    torch.testing.assert_close(weights(module), weights(plain))


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(20, 4), nn.Linear(4, 1)

    def forward(self, words: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        values = self.table(words) * mask[..., None]
        return self.head(values.sum(1) / mask.sum(1, keepdim=True))


def test_lengths_and_sparse_inputs_do_not_compile_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = torch.compile
    monkeypatch.setattr(torch, "compile", lambda call, options: compiled(call, backend="eager"))
    module = Words()
    compile_in_place(module, CPU, Arguments((torch.ones(9, 9).long(), torch.ones(9, 9))))
    compilations()
    for rows, length in ((6, 6), (5, 6), (6, 9), (4, 2), (7, 20)):
        words = torch.randint(0, 20, (rows, length))
        assert module(words, torch.ones(rows, length)).shape == (rows, 1)
    assert compilations() == 1
    sparse = nn.Linear(4, 1)
    expected = sparse(torch.eye(4))
    compile_in_place(sparse, CPU, Arguments((torch.eye(4).to_sparse(),)))
    torch.testing.assert_close(sparse(torch.eye(4).to_sparse()), expected)


def test_code_is_for_the_largest_batch_not_for_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[int] = []

    def keep(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        rows.extend(value.node.hint for value in inputs if isinstance(value, torch.SymInt))
        return graph.forward

    compiled = torch.compile
    monkeypatch.setattr(torch, "compile", lambda call, options: compiled(call, backend=keep))
    config = TrainConfig(batch_size=6, learning_rate=0.1, compile=True)
    run(make_net(), config, make_data([23], dtype=torch.float32))  # the first has 5
    assert rows == [6]


def test_a_process_keeps_compiled_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = torch.compile
    monkeypatch.setattr(torch, "compile", lambda call, options: compiled(call, backend="eager"))
    config = TrainConfig(batch_size=4, learning_rate=0.1, compile=True)
    data = make_data([8], dtype=torch.float32)
    plan = plan_for(data, config)
    rows, part = MappedRows(data[0], plan), RoundPart(epoch=0, step=0, step_in_epoch=0, num_steps=2)
    compilations()
    for number in range(torch._dynamo.config.recompile_limit + 1):  # of fits, one after the other
        module = seeded(make_net, seed=number)
        replica = RoundReplica(module, config, plan, CPU)
        for _ in range(2):
            replica.train({"model": module.state_dict()}, 0, rows, part, NullObserver())
        assert compilations() == 1


def test_what_is_missing_to_compile_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    config = TrainConfig(compile=True)
    with monkeypatch.context() as patched:
        cpp_builder.cpp_compiler_search.cache_clear()  # another process has not looked yet
        patched.setenv("PATH", "/nowhere")
        with pytest.raises(ClusterError, match=r"no C\+\+ compiler.*install g\+\+"):
            run(make_net(), config, make_data([4]))
    monkeypatch.setattr(sysconfig, "get_path", lambda name: "/nowhere")
    with pytest.raises(ClusterError, match=r"/nowhere/Python.h is missing"):
        run(make_net(), config, make_data([4]))


def test_the_usual_size_of_a_batch_has_code_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[list[Any]] = []

    def keep(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        symbols = [value for value in inputs if isinstance(value, torch.SymInt)]
        sizes.append([value.node.hint for value in symbols])
        return graph.forward

    compiled = torch.compile
    monkeypatch.setattr(torch, "compile", lambda call, options: compiled(call, backend=keep))
    module, data = seeded(make_net), make_data([23], dtype=torch.float32)
    plan = plan_for(data, TrainConfig(batch_size=6))
    assert plan.usual_rows(0) == 6  # three times of four
    expected = seeded(make_net).eval()
    example = Arguments((torch.ones(9, NUM_FEATURES),))
    compile_in_place(module, CPU, example, usual_rows=plan.usual_rows(0))
    compilations()
    for rows in (6, 5, 6, 4, 6):
        module(torch.randn(rows, NUM_FEATURES))
    assert compilations() == 2
    assert sizes == [[], [9]]  # a number, and a variable that was compiled for the example
    module.load_state_dict(expected.state_dict())
    module.eval()
    for rows in (6, 5, 4):
        given = torch.randn(rows, NUM_FEATURES)
        torch.testing.assert_close(module(given), expected(given))


OF_A_SCRIPT = """
import functools
import torch
import torch.nn.functional as F
FACTOR, COUNT = 2.0, 0
class Scale:
    def __init__(self, by): self.by = by
    def __call__(self, x): return x * self.by * FACTOR
def twice(x): return x * FACTOR
def power(n): return 1 if n == 0 else FACTOR * power(n - 1)
@torch.compiler.disable
def apart(x): return x * (2.0 if __name__ == NAME else 5.0)
class Net(torch.nn.Linear):
    def __init__(self):
        super().__init__(4, 3)
        part = functools.partial(torch.mul, other=FACTOR)
        self.parts = [Scale(3.0), twice, part, lambda x: x + FACTOR]
    @staticmethod
    def scaled(x): return F.relu(x) + torch.tanh(x)
    def forward(self, x):
        global COUNT
        COUNT += 1
        x = twice(self.scaled(super().forward(x))) * power(3) * len(__name__)
        for part in self.parts: x = part(x)
        return apart(x) * COUNT
NAME = __name__
"""


@pytest.mark.parametrize("name", ["__main__", "not_there"])
def test_code_of_a_script_finds_its_globals(name: str) -> None:
    """Which no module of this process has, as in a worker."""
    of_script: dict[str, Any] = {"__name__": name}
    exec(OF_A_SCRIPT, of_script)
    torch.manual_seed(0)
    module, values = of_script["Net"]().eval(), torch.randn(5, 4)
    expected = module(values)
    compile_in_place(module, CPU, Arguments((values,)))
    of_script["COUNT"] = 0
    assert torch.allclose(module(values), expected)
    assert of_script["COUNT"] == 1 and of_script["__name__"] == name
    of_script["FACTOR"] = 3.0
    assert not torch.allclose(module(values), 2 * expected)  # it is compiled anew
    of_script["FACTOR"] = 2.0
    assert torch.allclose(module(values), 3 * expected)
