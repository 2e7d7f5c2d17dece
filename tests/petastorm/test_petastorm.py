"""Datasets that petastorm reads, in the environment that it needs: see `make petastorm`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from sparkdl import PetastormSource, TorchClassifier
from sparkdl.config import EarlyStopping
from sparkdl.data.batches import Batch, sequential_batches
from sparkdl.data.plan import SpoolColumn
from sparkdl.data.source import Contents, open_shards
from sparkdl.errors import ConfigError, DataError
from tests.data.sources import test_parquet
from tests.data.sources.test_parquet import plan_of, wanted

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytest.importorskip("petastorm", reason="has an environment of its own: make petastorm")

pytestmark = [
    # petastorm uses what pyarrow calls deprecated, and both it and Spark 4.0 leave files open.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

ROWS = 73
LABEL = SpoolColumn(name="label", role="label", dtype="int64", as_classes=True)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Parquet that petastorm has not written."""
    folder = tmp_path_factory.mktemp("plain")
    for number, (first, stop) in enumerate([(0, 40), (40, ROWS)]):
        rows = np.arange(first, stop)
        features = list(np.stack([rows, -rows], 1).astype("float64"))
        table = pa.table({"features": features, "label": rows % 3, "row": rows})
        pq.write_table(table, folder / f"{number}.parquet", row_group_size=9)
    return f"file://{folder}"


