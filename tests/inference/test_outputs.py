from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from sparkdl.data.collate import Arguments
from sparkdl.errors import ConfigError
from sparkdl.inference.outputs import Forward, Output, check_rows, children, find_layer, pick
from sparkdl.serialization.json_objects import describe, restore

Pair = namedtuple("Pair", ["first", "second"])


@dataclass
class Answer:
    logits: torch.Tensor
    cache: torch.Tensor | None = None


class InPlace(nn.Sequential):
    """A layer whose output the next one overwrites."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Linear(3, 4), nn.ReLU(inplace=True), nn.Linear(4, 2))


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.unused = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(self.layer(x))


ONE, TWO = torch.zeros(2), torch.ones(2, 3)


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ((ONE, TWO), (1,)),
        ([ONE, TWO], (-1,)),
        ({"a": ONE, "b": {"c": [ONE, TWO]}}, ("b", "c", 1)),
        (Pair(ONE, TWO), ("second",)),
        (Pair(ONE, TWO), (1,)),
        (Answer(logits=TWO), ("logits",)),
        ({1: TWO, 0: ONE}, (1,)),
    ],
)
def test_parts_are_found(value: Any, path: tuple[Any, ...]) -> None:
    assert pick(value, path, "it") is TWO


@pytest.mark.parametrize(
    ("value", "path", "message"),
    [
        ({"a": ONE}, ("b",), "there is no 'b'; known: 'a'"),
        ((ONE,), (1,), "there is no 1; known: 0"),
        ((ONE,), (-2,), "there is no -2"),
        (ONE, ("a",), "nothing at 'a' in a tensor"),
        (Answer(logits=ONE), ("cache",), "there is no 'cache'; known: 'logits'"),
    ],
)
def test_missing_parts_are_named(value: Any, path: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        pick(value, path, "it")


def test_what_is_no_structure_has_no_children() -> None:
    assert children(ONE) is None
    assert children("text") is None
    assert children(Answer) is None
    assert children(()) == {}


def test_rows_are_checked() -> None:
    assert check_rows(TWO, 2, "it") is TWO
    with pytest.raises(
        ConfigError, match=r"it has shape \(2, 3\) for 3 samples, .*\(predictionOutput\)"
    ):
        check_rows(TWO, 3, "it")
    with pytest.raises(ConfigError, match="it is a str"):
        check_rows("text", 3, "it")
    with pytest.raises(ConfigError, match=r"shape \(\)"):
        check_rows(torch.tensor(1.0), 1, "it")


def test_layers_are_seen_as_they_were_before_work_in_place() -> None:
    module, x = InPlace(), torch.randn(5, 3)
    found = Forward(layers=("0", "1")).outputs(module, Arguments((x,)))
    assert torch.equal(found["0"], module[0](x))
    assert (found["0"] < 0).any()
    assert torch.equal(found["1"], module[0](x).relu())
    assert torch.equal(found[None], module(x))
    assert not module[0]._forward_hooks and not module[1]._forward_hooks


def test_a_layer_may_return_a_structure() -> None:
    module = nn.Sequential(nn.LSTM(3, 4, batch_first=True))
    found = Forward(layers=("0",)).outputs(module, Arguments((torch.randn(2, 5, 3),)))
    assert pick(found["0"], (1, 0), "it").shape == (1, 2, 4)


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        ("layer", "'layer' is called more than once"),
        ("unused", "'unused' is never called"),
        ("absent", "no layer 'absent'; its layers: layer, unused"),
        ("", "no layer ''"),
    ],
)
def test_layers_that_do_not_do_are_named(layer: str, message: str) -> None:
    module = Twice()
    with pytest.raises(ConfigError, match=message):
        Forward(layers=(layer,)).outputs(module, Arguments((torch.zeros(2, 3),)))
    assert not module.layer._forward_hooks


def test_a_shared_layer_has_two_names() -> None:
    layer = nn.Linear(2, 2)
    module = nn.ModuleDict({"a": layer, "b": layer})
    assert find_layer(module, "a") is find_layer(module, "b") is layer


def test_processing_before_and_after() -> None:
    forward = Forward(
        preprocessing=lambda x: (x * 2, x),
        postprocessing=lambda output: {"sum": output},
    )

    class Add(nn.Module):
        def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return a + b

    inputs = Arguments((ONE + 1,))
    assert torch.equal(forward.outputs(Add(), inputs)[None]["sum"], ONE + 3)
    assert torch.equal(forward.module_output(Add(), inputs), ONE + 3)
    one_argument = Forward(preprocessing=lambda a, b: a + b)
    assert torch.equal(
        one_argument.module_output(nn.Identity(), Arguments((ONE, ONE + 1))), ONE + 1
    )


def test_outputs_check_themselves_and_come_back_from_json() -> None:
    assert Output(key="a") == Output(key=("a",))
    assert str(Output(key=("a", 1), layer="b")) == "output 'a.1' of layer 'b'"
    assert str(Output()) == "the module"
    output = Output(key=("a", 1), layer="b", form="vector")
    assert restore(describe(output)) == output
    for wrong in ({"key": 1.5}, {"key": True}, {"form": "list"}, {"layer": 3}):
        with pytest.raises(ConfigError):
            Output(**wrong)
