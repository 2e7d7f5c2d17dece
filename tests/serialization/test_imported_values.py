"""What code names of the user's own modules is found, whatever it is reached through."""

from __future__ import annotations

import builtins
import collections
import decimal
import functools
import gc
import importlib
import math
import os
import pickle
import re
import sys
import time
import types
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.optim import lr_scheduler

from sparkdl.serialization.program import imported_values as module
from sparkdl.serialization.program import package_patches
from sparkdl.serialization.program.imported_values import (
    ProgramValues,
    changed_names,
    differing,
    give_back,
    imported_values,
    program_code,
    values_to_send,
)
from sparkdl.serialization.program.named_code import computes_only, parsed
from sparkdl.serialization.program.package_patches import describe_patches
from sparkdl.serialization.program.process_settings import (
    changed_settings,
    give_settings_back,
    kept_settings,
    present_settings,
    settings_of_task,
    take_settings,
)
from sparkdl.serialization.travel.pickling import sent_along
from tests.serialization.programs import program

KINDS = {
    "wraps": "@deco\ndef held(x): return x * {K}\ndef use(x): return held(x)",
    "closure": "def make():\n    return lambda x: x * {K}\nheld = make()\n"
    "def use(x): return held(x)",
    "autocast": "@torch.autocast('cpu', enabled=False)\ndef use(x): return x * {K}",
    "no_grad": "@torch.no_grad()\ndef use(x): return x * {K}",
    "foreign wraps": "@functools.wraps(torch.sin)\ndef held(x): return x * {K}\n"
    "def use(x): return held(x)",
    "partial": "held = functools.partial({T})\ndef use(x): return held(x)",
    "partial args": "held = functools.partial(call, {T})\ndef use(x): return held(x)",
    "partial keywords": "held = functools.partial(call, f={T})\ndef use(x): return held(x=x)",
    "default": "def use(x, f={T}): return f(x)",
    "lru_cache": "@functools.lru_cache(None)\ndef held(x): return x * {K}\n"
    "def use(x): return held(x)",
    "singledispatch": "@functools.singledispatch\ndef held(x): return x\n@held.register(int)\n"
    "def _(x): return x * {K}\ndef use(x): return held(x)",
    "call": "class Op:\n    def __call__(self, x): return x * {K}\nheld = Op()\n"
    "def use(x): return held(x)",
    "attribute": "class Op:\n    def __init__(self): self.f = {T}\nheld = Op()\n"
    "def use(x): return held.f(x)",
    "slot": "class Op:\n    __slots__ = ('f',)\n    def __init__(self): self.f = {T}\nheld = Op()\n"
    "def use(x): return held.f(x)",
    "list": "held = [{T}]\ndef use(x): return held[0](x)",
    "tuple": "held = ({T},)\ndef use(x): return held[0](x)",
    "dict": "held = {{'a': [{T}]}}\ndef use(x): return held['a'][0](x)",
    "set": "held = {{{T}}}\ndef use(x): return next(iter(held))(x)",
    "deque": "held = collections.deque([{T}])\ndef use(x): return held[0](x)",
    "proxy": "held = types.MappingProxyType({{'a': {T}}})\ndef use(x): return held['a'](x)",
    "dataclass": "@dataclasses.dataclass(frozen=True)\nclass Op:\n    f: object\nheld = Op({T})\n"
    "def use(x): return held.f(x)",
    "factory": "@dataclasses.dataclass\nclass Op:\n    k: float = dataclasses.field("
    "default_factory=lambda: {K})\ndef use(x): return x * Op().k",
    "enum": "class Op(enum.Enum):\n    A = 1\n    def __call__(self, x): return x * {K}\n"
    "def use(x): return Op.A(x)",
    "class attribute": "class Op:\n    f = [{T}]\ndef use(x): return Op.f[0](x)",
    "bound": "class Op:\n    def run(self, x): return x * {K}\nheld = Op().run\n"
    "def use(x): return held(x)",
    "static": "class Op:\n    @staticmethod\n    @deco\n    def run(x): return x * {K}\n"
    "def use(x): return Op.run(x)",
    "class method": "class Op:\n    @classmethod\n    def run(cls, x): return x * {K}\n"
    "held = Op.run\ndef use(x): return held(x)",
    "property": "class Op:\n    @property\n    def k(self): return {K}\n"
    "def use(x): return x * Op().k",
    "cached_property": "class Op:\n    @functools.cached_property\n    def k(self): return {K}\n"
    "def use(x): return x * Op().k",
    "partialmethod": "class Op:\n    run = functools.partialmethod(lambda self, x: x * {K})\n"
    "def use(x): return Op().run(x)",
    "metaclass": "class Meta(type):\n    def __call__(cls, x): return x * {K}\n"
    "class Op(metaclass=Meta): pass\ndef use(x): return Op(x)",
    "module": "held = torch.nn.ModuleDict()\nclass Op(torch.nn.Module):\n"
    "    def forward(self, x): return x * {K}\nheld['a'] = Op()\ndef use(x): return held['a'](x)",
    "attributes": "class Op:\n    def __getattr__(self, name): raise SystemExit(name)\n"
    "    def run(self, x): return x * {K}\nheld = Op()\ndef use(x): return held.run(x)",
}
"""Ways from ``use`` to a global; {K} is that, and {T} is a function that multiplies by it."""

