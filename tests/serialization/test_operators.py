"""Operators of torch that a program has made are asked for where its code calls them."""

from __future__ import annotations

import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from sparkdl.serialization.travel.operators import Operators
from sparkdl.serialization.travel.pickling import dumps, loads, sent_along
from sparkdl.spark.cluster.probe import Needs
from tests.serialization.programs import program

MADE = """
import torch

@torch.library.custom_op("sparkdl_tests::{name}", mutates_args=())
def {name}(x: torch.Tensor) -> torch.Tensor:
    return 2 * x
"""
CODE = (
    MADE.format(name="own")
    + """
import types

own_by_name = torch.ops.sparkdl_tests.own
library = torch.library.Library("sparkdl_tests_library", "DEF")
library.define("cube(Tensor x) -> Tensor")
library.impl("cube", lambda x: x * x * x, "CompositeImplicitAutograd")
ops = torch.ops

def calls_it(x):
    return own(x)

def calls_a_variable(x):
    return own_by_name(x)

def names_it(x):
    return torch.ops.sparkdl_tests.own(x)

def names_a_variant(x):
    def inner():
        return ops.sparkdl_tests_library.cube.default(x)

    return inner()

class Has(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.act = own_by_name.default

class IsAlike(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.ops = types.SimpleNamespace(of=types.SimpleNamespace(mine=torch.neg))
        self.act = torch.ops.aten.tanh

    def forward(self, x):
        return self.ops.of.mine(self.act(x))
"""
)
REST = "import pickle, sys; print(pickle.loads(sys.stdin.buffer.read()).missing())"


@pytest.fixture(scope="module")
def made() -> Iterator[types.ModuleType]:
    with program(CODE, "sparkdl_tests_operators") as module:
        yield module


def missing_elsewhere(operators: Operators, path: Path) -> str:
    """What another process says, which can import the files of a folder."""
    import pickle

    found = subprocess.run(
        [sys.executable, "-c", REST], input=pickle.dumps(operators), capture_output=True,
        timeout=60, check=True, env={"PYTHONPATH": f"{path}:{':'.join(filter(None, sys.path))}"},
    )  # fmt: skip
    return found.stdout.decode().strip()


def test_code_names_the_operators_that_it_calls(made: types.ModuleType) -> None:
    def named(value: Any) -> set[str]:
        return set(sent_along(value).operators.names)

    for value in (made.calls_it, made.names_it):
        assert named(value) == {"sparkdl_tests.own"}
    assert named(made.calls_a_variable) == {"sparkdl_tests.own"}
    assert named(made.names_a_variant) == {"sparkdl_tests_library.cube"}
    assert named({"module": made.Has()}) == {"sparkdl_tests.own", "sparkdl_tests.own.default"}
    assert named(made.IsAlike()) == {"aten.tanh"}
    assert named(torch.nn.Linear(1, 1)) == set()


def test_they_travel_by_their_names(made: types.ModuleType) -> None:
    x = torch.ones(2)
    for value in (made.calls_it, made.calls_a_variable, made.names_it):
        assert loads(dumps(value))(x).tolist() == [2.0, 2.0]
    assert loads(dumps(made.names_a_variant))(2 * x).tolist() == [8.0, 8.0]
    assert loads(dumps(made.Has())).act is made.own_by_name.default
    assert loads(dumps(made.IsAlike()))(x).tolist() == (-x.tanh()).tolist()


def test_who_lacks_one_says_so(made: types.ModuleType, tmp_path: Path) -> None:
    of_program = sent_along(made.names_it).operators
    assert of_program.missing() is None
    assert missing_elsewhere(of_program, tmp_path) == "sparkdl_tests.own"
    absent = Needs(operators=Operators(frozenset({"sparkdl_tests.absent"})))
    assert absent
    assert str(absent.missing()).startswith("torch has no operator sparkdl_tests.absent there; ")
    assert not Needs(operators=Operators())


def test_one_that_a_module_makes_comes_with_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sparkdl_tests_module.py").write_text(MADE.format(name="theirs"), encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    uses = """
import torch
import sparkdl_tests_module
from sparkdl_tests_module import theirs

def calls_it(x):
    return theirs(x)

def names_it(x):
    sparkdl_tests_module
    return torch.ops.sparkdl_tests.theirs(x)
"""
    with program(uses, "sparkdl_tests_uses") as module:
        assert sent_along(module.calls_it).operators.names == set(), "code that is sent imports it"
        by_name = sent_along(module.names_it).operators
        assert by_name.names == {"sparkdl_tests.theirs"}
        assert "sparkdl_tests_module" in by_name.imports
        assert missing_elsewhere(by_name, tmp_path) == "None"
        assert loads(dumps(module.calls_it))(torch.ones(1)).tolist() == [2.0]
    del sys.modules["sparkdl_tests_module"]
