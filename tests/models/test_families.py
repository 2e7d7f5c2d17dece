"""A network of every family learns, by way of the estimators, what it is for.

Each test states the quality that it reaches on rows which it has never seen; each of the seeds 1 to
3 reached it. ``docs/networks.md`` has the worst of the three.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pyspark.sql import DataFrame, Row, SparkSession
from sklearn import datasets
from sklearn.decomposition import PCA
from torch import nn

from sparkdl import (
    InitialWeights,
    Output,
    Sequence,
    TorchClassifier,
    TorchEstimator,
    TorchModel,
    TorchRegressor,
    load_module,
)
from sparkdl.models import (
    FCNR,
    GAN,
    MLP,
    AlexNetR,
    Autoencoder,
    LeNet5,
    LSTMNet,
    ResNet20,
    ResNet50,
    TransformerNet,
    gan_step,
)

pytestmark = [pytest.mark.spark, pytest.mark.gang, pytest.mark.slow, pytest.mark.timeout(240)]

SEED = 1


def common(**more: Any) -> dict[str, Any]:
    values = {
        "numWorkers": 2, "batchSize": 32, "optimizer": "adam", "seed": SEED, "verbose": 0,
        "maxRestarts": 0,
    }  # fmt: skip
    return {**values, **more}


def frames(spark: SparkSession, rows: list[Row]) -> tuple[DataFrame, DataFrame]:
    """Three quarters to train on, and the rest; the same ones each time."""
    order = np.random.default_rng(0).permutation(len(rows))
    cut = len(rows) // 4
    parts = [[rows[i] for i in indices] for indices in (order[cut:], order[:cut])]
    train, test = (spark.createDataFrame(part).repartition(2).cache() for part in parts)
    return train, test


def table(spark: SparkSession, bunch: Any) -> tuple[DataFrame, DataFrame]:
    """The rows of one of scikit-learn's tables, each feature with mean 0 and variance 1."""
    values = (bunch.data - bunch.data.mean(0)) / bunch.data.std(0)
    pairs = zip(values.tolist(), bunch.target.tolist(), strict=True)
    return frames(spark, [Row(features=features, label=label) for features, label in pairs])


@cache
def digits() -> tuple[np.ndarray, list[int]]:
    bunch = datasets.load_digits()
    return (bunch.images * 15).astype(np.uint8), bunch.target.tolist()


def pictures(spark: SparkSession, scale: int, border: int = 0) -> tuple[DataFrame, DataFrame]:
    """Grey digits of ``8 * scale + 2 * border`` pixels, as bytes."""
    images = digits()[0].repeat(scale, 1).repeat(scale, 2)
    images = np.pad(images, ((0, 0), (border, border), (border, border)))
    pairs = zip(images, digits()[1], strict=True)
    return frames(spark, [Row(image=bytearray(i.tobytes()), label=n) for i, n in pairs])


def accuracy_on_digits(
    data: tuple[DataFrame, DataFrame], make: Any, size: int, **params: Any
) -> float:
    train, test = data
    classifier = TorchClassifier(
        module=make, featuresCol="image", inputShape=(1, size, size), **common(**params)
    )
    return classifier.fit(train).evaluate(test)["accuracy"]


@pytest.fixture(scope="module")
def digits_8(spark: SparkSession) -> tuple[DataFrame, DataFrame]:
    return pictures(spark, 1)


# --- fully connected ----------------------------------------------------------------------------


def test_mlp_tells_classes_apart(spark: SparkSession) -> None:
    train, test = table(spark, datasets.load_wine())
    make = partial(MLP, sizes=(13, 32, 16), num_outputs=3)
    model = TorchClassifier(module=make, **common(epochs=20, learningRate=0.005)).fit(train)
    assert model.evaluate(test)["accuracy"] >= 0.93


def test_mlp_predicts_numbers(spark: SparkSession) -> None:
    bunch = datasets.load_diabetes()
    bunch.target = bunch.target / 100
    train, test = table(spark, bunch)
    make = partial(MLP, sizes=(10, 32), num_outputs=1)
    regressor = TorchRegressor(module=make, **common(epochs=30, learningRate=0.005))
    assert regressor.fit(train).evaluate(test)["r2"] >= 0.4


def test_fcn_r(digits_8: tuple[DataFrame, DataFrame]) -> None:
    make = partial(FCNR, sizes=(64, 256, 512, 128))
    assert accuracy_on_digits(digits_8, make, 8, epochs=20, learningRate=0.003) >= 0.9


# --- convolutional ------------------------------------------------------------------------------


def test_lenet_5(spark: SparkSession) -> None:
    data = pictures(spark, 3, border=2)
    assert accuracy_on_digits(data, LeNet5, 28, epochs=10, learningRate=0.002) >= 0.95


def test_alexnet_r(spark: SparkSession) -> None:
    make = partial(AlexNetR, in_channels=1, image_size=(16, 16))
    data = pictures(spark, 2)
    assert accuracy_on_digits(data, make, 16, epochs=12, learningRate=0.002) >= 0.95


@pytest.mark.parametrize(
    ("kind", "width", "wanted"),
    [(ResNet20, 8, 0.95), (ResNet50, 4, 0.85)],
)
def test_resnets(
    digits_8: tuple[DataFrame, DataFrame], kind: type[nn.Module], width: int, wanted: float
) -> None:
    make = partial(kind, width=width, in_channels=1)
    assert accuracy_on_digits(digits_8, make, 8, epochs=8, learningRate=0.005) >= wanted


