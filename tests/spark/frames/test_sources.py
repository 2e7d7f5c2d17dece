"""Fit on data that workers read by themselves: as on a DataFrame of the same rows."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch.utils.data import IterableDataset
from torchmetrics.classification import MulticlassAccuracy

from sparkdl import (
    DatasetShard,
    DatasetSource,
    OneShotAveraging,
    ParameterAveraging,
    ParquetSource,
    TorchClassifier,
    Tournament,
)
from sparkdl.config import EarlyStopping
from sparkdl.data.batches import sequential_batches
from sparkdl.data.plan import Split, make_plan
from sparkdl.data.source import Contents, Wanted, open_shards
from sparkdl.errors import ConfigError, DataError
from sparkdl.inputs import Image, Named, Sequence, Sparse, Tensor
from sparkdl.spark.fit.check_request import prepare_columns
from sparkdl.spark.fit.check_rows import shaped
from sparkdl.spark.fit.fit import fit
from sparkdl.spark.frames.row_table import SourceTable, TableSpec, content_of
from sparkdl.spark.frames.shard_table import ShardTable
from sparkdl.spark.frames.user_data import empty_frame
from sparkdl.spark.run.run import FitRequest
from sparkdl.storage.blocks import Blocks, FileBlock
from sparkdl.train.callbacks import Callback, CallbackState
from tests.spark.fit.test_fit import digest, make_net, request

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.gang]

ROWS = 150


@pytest.fixture(scope="module")
def folder(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from pyspark.sql import functions as F

    features = [((F.col("id") * k) % 7 - 3).cast("double") for k in (1, 2, 3)]
    df = spark.range(0, ROWS, 1, 4).select(
        F.array(*features).alias("features"),
        (F.col("id") % 3).alias("label"),
        (F.col("id") % 10 == 0).alias("held"),
    )
    path = tmp_path_factory.mktemp("parquet") / "data"
    df.write.option("parquet.block.row.count.limit", 10).parquet(str(path))
    return path


@dataclass
class KillOnce(Callback):
    """Kills rank 1 at a step, once."""

    marker: str
    step: int = 7

    def on_step_end(self, state: CallbackState) -> None:
        if state.rank == 1 and state.step == self.step and not Path(self.marker).exists():
            Path(self.marker).touch()
            os.kill(os.getpid(), signal.SIGKILL)


def bytes_read(spark: SparkSession) -> int:
    """By all Spark jobs so far."""
    context: Any = spark.sparkContext
    executors = context._jsc.sc().statusStore().executorList(True)
    return sum(executors.apply(i).totalInputBytes() for i in range(executors.size()))


@pytest.mark.classic
def test_no_spark_job_reads_the_data_and_transform_sees_it_as_training_did(
    spark: SparkSession, folder: Path
) -> None:
    before = bytes_read(spark)
    classifier = TorchClassifier(
        module=make_net, epochs=2, batchSize=16, numWorkers=2, learningRate=0.02,
        optimizer="adam", validationIndicatorCol="held", verbose=0, metrics={},
    )  # fmt: skip
    model = classifier.fit(ParquetSource(folder))
    assert bytes_read(spark) == before
    assert model.summary.rows == 135
    assert model.summary.validation_rows == 15
    df = spark.read.parquet(str(folder))
    assert df.count() == ROWS
    assert bytes_read(spark) > before
    found = model.evaluate(df.where("held"))
    assert found.loss == pytest.approx(model.summary.history[-1]["val_loss"], rel=1e-5)
    assert model.transform(df).count() == ROWS


def blocks_lie(monkeypatch: pytest.MonkeyPatch, *hosts: str) -> None:
    """Files are on these hosts, in turn."""

    def locate(spark: SparkSession, url: str, paths: tuple[str, ...]) -> Blocks:
        return {
            path: [FileBlock(0, 1 << 40, ((hosts[number % len(hosts)],),))]
            for number, path in enumerate(paths)
        }

    monkeypatch.setattr("sparkdl.spark.frames.row_table.locate_blocks", locate)


@pytest.mark.slow
def test_neither_a_killed_worker_nor_moved_blocks_cost_a_bit(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    source = ParquetSource(folder, validation_fraction=0.1)
    blocks_lie(monkeypatch, "a", "b")
    whole = fit(source, request())
    kill, directory = KillOnce(str(tmp_path / "killed")), str(tmp_path / "checkpoints")
    # numWorkers decides the run, callbacks do not.
    wanted = request(kill, max_restarts=1, directory=directory)
    first = fit(source, replace(wanted, config=replace(wanted.config, max_steps=8)))
    assert first.summary.restarts == 1
    blocks_lie(monkeypatch, "b", "b", "c")
    with caplog.at_level("INFO"):
        again = fit(source, wanted)
    assert "shards stay those of the checkpoint" in caplog.text
    assert "going on from the checkpoint of step 8" in caplog.text
    assert digest(again) == digest(whole)
    assert [r["val_loss"] for r in again.summary.history] == [
        r["val_loss"] for r in whole.summary.history
    ]


@pytest.mark.slow
def test_rounds(folder: Path) -> None:
    config = replace(request().config, sync_strategy=ParameterAveraging(averaging_period=3))
    wanted = request(execution_mode="rounds", validation_col="held")
    wanted = replace(wanted, config=config)
    summary = fit(ParquetSource(folder), wanted).summary
    assert summary.rows == 135
    assert summary.history[-1]["val_loss"] > 0


@pytest.mark.slow
def test_populations_compete_on_the_validation_rows_of_a_source(folder: Path) -> None:
    strategy = Tournament(
        period=2, monitor="val_accuracy", mode="max", mutations={"learning_rate": [1e-4, 0.02]}
    )
    metrics = {"accuracy": partial(MulticlassAccuracy, 3, average="micro")}
    config = replace(request().config, sync_strategy=strategy, metrics=metrics)
    wanted = replace(request(execution_mode="rounds", validation_col="held"), config=config)
    summary = fit(ParquetSource(folder), wanted).summary
    assert (summary.rows, summary.validation_rows) == (135, 15)
    last = [note for note in summary.population if note["step"] == summary.steps]
    assert summary.history[-1]["val_accuracy"] == max(note["val_accuracy"] for note in last)
    assert summary.history[-1]["val_accuracy_spread"] >= 0
    contests = [note for note in summary.population if "rival" in note]
    assert contests
    for note in contests:
        assert note["is_lost"] == float(note["rival_accuracy"] > note["tournament_accuracy"])
    rates = {note["learning_rate"] for note in summary.population if "learning_rate" in note}
    assert rates <= {config.learning_rate, 1e-4, 0.02}


@pytest.mark.slow
def test_one_shot_averaging_needs_no_rows_set_aside(folder: Path) -> None:
    config = replace(request().config, sync_strategy=OneShotAveraging())
    for mode in ("rounds", "gang"):
        wanted = replace(request(execution_mode=mode, validation_col="held"), config=config)
        summary = fit(ParquetSource(folder), wanted).summary
        assert summary.rows == 135
        assert summary.history[-1]["val_loss"] > 0


def collected(spark: SparkSession, source: Any, wanted: FitRequest) -> SourceTable:
    prepared, _ = prepare_columns(empty_frame(spark, source), wanted, "float32")
    return SourceTable(spark, source, TableSpec(columns=tuple(prepared), num_shards=2))


def test_a_source_that_changes_before_a_restart(spark: SparkSession, tmp_path: Path) -> None:
    data = pa.table({"features": [[1.0, 2.0, 3.0]] * 4, "label": [0, 1, 2, 0]})
    pq.write_table(data, tmp_path / "a.parquet")
    table = collected(spark, ParquetSource(tmp_path), request())
    reader = table.collect() and table.reader
    assert table.collect()
    assert table.reader is reader, "workers compare the files with those that were listed first"
    pq.write_table(data.slice(1), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"data has changed during training: shard\(s\) \[0, 1\]"):
        table.collect()


@dataclass(frozen=True)
class Transformed:
    """A source whose rows a function makes."""

    transform: Any

    def schema(self) -> pa.Schema:
        return DatasetSource(by_index).schema()

    def contents(self, wanted: Wanted) -> Contents:
        return replace(DatasetSource(by_index).contents(wanted), transform=self.transform)


def test_checkpoints_of_another_transform_are_not_continued(spark: SparkSession) -> None:
    def content(transform: Any) -> str:
        return content_of(collected(spark, Transformed(transform), request()).collect())

    assert content(lambda row: row + 1) == content(lambda row: row + 1)
    assert len({content(None), content(lambda row: row + 1), content(lambda row: row + 2)}) == 3


def test_what_only_dataframes_can_do_is_refused(folder: Path) -> None:
    config = request().config
    with pytest.raises(ConfigError, match="ParquetSource has none; give it a validation_fraction"):
        fit(ParquetSource(folder), replace(
            request(execution_mode="rounds"), config=replace(config, sync_strategy=Tournament())
        ))  # fmt: skip
    with pytest.raises(ConfigError, match="groupByLength needs the lengths of all rows"):
        fit(ParquetSource(folder), replace(request(), config=replace(config, group_by_length=2)))
    with pytest.raises(ConfigError, match="shuffleWindowBytes is for DataFrames"):
        fit(
            ParquetSource(folder),
            replace(request(), config=replace(config, shuffle_window_bytes=1 << 20)),
        )
    skipping = Named(argument=None, specification=Image("features", on_error="skip"))
    with pytest.raises(ConfigError, match="on_error='skip' changes the number of rows"):
        fit(
            ParquetSource(folder),
            replace(request(), feature_cols=(), input_shapes=(), specified=(skipping,)),
        )


def test_columns_and_labels_are_checked(folder: Path) -> None:
    with pytest.raises(DataError, match='"nowhere" is not in the DataFrame; its columns: features'):
        fit(ParquetSource(folder), request(label_col="nowhere"))
    narrow = request(module=lambda: torch.nn.Linear(3, 2))
    message = r'column "label" has 50 label\(s\) outside the 2 classes .* \(first: row 2 of row'
    with pytest.raises(DataError, match=message):
        fit(ParquetSource(folder), narrow)


@pytest.mark.slow
def test_a_column_may_have_any_name(spark: SparkSession) -> None:
    """Also those of a source's methods, which a DataFrame has as attributes then."""
    with pytest.raises(ConfigError, match="fit takes a DataFrame of Spark or pandas, or a source"):
        fit([1, 2], request())  # type: ignore[arg-type]
    df = spark.createDataFrame([([1.0, 2.0, 3.0], 0)] * 4, "contents array<float>, schema int")
    wanted = request(feature_cols=("contents",), label_col="schema", epochs=1)
    assert fit(df, wanted).summary.rows == 4


