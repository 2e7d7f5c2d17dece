"""What do the blocks of docs/mesh.md find?"""

from __future__ import annotations

from collections import Counter
from typing import Any

from pyspark.sql import SparkSession
from torch import nn

from sparkdl import Mesh, TorchClassifierModel
from sparkdl.data.plan import Column
from sparkdl.models import TransformerNet
from sparkdl.sync.divided.layout import divided_layers


def make_net() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 2))


def prepare(spark: SparkSession) -> dict[str, Any]:
    column = Column(name="features", dtype="float32", shape=(2,), role="feature")
    return {"make_net": make_net, "model": TorchClassifierModel(make_net(), [column])}


def check(names: dict[str, Any]) -> None:
    spark = names["spark"]
    rows = [([float(i % 5), 1.0], i % 2) for i in range(400)]
    df = spark.createDataFrame(rows, "features array<float>, label int")
    estimator = names["estimator"]
    assert estimator.getParallelism().size == 8
    hierarchical = names["hierarchical"]
    strategy = hierarchical.getSyncStrategy()
    assert strategy.why_not_divided(hierarchical.getParallelism()) is None
    mesh = Mesh(shard=spark.sparkContext.defaultParallelism)
    summary = estimator.setParams(parallelism=mesh, verbose=0).fit(df).summary
    assert summary.world_size == mesh.size
    divided = divided_layers(names["tensor"], TransformerNet(num_outputs=2, num_tokens=10))
    assert names["model"].getParallelism() is None
    assert Counter(divided.values()) == {"columns": 2 * 4, "rows": 2 * 2}  # of two layers
