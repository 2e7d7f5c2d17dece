"""What becomes of modules on their way to a worker and back: all kinds of them, and refusals."""

from __future__ import annotations

import functools
import json
import os
import pickle
import random
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

from sparkdl.errors import ConfigError
from sparkdl.serialization.travel.packed_module import (
    as_on_driver,
    pack,
    pack_blank,
    travelled,
    unpack,
)
from sparkdl.serialization.travel.pickling import dumps, loads, shared_globals
from tests.serialization.programs import program

HERE = Path(__file__).parent / "travelling"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_every_kind_of_module_computes_the_same_in_another_process(tmp_path: Path) -> None:
    """Forward and three steps each of SGD and Adam give equal bits; ties and hooks are there."""
    file = tmp_path / "modules"
    for script in ("modules.py", "worker.py"):  # each a process without the other's classes
        run = [sys.executable, "-W", "error:TypedStorage", str(HERE / script), str(file)]
        result = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True)
        assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout.splitlines()[-1])
    assert found["bad"] == {}
    assert len(found["names"]) > 40


class Net(nn.Module):
    def __init__(self, **attributes: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x: torch.Tensor) -> Any:
        return self.layer(x)


LOCK = threading.Lock()


class UsesLock(Net):
    def forward(self, x: torch.Tensor) -> Any:
        with LOCK:
            return self.layer(x)


class MadeAnew(Net):
    def __reduce__(self) -> Any:
        return MadeAnew, ()


class Renamed:
    """Says that it is a value of the main program, which workers do not have."""

    def __reduce__(self) -> Any:
        return "some_name"


def hooked(value: Any) -> Net:
    net = Net()
    net.layer.weight.register_hook(lambda gradient: gradient if value else None)
    return net


def shares_with_a_script() -> nn.Module:
    net = nn.Sequential(torch.jit.script(nn.Linear(2, 2)), nn.Linear(2, 2))
    net[1].weight = net[0].weight
    return net


def exported() -> nn.Module:
    return torch.export.export(nn.Linear(2, 2), (torch.ones(3, 2),)).module()


REFUSED: dict[str, tuple[Any, str]] = {
    "lock": (lambda: Net(lock=threading.Lock()), "its attribute lock"),
    "lock inside": (lambda: nn.Sequential(Net(parts=[{"a": threading.Lock()}])), "0.parts"),
    "lambda": (lambda: Net(act=lambda x: (LOCK, x)), "its attribute act"),
    "file": (lambda: Net(file=Path(os.devnull).open("w")), "its attribute file"),  # noqa: SIM115
    "generator": (lambda: Net(rows=(x for x in "ab")), "its attribute rows"),
    "thread": (lambda: Net(thread=threading.Thread()), "its attribute thread"),
    "hook": (lambda: hooked(threading.Lock()), "its attribute layer.weight"),
    "exported": (exported, "give the module that was exported"),
    "another": (MadeAnew, "layer.weight has other values"),
    "tie with a script": (shares_with_a_script, "do not share memory"),
}


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore:.torch.jit:DeprecationWarning")
@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_travel_is_named(kind: str) -> None:
    make, named = REFUSED[kind]
    with pytest.raises(ConfigError, match=named):
        travelled(make(), copies=True)


def test_what_names_a_value_of_the_main_program_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Renamed, "__module__", "__main__")
    monkeypatch.setattr(sys.modules["__main__"], "some_name", Renamed(), raising=False)
    value = sys.modules["__main__"].some_name  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="names some_name of the main program"):
        travelled(Net(value=value), copies=True)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
def test_a_layer_tied_to_a_script_is_refused_with_what_helps() -> None:
    layer = nn.Linear(2, 2)
    tied = nn.Sequential(layer, torch.jit.script(layer))
    with pytest.raises(ConfigError, match=r"1\.bias .*a scripted layer .* use the layer itself in"):
        travelled(tied, copies=True)
    assert travelled(nn.Sequential(layer, layer), copies=True) is not None
    together = torch.jit.script(nn.Sequential(layer, layer))
    assert travelled(together, copies=True) is not None


def test_the_global_that_cannot_travel_is_named() -> None:
    cloudpickle.register_pickle_by_value(sys.modules[__name__])  # as the main program's classes
    try:
        with pytest.raises(ConfigError, match="its class UsesLock: forward, which uses LOCK"):
            travelled(UsesLock(), copies=True)
    finally:
        cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


def test_memory_is_sent_once_and_only_what_is_needed() -> None:
    table = torch.randn(100_000, 4)
    net = Net(weight=nn.Parameter(table[7:9]), twin=nn.Parameter(table[8:10].t()))
    packed = pack(net)
    assert len(packed.tensors) < 2000  # the table has 1.6 MB
    back = unpack(packed.skeleton, packed.tensors)
    assert torch.equal(back.weight, table[7:9]) and torch.equal(back.twin, table[8:10].t())
    back.weight.data[1] = 5.0
    assert back.twin[:, 0].tolist() == [5.0] * 4