# --- sequences ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def markers(spark: SparkSession) -> tuple[DataFrame, DataFrame]:
    """Sequences of 2 to 20 tokens; the label says which comes first, token 1 or token 2.

    Nothing but the order tells the classes apart.
    """
    random, rows = np.random.default_rng(0), []
    for label in (0, 1) * 800:
        length = int(random.integers(2, 21))
        words = random.integers(3, 20, length)
        words[sorted(random.choice(length, 2, replace=False))] = (1, 2) if label == 0 else (2, 1)
        rows.append(Row(words=words.tolist(), label=label))
    return frames(spark, rows)


@pytest.mark.parametrize(
    ("make", "rate"),
    [
        (partial(LSTMNet, num_tokens=20, num_features=16, width=32, num_outputs=2), 0.01),
        (
            partial(
                TransformerNet,
                num_tokens=20,
                width=32,
                num_layers=1,
                feedforward=64,
                num_outputs=2,
            ),
            0.005,
        ),
    ],
    ids=["lstm", "transformer"],
)
def test_networks_for_sequences_see_the_order(
    markers: tuple[DataFrame, DataFrame], make: Any, rate: float, tmp_path: Path
) -> None:
    train, test = markers
    classifier = TorchClassifier(
        module=make, inputs={"values": Sequence("words", mask="mask")}, groupByLength=4,
        **common(epochs=20, learningRate=rate),
    )  # fmt: skip
    model = classifier.fit(train)
    accuracy = model.evaluate(test)["accuracy"]
    assert accuracy >= 0.9  # by chance: 0.5
    model.save(str(tmp_path / "model"))
    assert type(model).load(str(tmp_path / "model")).evaluate(test)["accuracy"] == accuracy


# --- without labels -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def vectors(spark: SparkSession) -> tuple[DataFrame, DataFrame]:
    """Digits as 64 numbers from 0 to 1."""
    images, labels = digits()
    values = (images.reshape(-1, 64) / 240.0).tolist()
    triples = zip(range(len(values)), values, labels, strict=True)
    return frames(spark, [Row(id=i, features=v, label=label) for i, v, label in triples])


def values_of(df: DataFrame, column: str) -> np.ndarray:
    return np.array([row[column] for row in df.collect()])


def test_an_autoencoder_restores_digits_better_than_principal_components(
    vectors: tuple[DataFrame, DataFrame],
) -> None:
    train, test = vectors
    make = partial(Autoencoder, sizes=(64, 48, 8), activation="tanh")
    estimator = TorchEstimator(module=make, loss="mse", **common(epochs=40, learningRate=0.005))
    model = estimator.fit(train)
    model.setOutputs({"code": Output(layer="encoder")})
    out = model.transform(test)
    rows = values_of(out, "features")
    error = ((values_of(out, model.getPredictionCol()) - rows) ** 2).mean()
    assert values_of(out, "code").shape == (len(rows), 8)
    linear = PCA(8).fit(values_of(train, "features"))
    restored = linear.inverse_transform(linear.transform(rows))
    assert error < 0.9 * ((restored - rows) ** 2).mean()


def pretrained(df: DataFrame, sizes: tuple[int, ...], params: Mapping[str, Any]) -> TorchModel:
    """The loop of docs/networks.md."""
    model = None
    for depth in range(1, len(sizes)):
        new = f"*coder.{depth - 1}"
        model = TorchEstimator(
            module=partial(Autoencoder, sizes=sizes[: depth + 1], corruption=0.2),
            initialWeights=None if model is None else InitialWeights(source=model, skip=(new,)),
            frozenLayers=[f"*coder.{below}" for below in range(depth - 1)],
            **params,
        ).fit(df)
    assert model is not None
    return model


def test_a_stack_pretrained_layer_by_layer_needs_fewer_labels(
    vectors: tuple[DataFrame, DataFrame],
) -> None:
    train, test = vectors
    sizes = (64, 64, 32, 16)
    stack = pretrained(train, sizes, common(epochs=10, learningRate=0.005))
    few = train.where("id % 14 = 0").cache()  # 94 rows

    def accuracy(initial: InitialWeights | None) -> float:
        classifier = TorchClassifier(
            module=partial(MLP, sizes=sizes, num_outputs=10, activation="sigmoid"),
            initialWeights=initial,
            **common(epochs=60, learningRate=0.005, batchSize=8),
        )
        return classifier.fit(few).evaluate(test)["accuracy"]

    with_labels_only = accuracy(None)
    tuned = accuracy(InitialWeights(source=stack, skip=("decoder", "head")))
    assert tuned >= 0.7
    assert tuned >= with_labels_only + 0.1


def test_a_gan_learns_where_points_lie(spark: SparkSession, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    points = torch.randn(600, 2, generator=generator) * 0.5 + torch.tensor([2.0, -1.0])
    df = spark.createDataFrame([(p.tolist(),) for p in points], "features array<float>")
    estimator = TorchEstimator(
        module=partial(GAN, num_features=2, widths=(32,)),
        trainingStep=gan_step,
        learningRate=0.002,
        optimizerParams={"betas": (0.5, 0.9)},
        parameterGroups={"critic": {"lr": 0.004}},
        **common(epochs=60),
    )
    model = estimator.fit(df)
    model.write().overwrite().save(str(tmp_path / "gan"))
    gan: Any = load_module(str(tmp_path / "gan"))
    made = gan.generate(2000, generator).detach()
    assert (made.mean(0) - torch.tensor([2.0, -1.0])).abs().max() < 0.5
    assert 0.15 < made.std(0).min() <= made.std(0).max() < 1.0
    assert model.transform(df).count() == 600
