"""What code keeps outside of modules is found, and put back, whatever kind of place it is in."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from sparkdl.serialization.program import program_state
from sparkdl.serialization.program.program_state import ProgramState, program_kept, read_by_steps
from sparkdl.serialization.travel.packed_module import travelled
from tests.serialization.programs import program

IMPORTS = """
import collections, copy, dataclasses, enum, functools, itertools, random, types
import numpy as np, torch
from torch import nn
"""
KINDS = {
    "global": ("n = 0\ndef use():\n    global n\n    n += 1\n    return n", "n"),
    "new global": ("def use():\n    global n\n    n = globals().get('n', 0) + 1\n    return n",
                   "n"),
    "deleted": ("n = 1\ndef use():\n    global n\n    del n\n    return 2", "n"),
    "dictionary": ("n = {'a': [0]}\ndef use():\n    n['a'].append(1)\n    return len(n['a'])", "n"),
    "counter": ("n = collections.Counter()\ndef use():\n    n['x'] += 1\n    return n['x']", "n"),
    "ordered": ("n = collections.OrderedDict(a=1, b=2)\n"
                "def use():\n    n.move_to_end('a')\n    return list(n)", "n"),
    "lazy dictionary": ("class Lazy(collections.OrderedDict):\n"
                        "    def __getitem__(self, key): return super().__getitem__(key)()\n"
                        "    def __setitem__(self, key, value): 1 / 0\n"
                        "    def __len__(self): 1 / 0\n"
                        "n = Lazy.fromkeys([])\n"
                        "def use():\n    collections.OrderedDict.__setitem__(n, 'x', int)\n"
                        "    return [key for key in n]", "n"),
    "set": ("n = {1}\ndef use():\n    n.add(len(n) + 1)\n    return len(n)", "n"),
    "deque": ("n = collections.deque([1, 2], maxlen=2)\n"
              "def use():\n    n.append(n[1] + 1)\n    return n[1]", "n"),
    "bytes": ("n = bytearray(1)\ndef use():\n    n[0] += 1\n    return n[0]", "n"),
    "in a tuple": ("n = (1, [0])\ndef use():\n    n[1][0] += 1\n    return n[1][0]", "n"),
    "count": ("n = itertools.count()\ndef use(): return next(n)", "n"),
    "two names": ("n = itertools.count()\nheld = [n]\ndef use(): return next(n), next(held[0])",
                  "n"),
    "iterator": ("n = iter([3, 1, 2])\ndef use(): return next(n)", "n"),
    "tensor": ("n = torch.zeros(3)\ndef use():\n    n.add_(1)\n    return n.tolist()", "n"),
    "view": ("n = torch.zeros(4).view(2, 2).t()\ndef use():\n    n[0] += 1\n    return n.tolist()",
             "n"),
    "not a number": ("n = torch.full((2,), float('nan'))\n"
                     "def use():\n    n[0] = n[0].nan_to_num(0) + 1\n    return str(n)", "n"),
    "other shape": ("n = torch.zeros(1)\ndef use():\n    n.data = torch.cat([n, n])\n"
                    "    return len(n)", "n"),
    "gradient": ("n = torch.ones(2, requires_grad=True)\n"
                 "def use():\n    n.sum().backward()\n    return n.grad.tolist()", "n"),
    "array": ("n = np.zeros(2)\ndef use():\n    n[:] += 1\n    return n.tolist()", "n"),
    "objects": ("n = np.array([None, [0]], dtype=object)\n"
                "def use():\n    n[0] = 1 if n[0] is None else 2\n    return n[0]", "n"),
    "random": ("n = random.Random(1)\ndef use(): return n.random()", "n"),
    "numpy": ("n = np.random.default_rng(1)\ndef use(): return n.random()", "n"),
    "mersenne": ("n = np.random.Generator(np.random.MT19937(1))\ndef use(): return n.random()",
                 "n"),
    "legacy": ("n = np.random.RandomState(1)\ndef use(): return n.normal()", "n"),
    "torch": ("n = torch.Generator().manual_seed(1)\n"
              "def use(): return torch.rand((), generator=n).item()", "n"),
    "module": ("n = nn.BatchNorm1d(2)\n"
               "def use():\n    n(torch.randn(4, 2, generator=torch.Generator().manual_seed(1)))\n"
               "    return n.running_mean.tolist()", "n"),
    "class": ("class N:\n    n = 0\ndef use():\n    N.n += 1\n    return N.n", "N"),
    "new in class": ("class N: pass\ndef use():\n    N.n = getattr(N, 'n', 0) + 1\n    return N.n",
                     "N"),
    "of class": ("class N:\n    n = [0]\n    @classmethod\n    def up(cls):\n"
                 "        cls.n[0] += 1\n        return cls.n[0]\ndef use(): return N.up()", "N"),
    "base": ("class B:\n    n = 0\nclass N(B): pass\ndef use():\n    N.__bases__[0].n += 1\n"
             "    return N.n", "B"),
    "object": ("class N:\n    def __init__(self): self.n = 0\nheld = N()\n"
               "def use():\n    held.n += 1\n    return held.n", "held"),
    "slots": ("class N:\n    __slots__ = ('n', 'm')\n    def __init__(self): self.n = 0\n"
              "held = N()\ndef use():\n    held.n += 1\n    held.m = 1\n    return held.n", "held"),
    "dataclass": ("@dataclasses.dataclass\nclass N:\n    n: int = 0\nheld = {'a': N()}\n"
                  "def use():\n    held['a'].n += 1\n    return held['a'].n", "held"),
    "closure": ("def make():\n    n = 0\n    def use():\n        nonlocal n\n        n += 1\n"
                "        return n\n    return use\nuse = make()", "n"),
    "unset cell": ("def make():\n    def use():\n        nonlocal n\n        try: n += 1\n"
                   "        except NameError: n = 1\n        return n\n    if 0: n = 0\n"
                   "    return use\nuse = make()", "n"),
    "default": ("def use(n=[]):\n    n.append(1)\n    return len(n)", "use"),
    "keyword": ("def use(*, n=[]):\n    n.append(1)\n    return len(n)", "use"),
    "of function": ("def use():\n    use.n = getattr(use, 'n', 0) + 1\n    return use.n", "use"),
    "partial": ("def add(n):\n    n.append(1)\n    return len(n)\n"
                "held = functools.partial(add, [])\ndef use(): return held()", "held"),
    "wrapped": ("n = 0\n@functools.wraps(torch.sin)\ndef add():\n    global n\n    n += 1\n"
                "    return n\ndef use(): return add()", "n"),
    "proxies": ("import unittest.mock, weakref\nn = [0]\nclass Gone: pass\n"
                "held = [unittest.mock.Mock(spec=dict), unittest.mock.Mock(spec=nn.Module),\n"
                "        weakref.proxy(Gone()), unittest.mock.Mock(spec=type)]\n"
                "def use():\n    n[0] += len(held)\n    return n[0]", "n"),
    "method": ("class N:\n    def __init__(self): self.n = 0\n    def up(self):\n"
               "        self.n += 1\n        return self.n\nheld = N().up\n"
               "def use(): return held()", "held"),
    "namespace": ("n = types.SimpleNamespace(n=0)\n"
                  "def use():\n    n.n += 1\n    return n.n", "n"),
    "arguments": ("import argparse\nn = argparse.Namespace(held=[])\n"
                  "def use():\n    n.held.append(1)\n    return len(n.held)", "n"),
    "user's dictionary": ("n = collections.UserDict()\n"
                          "def use():\n    n['x'] = n.get('x', 0) + 1\n    return n['x']", "n"),
    "chain of maps": ("n = collections.ChainMap({})\n"
                      "def use():\n    n['x'] = n.get('x', 0) + 1\n    return n['x']", "n"),
    "array of numbers": ("import array\nn = array.array('d')\n"
                         "def use():\n    n.append(1.5)\n    return sum(n)", "n"),
    "file of text": ("import io\nn = io.StringIO('ab')\n"
                     "def use():\n    n.seek(0, 2)\n    n.write('x')\n    n.seek(1)\n"
                     "    return n.read()", "n"),
    "file of bytes": ("import io\nn = io.BytesIO(b'abcdef')\ndef use(): return n.read(1)", "n"),
    "optimizer": ("n = torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=0.5, momentum=0.9)\n"
                  "def use():\n    (p,) = n.param_groups[0]['params']\n    p.grad = torch.ones(1)\n"
                  "    n.step()\n    n.param_groups[0]['lr'] *= 2\n    return p.item()", "n"),
    "member": ("import enum\nclass N(enum.Enum):\n    A = []\n"
               "def use():\n    N.A.value.append(1)\n    return len(N.A.value)", "N"),
    "of member": ("import enum\nclass N(enum.Enum):\n    A = 1\nN.A.n = 0\n"
                  "def use():\n    N.A.n += 1\n    return N.A.n", "N"),
    "default count": ("def use(n=itertools.count()): return next(n)", "use"),
    "keyword count": ("def use(*, n=itertools.count()): return next(n)", "use"),
    "count in tuples": ("n = ('a', (itertools.count(), 0))\ndef use(): return next(n[1][0])", "n"),
    "enumerate": ("n = enumerate('abc')\ndef use(): return next(n)", "n"),
    "zip": ("n = zip(itertools.count(), iter([3, 1, 2]))\ndef use(): return next(n)", "n"),
    "map": ("n = map(str, [3, 1, 2])\ndef use(): return next(n)", "n"),
    "filter": ("n = filter(None, [0, 1, 0, 2])\ndef use(): return next(n)", "n"),
    "chain": ("n = itertools.chain([1], (2,))\ndef use(): return next(n)", "n"),
    "slice": ("n = itertools.islice(itertools.count(), 1, 5)\ndef use(): return next(n)", "n"),
    "sums": ("n = itertools.accumulate([3, 1, 2])\ndef use(): return next(n)", "n"),
    "pairs": ("n = itertools.product('ab', [1, 2])\ndef use(): return next(n)", "n"),
    "cycle": ("n = itertools.cycle([3, 1])\ndef use(): return [next(n) for _ in range(3)]", "n"),
    "cycle of count": ("n = itertools.cycle(map(str, range(3)))\n"
                       "def use(): return [next(n) for _ in range(2)]", "n"),
    "letters": ("n = iter('äbc')\ndef use(): return next(n)", "n"),
    "keys": ("n = iter({'a': 1, 'b': 2})\ndef use(): return next(n)", "n"),
    "items": ("n = iter({'a': [1], 'b': 2}.items())\ndef use(): return next(n)", "n"),
    "backwards": ("n = reversed([3, 1, 2])\ndef use(): return next(n)", "n"),
    "nested": ("n = 0\ndef up():\n    global n\n    n += 1\n    return n\n"
               "def use(): return [up() for _ in range(2)]", "n"),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_program_has_counted_is_put_back(kind: str) -> None:
    code, name = KINDS[kind]
    with program(IMPORTS + code) as made, program(IMPORTS + code, "the_same") as untouched:
        with program_kept(made.use) as state:
            assert state.changed() == []
            first = made.use()
            assert name in state.changed()
            state.put_back()
            assert state.changed() == []
            assert made.use() == first  # it has forgotten
        expected = untouched.use()
        assert made.use() == first == expected


def test_variables_of_contexts_and_threads_are_put_back() -> None:
    code = """
