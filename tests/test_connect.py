"""What only Spark Connect does differently: recovery, and a driver that executors do not reach."""

from __future__ import annotations

import hashlib
import os
import threading
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.gang, pytest.mark.connect]


@pytest.fixture(scope="module")
def points(spark: SparkSession) -> DataFrame:
    from pyspark.sql import functions as F

    features = [((F.col("id") * k) % 7 - 3).cast("float") for k in (1, 2, 3)]
    return spark.range(0, 600, 1, 3).select(
        F.array(*features).alias("features"), (F.col("id") % 3).alias("label")
    )


def make_net() -> Any:
    from torch import nn

    return nn.Sequential(nn.Linear(3, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 3))


def fitted(points: DataFrame, **params: Any) -> Any:
    from sparkdl import TorchClassifier

    classifier = TorchClassifier(
        module=make_net, epochs=3, seed=7, numWorkers=2, verbose=0, checkpointInterval=5
    )
    return classifier.setParams(**params).fit(points)


def digest(model: Any) -> str:
    tensors = model.module.state_dict().values()
    return hashlib.sha256(b"".join(t.numpy().tobytes() for t in tensors)).hexdigest()


@pytest.fixture(scope="module")
def undisturbed(points: DataFrame) -> str:
    """The bits of a fit without a fault."""
    return digest(fitted(points))


@pytest.mark.timeout(240)
@pytest.mark.slow
def test_a_lost_worker_changes_no_bit(
    spark: SparkSession, points: DataFrame, undisturbed: str, tmp_path: Path
) -> None:
    """It stands still, so that its task must be cancelled by its tag; one is killed below."""
    from tests.cluster import faults

    strike = faults.StopWorker(marker=str(tmp_path / "struck"), rank=1, step=12)
    spark.conf.set("spark.sparkdl.heartbeatTimeout", "10")
    try:
        model = fitted(points, callbacks=[strike])
    finally:
        spark.conf.unset("spark.sparkdl.heartbeatTimeout")
    assert model.summary.restarts == 1
    assert digest(model) == undisturbed
    assert model.transform(points).count() == 600


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_executors_that_do_not_reach_the_client(
    spark: SparkSession, points: DataFrame, undisturbed: str, tmp_path: Path
) -> None:
    from tests.cluster import faults

    strike = faults.KillWorker(marker=str(tmp_path / "struck"), rank=1, step=12)
    spark.conf.set("spark.sparkdl.channel", "workers")
    try:
        model = fitted(points, callbacks=[strike], checkpointDir=str(tmp_path / "checkpoints"))
    finally:
        spark.conf.unset("spark.sparkdl.channel")
    assert model.summary.restarts == 1
    assert digest(model) == undisturbed


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_an_executor_that_does_not_answer(
    spark: SparkSession, points: DataFrame, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has held `fit` for ever."""
    from sparkdl.errors import ClusterError
    from sparkdl.spark.cluster import probe
    from tests.cluster import faults

    task = partial(faults.StoppingProbeTask, struck=str(tmp_path / "struck"))
    monkeypatch.setattr(probe, "ProbeTask", task)
    spark.conf.set("spark.sparkdl.startTimeout", "15")
    try:
        with pytest.raises(ClusterError, match=r"Python on an executor has not answered within 15"):
            fitted(points)
    finally:
        spark.conf.unset("spark.sparkdl.startTimeout")


def learn(folder: str, batch: DataFrame, batch_id: int) -> None:
    """What a stream calls on the server: train on, from the model of the batch before."""
    goes_on = {} if batch_id == 0 else {"initialState": f"{folder}/{batch_id - 1}"}
    fitted(batch, keepTrainingState=True, **goes_on).save(f"{folder}/{batch_id}")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_foreach_batch_trains_on_the_server(
    spark: SparkSession, points: DataFrame, tmp_path: Path
) -> None:
    from sparkdl import TorchClassifierModel

    halves = points.where("label < 2"), points.where("label > 0")
    for number, half in enumerate(halves):
        half.coalesce(1).write.parquet(str(tmp_path / str(number)))
        (file,) = (tmp_path / str(number)).glob("*.parquet")
        os.utime(file, (1e9 + number, 1e9 + number))  # a stream takes older files first
    source = spark.readStream.schema(points.schema).option("maxFilesPerTrigger", 1)
    writer = source.parquet(str(tmp_path / "[01]")).writeStream
    writer.foreachBatch(partial(learn, str(tmp_path / "models")))
    query = writer.option("checkpointLocation", str(tmp_path / "query")).trigger(availableNow=True)
    assert query.start().awaitTermination(240)

    assert sorted(path.name for path in (tmp_path / "models").iterdir()) == ["0", "1"]
    first = fitted(halves[0], keepTrainingState=True)
    second = fitted(halves[1], keepTrainingState=True, initialState=first)
    for number, by_hand in enumerate((first, second)):
        learnt = TorchClassifierModel.load(str(tmp_path / "models" / str(number)))
        assert digest(learnt) == digest(by_hand)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_gang_begins_with_the_slots_that_there_are(
    spark: SparkSession, points: DataFrame, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spark Connect does not tell them: one of three workers begins, and a task finds a slot."""
    from sparkdl.spark.fit import gang_fit
    from tests.cluster.train_on_changing import Grows, until_there

    monkeypatch.setattr(gang_fit, "_WORTH", 0.0)
    marker = str(tmp_path / "training")
    busy = spark.range(0, 1, 1, 1).mapInArrow(partial(until_there, marker), "id long")
    threading.Thread(target=busy.collect, daemon=True).start()
    spark.conf.set("spark.sparkdl.elasticWait", "3")
    try:
        model = fitted(points, numWorkers=3, minWorkers=1, callbacks=[Grows(marker)])
    finally:
        Path(marker).touch()
        spark.conf.unset("spark.sparkdl.elasticWait")
    sizes = [size for _, size in model.summary.gang_sizes]
    assert (sizes[0], sizes[-1]) == (1, 2)
    assert model.transform(points).count() == 600


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_mistake_that_the_first_rows_show(spark: SparkSession, tmp_path: Path) -> None:
    """Of 4,000 rows in eight partitions the server computes those of one at most, each time."""
    from pyspark.sql import functions as F
    from torch import nn

    from sparkdl import TorchClassifier
    from sparkdl.errors import ConfigError, DataError

    computed = tmp_path / "computed"

    @partial(F.udf, returnType="array<float>", useArrow=False)
    def features(number: int) -> list[float]:
        with computed.open("ab") as file:
            file.write(b".")
        return [number % 7 + 1.0] * 4

    df = spark.range(0, 4000, 1, 8).select(
        features("id").alias("features"), (F.col("id") % 3).alias("label")
    )
    for module, error, message in (
        (nn.Linear(5, 3), ConfigError, r"Linear\(in_features=5.*got float32 \(batch, 4\)"),
        (nn.Linear(4, 2), DataError, r"outside the 2 classes.* where 2 is the highest"),
    ):
        with pytest.raises(error, match=message):
            TorchClassifier(module=module, numWorkers=2, verbose=0).fit(df)
    assert 0 < computed.stat().st_size <= 2 * 500
    # Behind a shuffle all rows would be computed for a few: they are computed once.
    os.truncate(computed, 0)
    model = TorchClassifier(module=nn.Linear(4, 3), numWorkers=2, verbose=0, maxSteps=2)
    assert model.fit(df.repartition(4, "label")).summary.steps == 2
    assert computed.stat().st_size == 4000
