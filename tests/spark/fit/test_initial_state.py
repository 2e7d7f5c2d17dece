"""A fitted model trains on: two fits are one, in a gang and in rounds, in memory and on disk."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from sparkdl.errors import ConfigError, StorageError
from sparkdl.estimator import TorchClassifier
from sparkdl.model import TorchClassifierModel
from sparkdl.serialization.load import load_module
from sparkdl.sync.averaging.slowmo import SlowMo

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.gang]

StepLR = functools.partial(torch.optim.lr_scheduler.StepLR, step_size=7, gamma=0.5)


def make_net() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def make_wider() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 9), nn.BatchNorm1d(9), nn.ReLU(), nn.Linear(9, 3))


@pytest.fixture(scope="module")
def df(spark: SparkSession) -> DataFrame:
    from pyspark.sql import functions as F

    features = [((F.col("id") * k) % 17 - 8).cast("float") for k in (1, 5, 7)]
    return spark.range(0, 120, 1, 3).select(
        F.array(*features).alias("features"), (F.col("id") % 3).alias("label")
    )


def classifier(**params: Any) -> TorchClassifier:
    values: dict[str, Any] = {
        "module": make_net, "epochs": 1, "batchSize": 16, "numWorkers": 2, "verbose": 0, "seed": 3,
        "optimizer": "adam", "learningRate": 0.05, "scheduler": StepLR, "keepTrainingState": True,
    }  # fmt: skip
    return TorchClassifier(**{**values, **params})


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other)


def same(one: TorchClassifierModel, other: TorchClassifierModel) -> bool:
    weights = equal(dict(one.module.state_dict()), dict(other.module.state_dict()))
    return weights and equal(one.trainingState.tree(), other.trainingState.tree())


MODES: dict[str, dict[str, Any]] = {
    "gang": {},
    "rounds": {"syncStrategy": SlowMo(averaging_period=3), "executionMode": "rounds"},
}


@pytest.fixture(scope="module", params=list(MODES))
def trained(request: pytest.FixtureRequest, df: DataFrame) -> tuple[str, Any, Any]:
    """A mode, and what its training came to after one epoch and after two."""
    ways = MODES[request.param]
    first, whole = classifier(**ways).fit(df), classifier(**ways, epochs=2).fit(df)
    return request.param, first, whole


def test_two_fits_are_one(trained: Any, df: DataFrame, tmp_path: Path) -> None:
    mode, first, whole = trained
    place = str(tmp_path / "first")
    first.save(place)
    second = classifier(**MODES[mode], initialState=first, runName="second").fit(df)
    assert same(second, whole)
    assert (second.trainingState.epoch, second.trainingState.step) == (2, whole.summary.steps)
    (record,) = second.summary.history
    assert (record["epoch"], record["loss"]) == (2, whole.summary.history[1]["loss"])
    facts = second.summary.record.facts
    assert (facts["first_epoch"], facts["first_step"]) == (1, first.summary.steps)

    loaded = TorchClassifierModel.load(place)
    assert same(loaded, first)
    assert equal(dict(load_module(place).state_dict()), dict(first.module.state_dict()))
    again = classifier(**MODES[mode], initialState=place, keepTrainingState=False).fit(df)
    assert equal(dict(again.module.state_dict()), dict(whole.module.state_dict()))
    assert again.trainingState is None
    again.save(str(tmp_path / "again"))
    with pytest.raises(StorageError, match="has no training state; fit it with keepTrain"):
        classifier(initialState=str(tmp_path / "again")).fit(df)
    with pytest.raises(TypeError, match="has no training state; fit it with keepTrain"):
        classifier(initialState=again)


@pytest.mark.slow
def test_other_rows_other_workers_and_checkpoints(
    trained: Any, df: DataFrame, tmp_path: Path
) -> None:
    mode, first, _ = trained
    other = df.where("label > 0 or features[0] > 0")
    estimator = classifier(
        **MODES[mode], numWorkers=1, initialState=first, checkpointDir=str(tmp_path / "c")
    )
    one, two = estimator.fit(other), estimator.fit(other)  # the second finds what the first wrote
    assert same(one, two)
    assert len(list((tmp_path / "c").iterdir())) == 1
    assert one.trainingState.epoch == 2
    own_steps = one.summary.steps - first.summary.steps
    assert own_steps == -(-other.count() // 16)
    assert one.trainingState.parts.keys() == first.trainingState.parts.keys()
    estimator.setInitialState(one).fit(other)
    assert len(list((tmp_path / "c").iterdir())) == 2  # another beginning, other checkpoints


def test_what_does_not_fit_is_refused_before_any_job(trained: Any, df: DataFrame) -> None:
    mode, first, _ = trained
    ways = {**MODES[mode], "initialState": first}
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"module": make_wider}, "the weights of initialState differ from the module in"),
        ({"optimizer": "sgd"}, "the optimizer was torch.optim.adam.Adam and is torch.optim.sgd"),
        ({"syncStrategy": "local_sgd", "executionMode": "auto"}, "Mode was|syncStrategy was"),
        ({"syncStrategy": "one_shot_averaging", "executionMode": "auto"}, "optimizers of their"),
        ({"initialWeights": first}, "initialState brings weights too"),
    ]
    for changes, message in wrong:
        with pytest.raises(ConfigError, match=message):
            classifier(**{**ways, **changes}).fit(df)
    with pytest.raises(ConfigError, match="keepTrainingState has no meaning with OneShot"):
        classifier(syncStrategy="one_shot_averaging").fit(df)


@pytest.mark.slow
def test_an_estimator_is_saved_with_its_initial_state(trained: Any, tmp_path: Path) -> None:
    _, first, _ = trained
    by_path = classifier(initialState="s3://key:secret@bucket/models/1")
    for name, estimator in (("held", classifier(initialState=first)), ("named", by_path)):
        for _ in range(2):  # the second takes the place of the first
            estimator.write().overwrite().save(str(tmp_path / name))
        loaded: Any = TorchClassifier.load(str(tmp_path / name)).getInitialState()
        given = estimator.getInitialState()
        assert equal(dict(loaded.weights), dict(given.weights))
        if name == "held":
            assert equal(loaded.training.tree(), given.training.tree())
        else:
            assert loaded.source == "s3://key@bucket/models/1"


class Swapping(nn.Module):
    """Shows evaluations other weights than training, as a mean of weights does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.factor = nn.Linear(3, 3), 1.0

    def train(self, mode: bool = True) -> Any:
        factor = 1.0 if mode else 0.25
        self.layer.weight.data *= factor / self.factor
        self.factor = factor
        return super().train(mode)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_what_eval_has_changed_goes_on_as_it_was(df: DataFrame, tmp_path: Path, mode: str) -> None:
    """A power of two, so that no bit depends on how often the modes have changed."""
    ways = {**MODES[mode], "module": Swapping}
    first, whole = classifier(**ways).fit(df), classifier(**ways, epochs=2).fit(df)
    assert same(classifier(**ways, initialState=first).fit(df), whole)
    first.save(str(tmp_path / "first"))
    assert same(classifier(**ways, initialState=str(tmp_path / "first")).fit(df), whole)