import contextvars, threading
scale, own = contextvars.ContextVar("scale", default=1.0), threading.local()
own.value = 3
def use():
    scale.set(scale.get() + 1)
    own.value, own.other = own.value + 1, 0
"""
    with program(code) as made:
        with program_kept(made.use) as state:
            made.use()
            assert sorted(state.changed()) == ["own", "scale"]
        assert made.scale.get() == 1.0 and vars(made.own) == {"value": 3}


def test_what_other_threads_use_is_left_alone() -> None:
    code = """
import logging, queue, threading
waiting, told = queue.Queue(), threading.Event()
def use():
    waiting.put(1)
    told.set()
    logging.getLogger("of_a_program").seen = 1
log = logging.getLogger("of_a_program")
def uses_log(): return log, waiting, told
"""
    with program(code) as made:
        with program_kept(made.use, made.uses_log) as state:
            made.use()
            assert state.changed() == []
        assert made.waiting.qsize() == 1 and made.told.is_set() and made.log.seen == 1


def test_iterators_without_copies_are_left_alone() -> None:
    code = "n = (i for i in range(9))\nm = zip(n, [1, 2])\ndef use(): return next(n), next(m)"
    with program(code) as made:
        with program_kept(made.use):
            made.use()
        assert next(made.n) == 2


def test_no_more_is_copied_than_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program_state, "_MOST_BYTES_IN_ALL", 2 * 32)
    arrays = [torch.zeros(8) for _ in range(3)]

    def step() -> None:
        for array in arrays:
            array += 1

    with program_kept(step):
        step()
    assert sorted(array[0].item() for array in arrays) == [0, 0, 1]


def test_what_is_not_the_users_is_left_alone() -> None:
    code = "n = [0]\nbig = list(range(200_000))\ndef use():\n    n[0] += 1\n    return json, big"
    with program("import json\n" + code) as made:
        state = ProgramState([made.use, random.Random, np.random.default_rng, torch.nn.Linear])
        made.use()
        made.big.append(1)
        assert state.changed() == ["n"]
        state.put_back()
        assert made.n == [0] and len(made.big) == 200_001


def test_an_imported_module_of_the_users_is_put_back_by_what_code_names(tmp_path: Any) -> None:
    with program("seen = 0\nother = 0\nclass at: n = 0\n", "a_library"):
        with program(
            "import a_library\ndef use():\n    a_library.seen += 1\n    a_library.at.n += 1\n"
        ) as made:
            with program_kept(made.use) as state:
                made.use()
                made.a_library.other = 1
                assert state.changed() == ["a_library.seen", "at"]
            library = made.a_library
            assert (library.seen, library.at.n, library.other) == (0, 0, 1)
        whole = ProgramState([library])
        library.other = 2
        assert whole.changed() == ["other"]


READ = """
from torch import nn