@pytest.fixture(scope="module")
def materialized(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A dataset as petastorm writes it, with images in its own codec."""
    from petastorm.codecs import NdarrayCodec, ScalarCodec
    from petastorm.etl.dataset_metadata import materialize_dataset
    from petastorm.unischema import Unischema, UnischemaField, dict_to_spark_row
    from pyspark.sql.types import IntegerType

    schema = Unischema("Rows", [
        UnischemaField("image", np.uint8, (3, 4), NdarrayCodec(), False),
        UnischemaField("label", np.int32, (), ScalarCodec(IntegerType()), False),
    ])  # fmt: skip
    url = f"file://{tmp_path_factory.mktemp('own')}/data"

    def row(number: int) -> Any:
        values = {"image": np.full((3, 4), number, np.uint8), "label": np.int32(number)}
        return dict_to_spark_row(schema, values)

    with materialize_dataset(spark, url, schema, row_group_size_mb=1):
        rows = [row(number) for number in range(20)]
        df = spark.createDataFrame(rows, schema.as_spark_schema())
        df.repartition(3).write.parquet(url)
    return url


def epoch_of(contents: Contents, rank: int, **changes: Any) -> list[Batch]:
    return test_parquet.epoch_of(contents, plan_of(contents), rank, **changes)


def numbers(batches: Sequence[Batch]) -> list[int]:
    return [int(x) for batch in batches for x in batch.inputs[0].reshape(batch.num_rows, -1)[:, 0]]


def test_a_batch_reader_gives_every_row_once_and_resumes(plain: str) -> None:
    features = SpoolColumn(name="features", role="feature", dtype="float32")
    source = PetastormSource(plain, buffer_bytes=300)
    assert source.schema().names == ["features", "label", "row"]
    contents = source.contents(wanted(features, LABEL))
    seen = [epoch_of(contents, rank) for rank in (0, 1)]
    assert sorted(numbers(seen[0]) + numbers(seen[1])) == list(range(ROWS))
    for batch in seen[0]:
        assert batch.inputs[0].dtype == torch.float32
        assert torch.equal(batch.target, batch.inputs[0][:, 0].long() % 3)
    for start in range(len(seen[1])):
        assert numbers(epoch_of(contents, 1, start_step=start)) == numbers(seen[1][start:])


def test_a_fraction_is_held_out(plain: str) -> None:
    features = SpoolColumn(name="features", role="feature", dtype="float32")
    contents = PetastormSource(plain, validation_fraction=0.2).contents(wanted(features, LABEL))
    plan = plan_of(contents)
    held = []
    for rank in (0, 1):
        rows = open_shards(contents.reader, plan, rank, "validation")
        held += numbers(list(sequential_batches(rows, plan)))
    train = [n for rank in (0, 1) for n in numbers(epoch_of(contents, rank))]
    assert sorted(train + held) == list(range(ROWS))
    assert 0.2 * ROWS <= len(held) <= 0.2 * ROWS + 9


@pytest.mark.spark
def test_a_reader_decodes_what_petastorm_has_written(materialized: str) -> None:
    image = SpoolColumn(name="image", role="feature", dtype="int16")
    contents = PetastormSource(materialized, reader="make_reader").contents(wanted(image, LABEL))
    seen = [batch for rank in (0, 1) for batch in epoch_of(contents, rank)]
    assert sorted(numbers(seen)) == list(range(20))
    for batch in seen:
        assert batch.inputs[0].dtype == torch.uint8
        assert batch.inputs[0].shape[1:] == (3, 4)
        assert torch.equal(batch.inputs[0][:, 2, 3].long(), batch.target)


def test_a_transform_that_drops_rows_is_an_error(plain: str) -> None:
    from petastorm.transform import TransformSpec

    features = SpoolColumn(name="features", role="feature", dtype="float32")
    spec = TransformSpec(lambda frame: frame[frame.label > 0])
    contents = PetastormSource(plain, transform_spec=spec).contents(wanted(features, LABEL))
    with pytest.raises(DataError, match=r"has \d rows, not \d as when fit began"):
        epoch_of(contents, 0)


@pytest.mark.parametrize("values", [[1.0, None, 3.0, None], [[1.0], [None], [3.0], [None]]])
def test_nulls_are_refused(tmp_path: Path, values: list[Any]) -> None:
    from petastorm.transform import TransformSpec

    data = pa.table({"x": values, "label": [0, 1, 2, 0], "unused": [None, 1, 2, 3]})
    pq.write_table(data, tmp_path / "a.parquet", row_group_size=2)
    features = SpoolColumn(name="x", role="feature", dtype="float32")
    source = PetastormSource(f"file://{tmp_path}")
    with pytest.raises(
        DataError, match=r'"x" has 2 null value\(s\) \(the first in row group 0 of a'
    ):
        source.contents(wanted(features, LABEL))
    filled = TransformSpec(
        lambda frame: frame.assign(x=1.0), edit_fields=[("x", np.float64, (), False)]
    )
    contents = replace(source, transform_spec=filled).contents(wanted(features, LABEL))
    assert numbers([batch for rank in (0, 1) for batch in epoch_of(contents, rank)]) == [1] * 4


def test_the_order_is_another_where_other_row_groups_are_mixed(plain: str) -> None:
    features = SpoolColumn(name="features", role="feature", dtype="float32")
    group = 9 * (2 * 4 + 8)
    one, also_one, two = (
        PetastormSource(plain, buffer_bytes=2 * size).contents(wanted(features, LABEL))
        for size in (group, 2 * group - 1, 2 * group)
    )
    prints = [[s.fingerprint for s in contents.shards] for contents in (one, also_one, two)]
    assert prints[0] == prints[1] != prints[2]
    assert one.content == two.content


def test_options_are_checked(plain: str) -> None:
    with pytest.raises(ConfigError, match="petastorm takes URLs"):
        PetastormSource(plain.removeprefix("file://"))
    with pytest.raises(ConfigError, match="reader must be one of"):
        PetastormSource(plain, reader="make_tf_reader")  # type: ignore[arg-type]


@pytest.mark.spark
@pytest.mark.gang
def test_fit_and_transform_on_the_spark_that_petastorm_needs(
    spark: SparkSession, plain: str
) -> None:
    from torch import nn

    classifier = TorchClassifier(
        module=lambda: nn.Linear(2, 3), epochs=2, batchSize=16, numWorkers=2, verbose=0,
        earlyStopping=EarlyStopping(monitor="val_loss", patience=2),
    )  # fmt: skip
    model = classifier.fit(PetastormSource(plain, validation_fraction=0.2))
    again = classifier.fit(PetastormSource(plain, validation_fraction=0.2))
    assert [r["val_loss"] for r in model.summary.history] == [
        r["val_loss"] for r in again.summary.history
    ]
    df = spark.read.parquet(str(Path(plain.removeprefix("file://"))))
    rows = model.transform(df).select("row", "features", "prediction", "probability").collect()
    assert sorted(row["row"] for row in rows) == list(range(ROWS))
    module = model.module
    with torch.no_grad():
        for row in rows:
            expected = torch.softmax(module(torch.tensor([row["features"]])), 1)[0]
            assert row["probability"].toArray() == pytest.approx(expected.numpy(), rel=1e-5)
            assert row["prediction"] == int(expected.argmax())
    assert model.evaluate(df).loss > 0


@pytest.mark.spark
@pytest.mark.gang
def test_a_dataframe_trains_there_too(spark: SparkSession, plain: str) -> None:
    from torch import nn

    df = spark.read.parquet(plain)
    model = TorchClassifier(module=lambda: nn.Linear(2, 3), epochs=1, numWorkers=2, verbose=0).fit(
        df
    )
    assert model.summary.rows == ROWS
    assert model.transform(df).count() == ROWS
