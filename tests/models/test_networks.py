"""Every reference network keeps what docs/networks.md promises of all of them."""

from __future__ import annotations

import functools
import inspect
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import sparkdl.models
from sparkdl.cli.job_files.job_file import TrainJob
from sparkdl.cli.job_files.job_objects import import_object, make_estimator
from sparkdl.cli.job_files.toml_values import build
from sparkdl.data.plan import Column
from sparkdl.errors import ConfigError
from sparkdl.inputs import Sequence
from sparkdl.serialization.example_inputs import example_of
from sparkdl.serialization.exported_program import read_program, write_program
from sparkdl.serialization.json_objects import describe, restore
from sparkdl.serialization.onnx_export import export_onnx
from sparkdl.storage.storage import LocalStorage
from tests.serialization.saving import load_module_from, save_module

ROOT = Path(__file__).parent.parent.parent
WORDS = {
    "values": torch.randint(0, 9, (2, 5)),
    "mask": torch.tensor([[True] * 5, [True, *[False] * 4]]),
}
GREY = torch.randint(0, 256, (2, 1, 28, 28), dtype=torch.uint8)
COLOUR = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8)
ROWS = torch.randn(2, 13)

# Of each the arguments, a batch, the shape of what it gives, and its parameters counted by hand
# or as the source has them.
NETWORKS: dict[str, tuple[dict[str, Any], Any, tuple[int, ...], int]] = {
    "MLP": ({"sizes": [13, 64, 32], "num_outputs": 3}, ROWS, (2, 3), 896 + 2080 + 99),
    "FCNR": ({}, GREY, (2, 10), 1607680 + 8392704 + 4195328 + 10250),
    "LeNet5": ({}, GREY, (2, 10), 156 + 2416 + 48120 + 10164 + 850),
    "AlexNetR": ({}, COLOUR, (2, 10), 2432 + 25632 + 51264 + 5770),
    "ResNet20": ({}, COLOUR, (2, 10), 269_722),
    "ResNet56": ({}, COLOUR, (2, 10), 853_018),
    "ResNet50": ({}, COLOUR, (2, 10), 25_557_032 - 990 * 2049 - 64 * 3 * 40),
    "CifarResNet": (
        {"blocks": [1, 1, 1], "width": 8}, COLOUR, (2, 10), 232 + 1184 + 3520 + 13952 + 330,
    ),
    "LSTMNet": ({"num_outputs": 2, "num_tokens": 9}, WORDS, (2, 2), 288 + 25088 + 130),
    "GAN": ({"num_features": 13}, ROWS, (2, 1), 288 + 1056 + 429 + 448 + 1056 + 33),
    "Autoencoder": ({"sizes": [13, 8, 4]}, ROWS, (2, 13), 112 + 36 + 117 + 40),
    "TransformerNet": (
        {"num_outputs": 2, "num_tokens": 9}, WORDS, (2, 2),
        9 * 64 + 64 + 2 * (64 * 259 + 64 * 128 + 128 + 128 * 64 + 64 + 2 * 128) + 128 + 130,
    ),
    "LanguageModel": (
        {"num_tokens": 9}, WORDS["values"], (2, 9, 5),
        (9 + 256) * 64 + 2 * (64 * 259 + 64 * 256 + 256 + 256 * 64 + 64 + 2 * 128) + 128 + 585,
    ),
    "SequenceToSequence": (
        {"num_tokens": 9},
        {"source": WORDS["values"], "target": WORDS["values"][:, :3], "mask": WORDS["mask"]},
        (2, 9, 3),
        (9 + 256) * 64 + 4 * (64 * 259 + 64 * 256 + 256 + 256 * 64 + 64 + 2 * 128)
        + 2 * (64 * 259 + 128) + 2 * 128 + 585,
    ),
}  # fmt: skip
SLOW = {"FCNR", "ResNet20", "ResNet50", "ResNet56"}  # others are of the same code
every = pytest.mark.parametrize("name", NETWORKS)
quick = pytest.mark.parametrize("name", sorted(NETWORKS.keys() - SLOW))
exported = pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in ("CifarResNet", "MLP") else pytest.mark.slow)
        for name in sorted(NETWORKS.keys() - SLOW)
    ],
)


def factory(name: str) -> functools.partial[nn.Module]:
    return functools.partial(import_object(f"sparkdl.models:{name}"), **NETWORKS[name][0])


def shallow(name: str) -> nn.Module:
    """With one layer of each kind, where more would only take longer to export."""
    make = factory(name)
    if "num_layers" in inspect.signature(make.func).parameters:
        return make(num_layers=1)
    return make()


def call(net: nn.Module, batch: Any) -> torch.Tensor:
    return net(**batch) if isinstance(batch, dict) else net(batch)


def test_the_table_has_every_network() -> None:
    assert {*NETWORKS, "gan_step"} == set(sparkdl.models.__all__)