def test_a_factorys_memory_is_not_copied_and_an_instances_is() -> None:
    net = Net()
    own = travelled(net, copies=True)
    assert own.layer.weight.data_ptr() != net.layer.weight.data_ptr()
    assert travelled(own, copies=False).layer.weight.data_ptr() == own.layer.weight.data_ptr()


def test_a_blank_module_has_zeros_where_the_state_comes_along_and_nowhere_else() -> None:
    memory = torch.arange(8.0)
    net = Net(part=memory[4:])
    net.row = nn.Parameter(memory[:4])
    net.register_buffer("kept", torch.ones(2), persistent=False)
    packed = pack_blank(net)
    blank = unpack(packed.skeleton, packed.tensors)
    assert not any(value.any() for value in blank.state_dict().values())
    assert blank.part.tolist() == [4, 5, 6, 7] and blank.kept.tolist() == [1, 1]
    assert net.row.tolist() == [0, 1, 2, 3]


def test_a_hook_of_the_worker_takes_no_hooks_place() -> None:
    net = Net()
    net.layer.register_forward_hook(lambda module, given, output: output * 0)
    packed = pack(net)
    code = (
        "import pickle, sys, torch\n"
        "from sparkdl.serialization.travel.packed_module import unpack\n"
        "net = unpack(*pickle.loads(sys.stdin.buffer.read()))\n"
        "net.layer.register_forward_hook(lambda *given: None)\n"
        "print(net.layer(torch.ones(1, 2)).abs().sum().item(), len(net.layer._forward_hooks))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        input=pickle.dumps((packed.skeleton, packed.tensors)),
        capture_output=True,
        check=True,
        cwd=Path(__file__).parents[2],
    )
    assert result.stdout.decode().split() == ["0.0", "2"]


def test_the_default_dtype_of_the_program_comes_along() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        skeleton = pack(Net()).skeleton
    finally:
        torch.set_default_dtype(torch.float32)
    with as_on_driver(skeleton):
        assert torch.eye(2).dtype is torch.float64
    assert torch.eye(2).dtype is torch.float32


def test_tensors_of_graphs_and_made_classes_are_the_same_after_two_journeys() -> None:
    net = nn.Sequential(parametrizations.weight_norm(nn.Linear(2, 2)), nn.Linear(2, 2))
    prune.l1_unstructured(net[1], "weight", 0.5)
    once = travelled(net, copies=True)
    twice = travelled(once, copies=False)
    x = torch.ones(3, 2)
    assert torch.equal(twice(x), net(x)) and type(twice[0]).__name__ == type(net[0]).__name__


NOTEBOOK = """
from torch import nn
FACTOR = 1.0
class Cell(nn.Module):
    def forward(self, x):
        return FACTOR * x
"""


def test_a_class_of_the_program_stays_its_own() -> None:
    """Its functions see what the program gives to its globals later, as they did before."""
    with program(NOTEBOOK) as notebook:
        given = notebook.Cell()
        packed = pack(given)
        modules = [given, travelled(given, copies=True), unpack(packed.skeleton, packed.tensors)]
        notebook.FACTOR = 3.0
        again = pack(given)
    assert all(type(module) is notebook.Cell for module in modules)
    assert [module(1.0) for module in modules] == [3.0] * 3
    assert again.skeleton != packed.skeleton


def test_code_may_name_operators_of_torch() -> None:
    space = {"torch": torch, "aten": torch.ops.aten}
    exec("def both(x): return torch.ops.aten.tanh(x) + aten.tanh.default(x)", space)
    space["both"].__module__ = "__main__"
    both = pickle.loads(dumps(space["both"]))
    torch.testing.assert_close(both(torch.ones(2)), 2 * torch.ones(2).tanh())


def test_what_is_read_where_it_was_written_leaves_its_class_alone() -> None:
    """Else methods would have other globals from then on, and a second fit those of the first."""
    code = """
    COUNT = {"n": 0}

    class Counts:
        def count(self):
            COUNT["n"] += 1
    """
    with program(textwrap.dedent(code)) as made:
        before = vars(made.Counts)["count"]
        copied = loads(dumps(made.Counts()))
        assert type(copied) is made.Counts and vars(made.Counts)["count"] is before
        copied.count()
        assert made.COUNT == {"n": 1}