HEAD = """
import collections, dataclasses, enum, functools, types
import torch

def deco(f):
    @functools.wraps(f)
    def g(*args):
        return f(*args)
    return g

def call(f, x):
    return f(x)

def scale(k):
    def scaled(x):
        return x * k
    return scaled

def named(name, k):
    made = scale(k)
    made.__name__ = made.__qualname__ = name
    return made

by_two = scale(2.0)
twice = named("twice", 2.0)
def uses_it(x): return by_two(x) + twice(x)
def place(): return __file__, __name__, __spec__

class Base:
    def get(self): return 1
class Child(Base):
    def get(self): return super().get() + 1
def getting(kind, k):
    def get(self): return super(kind, self).get() + k
    get.__qualname__ = "Child.get"
    return get
def gets(): return Child().get()

class Level(enum.Enum):
    LOW = 1
    HIGH = 2
    def __init__(self, number): self.scale = 1.0

def build():
    class Built:
        size = 3
        def area(self): return self.size
    return Built
Built = build()
def reads(): return Level.HIGH.value, Level.LOW.scale, Built().area()
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    text = HEAD
    for number, body in enumerate(KINDS.values()):
        made = body.format(K=f"K{number}", T=f"times{number}")
        for name in ("held", "use", "make", "Op", "Meta"):
            made = made.replace(f"{name}", f"{name}{number}")
        text += f"\nK{number} = 1.0\ndef times{number}(x): return x * K{number}\n{made}\n"
    path = tmp_path_factory.mktemp("library")
    (path / "library_of_kinds.py").write_text(text, encoding="utf-8")
    sys.path.insert(0, str(path))
    try:
        yield importlib.import_module("library_of_kinds")
    finally:
        sys.path.remove(str(path))
        del sys.modules["library_of_kinds"]


@pytest.mark.parametrize("number", range(len(KINDS)), ids=list(KINDS))
def test_globals_are_found_through_each_kind(library: Any, number: int) -> None:
    use = getattr(library, f"use{number}")
    found = imported_values([use])
    assert (library.__name__, f"K{number}") in found
    assert not any(name in ("K0", "torch") for _, name in found) or number == 0
    assert {place[0] for place in found} == {library.__name__}
    code = program_code([use])
    assert code.lacks == {}
    names = {(library.__name__, f"{name}{number}") for name in ("K", "use")}
    assert names <= pickle.loads(code.values).keys()


LOOKUPS = """
import importlib, sys, operator, types
import {name} as held
BY_NAME = {{"a": held}}
class Holds: library = held
def of_module(x): return x * getattr(held, "K" + "1")
def of_dict(x): return x * BY_NAME["a"].K1
def of_class(x): return x * Holds.library.K1
def of_members(x): return x * held.__dict__["K" + "1"]
def of_process(x): return x * sys.modules["{name}"].K1
def of_import(x): return x * importlib.import_module("{name}").K1
def made(library): return lambda x: x * library.K1
of_closure = made(held)
def of_itself(x): return x * held.looked_up("K" + "1")
def nothing(x): return x * getattr(x, "scale", 1.0)
"""


@pytest.mark.parametrize("name", re.findall(r"\bof_[a-z]+|nothing", LOOKUPS))
def test_globals_are_found_that_code_looks_up(library: Any, name: str) -> None:
    library.looked_up = types.FunctionType(
        compile("def looked_up(n): return globals()[n]", "library", "exec").co_consts[0],
        vars(library),
    )
    with program(LOOKUPS.format(name=library.__name__)) as made:
        found = imported_values([getattr(made, name)])
    assert ((library.__name__, "K1") in found) is (name != "nothing")


def test_names_that_no_code_has_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    text = "import sys\ndef use(x): return eval('x') + globals()['y']\ndef get(): return sys.argv"
    with program(text + "\ndef plain(x): return x") as made:
        for _ in range(2):
            program_code([made.use, made.get, made.plain])
    assert [message.partition(", which")[0] for message in caplog.messages] == [
        "use uses eval(), globals()", "get uses sys.argv"
    ]  # fmt: skip


@functools.lru_cache(maxsize=4)
def drawn(number: int) -> float:
    return float(torch.rand(()))


def uses_drawn(x: float) -> float:
    return x * drawn(3)


def test_the_results_that_a_cache_holds_go_along() -> None:
    place = (__name__, "drawn")
    drawn.cache_clear()
    assert imported_values([uses_drawn])[place] == module.as_imported([place])[place]
    value = drawn(3)
    expected = imported_values([uses_drawn])
    sent = values_to_send(expected, dict(expected))
    assert sent.values.keys() == {place}
    assert pickle.loads(sent.values[place])(3) == value


def test_settings_of_torch_go_along() -> None:
    before = changed_settings()
    with kept_settings():
        torch.set_float32_matmul_precision("medium")
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.set_flush_denormal(True)
        sent = program_code([]).settings
    assert changed_settings() == before
    take_settings(sent)
    assert torch.get_float32_matmul_precision() == "medium"
    assert torch.is_deterministic_algorithms_warn_only_enabled()
    assert torch.tensor(2.0**-1060, dtype=torch.float64).mul(0.5).item() == 0
    give_settings_back()
    assert changed_settings() == before


@pytest.mark.parametrize(
    "text",
    [
        "cuda.matmul.fp32_precision = 'tf32'",
        "fp32_precision = 'tf32'",
        "mkldnn.fp32_precision = 'bf16'",
        "cuda.matmul.allow_tf32 = True",
        "cudnn.allow_tf32 = False",
        "mkldnn.enabled = False",
    ],
)
def test_precisions_go_along_by_the_names_that_torch_has_now(text: str) -> None:
    """Torch refuses to say then what they are by its older names."""
    before = changed_settings()
    with kept_settings():
        exec(f"torch.backends.{text}")
        sent = program_code([]).settings
    assert changed_settings() == before
    take_settings(sent)
    assert changed_settings() == sent
    give_settings_back()
    assert changed_settings() == before


def of_the_process() -> Any:
    return (
        present_settings(travelling=False),
        warnings.filters[:],
        np.get_printoptions(),
        (decimal.getcontext().prec, sys.getrecursionlimit(), dict(os.environ)),
        (torch.get_default_dtype(), torch.is_grad_enabled(), torch.is_anomaly_enabled()),
    )


def change_the_process() -> None:
    np.seterr(all="raise")
    np.set_printoptions(precision=2)
    torch.use_deterministic_algorithms(True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.autograd.set_detect_anomaly(True)
    torch.set_flush_denormal(True)
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    decimal.getcontext().prec = 3
    sys.setrecursionlimit(5000)
    warnings.simplefilter("ignore")
    os.environ["OF_THE_TASK"] = "1"
    del os.environ["HOME"]


def test_settings_that_a_task_changes_end_with_it() -> None:
    before = of_the_process()
    with pytest.raises(ValueError, match="of the task"), settings_of_task():
        change_the_process()
        assert of_the_process() != before
        raise ValueError("of the task")
    assert of_the_process() == before
    take_settings({"float32 matmul precision": "medium"})  # as unpickling a task does
    with settings_of_task():
        assert torch.get_float32_matmul_precision() == "medium"
    assert of_the_process() == before


def test_checkpoints_tell_patched_packages_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    def described() -> str:
        return describe_patches(program_code([Acting]).patches)

    plain = described()
    monkeypatch.setattr(functional, "relu", lambda x: x * 2)
    twice = described()
    assert plain != twice == described()
    monkeypatch.setattr(functional, "relu", lambda x: x * 3)
    assert described() not in (plain, twice)
    assert describe_patches([]) == ""


def test_what_importing_sets_is_no_value_of_the_program(library: Any) -> None:
    assert imported_values([library.place]) == {}
    assert library.place()[0] == library.__file__


def test_the_kinds_use_the_global_that_they_name(library: Any) -> None:
    """So that the table says something: a change of the global changes what ``use`` gives."""
    for number, kind in enumerate(KINDS):
        setattr(library, f"K{number}", 3.0)
        if kind != "attributes":
            value: Any = library.torch.ones(1) if kind == "module" else 5
            assert getattr(library, f"use{number}")(value) == value * 3, kind
        setattr(library, f"K{number}", 1.0)


@pytest.mark.parametrize("number", range(len(KINDS)), ids=list(KINDS))
def test_what_the_program_has_changed_is_named(
    library: Any, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr(module, "as_imported", as_at_first(monkeypatch, library))
    use = getattr(library, f"use{number}")
    assert changed_names([use]) == []
    monkeypatch.setattr(library, f"K{number}", 0.123)
    assert f"{library.__name__}.K{number}" in changed_names([use])  # and what holds code with it


def as_at_first(monkeypatch: pytest.MonkeyPatch, library: Any) -> Any:
    """What a fresh process says: what these modules have now, before the test changes them."""
    uses = [value for name, value in vars(library).items() if name.startswith(("use", "gets"))]
    first = imported_values(uses)
    return lambda places: {place: first[place] for place in places}


def test_a_fresh_process_is_asked_only_for_what_the_text_of_files_does_not_tell(
    library: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[set[Any]] = []
    at_first = as_at_first(monkeypatch, library)
    monkeypatch.setattr(module, "as_imported", lambda places: asked.append(set(places)) or {})
    assert changed_names([library.gets, library.use0]) == []
    assert asked == [set()]
    monkeypatch.setattr(module, "as_imported", at_first)
    assert changed_names([library.uses_it]) == []
    monkeypatch.setattr(library, "by_two", library.scale(4.0))
    assert changed_names([library.uses_it]) == [f"{library.__name__}.by_two"]

    def get(self: Any) -> int:  # a method under its own name, which the program has made
        return 7

    get.__module__ = "__main__"
    monkeypatch.setattr(library.Child, "get", get)
    assert changed_names([library.gets]) == [f"{library.__name__}.Child.get"]


KEEPS = """
import functools, math
import torch
FACTOR, VOCAB, MEMO, CALLS = 2.0, [], {}, []
@functools.lru_cache
def waves(n): return torch.arange(n) * FACTOR + math.pi
@functools.lru_cache(maxsize=None)
def index(word): VOCAB.append(word); return len(VOCAB) - 1
@functools.lru_cache
def noise(n): return torch.rand(n)
@functools.lru_cache
def held():
    def inner(): return inner.k
    inner.k = 1.0
    return inner
