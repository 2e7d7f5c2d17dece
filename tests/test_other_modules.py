"""Modules of other packages train through the estimators: Lightning's and Hugging Face's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from sparkdl import Sequence, TorchClassifier

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.gang]

WORDS = 12


@pytest.fixture(scope="module")
def digits(spark: SparkSession) -> DataFrame:
    from sklearn.datasets import load_digits

    found = load_digits()
    rows = [
        (image.tolist(), int(label), index % 4 == 0)
        for index, (image, label) in enumerate(zip(found.data / 16, found.target, strict=True))
    ]
    return spark.createDataFrame(rows, "image array<float>, label int, held boolean").cache()


@pytest.fixture(scope="module")
def sentences(spark: SparkSession) -> DataFrame:
    """Word numbers; the class is whether word 1 stands in the sentence."""
    generator = torch.Generator().manual_seed(0)
    rows = []
    for _ in range(400):
        length = int(torch.randint(2, 9, (), generator=generator))
        words = torch.randint(2, WORDS, (length,), generator=generator)
        label = int(torch.randint(0, 2, (), generator=generator))
        if label:
            words[int(torch.randint(0, length, (), generator=generator))] = 1
        rows.append((words.tolist(), label))
    return spark.createDataFrame(rows, "words array<bigint>, label int").cache()


def accuracy(df: DataFrame) -> float:
    from pyspark.sql import functions as F

    row = df.select(F.avg((F.col("prediction") == F.col("label")).cast("double"))).first()
    assert row is not None
    return float(row[0])


def make_lightning() -> Any:
    lightning = pytest.importorskip("lightning")

    class Net(lightning.LightningModule):  # type: ignore[misc, name-defined]
        """A tiny LightningModule, as their tutorials have it."""

        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers(x)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            images, labels = batch
            return nn.functional.cross_entropy(self(images), labels)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
            return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)]

    return Net()


def test_a_lightning_module_trains_and_predicts(digits: DataFrame) -> None:
    classifier = TorchClassifier(
        module=make_lightning, featuresCol="image", epochs=6, batchSize=32, numWorkers=2, verbose=0,
        validationIndicatorCol="held",
    )  # fmt: skip
    model = classifier.fit(digits)
    rates = [record["learning_rate"] for record in model.summary.history]
    assert rates == pytest.approx([0.01 * 0.8**n for n in range(1, 7)])
    assert accuracy(model.transform(digits.filter("held"))) > 0.93


def make_bert() -> Any:
    """A tiny BERT, made from its configuration: nothing is downloaded."""
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=WORDS, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=32, max_position_embeddings=16, num_labels=2, pad_token_id=0,
    )  # fmt: skip
    return transformers.BertForSequenceClassification(config)


@pytest.mark.slow
def test_a_hugging_face_model_trains_and_predicts(sentences: DataFrame) -> None:
    classifier = TorchClassifier(
        module=make_bert,
        inputs={"input_ids": Sequence("words", mask="attention_mask")},
        optimizer="adamw", learningRate=0.005, epochs=12, batchSize=16, numWorkers=2, verbose=0,
    )  # fmt: skip
    model = classifier.fit(sentences)
    assert accuracy(model.transform(sentences)) > 0.95
    found = model.evaluate(sentences)
    assert found["accuracy"] == pytest.approx(accuracy(model.transform(sentences)))
    assert found.loss == pytest.approx(model.summary.history[-1]["loss"], abs=0.3)