def test_a_hook_that_has_travelled_still_shares_the_globals_of_its_program() -> None:
    """The module is made anew on the driver before it is sent; its loss is not."""
    code = """
seen = {}
def keep(layer, given, output): seen["h"] = output
def penalty(): return seen["h"].square().mean()
"""
    with program(code) as made:
        net = nn.Linear(3, 2)
        net.register_forward_hook(made.keep)
        packed, penalty = pack(travelled(net, copies=True)), dumps(made.penalty)
    spaces: dict[str, dict[str, Any]] = {}
    with shared_globals(spaces):
        found = pickle.loads(penalty)
    with shared_globals(spaces):
        arrived = unpack(packed.skeleton, packed.tensors)
    assert found.__globals__ is arrived._forward_hooks.popitem()[1].__globals__
    assert made.seen == {}


def test_functions_of_a_program_that_are_pickled_apart_share_its_globals_where_asked() -> None:
    code = """
AUX = []
def leaves(value): AUX.append(value)
def finds(): return list(AUX)
class Net:
    def forward(self): AUX.append("forward")
"""
    with program(code) as made:
        leaves, finds = dumps((made.leaves, made.Net)), dumps(made.finds)
    for spaces in ({}, {}):  # one run after the other
        with shared_globals(spaces):
            leave, net = pickle.loads(leaves)
        with shared_globals(spaces):
            find = pickle.loads(finds)
        leave(1)
        net().forward()
        assert find() == [1, "forward"]
    apart, (leave, _) = pickle.loads(finds), pickle.loads(leaves)
    leave(2)
    assert apart() == [] and find() == [1, "forward"]
    assert made.AUX == []


def test_a_class_of_values_alone_stays_as_it_is() -> None:
    code = """
class Held: pass
Held.values = {"a": 1}
def hook(layer, inputs, output): return Held.values
"""
    with program(code) as made:
        net, values = nn.Linear(3, 2), made.Held.values
        net.register_forward_hook(made.hook)
        arrived = travelled(net, copies=True)
        assert made.Held.values is values and arrived(torch.ones(1, 3)) is values


def test_variables_of_contexts_and_threads_come_along_with_their_values() -> None:
    code = """
import contextvars, threading
scale, unset = contextvars.ContextVar("scale", default=1.0), contextvars.ContextVar("unset")
own = threading.local()
own.value = 3
def use(): return scale.get(), unset.get("none"), own.value
"""
    with program(code) as made:
        token = made.scale.set(2.0)
        sent = dumps([made.use, made.own, made.own])
        made.scale.reset(token)
    use, own, again = pickle.loads(sent)
    assert use() == (2.0, "none", 3) and own is again
    own.value = 4
    assert use() == (2.0, "none", 4)


def test_what_code_knows_by_its_identity_is_the_same_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A default such as ``object()``, of a module that workers import or of the program."""
    code = """
from torch import nn
UNSET = object()
act = lambda x: x.sigmoid()
class Net(nn.Linear):
    def __init__(self, mode=UNSET):
        super().__init__(2, 1)
        self.mode, self.act = mode, act
    def is_known(self): return self.mode is UNSET, self.act is act
"""
    (tmp_path / "with_a_sentinel.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    import with_a_sentinel as library  # type: ignore[import-not-found]

    try:
        packed = pack(travelled(library.Net(), copies=True))
        assert unpack(packed.skeleton, packed.tensors).is_known() == (True, True)
        assert pickle.loads(dumps([library.UNSET]))[0] is library.UNSET
    finally:
        del sys.modules["with_a_sentinel"]
    with program(code) as made:
        given = travelled(made.Net(), copies=True)
        assert given.is_known()[0]
        packed, nobodys = pack(given), dumps([made.UNSET, object()])
    arrived = unpack(packed.skeleton, packed.tensors)
    assert arrived.is_known()[0]
    assert len(set(pickle.loads(nobodys))) == 2


KNOWN = """
import enum, os, pickle, sys
import torch
from torch import nn
from sparkdl.serialization.program.imported_values import ProgramValues, program_code
from sparkdl.serialization.travel.packed_module import travelled
from sparkdl.serialization.travel.pickling import dumps, sent_code

UNSET = lambda: None
COUNTED = []
def plain(x): return torch.relu(x)
class Kind(enum.Enum):
    A = 1
Kind.A.factor = 2.0
def counts(x): COUNTED.append(x); return x

class Net(nn.Module):
    def __init__(self, mode=UNSET, act=plain, counts=counts):
        super().__init__()
        self.mode, self.act, self.counts = mode, act, counts
    def forward(self):
        return [self.mode is UNSET, self.act is plain, os.environ.get("SCALE"), os.getenv("GONE")]

