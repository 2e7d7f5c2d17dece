"""The bucket of docs/fine_tuning.md's reader, and what its blocks must reach."""

from __future__ import annotations

from typing import Any

import torch
from pyspark.sql import SparkSession

from sparkdl.serialization.initial_weights import load_initial_weights
from tests.s3 import make_bucket


def prepare(spark: SparkSession) -> None:
    make_bucket("models")


def check(names: dict[str, Any]) -> None:
    fitted = names["classifier"].setParams(numWorkers=1, verbose=0).fit(names["df"]).module
    large = names["large"].module
    renamed = names["Net"]()
    load_initial_weights(renamed, names["published"])
    published = torch.load("published.pt", weights_only=True)["state_dict"]
    expected = published["module.backbone.layers.8.bias"]
    assert torch.equal(renamed.body.layers[8].bias, expected)
    assert names["tuesday"].trainingState.epoch == 4
    assert torch.equal(fitted.body.stem.weight, large.body.stem.weight)
    assert torch.equal(fitted.body.layers[7].weight, large.body.layers[7].weight)
    assert not torch.equal(fitted.body.layers[8].weight, large.body.layers[8].weight)