FACTOR = {"value": 1.0}

def hook(layer, inputs, output):
    return output * FACTOR["value"]

class Loss:
    def __init__(self):
        self.factor = 1.0
    def __call__(self, output, target):
        return self.factor * (output - target)
"""


def test_what_steps_read_is_seen_in_hooks_of_a_module_that_has_travelled_and_in_objects() -> None:
    with program(READ) as made:
        layer, loss = torch.nn.Linear(2, 2), made.Loss()
        layer.register_forward_hook(made.hook)
        given = {"loss": loss, "callbacks": (loss,)}
        factor = made.FACTOR
        arrived = travelled(layer, copies=True)
        (hook,) = arrived._forward_hooks.values()
        assert made.FACTOR is factor and hook is not made.hook
        assert hook.__globals__ is vars(made)
        of_all = read_by_steps(arrived, given, with_objects=True)
        of_code = read_by_steps(arrived, given)
        loss.factor = 2.0
        assert (of_all.changed(), of_code.changed()) == (["loss"], [])
        made.FACTOR["value"] = 3.0
        assert sorted(of_all.changed()) == ["FACTOR", "loss"] and of_code.changed() == ["FACTOR"]
        assert torch.equal(arrived(torch.ones(1, 2)), layer(torch.ones(1, 2)))