os.environ.update(SCALE="2.5", OTHER="x", SPARK_HOME="y")
os.environ.pop("GONE", None)
net = travelled(Net(), copies=True)
assert net() == [True, True, "2.5", None] and net.act(torch.ones(1)) == 1
net.counts(1)
assert COUNTED == [1]  # as a method of the class would leave it
COUNTED.clear()
code = program_code(one for one, _ in sent_code(net))
assert code.environment == {"GONE": None, "SCALE": "2.5"}, code.environment
sys.stdout.buffer.write(dumps((ProgramValues(code=code), [net, net], Kind)))
"""
THERE = """
import os, pickle, sys
data = sys.stdin.buffer.read()
values, nets, kind = pickle.loads(data)
for net in nets:
    assert net() == [True, True, "2.5", None], net()
assert vars(kind.A).pop("factor") == 2.0
kind.A.of_another_program = 3.0
assert pickle.loads(data)[2] is kind
assert kind.A.factor == 2.0 and not hasattr(kind.A, "of_another_program")
from sparkdl.serialization.program.imported_values import give_back
give_back()
assert os.environ["GONE"] == "here" and "SCALE" not in os.environ
"""


def test_code_knows_functions_by_identity_and_the_environment_of_the_program(
    tmp_path: Path,
) -> None:
    (tmp_path / "known.py").write_text(KNOWN)
    root = str(Path(__file__).parents[2])
    environment = {**os.environ, "PYTHONPATH": root, "GONE": "here"}
    command = [sys.executable, "known.py"]
    made = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, timeout=60, check=False
    )
    assert made.returncode == 0, made.stderr.decode()
    command = [sys.executable, "-c", THERE]
    there = subprocess.run(
        command, env=environment, input=made.stdout, capture_output=True, timeout=60, check=False
    )
    assert there.returncode == 0, there.stderr.decode()


def sums(*numbers: float, by: float = 1.0) -> float:
    return sum(numbers) * by + random.random()


@pytest.mark.parametrize("options", [{"maxsize": None}, {"maxsize": 3}, {"typed": True}], ids=str)
def test_a_cache_comes_with_its_results(options: Any) -> None:
    cached = functools.lru_cache(**options)(sums)
    calls: list[tuple[Any, Any]] = [((1,), {}), ((1.5, 2), {}), ((2,), {"by": 3})]
    values = [cached(*args, **kwargs) for args, kwargs in calls]
    again = loads(dumps(loads(dumps(cached))))
    assert [again(*args, **kwargs) for args, kwargs in calls] == values
    assert again.cache_info()[1:] == cached.cache_info()[1:]
    assert again(7) != cached(7)


@pytest.mark.parametrize("make", [threading.Lock, lambda: bytes(1 << 21)], ids=["lock", "large"])
def test_results_that_do_not_go_are_told(
    make: Callable[[], Any], caplog: pytest.LogCaptureFixture
) -> None:
    def made_anew(number: int) -> Any:
        return make()

    made_anew.__qualname__ = f"made_anew_{id(make)}"
    cached = functools.cache(made_anew)
    cached(1)
    assert loads(dumps(cached)).cache_info().currsize == 0
    dumps(cached)
    (message,) = caplog.messages
    assert "made_anew" in message and "begin with an empty one" in message


def test_a_method_may_hold_results_of_its_module() -> None:
    class Own(nn.Module):
        __module__ = "__main__"

        @functools.cache  # noqa: B019
        def own(self, number: int) -> float:
            return random.random()

    module = Own()
    value = module.own(3)
    again = loads(dumps(module))
    assert again.own(3) == value


def test_backends_of_torch_go_by_their_names() -> None:
    for backend in (torch.backends.cudnn, torch.backends.mps, torch.backends.mkldnn):
        assert loads(dumps(backend)) is backend


@pytest.mark.parametrize("maxsize", [None, 8])
def test_results_and_arguments_of_any_kind_come_in_their_places(maxsize: int | None) -> None:
    first, second = object(), object()

    def made(*given: Any) -> Any:
        return {number: random.random() for number in range(len(given))}

    cached = functools.lru_cache(maxsize)(made)
    keys = [(1,), (1, 2), (first,), (second,), (first, second), ()]
    values = [cached(*key) for key in keys]
    again, copies = loads(dumps((cached, keys)))
    assert again.cache_info().currsize == len(keys)
    assert [again(*key) for key in copies] == values
    assert again.giving.results == []


def test_a_cache_may_hold_what_holds_it() -> None:
    class Holder:
        def __init__(self) -> None:
            self.number = 1

        def __hash__(self) -> int:
            return hash(self.number)

    @functools.cache
    def of(holder: Any) -> float:
        return holder.number + random.random()

    holder: Any = Holder()
    holder.of = of
    of(holder)
    again = loads(dumps(holder))
    assert 1 <= again.of(again) < 2
