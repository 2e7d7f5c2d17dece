"""Does a whole fit live on HDFS: data, checkpoints, resume, models, and the loss of a data node?"""

from __future__ import annotations

import hashlib
import json
import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.cluster import faults
from tests.hdfs.daemons import Hdfs

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from torch import nn

    from sparkdl.model import TorchClassifierModel

pytestmark = [pytest.mark.spark, pytest.mark.gang, pytest.mark.slow, pytest.mark.timeout(240)]

MODES = ("gang", "rounds")


def make_net() -> nn.Module:
    from torch import nn

    return nn.Sequential(nn.Linear(3, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 3))


@pytest.fixture(scope="module")
def df(spark: SparkSession, hdfs: Hdfs) -> DataFrame:
    """Parquet on HDFS."""
    from pyspark.sql import functions as F

    features = [((F.col("id") * k) % 7 - 3).cast("float") for k in (1, 2, 3)]
    rows = spark.range(0, 1000, 1, 3).select(
        F.array(*features).alias("features"), (F.col("id") % 3).alias("label")
    )
    rows.write.parquet(f"{hdfs.url}/rows")
    return spark.read.parquet(f"{hdfs.url}/rows")


def fitted(df: DataFrame, mode: str, *callbacks: Any, **changes: Any) -> TorchClassifierModel:
    from sparkdl import ParameterAveraging, TorchClassifier

    strategy = {"gang": "allreduce", "rounds": ParameterAveraging(averaging_period=4)}[mode]
    params = {"epochs": 3, "checkpointInterval": 4, **changes}
    classifier = TorchClassifier(
        module=make_net,
        syncStrategy=strategy,
        executionMode=mode,
        batchSize=32,
        seed=7,
        numWorkers=2,
        verbose=0,
        callbacks=list(callbacks),
        **params,
    )
    return classifier.fit(df)


def digest(model: TorchClassifierModel) -> str:
    data = b"".join(tensor.numpy().tobytes() for tensor in model.module.state_dict().values())
    return hashlib.sha256(data).hexdigest()


@pytest.fixture(scope="module")
def undisturbed(df: DataFrame) -> dict[str, str]:
    """Digest of the weights that come out without checkpointDir and without faults."""
    return {mode: digest(fitted(df, mode)) for mode in MODES}


def test_checkpoints_reach_hdfs_by_way_of_the_driver(
    df: DataFrame, undisturbed: dict[str, str], url: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "sparkdl.spark.link"):
        model = fitted(df, "gang", checkpointDir=url)
    assert digest(model) == undisturbed["gang"]
    assert f"checkpoints reach {url} by way of the driver, since executors" in caplog.text


@pytest.mark.parametrize("mode", MODES)
def test_a_killed_worker_changes_no_bit(
    df: DataFrame, undisturbed: dict[str, str], url: str, tmp_path: Path, mode: str
) -> None:
    strike = faults.KillWorker(marker=str(tmp_path / "struck"), rank=1, step=13)
    model = fitted(df, mode, strike, faults.Slow(), checkpointDir=url)
    assert (tmp_path / "struck").exists()
    assert digest(model) == undisturbed[mode]
    if mode == "gang":
        assert model.summary.restarts == 1


@pytest.mark.parametrize("mode", MODES)
def test_a_finished_run_is_found_again_and_continued(
    spark: SparkSession, df: DataFrame, undisturbed: dict[str, str], url: str, tmp_path: Path,
    mode: str,
) -> None:  # fmt: skip
    from sparkdl.spark.hadoop import open_on_driver

    fitted(df, mode, epochs=1, checkpointDir=url)
    assert digest(fitted(df, mode, checkpointDir=url)) == undisturbed[mode]
    never = faults.Fail(marker=str(tmp_path / "never"), rank=0, step=1)
    assert digest(fitted(df, mode, never, checkpointDir=url)) == undisturbed[mode]
    assert not (tmp_path / "never").exists()
    storage = open_on_driver(spark, url)
    (run_key,) = storage.list("")  # no marker, no probe
    manifests = [
        json.loads(storage.read(f"{run_key}/{name}/manifest.json"))
        for name in storage.list(run_key)
    ]
    assert manifests and manifests[-1]["complete"]


@pytest.fixture
def data_node_dies_in_mid_fit(hdfs: Hdfs, spark: SparkSession, url: str) -> Iterator[list[str]]:
    """Kills a data node as soon as the first checkpoint is whole; tells which it was."""
    from sparkdl.spark.hadoop import open_on_driver

    storage, seen = open_on_driver(spark, url), []

    def strike() -> None:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and not seen:
            for key in storage.list(""):
                for name in storage.list(key):
                    if storage.exists(f"{key}/{name}/manifest.json") and not seen:
                        hdfs.kill_data_node(0)
                        seen.append(name)
            time.sleep(0.05)

    watcher = threading.Thread(target=strike, daemon=True)
    watcher.start()
    yield seen
    watcher.join(120)
    if seen:
        hdfs.start_data_node(0)


@pytest.mark.parametrize("mode", MODES)
def test_a_data_node_that_dies_in_mid_fit_changes_no_bit(
    df: DataFrame, undisturbed: dict[str, str], url: str, data_node_dies_in_mid_fit: list[str],
    mode: str,
) -> None:  # fmt: skip
    model = fitted(df, mode, faults.Slow(), checkpointDir=url)
    assert data_node_dies_in_mid_fit[0] < "step-00000040"  # of 48
    assert digest(model) == undisturbed[mode]
    assert model.summary.restarts == 0
    # What was written with one data node left is read with it.
    again = fitted(df, mode, checkpointDir=url)
    assert digest(again) == undisturbed[mode] and again.summary.restarts == 0


def test_a_torn_checkpoint_is_passed_over(
    spark: SparkSession, df: DataFrame, undisturbed: dict[str, str], url: str
) -> None:
    from sparkdl.spark.hadoop import open_on_driver

    fitted(df, "gang", epochs=2, checkpointDir=url)
    storage = open_on_driver(spark, url)
    (key,) = storage.list("")
    newest = f"{key}/{storage.list(key)[-1]}"
    manifest = storage.read(f"{newest}/manifest.json")
    storage.write(f"{newest}/manifest.json", manifest[: len(manifest) // 2])
    assert digest(fitted(df, "gang", checkpointDir=url)) == undisturbed["gang"]


def test_models_estimators_and_pipelines_are_saved_and_loaded(df: DataFrame, url: str) -> None:
    from pyspark.ml import Pipeline, PipelineModel

    from sparkdl import TorchClassifier, TorchClassifierModel

    model = fitted(df, "gang", epochs=1)
    expected = model.transform(df).select("prediction").collect()
    model.save(f"{url}/model")
    with pytest.raises(Exception, match="already exists"):
        model.save(f"{url}/model")
    model.write().overwrite().save(f"{url}/model")
    loaded = TorchClassifierModel.load(f"{url}/model")
    assert digest(loaded) == digest(model)
    assert loaded.transform(df).select("prediction").collect() == expected

    estimator = TorchClassifier(module=make_net(), epochs=1, numWorkers=2, verbose=0)
    estimator.save(f"{url}/estimator")
    assert TorchClassifier.load(f"{url}/estimator").getEpochs() == 1

    pipeline = Pipeline(stages=[estimator]).fit(df)
    pipeline.save(f"{url}/pipeline")
    again = PipelineModel.load(f"{url}/pipeline")
    assert digest(again.stages[0]) == digest(pipeline.stages[0])
