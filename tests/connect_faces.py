"""Run by test_connect.py in a process of its own: the faces on Spark Connect."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
from pyspark.ml import PipelineModel
from pyspark.sql import SparkSession
from torch import nn

from sparkdl.estimator import TorchClassifier
from sparkdl.model import ARTIFACT_BYTES, TorchClassifierModel, TorchModel
from sparkdl.plan import Column

COLUMN = Column(name="features", role="feature", dtype="float32", shape=(3,))


def make_module() -> nn.Module:
    return nn.Linear(3, 2)


def main(folder: Path) -> None:
    spark = SparkSession.builder.remote("local[2]").getOrCreate()
    rows = [[float(i), i * 0.5, -1.0 * i] for i in range(7)]
    labelled = [(i, row, i % 2) for i, row in enumerate(rows)]
    df = spark.createDataFrame(labelled, "id int, features array<float>, label int")

    model = TorchClassifierModel(make_module(), [COLUMN], num_classes=2)
    model.save(str(folder / "model"))
    model.write().overwrite().save(str(folder / "model"))
    PipelineModel([TorchClassifierModel.load(str(folder / "model"))]).save(str(folder / "pipeline"))
    out = PipelineModel.load(str(folder / "pipeline")).transform(df).orderBy("id").collect()
    raw = np.stack([row.rawPrediction.toArray() for row in out])
    with torch.inference_mode():
        np.testing.assert_array_equal(raw, model.module(torch.tensor(rows)).double().numpy())
    print("small module: ok")

    large = nn.Sequential(nn.Linear(3, 2000), nn.Linear(2000, 1000), nn.Linear(1000, 1)).eval()
    model = TorchModel(large, [COLUMN])
    assert sum(p.nbytes for p in large.parameters()) > ARTIFACT_BYTES
    for _ in range(2):  # the second time the file is there already
        values = [row.prediction for row in model.transform(df).orderBy("id").collect()]
        with torch.inference_mode():
            expected = large(torch.tensor(rows)).reshape(-1).numpy()
        np.testing.assert_allclose(values, expected, rtol=1e-4, atol=1e-5)
    again = TorchModel(large, [COLUMN]).transform(df)  # the same content from another model
    assert again.count() == 7
    print("large module: ok")

    estimator = TorchClassifier(module=make_module, epochs=2, numWorkers=2, verbose=0)
    estimator.save(str(folder / "estimator"))
    fitted = TorchClassifier.load(str(folder / "estimator")).fit(df)
    assert len(fitted.transform(df).collect()) == 7
    assert len(fitted.summary.history) == 2
    print("fit: ok")
    spark.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
