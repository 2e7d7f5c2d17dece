"""Does a fit keep checkpoints and models on S3, although plain pyspark knows no S3?"""

from __future__ import annotations

import io
import logging
import re
import signal
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from subprocess import Popen
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import save

from sparkdl import ParameterAveraging, TorchClassifier, TorchClassifierModel, TorchRegressor
from sparkdl.cli.job_files.job_file import (
    DataSection,
    EstimatorSection,
    ObjectRef,
    TrainJob,
    TrainOutput,
)
from sparkdl.cli.jobs import load_model, run_train
from sparkdl.data.plan import Column
from sparkdl.errors import ConfigError, StorageError
from sparkdl.report.record.run_folder import RunReader
from sparkdl.serialization.load import load_module, load_signature
from sparkdl.storage.storage import open_storage
from tests import s3
from tests.cluster import faults
from tests.s3_proxy import NONE, Proxy, started_proxy

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.classic]


def make_net() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 2))


def from_s3(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The rows of the Parquet files that the column ``name`` names."""
    for batch in batches:
        for row in batch.to_pylist():
            file = open_storage(row["url"]).read(row["name"])
            yield from pq.read_table(pa.BufferReader(file)).to_batches()


@pytest.fixture(scope="module")
def df(spark: SparkSession, s3_server: Popen[bytes]) -> DataFrame:
    """Rows that lie on S3; a Spark without hadoop-aws lets Python read them, task by task."""
    url = f"s3://{s3.BUCKET}/{uuid.uuid4().hex}"
    for part in range(2):
        numbers = range(30 * part, 30 * (part + 1))
        features = [[float(number)] for number in numbers]
        columns = {"features": pa.array(features, pa.list_(pa.float32())),
                   "label": pa.array([number % 2 for number in numbers], pa.int64())}  # fmt: skip
        file = io.BytesIO()
        pq.write_table(pa.table(columns), file)
        open_storage(url).write(f"part-{part}.parquet", file.getvalue())
    names = [(url, name) for name in open_storage(url).list("")]
    parts = spark.createDataFrame(names, "url string, name string").repartition(2)
    return parts.mapInArrow(from_s3, "features array<float>, label bigint")


def fitted(df: DataFrame, mode: str, *callbacks: Any, **params: Any) -> TorchClassifierModel:
    strategy = {"gang": "allreduce", "rounds": ParameterAveraging(averaging_period=2)}[mode]
    return TorchClassifier(
        module=make_net, syncStrategy=strategy, executionMode=mode, batchSize=10,
        seed=7, numWorkers=2, verbose=0, callbacks=list(callbacks), **{"epochs": 3, **params},
    ).fit(df)  # fmt: skip


def same_weights(one: Any, other: Any) -> bool:
    ours, theirs = (getattr(each, "module", each).state_dict() for each in (one, other))
    return all(torch.equal(value, theirs[name]) for name, value in ours.items())


@pytest.fixture(scope="module")
def undisturbed(df: DataFrame) -> TorchClassifierModel:
    """The model of a gang that keeps nothing."""
    return fitted(df, "gang")


@pytest.mark.gang
@pytest.mark.slow
def test_checkpoints_and_resume(
    df: DataFrame, s3_url: str, tmp_path: Path, undisturbed: TorchClassifierModel,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    strike = faults.KillWorker(marker=str(tmp_path / "struck"), rank=1, step=5)
    params: dict[str, Any] = {"checkpointDir": s3_url, "checkpointInterval": 2}
    with caplog.at_level(logging.INFO, "sparkdl"):
        model = fitted(df, "gang", strike, **params)
        assert (tmp_path / "struck").exists()
        assert "by way of the driver" not in caplog.text  # workers have credentials of their own
        again = fitted(df, "gang", **params)
    assert "going on from the checkpoint of step 12" in caplog.text
    assert same_weights(model, undisturbed) and same_weights(again, model)
    assert len(open_storage(s3_url).list("")) == 1  # no marker, no probe
    assert "a-secret-that-no-log-shows" not in caplog.text


@pytest.mark.gang
@pytest.mark.slow
def test_a_server_that_is_away_for_a_while_changes_no_bit(
    df: DataFrame, s3_server: Popen[bytes], s3_url: str, undisturbed: TorchClassifierModel
) -> None:
    storage = open_storage(s3_url)

    def pause() -> None:
        while not any(storage.list(key) for key in storage.list("")):
            time.sleep(0.05)
        s3_server.send_signal(signal.SIGSTOP)
        paused.set()
        time.sleep(3)
        s3_server.send_signal(signal.SIGCONT)

    paused = threading.Event()
    thread = threading.Thread(target=pause, daemon=True)
    thread.start()
    model = fitted(df, "gang", faults.Slow(0.1), checkpointDir=s3_url, checkpointInterval=2)
    thread.join(30)
    assert paused.is_set() and model.summary.restarts == 0
    assert same_weights(model, undisturbed)


@pytest.fixture
def proxy(
    spark: SparkSession, s3_server: Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Proxy]:
    """Between S3 and both driver and workers."""
    environment: dict[str, str] = spark.sparkContext.environment
    with started_proxy(s3.ENVIRONMENT["AWS_ENDPOINT_URL"]) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", proxy.url)
        monkeypatch.setitem(environment, "AWS_ENDPOINT_URL_S3", proxy.url)
        yield proxy


@pytest.mark.gang
@pytest.mark.slow
@pytest.mark.timeout(240)
def test_requests_that_fail_change_no_bit_and_an_outage_costs_the_checkpoints_only(
    df: DataFrame, proxy: Proxy, s3_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    def train(name: str) -> TorchClassifierModel:
        place = f"{s3_url}/{name}"
        return fitted(df, "gang", checkpointDir=place, checkpointInterval=5)

    undisturbed = train("undisturbed")
    total = proxy.count
    proxy.fail("reset", range(total // 8, total, total // 4))
    model = train("reset")
    assert proxy.count > total and model.summary.restarts == 0
    assert same_weights(model, undisturbed)
    assert "there is no checkpoint" not in caplog.text
    proxy.fail("503", range(total * 3 // 4, 10**6))
    assert same_weights(train("outage"), undisturbed)
    proxy.fail("", NONE)
    assert re.search("there is no checkpoint .*-0/step-00000012-final: ", caplog.text)
    caplog.clear()
    with caplog.at_level(logging.INFO, "sparkdl"):
        assert same_weights(train("outage"), undisturbed)
    assert re.search(r"going on from the checkpoint of step (5|10) ", caplog.text)


@pytest.mark.slow
def test_models(spark: SparkSession, s3_url: str) -> None:
    column = Column(name="features", role="feature", dtype="float32", shape=(1,))
    model = TorchClassifierModel(make_net(), [column], num_classes=2)
    model.save(f"{s3_url}/model")
    loaded = TorchClassifierModel.load(f"{s3_url}/model")
    assert same_weights(loaded, model) and loaded.uid == model.uid
    assert same_weights(load_module(f"{s3_url}/model"), model)
    assert load_signature(f"{s3_url}/model").inputs == (column,)


def test_damage_is_found(spark: SparkSession, s3_url: str) -> None:
    column = Column(name="features", role="feature", dtype="float32", shape=(1,))
    TorchClassifierModel(make_net(), [column], num_classes=2).save(f"{s3_url}/model")
    storage = open_storage(f"{s3_url}/model")
    for name in ("metadata/part-00000", "model/module.json", "model/weights.safetensors"):
        content = storage.read(name)
        storage.write(name, content.replace(b"features", b"fixtures", 1)[:-1])
        with pytest.raises(StorageError, match="is damaged"):
            TorchClassifierModel.load(f"{s3_url}/model")
        storage.write(name, content)
    TorchClassifierModel.load(f"{s3_url}/model")


@pytest.mark.slow
def test_rounds_start_from_weights_and_go_on_from_checkpoints_there(
    df: DataFrame, s3_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    source = make_net()
    open_storage(s3_url).write("w.safetensors", save(source.state_dict()))
    start: dict[str, Any] = {
        "learningRate": 1e-30, "epochs": 1, "initialWeights": f"{s3_url}/w.safetensors",
        "checkpointDir": f"{s3_url}/kept", "checkpointInterval": 2,
    }  # fmt: skip
    assert same_weights(fitted(df, "rounds", **start), source)
    with caplog.at_level(logging.INFO, "sparkdl"):
        assert same_weights(fitted(df, "rounds", **start), source)
    assert "going on from the checkpoint of step 4" in caplog.text
    assert len(open_storage(f"{s3_url}/kept").list("")) == 1
    assert "a-secret-that-no-log-shows" not in caplog.text


@pytest.mark.slow
@pytest.mark.gang
def test_jobs_keep_their_models_there(
    spark: SparkSession, df: DataFrame, s3_url: str, tmp_path: Path
) -> None:
    df.write.parquet(f"{tmp_path}/rows")
    path = f"{s3_url}/model"
    job = TrainJob(
        model=ObjectRef(factory=f"{__name__}:make_net"),
        data=DataSection(path=f"{tmp_path}/rows"),
        estimator=EstimatorSection(num_workers=2, epochs=1, verbose=0, report_dir=f"{s3_url}/runs"),
        output=TrainOutput(path=path),
    )
    assert run_train(job, spark).path == path
    runs = RunReader(open_storage(f"{s3_url}/runs"))
    (name,) = runs.names()
    report = runs.read(name)
    assert report is not None
    assert report.status == "succeeded"
    with pytest.raises(ConfigError, match="there is something at s3://"):
        run_train(job, spark)
    assert isinstance(load_model(spark, path), TorchClassifierModel)
    with pytest.raises(StorageError, match="there is no saved model at"):
        load_model(spark, f"{s3_url}/absent")
    metadata = open_storage(path).read("metadata/part-00000")
    changed = metadata.replace(b"sparkdl.model.TorchClassifierModel", b"pyspark.ml.PipelineModel")
    of_spark = changed.replace(b'"sparkdl"', b'"another"')  # theirs have no entry of ours
    open_storage(s3_url).write("pipeline/metadata/part-00000", of_spark)
    with pytest.raises(StorageError, match="no file system for s3://; add one, such as hadoop-aws"):
        load_model(spark, f"{s3_url}/pipeline")


def test_estimators_and_overwriting(spark: SparkSession, s3_url: str) -> None:
    estimator = TorchRegressor(module=make_net(), epochs=4)
    estimator.save(f"{s3_url}/estimator")
    assert TorchRegressor.load(f"{s3_url}/estimator").getEpochs() == 4
    with pytest.raises(StorageError, match=r"estimator already exists; use write\(\)\.overwrite"):
        estimator.save(f"{s3_url}/estimator")
    estimator.setEpochs(5).write().overwrite().save(f"{s3_url}/estimator")
    assert TorchRegressor.load(f"{s3_url}/estimator").getEpochs() == 5


def test_loading_what_is_not_there(spark: SparkSession, s3_url: str) -> None:
    with pytest.raises(StorageError, match=r"nothing is saved at s3://tests/.*/absent"):
        TorchRegressor.load(f"{s3_url}/absent")
