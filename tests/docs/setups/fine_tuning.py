"""What do the blocks of docs/fine_tuning.md find?"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from pyspark.sql import SparkSession
from torch import nn

from sparkdl.serialization.initial_weights import load_initial_weights
from tests.docs.digits import saved_model
from tests.s3 import make_bucket


class Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 4)
        self.layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(9)))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.layers(self.stem(features))


class Net(nn.Module):
    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        self.body, self.head = Body(), nn.Linear(4, num_classes)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(features))


PUBLISHED = "published.pt"


def prepare(spark: SparkSession) -> dict[str, Any]:
    make_bucket("models")
    factory = partial(Net, num_classes=3)
    large = factory()
    model = saved_model(large, "features", (4,), factory=factory, num_classes=3)
    model.save("s3://models/large")
    rows = [([float(i)] * 4, i % 10) for i in range(20)]
    df = spark.createDataFrame(rows, "features array<float>, label int")
    state = {
        name.replace("body.stem", "module.backbone.conv1").replace(
            "body.layers", "module.backbone.block"
        ): value
        for name, value in Net().state_dict().items()
        if not name.startswith("head")
    }
    torch.save({"epoch": 3, "state_dict": {**state, "module.fc.bias": torch.ones(2)}}, PUBLISHED)
    return {"make_net": Net, "df": df, "more": df, "large": large}


def check(names: dict[str, Any]) -> None:
    fitted = names["classifier"].setParams(numWorkers=1, verbose=0).fit(names["df"]).module
    large = names["large"]
    renamed = Net()
    load_initial_weights(renamed, names["published"])
    published = torch.load(PUBLISHED, weights_only=True)["state_dict"]
    expected = published["module.backbone.block.8.bias"]
    assert torch.equal(renamed.body.layers[8].bias, expected)  # type: ignore[arg-type, union-attr]
    assert names["tuesday"].trainingState.epoch == 4
    assert torch.equal(fitted.body.stem.weight, large.body.stem.weight)
    assert torch.equal(fitted.body.layers[7].weight, large.body.layers[7].weight)
    assert not torch.equal(fitted.body.layers[8].weight, large.body.layers[8].weight)
