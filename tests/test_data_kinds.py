"""Every kind of column can be trained on, and the model sees rows as training did."""

from __future__ import annotations

import io
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image as pillow
from pyspark.ml.linalg import DenseVector, SparseVector, Vectors
from pyspark.sql import DataFrame, Row, SparkSession
from sklearn.datasets import load_digits
from torch import nn
from torchmetrics.classification import BinaryAccuracy, MulticlassAccuracy

from sparkdl import (
    Image,
    Sequence,
    Sparse,
    Tensor,
    TorchClassifier,
    TorchEstimator,
    TorchModel,
    TorchRegressor,
)
from sparkdl.errors import ConfigError, DataError
from tests.describable import tokenize

pytestmark = [pytest.mark.spark, pytest.mark.gang]

QUIETLY: dict[str, Any] = {"numWorkers": 2, "batchSize": 32, "seed": 1, "verbose": 0}
WORDS = ["a", "bb", "ccc", "dddd", "eeeee"]


class Ages(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.of_x, self.of_age = nn.Linear(2, 1), nn.Linear(1, 1)

    def forward(self, *, age: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return self.of_x(x) + self.of_age(age[:, None])


@pytest.fixture(scope="module")
def people(spark: SparkSession) -> DataFrame:
    rows = [
        Row(user=Row(age=float(i % 7), name="n"), x=[i / 50, 1.0], y=float(i % 7) + i / 50)
        for i in range(90)
    ]
    return spark.createDataFrame(rows).repartition(2).cache()


@pytest.mark.slow
def test_inputs_are_passed_by_name_and_fields_of_structs_found(people: DataFrame) -> None:
    regressor = TorchRegressor(
        module=Ages, inputs={"x": "x", "age": Tensor("user.age")}, labelCol="y", epochs=2,
        learningRate=0.05, **QUIETLY,
    )  # fmt: skip
    model = regressor.fit(people)
    assert [column.argument for column in model.columns] == ["x", "age"]
    for row in model.transform(people).limit(5).collect():
        with torch.no_grad():
            wanted = model.module(age=torch.tensor([row.user.age]), x=torch.tensor([row.x]))
        assert row.prediction == pytest.approx(wanted.item(), abs=1e-5)
    moved = people.selectExpr("user.age AS years", "x")
    renamed = model.copy()
    renamed.setInputs({"age": "years", "x": "x"})
    assert renamed.transform(moved).count() == 90


@pytest.mark.slow
def test_simple_columns_may_be_fields_of_structs_too(people: DataFrame) -> None:
    regressor = TorchRegressor(
        module=Ages, inputCols=["x", "user.age"], labelCol="y", **QUIETLY
    )  # fmt: skip
    with pytest.raises(ConfigError, match="the module cannot take the features"):
        regressor.fit(people)  # by position: forward takes them by name only
    flat = TorchRegressor(
        module=nn.Linear(1, 1), featuresCol="user.age", inputShape=(1,), labelCol="y", **QUIETLY
    )
    assert flat.fit(people).transform(people).count() == 90


@pytest.mark.parametrize(
    ("params", "error", "said"),
    [
        ({"inputs": {"x": "user"}}, DataError, '"user" has type struct<.*cannot become a tensor'),
        ({"inputs": {"x": "user.size"}}, DataError, '"user" has no field "size"'),
        ({"inputs": {"x": Sequence("user.name")}}, DataError, "must be an array of numbers"),
        ({"inputs": {"x": Image("x")}}, DataError, "must be binary .* or Spark's image struct"),
        ({"inputs": {"x": Sparse("x")}}, DataError, "must be a Spark ML vector, or a struct"),
        ({"inputs": {"x": "x"}, "featuresCol": "x"}, ConfigError, "either inputs or featuresCol"),
        ({"inputs": {"x": "x"}, "inputShape": (2,)}, ConfigError, r"use Tensor\(shape"),
        ({"inputs": {"x": "x"}, "groupByLength": 4}, ConfigError, "needs an input that is a"),
        ({"inputs": {}}, ConfigError, "inputs is empty"),
    ],
)
def test_what_cannot_be_is_said(people: DataFrame, params: Any, error: Any, said: str) -> None:
    with pytest.raises(error, match=said):
        TorchRegressor(module=Ages, labelCol="y", **params, **QUIETLY).fit(people)


# --- images -------------------------------------------------------------------------------------


class Digits(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert x.dtype == torch.uint8 and x.shape[1:] == (1, 8, 8)
        return self.layers(x.float() / 255)


def png(pixels: np.ndarray) -> bytearray:
    file = io.BytesIO()
    pillow.fromarray(pixels).save(file, "PNG")
    return bytearray(file.getvalue())


@cache
def digits(num_rows: int) -> list[tuple[np.ndarray, int]]:
    bunch = load_digits()
    images = (bunch.images[:num_rows] * 15).astype(np.uint8)
    return list(zip(images, map(int, bunch.target), strict=False))


@pytest.fixture(scope="module")
def pictures(spark: SparkSession) -> DataFrame:
    rows = [
        Row(id=i, png=png(pixels), label=label, image=Row(
            origin=f"file:/{i}.png", height=8, width=8, nChannels=1, mode=0,
            data=bytearray(pixels.tobytes())))
        for i, (pixels, label) in enumerate(digits(400))
    ]  # fmt: skip
    return spark.createDataFrame(rows).repartition(2).cache()


@pytest.mark.slow
def test_images_are_trained_on_however_they_are_decoded(pictures: DataFrame) -> None:
    weights = {}
    for decode in ("spool", "batch"):
        classifier = TorchClassifier(
            module=Digits, inputs=[Image("png", channels=1, decode=decode)], epochs=8,
            learningRate=0.01, **QUIETLY,
        )  # fmt: skip
        model = classifier.fit(pictures)
        assert model.transform(pictures).where("prediction = label").count() > 360
        weights[decode] = nn.utils.parameters_to_vector(model.module.parameters())
    assert torch.equal(weights["spool"], weights["batch"])


@pytest.mark.slow
def test_spark_images_are_trained_on_and_predicted_as_in_training(pictures: DataFrame) -> None:
    classifier = TorchClassifier(
        module=Digits, inputs={"x": Image("image", channels=1)}, epochs=1, **QUIETLY
    )
    model = classifier.fit(pictures)
    rows = model.transform(pictures).orderBy("id").limit(50).collect()
    pixels = np.stack([pixels for pixels, _ in digits(50)])[:, None]
    with torch.no_grad():
        wanted = model.module(x=torch.from_numpy(pixels))
    found = np.stack([row.rawPrediction.toArray() for row in rows])
    np.testing.assert_allclose(found, wanted.numpy(), atol=1e-5)


@pytest.mark.slow
def test_bad_images_are_counted_before_training(spark: SparkSession) -> None:
    rows = [Row(png=png(pixels), label=label) for pixels, label in digits(20)]
    rows += [Row(png=bytearray(b"nothing"), label=0), Row(png=None, label=1)]
    df = spark.createDataFrame(rows)
    classifier = TorchClassifier(module=Digits, inputs=[Image("png", channels=1)], **QUIETLY)
    with pytest.raises(DataError, match=r'"png" has 1 bad row: cannot be decoded') as info:
        classifier.fit(df)
    told = "(such as the row with label=0); 1 null (such as the row with label=1)"
    assert told in str(info.value)
    good = df.where("png IS NOT NULL AND length(png) > 10")
    with pytest.raises(Exception, match="cannot be decoded"):
        classifier.setEpochs(1).fit(good).transform(df.na.drop()).collect()


# --- text ---------------------------------------------------------------------------------------


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 6)
        self.head = nn.Linear(6, 2)

    def forward(self, *, tokens: torch.Tensor, is_token: torch.Tensor) -> torch.Tensor:
        vectors = self.embed(tokens) * is_token[..., None]
        return self.head(vectors.sum(1) / is_token.sum(1, keepdim=True).clamp(min=1))


@pytest.fixture(scope="module")
def texts(spark: SparkSession) -> DataFrame:
    """Half of the texts have only short words; their lengths differ widely."""
    random = np.random.default_rng(4)
    rows = []
    for i in range(200):
        words = random.choice(WORDS[:3] if i % 2 else WORDS[2:], 1 + int(random.integers(0, 20)))
        rows.append(Row(id=i, text=" ".join(words), label=i % 2))
    return spark.createDataFrame(rows).repartition(2).cache()


def test_text_is_tokenized_padded_and_grouped(texts: DataFrame, tmp_path: Path) -> None:
    classifier = TorchClassifier(
        module=Words, inputs={"tokens": Sequence("text", transform=tokenize, mask="is_token")},
        epochs=6, learningRate=0.05, groupByLength=4, augmentation=shuffled,
        **{**QUIETLY, "batchSize": 8},
    )  # fmt: skip
    model = classifier.fit(texts)
    (column,) = model.columns
    assert (column.dtype, column.shape, column.longest) == ("int64", (), 20)
    out = model.transform(texts)
    assert out.where("prediction = label").count() > 180
    model.save(str(tmp_path / "model"))
    again = type(model).load(str(tmp_path / "model"))
    assert again.columns == model.columns
    same = again.transform(texts).select("id", "prediction")
    assert sorted(same.collect()) == sorted(out.select("id", "prediction").collect())


def shuffled(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Words in another order; the module does not see their order."""
    order = torch.randperm(inputs["tokens"].shape[1])
    return {name: value[:, order] for name, value in inputs.items()}


def failing(batch: Any) -> Any:
    raise KeyError("no such word")


@pytest.mark.slow
def test_a_transform_that_fails_is_told_with_its_cause(texts: DataFrame) -> None:
    classifier = TorchClassifier(
        module=Words, inputs={"tokens": Sequence("text", transform=failing)}, **QUIETLY
    )
    with pytest.raises(DataError, match=r'transform of "text" failed: KeyError: .*no such word'):
        classifier.fit(texts)


# --- several labels -----------------------------------------------------------------------------


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU())
        self.digit, self.odd = nn.Linear(32, 10), nn.Linear(32, 1)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        seen = self.body(x.float() / 255)
        return {"digit": self.digit(seen), "odd": self.odd(seen)}


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["gang", "rounds"])
def test_several_labels_have_losses_metrics_and_weights(pictures: DataFrame, mode: str) -> None:
    df = pictures.selectExpr(
        "png", "cast(label as double) AS digit", "cast(label % 2 as double) AS is_odd",
        "id % 5 = 0 AS held_out", "1.0 + id % 2 AS weight",
    )  # fmt: skip
    estimator = TorchEstimator(
        module=TwoHeads, inputs=[Image("png", channels=1)],
        labels={"digit": "digit", "odd": "is_odd"},
        loss={"digit": "cross_entropy", "odd": "bce_with_logits"}, lossWeights={"odd": 0.5},
        metrics={
            "digit": {"accuracy": lambda: MulticlassAccuracy(10, average="micro")},
            "odd": {"accuracy": BinaryAccuracy},
        },
        weightCol="weight", validationIndicatorCol="held_out", epochs=6, learningRate=0.02,
        syncStrategy="allreduce" if mode == "gang" else "parameter_averaging",
        executionMode=mode, **QUIETLY,
    )  # fmt: skip
    model = estimator.fit(df)
    last = model.summary.history[-1]
    for prefix in ("", "val_"):
        parts = last[f"{prefix}loss_digit"] + 0.5 * last[f"{prefix}loss_odd"]
        assert last[f"{prefix}loss"] == pytest.approx(parts)
    assert last["val_digit_accuracy"] > 0.6 and last["val_odd_accuracy"] > 0.7
    assert last["loss"] < model.summary.history[0]["loss"]


def test_labels_that_contradict_are_refused() -> None:
    def fit(**params: Any) -> None:
        TorchEstimator(module=TwoHeads, inputs=["png"], **params)._request()

    with pytest.raises(ConfigError, match="either labels or labelCol"):
        fit(labels={"a": "a"}, labelCol="a")
    with pytest.raises(ConfigError, match="loss is a dict by label, but labels is not set"):
        fit(loss={"a": "mse"})
    with pytest.raises(ConfigError, match=r"lossWeights names \['b'\]"):
        fit(labels={"a": "a"}, lossWeights={"b": 1.0})
    with pytest.raises(ConfigError, match="a label has no mask"):
        fit(labels={"a": Sequence("a", mask="m")})


# --- sparse vectors -----------------------------------------------------------------------------


class Bag(nn.Module):
    def __init__(self, is_sparse: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(50, 1))
        self.is_sparse = is_sparse

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert x.is_sparse == self.is_sparse
        return torch.sparse.mm(x, self.weight) if x.is_sparse else x @ self.weight


@pytest.fixture(scope="module")
def bags(spark: SparkSession) -> DataFrame:
    random = np.random.default_rng(3)
    rows = []
    for i in range(120):
        places = sorted(random.choice(50, 4, replace=False).tolist())
        vector: SparseVector | DenseVector = Vectors.sparse(50, places, [1.0] * 4)
        if i % 10 == 0:
            vector = Vectors.dense(vector.toArray())
        rows.append(Row(words=vector, y=float(sum(places)) / 50))
    return spark.createDataFrame(rows).repartition(2).cache()


@pytest.mark.slow
@pytest.mark.parametrize("is_dense", [True, False])
def test_sparse_vectors_stay_sparse_until_the_batch(bags: DataFrame, is_dense: bool) -> None:
    regressor = TorchRegressor(
        module=Bag(not is_dense), inputs=[Sparse("words", dense=is_dense)], labelCol="y",
        epochs=3, learningRate=0.1, gradientAccumulationSteps=2, **QUIETLY,
    )  # fmt: skip
    model = regressor.fit(bags)
    weight = model.module.weight.detach().numpy()[:, 0]
    assert (weight != 0).all()
    again = TorchModel(model.module, model.columns)
    assert again.getInputs() == [Sparse("words", dense=is_dense)]
    for row in again.transform(bags).collect():
        assert row.prediction == pytest.approx(float(row.words.dot(weight)), abs=1e-5)