@every
def test_parameters_are_as_many_as_published_and_shapes_as_said(name: str) -> None:
    _, batch, shape, num_parameters = NETWORKS[name]
    net = factory(name)().eval()
    assert sum(p.numel() for p in net.parameters()) == num_parameters
    with torch.no_grad():
        assert call(net, batch).shape == shape


@every
def test_constructors_take_keywords_that_json_can_hold(name: str) -> None:
    parameters = inspect.signature(getattr(sparkdl.models, name)).parameters.values()
    assert {p.kind for p in parameters} == {inspect.Parameter.KEYWORD_ONLY}
    json.dumps([p.default for p in parameters if p.default is not p.empty])
    again = restore(json.loads(json.dumps(describe(factory(name)))))
    assert again.func is getattr(sparkdl.models, name)
    assert again.keywords == NETWORKS[name][0]


def test_a_job_file_names_one() -> None:
    sections = {
        "data": {"path": "d"},
        "model": {"factory": "sparkdl.models:MLP", "args": {"sizes": [4, 3], "num_outputs": 2}},
        "output": {"path": "m"},
    }
    estimator = make_estimator(build(TrainJob, sections))
    net = estimator.getOrDefault("module")()
    assert isinstance(net, sparkdl.models.MLP)
    assert net(torch.rand(1, 4)).shape == (1, 2)


@quick
def test_a_saved_one_computes_the_same(name: str, tmp_path: Path) -> None:
    make, batch = factory(name), NETWORKS[name][1]
    net = make()
    call(net, batch)  # statistics of BatchNorm are not those of the beginning any more
    net.eval()
    save_module(net, make, LocalStorage(tmp_path), "m", example_inputs=None, extra={})
    loaded, _ = load_module_from(LocalStorage(tmp_path), "m")
    assert type(loaded) is type(net)
    with torch.no_grad():
        assert torch.equal(call(loaded, batch), call(net, batch))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["CifarResNet", "MLP", "SequenceToSequence"])
def test_one_can_become_a_program(name: str) -> None:
    batch = NETWORKS[name][1]
    net = shallow(name).eval()
    program = read_program(write_program(net, batch if isinstance(batch, dict) else (batch,)))
    with torch.no_grad():
        torch.testing.assert_close(call(program, batch), call(net, batch))


@pytest.mark.slow
@exported
def test_one_can_become_an_onnx_file(name: str, tmp_path: Path) -> None:
    batch = NETWORKS[name][1]
    given = batch if isinstance(batch, dict) else (batch,)
    export_onnx(shallow(name), tmp_path / "m.onnx", example_inputs=given)  # compares
    assert (tmp_path / "m.onnx").stat().st_size > 0


@pytest.mark.slow
def test_a_transformer_is_exported_for_any_length_and_an_lstm_for_one(tmp_path: Path) -> None:
    columns = (
        Column(
            name="words", role="feature", dtype="int64", shape=(), argument="values",
            specification=Sequence("words", mask="mask"), longest=5,
        ),
    )  # fmt: skip
    net = shallow("TransformerNet").eval()
    program = read_program(write_program(net, example_of(columns)))
    longer = {"values": torch.randint(0, 9, (3, 8)), "mask": torch.rand(3, 8) < 0.5}
    with torch.no_grad():
        torch.testing.assert_close(program(**longer), net(**longer))
    with pytest.raises(ConfigError, match=r"torch.export cannot export it"):
        write_program(factory("LSTMNet")(), example_of(columns))  # a limit of torch's


@quick
def test_other_floating_types_work(name: str) -> None:
    batch = NETWORKS[name][1]
    is_floating = isinstance(batch, torch.Tensor) and batch.is_floating_point()
    assert call(factory(name)().double(), batch.double() if is_floating else batch).dtype == (
        torch.float64
    )


@pytest.mark.parametrize("name", [n for n, v in NETWORKS.items() if v[1] is GREY or v[1] is COLOUR])
def test_bytes_are_the_same_as_numbers_from_0_to_1(name: str) -> None:
    net, images = factory(name)().eval(), NETWORKS[name][1]
    with torch.no_grad():
        torch.testing.assert_close(net(images), net(images.float() / 255))


def test_importing_sparkdl_imports_no_networks() -> None:
    code = "import sys, sparkdl; assert not {'torch', 'sparkdl.models'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=60)


def test_the_documents_have_every_network_with_its_parameters() -> None:
    text = (ROOT / "docs" / "networks.md").read_text(encoding="utf-8")
    text, _, _ = text.partition("## What they reach")
    rows = {match[1]: match[0] for match in re.finditer(r"^\| `(\w+)`.*$", text, re.MULTILINE)}
    assert set(rows) == set(NETWORKS)
    for name in ("FCNR", "LeNet5", "AlexNetR", "ResNet20", "ResNet56", "ResNet50"):
        assert f"{NETWORKS[name][3]:,}" in rows[name]
