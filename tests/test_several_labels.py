"""A model with several labels is evaluated as training compares them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from torch import nn
from torch.nn import functional
from torchmetrics.classification import MulticlassAccuracy

from sparkdl import Sequence, TorchClassifierModel, TorchEstimator, TorchModel
from sparkdl.data.plan import Column
from sparkdl.errors import ConfigError, DataError

pytestmark = pytest.mark.spark

X = Column(name="x", role="feature", dtype="float64", shape=(3,))
ROWS = 57
LABELS = {"kind": "kind", "price": "price"}
LOSS = {"kind": "cross_entropy", "price": "huber"}


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(3)
            self.kind, self.price = nn.Linear(3, 4).double(), nn.Linear(3, 1).double()

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"kind": self.kind(x), "price": self.price(x)}


def values() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    return (
        random.normal(size=(ROWS, 3)),
        random.integers(0, 4, ROWS),
        random.normal(size=ROWS),
        random.uniform(0, 2, ROWS),
    )


@pytest.fixture(scope="module")
def rows(spark: SparkSession) -> DataFrame:
    columns = [array.tolist() for array in values()]
    data = [(number, *row) for number, row in enumerate(zip(*columns, strict=True))]
    schema = "id int, x array<double>, kind int, price double, weight double"
    return spark.createDataFrame(data, schema).repartition(3).cache()


def model(**params: Any) -> TorchModel:
    made = TorchModel(TwoHeads(), [X])
    return made._set(labels=LABELS, loss=LOSS, **params)  # type: ignore[return-value]


def losses() -> dict[str, np.ndarray]:
    x, kind, price, _ = (torch.from_numpy(array) for array in values())
    output = TwoHeads()(x)
    return {
        "kind": functional.cross_entropy(output["kind"], kind, reduction="none").detach().numpy(),
        "price": functional.huber_loss(output["price"][:, 0], price, reduction="none")
        .detach()
        .numpy(),
    }


@pytest.mark.slow
@pytest.mark.parametrize("weight", ["", "weight"])
@pytest.mark.parametrize("partitions", [1, 5])
def test_losses_are_those_of_one_process_on_any_partitioning(
    rows: DataFrame, weight: str, partitions: int
) -> None:
    made = model(lossWeights={"price": 0.1})
    result = made.evaluate(rows.repartition(partitions), weightCol=weight, batchSize=7)
    by_row, weights = losses(), values()[3] if weight else np.ones(ROWS)
    for name in LABELS:
        wanted = np.average(by_row[name], weights=weights)
        assert result[f"loss_{name}"] == pytest.approx(wanted, abs=1e-12)
    total = np.average(by_row["kind"] + 0.1 * by_row["price"], weights=weights)
    assert result["loss"] == pytest.approx(total, abs=1e-12)
    assert result.rows == ROWS
    assert result.to_dict()["loss_kind"] == result["loss_kind"]
    assert "loss_price" in repr(result)


@pytest.mark.slow
def test_each_label_has_metrics_of_its_own(rows: DataFrame) -> None:
    x, kind, _, _ = (torch.from_numpy(array) for array in values())
    metrics = {"kind": {"accuracy": MulticlassAccuracy(4, average="micro")}}
    result = model().evaluate(rows, metrics=metrics)
    right = (TwoHeads()(x)["kind"].argmax(1) == kind).double().mean()
    assert result["kind_accuracy"] == pytest.approx(float(right), abs=1e-12)


@pytest.mark.slow
def test_scores_are_the_weighted_sum_of_a_rows_losses(rows: DataFrame) -> None:
    scored = model(lossWeights={"price": 0.5}).scores(rows, "id").orderBy("id").collect()
    by_row = losses()
    wanted = by_row["kind"] + 0.5 * by_row["price"]
    assert [row.loss for row in scored] == pytest.approx(wanted.tolist(), abs=1e-12)


def whole(output: dict[str, torch.Tensor], labels: dict[str, torch.Tensor]) -> torch.Tensor:
    return (output["price"][:, 0] - labels["price"]).abs()


@pytest.mark.slow
def test_a_function_of_all_labels_is_called_as_in_training(rows: DataFrame) -> None:
    x, _, price, _ = (torch.from_numpy(array) for array in values())
    result = model().evaluate(rows, loss=whole)
    wanted = (TwoHeads()(x)["price"][:, 0] - price).abs().mean().detach()
    assert result["loss"] == pytest.approx(float(wanted), abs=1e-12)
    assert "loss_kind" not in result


class Tagger(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([x, -x], dim=1)  # (batch, classes, length)


@pytest.mark.slow
def test_labels_of_different_lengths(spark: SparkSession) -> None:
    data = [(0, [1.0, -2.0], [0, 1]), (1, [3.0], [1]), (2, [0.5, 1.0, 2.0], [0, 0, 1])]
    rows = spark.createDataFrame(data, "id int, x array<float>, tags array<int>").repartition(1)
    column = Column(
        name="x", role="feature", dtype="float32", shape=(), specification=Sequence("x"), longest=3
    )
    made = TorchModel(Tagger(), [column])
    made._set(labels={"tags": Sequence("tags", padding_value=-100)}, loss="cross_entropy")
    result = made.evaluate(rows, batchSize=2)
    logits = torch.cat([Tagger()(torch.tensor([x])) for _, x, _ in data], dim=2)
    tags = torch.tensor([[tag for _, _, tags in data for tag in tags]])
    assert result["loss"] == pytest.approx(float(functional.cross_entropy(logits, tags)), abs=1e-6)


@pytest.mark.slow
def test_a_fitted_model_has_its_labels_and_repeats_its_validation(rows: DataFrame) -> None:
    marked = rows.withColumn("held", F.col("id") % 3 == 0)
    estimator = TorchEstimator(
        module=TwoHeads, inputs=["x"], labels=LABELS, loss=LOSS, lossWeights={"price": 0.3},
        validationIndicatorCol="held", epochs=1, numWorkers=1, verbose=0, seed=0,
    )  # fmt: skip
    fitted = estimator.fit(marked)
    result = fitted.evaluate(marked.filter("held"))
    last = fitted.summary.history[-1]
    for name in ("loss", "loss_kind", "loss_price"):
        assert result[name] == pytest.approx(last[f"val_{name}"], rel=1e-9)


@pytest.mark.slow
def test_what_cannot_be_compared_is_refused(rows: DataFrame) -> None:
    with pytest.raises(ConfigError, match="set either labels or labelCol, not both"):
        model().evaluate(rows, labelCol="kind")
    with pytest.raises(ConfigError, match=r"lossWeights names \['x'\]"):
        model().evaluate(rows, lossWeights={"x": 1.0})
    with pytest.raises(DataError, match='column "kind" is not in the DataFrame'):
        model().evaluate(rows.drop("kind"))
    bad = rows.withColumn("kind", F.expr("IF(id = 5, -1.5, double(kind))"))
    with pytest.raises(DataError, match=r'column "kind" must hold whole, .*-1.5 in row 4'):
        model().evaluate(bad)
    classifier = TorchClassifierModel(nn.Linear(3, 4).double(), [X], num_classes=4)
    classifier.clear(classifier.labelCol)
    with pytest.raises(ConfigError, match=r"set either labels or labelCol|has one label"):
        classifier.evaluate(rows, labels=LABELS)