@pytest.fixture(scope="module")
def kinds(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> DataFrame:
    """Columns of all types, as Spark writes them."""
    from pyspark.ml.functions import array_to_vector
    from pyspark.sql import functions as F

    i = F.col("id")
    numbers = F.array(i.cast("double"), i / 2)
    df = spark.range(0, 40, 1, 2).select(
        array_to_vector(numbers).alias("vector"),
        F.array(numbers, numbers).alias("matrix"),
        (i % 2 == 0).alias("flag"),
        i.cast("tinyint").alias("tiny"),
        (i / 8).cast("decimal(10,3)").alias("decimal"),
        F.encode(F.lpad(i.cast("string"), 3, "0"), "us-ascii").alias("bytes"),
        F.struct((i * 3).cast("int").alias("Age"), F.lit("x").alias("name")).alias("user"),
        F.slice(F.array(*[i + k for k in range(4)]), F.lit(1), (i % 4).cast("int")).alias("words"),
        F.concat(F.lit("t"), i.cast("string")).alias("text"),
        F.timestamp_seconds(i).alias("time"),
        i.alias("label"),
        (i / 4 + 1).alias("weight"),
        (i % 4 == 0).alias("held"),
    )
    path = str(tmp_path_factory.mktemp("kinds") / "data")
    df.write.option("parquet.block.row.count.limit", 7).parquet(path)
    return spark.read.parquet(path)


def length(batch: Any) -> Any:
    """Of the text, and seconds."""
    seconds = [time.timestamp() for time in batch.column("time").to_pylist()]
    texts = [len(text) for text in batch.column("text").to_pylist()]
    return [list(pair) for pair in zip(texts, seconds, strict=True)]


SPECIFIED = (
    Named(argument="tiny", specification=Tensor("TINY")),
    Named(argument="flag", specification=Tensor("flag")),
    Named(argument="decimal", specification=Tensor("decimal")),
    Named(argument="bytes", specification=Tensor("bytes")),
    Named(argument="matrix", specification=Tensor("matrix", shape=(4,))),
    Named(argument="age", specification=Tensor("user.age")),
    Named(argument="words", specification=Sequence("words", max_length=2, mask="own")),
    Named(argument="sparse", specification=Sparse("vector")),
    Named(argument="dense", specification=Tensor("vector")),
    Named(argument="made", specification=Tensor(("text", "time"), transform=length)),
)


def rows_of(table: Any, wanted: FitRequest, split: Split) -> Iterator[dict[Any, Any]]:
    """All rows by the name of the input, as lists, without padding."""
    try:
        shards = table.collect()
        plan = make_plan(
            columns=shaped(table.columns(shards), wanted.input_shapes),
            shards=[part.shard for part in shards],
            world_size=1,
            batch_size=1,
            epochs=1,
        )
        rows = open_shards(table.reader, plan, 0, split)
        for batch in sequential_batches(rows, plan):
            named = dict(zip(batch.names, batch.inputs, strict=True))
            assert isinstance(batch.target, torch.Tensor)
            values = {**named, "label": batch.target, "weight": batch.weight}
            yield {name: (str(v.dtype), v.tolist()) for name, v in values.items()}
    finally:
        table.close()


@pytest.mark.slow
@pytest.mark.parametrize("split", ["train", "validation"])
def test_rows_are_those_that_a_dataframe_gives(
    spark: SparkSession, kinds: DataFrame, split: Split
) -> None:
    wanted = replace(
        request(weight_col="weight", validation_col="held"), feature_cols=(), specified=SPECIFIED,
        input_shapes=(),
    )  # fmt: skip
    prepared, validation = prepare_columns(kinds, wanted, "float32")
    spec = TableSpec(
        columns=tuple(prepared), num_shards=2, validation=validation, validation_col="held"
    )
    spooled = ShardTable(kinds, spec, run_id="kinds")
    source = ParquetSource(kinds.inputFiles()[0].removeprefix("file://").rpartition("/")[0])
    empty = empty_frame(spark, source)
    assert [(f.name, f.dataType) for f in empty.schema] == [
        (f.name, f.dataType) for f in kinds.schema
    ]
    prepared, _ = prepare_columns(empty, wanted, "float32")
    read = SourceTable(spark, source, replace(spec, columns=tuple(prepared)))
    expected = sorted(rows_of(spooled, wanted, split), key=lambda row: row["label"])
    found = sorted(rows_of(read, wanted, split), key=lambda row: row["label"])
    assert len(found) == (30 if split == "train" else 10)
    assert found == expected


class Numbers(IterableDataset[Any]):
    """The rows of the files, each worker its own."""

    def __init__(self, part: DatasetShard) -> None:
        self.rows = list(range(part.shard_id, ROWS, part.num_shards))
        random.Random(f"{part.seed} {part.epoch}").shuffle(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Any]:
        return (sample_of(row) for row in self.rows)


def sample_of(row: int) -> tuple[torch.Tensor, int]:
    return torch.tensor([row * k % 7 - 3.0 for k in (1, 2, 3)]), row % 3


def by_index() -> list[tuple[torch.Tensor, int]]:
    return [sample_of(row) for row in range(ROWS)]


@pytest.mark.slow
def test_a_dataset_of_the_users_own(spark: SparkSession, folder: Path, tmp_path: Path) -> None:
    source = DatasetSource(Numbers, validation=by_index)
    whole = fit(source, request())
    assert whole.summary.rows == whole.summary.validation_rows == ROWS
    kill = KillOnce(str(tmp_path / "killed"))
    again = fit(source, request(kill, max_restarts=1, directory=str(tmp_path / "checkpoints")))
    assert again.summary.restarts == 1
    assert digest(again) == digest(whole)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fraction", "column", "dataset"])
def test_metrics_and_early_stopping_on_validation_rows(folder: Path, kind: str) -> None:
    from torchmetrics.classification import MulticlassAccuracy

    source: Any = ParquetSource(folder, validation_fraction=0.2 * (kind == "fraction"))
    if kind == "dataset":
        source = DatasetSource(by_index, validation=by_index)
    asked = request(validation_col="held" if kind == "column" else None)
    config = replace(
        asked.config,
        metrics={"accuracy": MulticlassAccuracy(num_classes=3)},
        early_stopping=EarlyStopping(monitor="val_accuracy", mode="max"),
    )
    summary = fit(source, replace(asked, config=config)).summary
    if kind == "dataset":
        assert summary.rows == summary.validation_rows == ROWS
    assert all(0 <= record["val_accuracy"] <= 1 for record in summary.history)


def test_metrics_need_validation_rows(folder: Path) -> None:
    asked = request()
    stopping = replace(asked, config=replace(asked.config, early_stopping=EarlyStopping()))
    with pytest.raises(ConfigError, match="monitors 'val_loss', but the history has only"):
        fit(ParquetSource(folder), stopping)


@pytest.mark.slow
def test_a_dataset_in_rounds_and_transform(spark: SparkSession, folder: Path) -> None:
    classifier = TorchClassifier(
        module=make_net, epochs=2, batchSize=16, numWorkers=2, verbose=0,
        syncStrategy=ParameterAveraging(averaging_period=3), executionMode="rounds",
    )  # fmt: skip
    model = classifier.fit(DatasetSource(Numbers, validation=by_index))
    df = spark.read.parquet(str(folder))
    found = model.evaluate(df)
    assert found.loss == pytest.approx(model.summary.history[-1]["val_loss"], rel=1e-5)
