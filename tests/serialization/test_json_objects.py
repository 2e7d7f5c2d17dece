"""Does JSON bring objects back, and is what it cannot bring back refused with a reason?"""

from __future__ import annotations

import functools
import json
import math
import types
from typing import Any

import pytest
import torch

from sparkdl.config import EarlyStopping
from sparkdl.errors import ConfigError
from sparkdl.serialization.json_objects import DescribeError, describe, restore
from tests import describable
from tests.describable import Mutable, Options, Plain, add


def again(value: Any) -> Any:
    return restore(json.loads(json.dumps(describe(value))))


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        3,
        0.5,
        math.inf,
        "text",
        [1, (2, [3])],
        {"a": 1, 2: (None,)},
        {"import": "os:system"},
        add,
        Plain,
        Plain.wide,
        torch.nn.functional.cross_entropy,
        torch.optim.SGD,
        math.sqrt,
        torch.float16,
        EarlyStopping(patience=7, monitor="loss"),
        Options(period=5, shape=(4,)),
        (torch.float32, EarlyStopping),
    ],
)
def test_values_come_back_equal(value: Any) -> None:
    back = again(value)
    assert back == value and type(back) is type(value)


def test_nan_and_size_and_tensors_come_back() -> None:
    assert math.isnan(again(math.nan))
    assert again(torch.Size([2, 3])) == (2, 3)
    for tensor in (torch.tensor([1.5, 2]), torch.empty(0, 2), torch.tensor(True)):
        back = again(tensor)
        assert torch.equal(back, tensor) and back.dtype == tensor.dtype


def test_partials_keep_their_arguments() -> None:
    back = again(functools.partial(add, (1,), b=(2,)))
    assert isinstance(back, functools.partial) and back() == (1, 2)


def local() -> Any:
    def inner() -> None:
        return None

    return inner


def from_main() -> Any:
    function = types.FunctionType(add.__code__, {})
    function.__module__, function.__qualname__ = "__main__", "mine"
    return function


def impostor() -> Any:
    function = types.FunctionType(add.__code__, {})
    function.__module__, function.__qualname__ = add.__module__, "add"
    return function


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (lambda: None, "a lambda cannot be imported"),
        (describable.renamed, "a lambda cannot be imported"),
        (local(), "defined inside a function"),
        (from_main(), "mine is defined in __main__"),
        (impostor(), "gives another object"),
        (functools.partial(add, b=local()), "defined inside a function"),
        ([{"k": object()}], "type builtins.object"),
        (Plain().forward, "gives another object"),
        (torch.zeros(10**5), "too large"),
    ],
)
def test_what_has_no_path_is_refused_with_the_remedy(value: Any, why: str) -> None:
    with pytest.raises(DescribeError, match=why) as caught:
        describe(value)
    assert isinstance(caught.value, ValueError)
    assert "pass" in str(caught.value)


def test_a_dataclass_that_can_change_is_refused() -> None:
    with pytest.raises(DescribeError, match="frozen=True"):
        describe(Mutable())


def test_a_dataclass_that_was_changed_by_force_is_refused() -> None:
    options = Options()
    object.__setattr__(options, "twice", 99)
    with pytest.raises(DescribeError, match="not what its fields make"):
        describe(options)


@pytest.mark.parametrize(
    ("description", "words"),
    [
        ({}, "not a description"),
        ({"unknown": 1}, "not a description"),
        (object(), "not a description"),
        ({"import": "os"}, "reads 'package.module:name'"),
        ({"import": 3}, "reads 'package.module:name'"),
        ({"import": "absent_package.x:y"}, "cannot import 'absent_package.x:y'"),
        ({"import": "os:absent"}, "cannot import 'os:absent'"),
        ({"import": "os:getpid"}, "which is code of posix"),
        ({"partial": {"import": "tests.describable:add"}}, "KeyError: 'keywords'"),
        ({"dataclass": "tests.describable:add", "fields": {}}, "not a dataclass"),
        ({"dataclass": "sparkdl.config:EarlyStopping", "fields": {"x": 1}}, "has no argument .x."),
        ({"dataclass": "sparkdl.config:EarlyStopping", "fields": {"patience": 0}}, "patience"),
        ({"module": "tests.describable:add", "args": {}, "frozen": []}, "not a class of modules"),
        ({"module": "torch.nn:Linear", "args": {}, "frozen": []}, "missing 2 required"),
        (
            {
                "module": "torch.nn:MultiheadAttention",
                "args": {"embed_dim": 5, "num_heads": 2},
                "frozen": [],
            },
            "AssertionError: embed_dim must be divisible",
        ),
        ({"dtype": "system"}, "no dtype 'system'"),
        ({"tensor": "!", "dtype": "float32", "shape": []}, "cannot make"),
    ],
)
def test_malformed_descriptions_are_configuration_errors(description: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        restore(description)
