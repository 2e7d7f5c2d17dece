"""A stream trains one model on and on; a batch that Spark repeats is trained once."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from pyspark.errors import StreamingQueryException
from torch import nn

from sparkdl.estimator import TorchClassifier
from sparkdl.model import TorchClassifierModel

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.gang, pytest.mark.slow, pytest.mark.timeout(300)]


def make_net() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 3))


@pytest.mark.classic  # on Connect the function runs elsewhere
def test_each_batch_is_trained_once(spark: SparkSession, tmp_path: Path) -> None:
    schema = "features array<float>, label int"
    days = [tmp_path / "in" / f"day={day}" for day in range(2)]
    for day, path in enumerate(days):
        rows = [([float((i * k + day) % 7) for k in (1, 2, 3)], i % 3) for i in range(60)]
        spark.createDataFrame(rows, schema).coalesce(1).write.parquet(str(path))
    estimator = TorchClassifier(
        module=make_net, numWorkers=2, batchSize=10, seed=3, verbose=0, keepTrainingState=True,
        checkpointDir=str(tmp_path / "checkpoints"),
    )  # fmt: skip
    calls: list[int] = []
    fits: list[int] = []

    def place(batch_id: int) -> Path:
        return tmp_path / "models" / str(batch_id)

    def learn(batch: DataFrame, batch_id: int) -> None:
        calls.append(batch_id)
        if place(batch_id).exists():
            return
        goes_on = estimator.copy()
        if batch_id:
            goes_on.setInitialState(str(place(batch_id - 1)))
        model: Any = goes_on.fit(batch)
        fits.append(model.summary.steps)
        if calls == [0, 1]:
            raise RuntimeError("the program ends before the model is saved")
        model.save(str(place(batch_id)))
        if calls == [0, 1, 1]:
            raise RuntimeError("the program ends before Spark knows that the batch is done")

    def run() -> None:
        stream = spark.readStream.schema(f"{schema}, day int").option("maxFilesPerTrigger", 1)
        writer = stream.parquet(str(tmp_path / "in")).drop("day").writeStream.foreachBatch(learn)
        writer = writer.option("checkpointLocation", str(tmp_path / "query"))
        query = writer.trigger(availableNow=True).start()
        assert query.awaitTermination(200)

    for message in ("before the model is saved", "before Spark knows"):
        with pytest.raises(StreamingQueryException, match=message):
            run()
    run()
    assert calls == [0, 1, 1, 1]
    per_day = fits[0]
    assert fits == [per_day, 2 * per_day, 2 * per_day]
    assert len(list((tmp_path / "checkpoints").iterdir())) == 2  # the repeated fit found its own

    first: Any = estimator.fit(spark.read.schema(schema).parquet(str(days[0])))
    second: Any = (
        estimator.copy().setInitialState(first).fit(spark.read.schema(schema).parquet(str(days[1])))
    )
    saved = TorchClassifierModel.load(str(place(1)))
    assert saved.trainingState is not None and saved.trainingState.epoch == 2
    for name, value in second.module.state_dict().items():
        assert torch.equal(value, saved.module.state_dict()[name]), name
