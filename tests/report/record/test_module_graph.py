from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from sparkdl.report.page.svg import model_graph
from sparkdl.report.record.module_graph import condensed, traced


class Residual(nn.Module):
    def __init__(self, size: int = 8) -> None:
        super().__init__()
        self.first = nn.Linear(size, size)
        self.second = nn.Linear(size, size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(x + self.second(self.first(x)))


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 3), nn.Embedding(7, 3)

    def forward(self, x: torch.Tensor, words: torch.Tensor) -> dict[str, torch.Tensor]:
        both = torch.cat([self.left(x.view(len(x), -1)), self.right(words).mean(1)], 1)
        return {"logits": both, "state": both.tanh()}


def graph_of(module: nn.Module, *inputs: torch.Tensor, **named: torch.Tensor) -> dict[str, Any]:
    found: list[Any] = []
    with traced(module, found.append):
        module(*inputs, **named)
    (graph,) = found
    return graph


def edges(graph: dict[str, Any]) -> set[tuple[str, str]]:
    names = [node["name"] for node in graph["nodes"]]
    return {(names[a], names[b]) for a, b in graph["edges"]}


def test_layers_functions_and_what_flows_between_them() -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(16, 8), Residual())
    graph = graph_of(net, torch.zeros(2, 4, 4))
    assert edges(graph) == {
        ("input 1", "0"), ("0", "1"), ("1", "2.first"), ("2.first", "2.second"), ("1", "2.add"),
        ("2.second", "2.add"), ("2.add", "2.relu"), ("2.relu", "output"),
    }  # fmt: skip
    by_name = {node["name"]: node for node in graph["nodes"]}
    assert by_name["1"]["op"] == "Linear"
    assert by_name["1"]["parameters"] == 136
    assert "in_features=16" in by_name["1"]["detail"]
    assert by_name["input 1"]["shape"] == [4, 4]
    assert by_name["2.relu"]["shape"] == [8]


def test_several_inputs_by_name_and_several_outputs() -> None:
    graph = graph_of(TwoInputs(), torch.zeros(2, 2, 2), words=torch.zeros(2, 5, dtype=torch.long))
    assert {("input 1", "left"), ("input 2", "right"), ("left", "cat"), ("cat", "output"),
            ("tanh", "output"), ("right", "mean"), ("mean", "cat")} <= edges(graph)  # fmt: skip


def test_a_module_that_is_a_layer_itself() -> None:
    assert edges(graph_of(nn.Linear(2, 1), torch.zeros(2, 2))) == {
        ("input 1", "Linear"), ("Linear", "output"),
    }  # fmt: skip


def test_recurrent_and_attention_layers_are_one_node_each() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, batch_first=True).eval()
    ops = [node["op"] for node in graph_of(layer, torch.zeros(2, 5, 8))["nodes"]]
    assert "LSTM" in [n["op"] for n in graph_of(nn.LSTM(3, 4), torch.zeros(5, 2, 3))["nodes"]]
    assert ops[0] == "input" and ops[-1] == "output"


class Copies(nn.Module):
    """Copies one of its layers, with the hooks that look."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 2), nn.ReLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        copied: torch.Tensor = copy.deepcopy(self.layers)(x).detach()
        out: torch.Tensor = self.layers(x)
        return out + copied


def test_layers_may_be_copied_while_somebody_looks() -> None:
    module, x, graphs = Copies(), torch.randn(2, 4), list[Any]()
    with traced(module, graphs.append):
        found = module(x)
    assert torch.equal(found, 2 * module.layers(x))
    assert {node["op"] for node in graphs[0]["nodes"]} >= {"input", "Linear", "ReLU", "output"}


def test_tracing_leaves_nothing_behind_and_changes_nothing() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), Residual(4))
    inputs = torch.randn(3, 4)
    torch.manual_seed(1)
    expected = net(inputs)
    after = torch.rand(1)
    torch.manual_seed(1)
    found: list[Any] = []
    with traced(net, found.append):
        result = net(inputs)
        net(inputs)  # only the first call is shown
    torch.manual_seed(1)
    net(inputs)
    assert torch.equal(torch.rand(1), after)
    assert torch.equal(result, expected)
    assert len(found) == 1
    assert all(not part._forward_hooks and not part._forward_pre_hooks for part in net.modules())


def test_a_module_that_fails_has_no_graph() -> None:
    found: list[Any] = []
    with pytest.raises(RuntimeError), traced(nn.Linear(2, 1), found.append):
        nn.Linear(2, 1)(torch.zeros(2, 3))
    assert found == []


def test_deep_models_are_shown_as_what_their_layers_are_in() -> None:
    net = nn.Sequential(*(Residual() for _ in range(30)), nn.Linear(8, 2))
    graph = graph_of(net, torch.zeros(2, 8))
    assert len(graph["nodes"]) == 30 * 4 + 3
    smaller = condensed(graph)
    assert len(smaller["nodes"]) == 33
    assert smaller["nodes"][1]["op"] == "Residual"
    assert smaller["nodes"][1]["parameters"] == 2 * 72
    assert smaller["nodes"][1]["inside"] == 4
    assert list(range(32)) == [a for a, b in smaller["edges"] if b == a + 1]
    assert condensed(smaller) == smaller
    assert model_graph(smaller).count("<rect") == 33
