"""A user's program: trains in a gang and in rounds and saves, or loads and applies; prints JSON.

    python program.py train FOLDER
    python program.py apply FOLDER

It imports nothing of the tests, so any environment with sparkdl runs it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import sparkdl
from sparkdl import AllReduce, ParameterAveraging, TorchClassifier, TorchClassifierModel

ROWS, EPOCHS, LEARNING_RATE = 64, 4, 0.5
STRATEGIES = {"gang": AllReduce(), "rounds": ParameterAveraging(averaging_period=1)}
"""Where training runs -> a strategy that steps along the gradient of all rows."""


def rows(spark: SparkSession) -> DataFrame:
    features = [((F.col("id") * k) % 17 - 8) / 8 for k in (1, 5, 7)]
    label = (F.col("features")[0] + F.col("features")[1] > 0).cast("int")
    numbers = spark.range(0, ROWS, 1, 2).select("id", F.array(*features).alias("features"))
    return numbers.withColumn("label", label)


def train(spark: SparkSession, folder: Path) -> None:
    def make_net() -> Any:
        from torch import nn

        net = nn.Sequential(nn.Linear(3, 2))
        for parameter in net.parameters():
            nn.init.zeros_(parameter)
        return net

    for mode, strategy in STRATEGIES.items():
        estimator = TorchClassifier(
            module=make_net, optimizer="sgd", learningRate=LEARNING_RATE, epochs=EPOCHS,
            batchSize=ROWS, numWorkers=2, syncStrategy=strategy, executionMode=mode, verbose=0,
        )  # fmt: skip
        estimator.fit(rows(spark)).write().overwrite().save(str(folder / mode))


def apply(spark: SparkSession, folder: Path) -> dict[str, Any]:
    """Of each saved model the probabilities of class 1, and the weights where Spark is not used."""
    found: dict[str, Any] = {}
    for mode in STRATEGIES:
        path = str(folder / mode)
        applied = TorchClassifierModel.load(path).transform(rows(spark)).orderBy("id").collect()
        module = sparkdl.load_module(path)
        found[mode] = {
            "probabilities": [row["probability"][1] for row in applied],
            "weights": {name: value.tolist() for name, value in module.state_dict().items()},
        }
    return found


if __name__ == "__main__":
    work = {"train": train, "apply": apply}[sys.argv[1]]
    session = SparkSession.builder.master("local[2]").getOrCreate()
    print(json.dumps(work(session, Path(sys.argv[2]))))
    session.stop()
