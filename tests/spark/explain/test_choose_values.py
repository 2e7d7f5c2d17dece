"""Params that are "auto" are chosen before a fit, shown with it, and kept with its checkpoints."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.ml.tuning import CrossValidator
from torch import nn

from sparkdl import ConfigError, StorageError, TorchClassifier, TorchRegressor
from sparkdl.explain.comparison import Choice
from sparkdl.spark.cluster import slots
from sparkdl.spark.explain import choose_values, measure_gang
from sparkdl.spark.explain.choose_values import Kept
from sparkdl.spark.frames.user_data import user_data
from sparkdl.storage.storage import LocalStorage
from sparkdl.sync.averaging.parameter_averaging import ParameterAveraging
from sparkdl.sync.gradients.allreduce import AllReduce
from sparkdl.sync.strategy import SyncStrategy

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from sparkdl.model import TorchModel

pytestmark = [pytest.mark.spark, pytest.mark.gang, pytest.mark.timeout(600)]

ALL = ("batchSize", "learningRate", "numWorkers", "syncStrategy")


def make_net() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 3))


@pytest.fixture(scope="module")
def df(spark: SparkSession) -> DataFrame:
    from pyspark.sql import functions as F

    features = [((F.col("id") * k % 97 - 48) / 28).cast("float") for k in (1, 2, 3)]
    return spark.range(0, 3000, 1, 3).select(
        F.array(*features).alias("features"), (F.col("id") % 97 > 48).cast("int").alias("label")
    )


@pytest.fixture(autouse=True, scope="module")
def quick() -> Iterator[None]:
    """Measurements are short."""
    before = choose_values.FIT_OPTIONS
    choose_values.FIT_OPTIONS = replace(before, measure_seconds=0.05)
    yield
    choose_values.FIT_OPTIONS = before


def classifier(**params: Any) -> TorchClassifier:
    values: dict[str, Any] = dict.fromkeys(ALL, "auto")
    return TorchClassifier(module=make_net, seed=3, verbose=0, **{**values, **params})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("auto")


@pytest.fixture(scope="module")
def fitted(df: DataFrame, folder: Path) -> TorchModel:
    """All four were chosen."""
    return classifier(checkpointDir=str(folder), reportDir=str(folder / "runs")).fit(df)


def test_what_is_auto_is_chosen_before_the_fit(fitted: TorchModel) -> None:
    summary = fitted.summary
    assert set(summary.chosen) == set(ALL)
    value = {name: choice["value"] for name, choice in summary.chosen.items()}
    assert value["batchSize"] in (16, 32, 64, 128)
    assert value["numWorkers"] == summary.world_size
    assert summary.world_size in (1, 2)
    assert summary.history[-1]["learning_rate"] == value["learningRate"]
    assert 1e-5 < value["learningRate"] < 1
    reasons = [choice["reason"] for choice in summary.chosen.values()]
    assert all(any(letter.isdigit() for letter in reason) for reason in reasons)
    assert summary.phase_seconds["fit: choose"] > 0
    assert value["syncStrategy"] in repr(summary)


@pytest.mark.slow
def test_record_and_page_have_the_reasons(fitted: TorchModel) -> None:
    record, chosen = fitted.summary.record, fitted.summary.chosen
    assert record is not None
    assert record.facts["chosen"] == chosen
    assert record.facts["strategy"].startswith(chosen["syncStrategy"]["value"].split("(")[0])
    assert {p["value"] for p in record.params if p["name"] in ALL} == {"auto"}
    page = Path(str(fitted.summary.report_path)).read_text(encoding="utf-8")
    assert "Chosen automatically" in page
    assert json.loads(json.dumps(fitted.summary.to_dict()))["chosen"] == chosen


@pytest.mark.slow
def test_an_equal_fit_takes_the_choice_and_goes_on(
    fitted: TorchModel, df: DataFrame, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "sparkdl"):
        again = classifier(checkpointDir=str(folder), epochs=2).fit(df)
    chosen = {name: choice["value"] for name, choice in again.summary.chosen.items()}
    assert chosen == {name: choice["value"] for name, choice in fitted.summary.chosen.items()}
    assert "kept in checkpointDir by an earlier fit" in str(again.summary.chosen)
    assert again.summary.history[0] == fitted.summary.history[0]  # with its seconds
    assert len(again.summary.history) == 2
    assert any("learningRate=" in message for message in caplog.messages)


def test_a_choice_comes_back_as_it_was_kept(tmp_path: Path) -> None:
    kept = Kept(storage=LocalStorage(tmp_path), path="chosen/a.json", most_workers=2)
    assert kept.read() is None
    strategies = (AllReduce(compression="bf16"), ParameterAveraging(averaging_period="auto"))
    for strategy in strategies:
        choices = [
            Choice(param="numWorkers", value=64, reason="shortest"),
            Choice(param="syncStrategy", value=strategy, reason="quick"),
            Choice(param="learningRate", value=None, reason="nothing was learnt"),
            Choice(param="batchSize", value=128, reason="faster"),
        ]
        kept.write(choices)
        workers, *others = kept.read() or []
        assert (workers.value, workers.reason) == (
            2,
            "an earlier fit had 64, but the cluster has room for 2",
        )
        assert [choice.value for choice in others] == [strategy, None, 128]
        assert others[0].reason == "quick; kept in checkpointDir by an earlier fit"
    (tmp_path / "chosen" / "a.json").write_text("{", encoding="utf-8")
    with pytest.raises(StorageError, match=r"damaged.*remove it"):
        kept.read()


@pytest.mark.slow
def test_workers_of_rounds(df: DataFrame) -> None:
    model = classifier(
        batchSize=32, learningRate=0.01, syncStrategy="auto", executionMode="rounds"
    ).fit(df)
    assert set(model.summary.chosen) == {"numWorkers", "syncStrategy"}
    assert model.summary.chosen["syncStrategy"]["value"].startswith("ParameterAveraging(")
    record = model.summary.record
    assert record is not None
    assert record.facts["mode"] == "rounds"


@pytest.mark.slow
def test_explain_shows_what_a_fit_would_choose_and_recommends_an_estimator(df: DataFrame) -> None:
    estimator = classifier(learningRate=0.01)
    found = estimator.explain(df, measure_seconds=0.05)
    assert set(found.chosen) == {"batchSize", "numWorkers", "syncStrategy"}
    assert found.plan.batch_size == found.chosen["batchSize"]["value"]
    assert found.plan.num_workers == found.chosen["numWorkers"]["value"]
    assert found.plan.strategy == found.chosen["syncStrategy"]["value"]
    assert "chosen" in str(found)
    best, recommended = found.recommendation, found.recommended
    assert best is not None
    assert type(recommended) is TorchClassifier
    assert recommended.getNumWorkers() == best.num_workers
    assert recommended.getSyncStrategy() == best.sync_strategy
    assert recommended.getBatchSize() == found.plan.batch_size
    assert recommended.getLearningRate() == 0.01
    assert estimator.getNumWorkers() == "auto"
    assert recommended.fit(df.limit(300)).summary.world_size == best.num_workers
    assert "recommended" not in found.to_dict()
    assert "sync_strategy" not in found.to_dict()["recommendation"]
    unmeasured = classifier().explain(df, calibrate=False)
    assert unmeasured.recommended is None
    assert "nothing was chosen for learningRate, batchSize" in unmeasured.notes[-1]


@pytest.mark.slow
def test_each_fit_of_a_search_chooses(df: DataFrame) -> None:
    estimator = classifier(batchSize=32, numWorkers=1, syncStrategy=AllReduce())
    maps = [{estimator.seed: 1}, {estimator.seed: 2}]
    fits = dict(estimator.fitMultiple(df, maps))
    assert [set(fits[index].summary.chosen) for index in (0, 1)] == [{"learningRate"}] * 2
    assert CrossValidator(estimator=estimator).getEstimator().getLearningRate() == "auto"


def without_gangs(monkeypatch: pytest.MonkeyPatch, spark: SparkSession) -> None:
    real, key = spark.conf.get, "spark.ssl.enabled"
    for module in (slots, measure_gang):
        monkeypatch.setattr(
            module, "conf", lambda _, asked: "true" if asked == key else real(asked, None)
        )


@pytest.mark.classic
def test_a_cluster_without_gangs_gets_rounds(
    df: DataFrame, monkeypatch: pytest.MonkeyPatch, spark: SparkSession
) -> None:
    rows, asked = user_data(df), classifier(numWorkers=2)._request()
    begun: SyncStrategy = choose_values.start_of(rows, asked).config.sync_strategy
    assert begun == AllReduce()
    without_gangs(monkeypatch, spark)
    begun = choose_values.start_of(rows, asked).config.sync_strategy
    assert isinstance(begun, ParameterAveraging)
    with pytest.raises(ConfigError, match=r"cannot be 'auto' on this cluster.*values of your own"):
        choose_values.choose(rows, asked, None)


def test_auto_is_kept_by_copies_and_files(tmp_path: Path, spark: SparkSession) -> None:
    classifier().write().save(str(tmp_path / "estimator"))
    loaded = TorchClassifier.load(str(tmp_path / "estimator"))
    for estimator in (classifier(), classifier().copy(), loaded):
        assert {estimator.getOrDefault(name) for name in ALL} == {"auto"}


def test_what_contradicts_auto_is_refused_before_any_job(df: DataFrame) -> None:
    regressor = TorchRegressor(
        module=make_net, learningRate="auto", optimizerParams={"lr": 0.1}, verbose=0
    )
    with pytest.raises(ConfigError, match="keep one"):
        regressor.fit(df)
