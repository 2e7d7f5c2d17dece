"""What `prepare` writes can be trained on, and bad images are skipped exactly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from sparkdl import Image, TorchClassifier, TorchClassifierModel
from sparkdl.cli.images.prepare import prepare
from sparkdl.errors import DataError
from sparkdl.models.demo import PhotoNet
from tests.cli.images.trees import digit_files, job

pytestmark = [pytest.mark.spark, pytest.mark.gang, pytest.mark.slow]

QUIETLY: dict[str, Any] = {"numWorkers": 2, "batchSize": 32, "seed": 1, "verbose": 0}


class Net(PhotoNet):
    def __init__(self) -> None:
        super().__init__(10, channels=1, hidden=16)


def classifier(epochs: int, **image: Any) -> TorchClassifier:
    inputs = [Image("image", channels=1, **image)]
    return TorchClassifier(
        module=Net, inputs=inputs, epochs=epochs, learningRate=0.004, optimizer="adam", **QUIETLY
    )


@pytest.fixture(scope="module")
def prepared(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("prepared")
    digit_files(root / "files", 600)
    told = job(
        root / "files", root / "o", split={"test": 0.25}, output_rows_per_file=200,
        image={"encoding": "jpeg", "mode": "L", "size": [12, 12], "quality": 90},
    )  # fmt: skip
    prepare(spark, told)
    return root / "o"


@pytest.fixture(scope="module")
def clean(spark: SparkSession, prepared: Path) -> DataFrame:
    return spark.read.parquet(str(prepared / "train")).cache()


@pytest.fixture(scope="module")
def dirty(clean: DataFrame) -> DataFrame:
    """The clean rows, and some among them whose image is null or cut off."""
    cut = clean.limit(7).withColumn("image", F.expr("substring(image, 1, length(image) - 40)"))
    null = clean.limit(3).withColumn("image", F.lit(None).cast("binary"))
    return clean.union(cut).union(null).repartition(3, "path").cache()


@pytest.fixture(scope="module")
def learned(clean: DataFrame) -> TorchClassifierModel:
    return classifier(12, on_error="skip").fit(clean)


def test_prepared_images_are_learned(
    spark: SparkSession, learned: TorchClassifierModel, prepared: Path
) -> None:
    result = learned.evaluate(spark.read.parquet(str(prepared / "test")))
    assert result["accuracy"] > 0.85
    assert learned.summary.skipped_rows == 0


def weights(model: TorchClassifierModel) -> list[torch.Tensor]:
    return [p.detach() for p in model.module.parameters()]


@pytest.mark.parametrize("decode", ["spool", "batch"])
def test_skipping_bad_images_gives_the_bits_of_training_without_them(
    clean: DataFrame, dirty: DataFrame, learned: TorchClassifierModel,
    caplog: pytest.LogCaptureFixture, decode: Any,
) -> None:  # fmt: skip
    with caplog.at_level("WARNING", "sparkdl"):
        model = classifier(12, decode=decode, on_error="skip").fit(dirty)
    assert (model.summary.rows, model.summary.skipped_rows) == (clean.count(), 10)
    assert "10 skipped" in repr(model.summary)
    # The messages, not the text: pyspark may have made the log's lines JSON.
    (warning,) = [text for text in caplog.messages if "training goes on without" in text]
    assert warning.startswith('training goes on without 10 row(s): column "image" has')
    assert "3 null (such as the row with label=" in warning
    assert "UNRESOLVED_COLUMN" not in caplog.text  # a union of files has no numbers of rows
    for ours, theirs in zip(weights(model), weights(learned), strict=True):
        assert torch.equal(ours, theirs)
    with pytest.raises(DataError, match="7 bad rows"):
        classifier(1, decode=decode).fit(dirty)


def test_rows_that_are_skipped_have_null_predictions_and_are_not_evaluated(
    clean: DataFrame, dirty: DataFrame, learned: TorchClassifierModel, tmp_path: Path
) -> None:
    learned.write().save(str(tmp_path / "m"))
    model = TorchClassifierModel.load(str(tmp_path / "m"))
    model.setBatchSize(5)
    predicted = model.transform(dirty).collect()
    ours = {row.path: (row.prediction, row.probability) for row in predicted if row.probability}
    theirs = {r.path: (r.prediction, r.probability) for r in model.transform(clean).collect()}
    assert [row.prediction for row in predicted if row.probability is None] == [None] * 10
    assert {path: p for path, (p, _) in ours.items()} == {p: c for p, (c, _) in theirs.items()}
    for path, (_, probability) in ours.items():
        assert probability.toArray() == pytest.approx(theirs[path][1].toArray(), abs=1e-5)
    found, wanted = model.evaluate(dirty), model.evaluate(clean)
    assert found.rows == wanted.rows
    assert found["loss"] == pytest.approx(wanted["loss"], abs=1e-6)
    assert found.confusion == wanted.confusion
    assert model.scores(dirty, "path").filter("loss is null").count() == 10
    only_bad = model.transform(dirty.filter("image is null"))
    assert [row.prediction for row in only_bad.collect()] == [None] * 3
