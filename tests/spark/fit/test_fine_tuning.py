"""The estimators start from given weights, freeze layers and group parameters, in both modes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from sparkdl.errors import ConfigError
from sparkdl.estimator import TorchClassifier
from sparkdl.serialization.initial_weights import InitialWeights
from sparkdl.serialization.load import load_module
from sparkdl.spark.fit.begin_module import make_module
from sparkdl.sync.averaging.parameter_averaging import ParameterAveraging
from sparkdl.sync.gradients.allreduce import AllReduce

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.gang]

ROWS = 96
MODES: dict[str, dict[str, Any]] = {
    "gang": {"syncStrategy": AllReduce(topology="ring")},  # shared memory would send nothing
    "rounds": {
        "syncStrategy": ParameterAveraging(averaging_period=3),
        "executionMode": "rounds",
    },
}
mode = pytest.mark.parametrize("mode", MODES)


def make_net(classes: int = 3) -> nn.Module:
    torch.manual_seed(5)
    body = nn.Sequential(nn.Linear(3, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 8))
    return nn.Sequential(body, nn.Dropout(0.2), nn.Linear(8, classes))


@pytest.fixture(scope="module")
def df(spark: SparkSession) -> DataFrame:
    from pyspark.sql import functions as F

    features = [((F.col("id") * k) % 17 - 8).cast("float") for k in (1, 5, 7)]
    return spark.range(0, ROWS, 1, 3).select(
        F.array(*features).alias("features"), (F.col("id") % 3).alias("label")
    )


def estimator(**params: Any) -> TorchClassifier:
    values: dict[str, Any] = {
        "module": make_net, "epochs": 2, "batchSize": 8, "numWorkers": 2, "seed": 7,
        "learningRate": 0.01, "verbose": 0, "maxRestarts": 0,
    }  # fmt: skip
    return TorchClassifier(**{**values, **params})


def pretrained() -> nn.Module:
    """With statistics that are not those of the rows."""
    module = make_net()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.25)
        for name, buffer in module.named_buffers():
            if "running" in name:
                buffer.copy_(torch.arange(64) / 7 + 1)
    return module


def state(module: nn.Module, prefix: str = "") -> dict[str, torch.Tensor]:
    return {n: v.clone() for n, v in module.state_dict().items() if n.startswith(prefix)}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)


@pytest.mark.slow
@mode
def test_frozen_layers_stay_as_they_came_and_cost_nothing(df: DataFrame, mode: str) -> None:
    tuned = estimator(initialWeights=pretrained(), frozenLayers=["0"], **MODES[mode]).fit(df)
    whole = estimator(initialWeights=pretrained(), **MODES[mode]).fit(df)
    assert same(state(tuned.module, "0."), state(pretrained(), "0."))
    assert not same(state(tuned.module, "2."), state(pretrained(), "2."))
    assert not same(state(whole.module, "0."), state(pretrained(), "0."))
    assert all(p.requires_grad for p in tuned.module.parameters())
    pairs = zip(tuned.summary.bytes_sent_by_rank, whole.summary.bytes_sent_by_rank, strict=True)
    assert all(few < 0.5 * many for few, many in pairs)
    assert tuned.summary.history[-1]["loss"] < tuned.summary.history[0]["loss"]


@pytest.mark.slow
def test_a_frozen_and_grouped_fit_in_rounds_goes_on_from_its_checkpoint_with_the_same_bits(
    df: DataFrame, tmp_path: Path
) -> None:
    params: dict[str, Any] = {
        "initialWeights": pretrained(), "frozenLayers": ["0.[0-1]"], "optimizer": "adamw",
        "parameterGroups": {"2": {"lr": 0.05, "weight_decay": 0.0}}, **MODES["rounds"],
    }  # fmt: skip
    whole = estimator(**params).fit(df)
    places = {"checkpointDir": str(tmp_path), "checkpointInterval": 4}
    estimator(**params, **places, maxSteps=10).fit(df)  # an epoch of 7 steps and a round of 3
    (key,) = [entry.name for entry in tmp_path.iterdir()]
    resumed = estimator(**params, **places).fit(df)
    assert [entry.name for entry in tmp_path.iterdir()] == [key]
    assert same(state(whole.module), state(resumed.module))


def test_training_starts_from_a_model_a_folder_or_a_file(df: DataFrame, tmp_path: Path) -> None:
    first = estimator().fit(df)
    first.save(str(tmp_path / "m"))
    save_file(first.module.state_dict(), tmp_path / "w.safetensors")
    sources = [first, first.module, first.module.state_dict(), str(tmp_path / "m"),
               f"file://{tmp_path}/w.safetensors"]  # fmt: skip
    for source in sources:
        request = estimator(initialWeights=source)._request()
        begun = make_module(request).module
        assert same(state(begun), state(first.module))
    model = estimator(initialWeights=first, maxSteps=1).fit(df)
    assert model.summary.history[0]["loss"] < first.summary.history[0]["loss"]


@pytest.mark.slow
def test_another_head_is_made_anew(df: DataFrame, tmp_path: Path) -> None:
    source = make_net(classes=10)
    with pytest.raises(ConfigError, match=r"2\.bias is float32 \(3,\) in the module, .*\(10,\)"):
        estimator(initialWeights=source).fit(df)
    initial = InitialWeights(source=source, skip=("2",))
    model = estimator(initialWeights=initial, frozenLayers=["0"]).fit(df)
    assert same(state(model.module, "0."), state(source, "0."))
    assert model.module[2].out_features == 3
    model.save(str(tmp_path / "m"))
    assert same(state(load_module(tmp_path / "m")), state(model.module))


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"frozenLayers": ["1"]}, r"frozenLayers: no parameter of the module fits '1'"),
        ({"frozenLayers": ["*"]}, "leave no parameter to train"),
        ({"parameterGroups": {"3": {}}}, "parameterGroups: no parameter of the module fits '3'"),
        ({"parameterGroups": {"2": {"lr": -1.0}}}, "Invalid learning rate"),
        ({"frozenLayers": ["2"], "parameterGroups": {"2": {}}}, "parameterGroups: no parameter"),
        ({"initialWeights": nn.Linear(3, 3)}, "initialWeights differ from the module"),
    ],
)
def test_mistakes_are_named_before_any_job(df: DataFrame, params: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        estimator(**params).fit(df)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("frozenLayers", "encoder"),
        ("frozenLayers", [1]),
        ("parameterGroups", {"a": 1}),
        ("parameterGroups", {"a": {"params": []}}),
        ("initialWeights", 42),
        ("initialWeights", "weights.pth"),
    ],
)
def test_values_of_other_kinds_are_refused_when_they_are_set(name: str, value: Any) -> None:
    with pytest.raises(TypeError, match=name):
        estimator(**{name: value})