def use(x): return waves(x)
def look(x): return index(x)
def draw(x): return noise(x)
def hold(x): return held()() * x
def memo(x): return MEMO.setdefault("scale", 1.0) * x
"""


def test_results_that_a_cache_would_get_again_are_no_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "code_that_keeps.py").write_text(KEEPS)
    monkeypatch.syspath_prepend(tmp_path)
    keeps: Any = importlib.import_module("code_that_keeps")
    uses = [getattr(keeps, name) for name in ("use", "look", "draw", "hold", "memo")]
    first = imported_values(uses)
    monkeypatch.setattr(module, "as_imported", lambda asked: {one: first[one] for one in asked})
    for use, argument in zip(uses, (3, "a", 3, 2.0, 1.0), strict=True):
        use(argument)
    drawn = torch.get_rng_state()
    told = [changed_names([use]) for use in uses]
    names = ("index", "noise", "held", "MEMO")
    assert [
        name for name in names if not any(f"code_that_keeps.{name}" in one for one in told)
    ] == []
    assert told[0] == [] and keeps.VOCAB == ["a"]  # what does more than compute is not called
    assert torch.equal(torch.get_rng_state(), drawn)
    monkeypatch.setattr(keeps, "FACTOR", 7)
    assert changed_names([keeps.use]) == ["code_that_keeps.FACTOR", "code_that_keeps.waves"]


TABLE, LOG = torch.zeros(1), list[float]()


class Counts:
    calls = 0

    def __add__(self, other: float) -> float:
        self.calls += 1
        return other


COUNTS = Counts()


@pytest.mark.parametrize(
    "text",
    [
        "(n, log=LOG.append): return log(n)",
        "(n, say=print): return say(n)",
        "(n): return TABLE.add_(n)",
        "(n): table = TABLE; table += n; return table",
        "(n): return LOG.__iadd__([n])",
        "(n): return torch.mul(TABLE, n, out=TABLE)",
        "(n): options = {'out': TABLE}; return torch.mul(TABLE, n, **options)",
        "(n): return np.savetxt('file', [n])",
        "(n): return torch.os.system('true')",
        "(n): return LOG.sort()",
        "(n): return torch.nn.init.constant_(TABLE, n)",
        "(n): return torch._C._set_grad_enabled(False)",
        "(n): return torch.rand(1) * n",
        "(n): return COUNTS + n",
        "(n): return [LOG.append(m) for m in (n, n)]",
    ],
)
def test_what_does_more_than_compute_is_known(text: str) -> None:
    made: dict[str, Any] = {}
    exec(f"def function{text}", globals(), made)
    assert not computes_only(made["function"])


def test_a_name_of_python_that_the_program_uses_for_another_thing_is_not_trusted() -> None:
    function = types.FunctionType(compile("sum([1])", "", "eval"), {"sum": LOG.append})
    assert not computes_only(function)
    assert computes_only(types.FunctionType(function.__code__, {}))


def test_a_cached_function_of_an_object_is_not_called(monkeypatch: pytest.MonkeyPatch) -> None:
    cached = functools.lru_cache(lambda counts: counts + 1.0)
    monkeypatch.setitem(globals(), "of_counts", cached)
    cached(COUNTS)
    before = COUNTS.calls
    assert not module._gives_again((__name__, "of_counts"))
    assert COUNTS.calls == before


def test_threads_parse_files_at_the_same_time() -> None:
    """Python 3.11 fails where another thread goes on while one is in the collector."""

    def let_others_run(phase: str, info: dict[str, int]) -> None:
        time.sleep(0)

    gc.callbacks.append(let_others_run)
    try:
        with ThreadPoolExecutor(2) as pool:
            assert all(tree.body for tree in pool.map(parsed, [torch.nn.functional.__file__] * 4))
    finally:
        gc.callbacks.remove(let_others_run)


def test_a_function_with_another_closure_is_sent(
    library: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether executors find it under its name or not."""
    names = {"by_two", "twice"}
    there = imported_values([library.uses_it])
    assert differing(there) == {}
    monkeypatch.setattr(module, "as_imported", dict)  # as a fresh process says
    monkeypatch.setattr(library, "by_two", library.scale(4.0))
    monkeypatch.setattr(library, "twice", library.named("twice", 4.0))
    changed = imported_values([library.uses_it])
    sent = values_to_send(changed, there)
    assert {name for _, name in sent.values} == names
    for name in names:
        assert pickle.loads(sent.values[library.__name__, name])(1.0) == 4.0


def test_a_method_whose_closure_has_its_class_is_sent(
    library: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = imported_values([library.gets])
    monkeypatch.setattr(module, "as_imported", dict)  # as a fresh process says
    with monkeypatch.context() as program:
        program.setattr(library.Child, "get", library.getting(library.Child, 5))
        sent = values_to_send(imported_values([library.gets]), there)
    assert_elsewhere(library.gets, sent, 6, 2)


def assert_elsewhere(use: Any, sent: Any, expected: Any, before: Any) -> None:
    """What came from a program holds until it is given back."""
    assert use() == before
    values, _, code = sent.__reduce__()[1]
    module._given(values, ("another machine", 1), code)
    assert use() == expected
    module.give_back()
    assert use() == before


def test_members_of_an_enum_and_classes_that_functions_make_are_sent(
    library: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the program has set in them comes to a process that has its own from the file."""
    there = imported_values([library.reads])
    monkeypatch.setattr(module, "as_imported", dict)  # as a fresh process says
    assert values_to_send(there, differing(there)).values == {}
    with monkeypatch.context() as program:
        program.setattr(library.Level.HIGH, "_value_", 5)
        program.setattr(library.Level.LOW, "scale", 2.0)
        program.setattr(library.Built, "size", 4)
        program.setattr(library.Built, "area", lambda self: self.size**2)
        sent = values_to_send(imported_values([library.reads]), there)
        assert library.reads() == (5, 2.0, 16)
    assert_elsewhere(library.reads, sent, (5, 2.0, 16), (2, 1.0, 3))


def test_the_walk_through_large_values_is_short(library: Any) -> None:
    library.held0.__dict__["data"] = [[{"a": object()}] for _ in range(100_000)]
    start = time.process_time()
    imported_values([library.use0])
    assert time.process_time() - start < 1.0
    del library.held0.__dict__["data"]


def gelu_as_it_was(values: torch.Tensor) -> torch.Tensor:
    return values * torch.sigmoid(1.702 * values)


def doubled(layer: nn.Linear, values: torch.Tensor) -> torch.Tensor:
    return functional.linear(values, 2 * layer.weight, layer.bias)


def test_what_a_program_has_put_into_packages_is_put_there_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert program_code([nn.Linear, nn.GELU]).patches == {}
    was = functional.gelu, nn.Linear.forward
    with monkeypatch.context() as patched:
        patched.setattr(functional, "gelu", gelu_as_it_was)
        patched.setattr(nn.Linear, "forward", doubled)
        code = program_code([nn.Bilinear, nn.modules.linear.NonDynamicallyQuantizableLinear])
    assert set(code.patches) == {
        ("torch.nn.functional", "gelu"), ("torch.nn.modules.linear", "Linear.forward")
    }  # fmt: skip
    assert ProgramValues(code=code).digest != ProgramValues().digest
    pickle.loads(pickle.dumps(ProgramValues(home=("elsewhere", 1), code=code)))
    try:
        layer, values = nn.Linear(3, 2), torch.randn(4, 3)
        assert torch.equal(layer(values), doubled(layer, values))
        assert torch.equal(functional.gelu(values), gelu_as_it_was(values))
    finally:
        give_back()
    assert (functional.gelu, nn.Linear.forward) == was


class Scaled(nn.Linear):
    """Reads what only the program has put into packages."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        known = math.pi * len(torch.__version__)
        scale = torch.scale_of_all * math.own * known_to_all  # type: ignore[attr-defined,name-defined]  # noqa: F821
        found: torch.Tensor = super().forward(x).twice()  # type: ignore[operator]
        return found * scale * self.width * nn.Dropout.table[0] / known  # type: ignore[attr-defined]


def test_values_that_a_program_has_put_into_packages_are_there_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module, values = Scaled(3, 2), torch.randn(4, 3)
    with monkeypatch.context() as patched:
        patched.setattr(torch, "scale_of_all", 3.0, raising=False)
        patched.setattr(math, "own", 5.0, raising=False)
        patched.setattr(builtins, "known_to_all", 7.0, raising=False)
        patched.setattr(nn.Linear, "width", torch.tensor(11.0), raising=False)
        patched.setattr(nn.Dropout, "table", [13.0], raising=False)
        patched.setattr(nn.Dropout, "nobody_reads_it", 17.0, raising=False)
        patched.setattr(torch.Tensor, "twice", lambda self: self * 2, raising=False)
        expected = module(values)
        code = program_code([Scaled, nn.Dropout])
    assert {place[1] for place in code.patches} - {"pi"} == {
        "scale_of_all", "own", "known_to_all", "Linear.width", "Dropout.table", "Tensor.twice"
    }  # fmt: skip
    with pytest.raises(AttributeError):
        module(values)
    pickle.loads(pickle.dumps(ProgramValues(home=("elsewhere", 1), code=code)))
    try:
        assert torch.equal(module(values), expected)
    finally:
        give_back()
    assert not hasattr(math, "own") and not hasattr(nn.Linear, "width")


class Constant(nn.Linear):
    """Uses constants and default arguments of packages."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = functional.leaky_relu(super().forward(x)) * torch.pi * np.pi
        return functional.elu(found) + lr_scheduler.EPOCH_DEPRECATION_WARNING.count("epoch")


def test_constants_and_defaults_of_packages_that_a_program_changes_are_there_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module, values = Constant(3, 2), torch.randn(4, 3)
    was = module(values)
    assert program_code([Constant]).patches == {}
    with monkeypatch.context() as patched:
        patched.setattr(functional.leaky_relu, "__defaults__", (0.5, False))
        patched.setattr(torch, "pi", 3.0)
        patched.setattr(np, "pi", 4)
        patched.setattr(lr_scheduler, "EPOCH_DEPRECATION_WARNING", "epochs of an epoch")
        expected = module(values)
        code = program_code([Constant])
    assert {".".join(place) for place in code.patches} == {
        "torch.nn.functional.leaky_relu.__defaults__", "torch.pi", "numpy.pi",
        "torch.optim.lr_scheduler.EPOCH_DEPRECATION_WARNING",
    }  # fmt: skip
    assert not torch.equal(was, expected)
    pickle.loads(pickle.dumps(ProgramValues(home=("elsewhere", 1), code=code)))
    try:
        assert torch.equal(module(values), expected)
    finally:
        give_back()
    assert torch.equal(module(values), was)


class Leaking(nn.Module):
    """Makes a layer in forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.LeakyReLU()(x)


def test_default_arguments_of_a_layer_are_looked_at_where_a_module_has_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Files of code are read for that, which takes long for all layers of torch."""
    read: list[str] = []

    def noted(file: str) -> Any:
        read.append(file)
        return parsed(file)

    monkeypatch.setattr(package_patches, "parsed", noted)
    package_patches._names_in.cache_clear()
    code = [one for one, _ in sent_along(nn.Sequential(Constant(3, 2), nn.Softplus())).code]
    assert program_code(code).patches == {}
    assert 0 < len(read) < 20, read
    for kind, is_had in ((nn.Softplus, True), (nn.Hardshrink, False)):
        with monkeypatch.context() as patched:
            patched.setattr(kind.forward, "__defaults__", (0.25,))
            found = {".".join(place) for place in program_code(code).patches}
        place = f"{kind.__module__}.{kind.__name__}.forward.__defaults__"
        assert found == ({place} if is_had else set())
    monkeypatch.setattr(nn.LeakyReLU.__init__, "__defaults__", (0.5, False))
    found = {".".join(place) for place in program_code([Leaking]).patches}
    assert found == {"torch.nn.modules.activation.LeakyReLU.__init__.__defaults__"}


class Acting(nn.ReLU):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = getattr(nn.Linear, "output", 1.0) * vars(functional).get("alpha", 1.0)
        found = super().forward(functional.relu(x)) * scale * math.exp(1.0)
        return found + torch.tanh(x) * torch.cuda.offset * torch.settings["a"] * torch.Made.size  # type: ignore[attr-defined,no-any-return]


class Made:
    size = np.float64(0.5)


def test_what_stands_in_the_place_of_a_function_of_a_package_goes_along(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also a function of the same package, one of C, and names that are words of its files."""
    module, values = Acting(), torch.randn(4, 3)
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    own = torch.optim.SGD.step
    with monkeypatch.context() as patched:
        patched.setattr(functional, "relu", functools.partial(functional.leaky_relu))
        patched.setattr(nn.ReLU, "forward", nn.Tanh.forward)
        patched.setattr(torch, "tanh", torch.sigmoid)
        patched.setattr(math, "exp", math.log1p)
        patched.setattr(nn.Linear, "output", np.float64(3.0), raising=False)
        patched.setattr(functional, "alpha", 5.0, raising=False)
        patched.setattr(torch.cuda, "offset", 7.0, raising=False)
        patched.setattr(torch, "settings", collections.OrderedDict(a=11.0), raising=False)
        patched.setattr(torch, "Made", Made, raising=False)
        patched.setattr(torch.optim.SGD, "step", lambda *given: own(*given))
        type(optimizer)([nn.Parameter(torch.ones(1))], lr=0.1)  # wraps the step
        expected = module(values)
        code = program_code([Acting])
    torch.optim.SGD.step = own  # type: ignore[method-assign]
    assert {place[1] for place in code.patches} == {
        "relu", "ReLU.forward", "tanh", "exp", "Linear.output", "alpha", "offset", "settings",
        "Made", "SGD.step",
    }  # fmt: skip
    pickle.loads(pickle.dumps(ProgramValues(home=("elsewhere", 1), code=code)))
    try:
        assert torch.equal(module(values), expected)
    finally:
        give_back()
    assert functional.relu(torch.tensor(-1.0)) == 0 and not hasattr(functional, "alpha")


def test_nothing_of_the_packages_themselves_is_taken_for_the_programs() -> None:
    """Though all of their names may be read."""
    names = {name for kind in (nn, torch.optim) for name in vars(kind)}
    names |= {*vars(torch), *vars(functional), *vars(np), *vars(np.linalg), *vars(np.random)}
    source = "import torch, numpy\nfrom torch.nn import functional\ndef reads(x):\n"
    source += f"    functional, torch, numpy\n    return {sorted(names)!r}"
    with program(source) as made:
        kinds = [kind for kind in vars(nn).values() if isinstance(kind, type)]
        found = program_code([made.reads, *kinds, collections.OrderedDict, functools.partial])
    assert {place for place in found.patches if place[0] != "builtins"} <= {("numpy", "Inf")}


def test_a_process_that_is_used_again_begins_as_its_files_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "counts.py").write_text("CALLS = [0]\ndef use():\n    CALLS[0] += 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    counts = importlib.import_module("counts")
    sent = pickle.dumps(ProgramValues(home=("elsewhere", 1), code=program_code([counts.use])))
    try:
        for _ in range(2):
            pickle.loads(sent)
            assert counts.CALLS == [0]
            counts.use()
    finally:
        give_back()
        del sys.modules["counts"]
    assert counts.CALLS == [0]
