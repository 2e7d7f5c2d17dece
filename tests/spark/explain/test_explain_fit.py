"""Explain as a whole: tells what fit does, refuses what fit refuses, leaves nothing behind."""

from __future__ import annotations

import dataclasses
import json
import re
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
import torch
from pyspark import TaskContext
from torch import nn

from sparkdl.config import CheckpointConfig, EarlyStopping, ExplainOptions, TrainConfig
from sparkdl.errors import ClusterError, ConfigError, DataError, WorkerError
from sparkdl.inference.classification import CLASSIFICATION
from sparkdl.mesh import Mesh
from sparkdl.runtime.activity import shown_by
from sparkdl.spark.cluster import slots
from sparkdl.spark.cluster.slots import Slots
from sparkdl.spark.explain import estimate, measure_gang
from sparkdl.spark.explain.explain_fit import explain
from sparkdl.spark.fit.check_request import check_request
from sparkdl.spark.fit.fit import fit
from sparkdl.spark.frames import spool_task
from sparkdl.spark.frames.frame_sample import take_sample
from sparkdl.spark.frames.row_table import TableSpec
from sparkdl.spark.frames.shard_table import ShardTable
from sparkdl.spark.run.run import FitRequest
from sparkdl.train.callbacks import Callback

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from sparkdl.explain.explanation import Explanation

pytestmark = [pytest.mark.spark, pytest.mark.gang, pytest.mark.timeout(300)]

ROWS = 120
PLAN_ONLY = ExplainOptions(calibrate=False)
QUICK = ExplainOptions(measure_seconds=0.05, num_workers=(64,))


def make_net() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def rows(spark: SparkSession, count: int) -> DataFrame:
    from pyspark.sql import functions as F

    features = [(F.col("id") * k % 97 - 3).cast("float") for k in (1, 2, 3)]
    return spark.range(0, count, 1, 3).select(
        F.array(*features).alias("features"),
        (F.col("id") % 3).alias("label"),
        (F.col("id") % 4 == 0).alias("held"),
        F.col("id").cast("string").alias("text"),
    )


@pytest.fixture(scope="module")
def df(spark: SparkSession) -> DataFrame:
    return rows(spark, ROWS)


def request(**changes: Any) -> FitRequest:
    config = TrainConfig(
        task=CLASSIFICATION, loss="cross_entropy", optimizer="adam", learning_rate=0.01,
        epochs=changes.pop("epochs", 2), batch_size=changes.pop("batch_size", 16), seed=7,
        sync_strategy=changes.pop("strategy", None), callbacks=changes.pop("callbacks", ()),
        checkpoint=CheckpointConfig(interval=5),
    )  # fmt: skip
    values: dict[str, Any] = {
        "module": make_net, "config": config, "feature_cols": ("features",),
        "input_shapes": (None,), "label_col": "label", "weight_col": None,
        "validation_col": None, "num_workers": 2, "max_restarts": 0, "verbose": 0,
        "cpus_per_worker": None, "gpus_per_worker": None,
    }  # fmt: skip
    return FitRequest(**{**values, **changes})


def tell_folders(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for _ in batches:
        pass
    found = [str(path) for root in spool_task.local_dirs() for path in Path(root).glob("sparkdl-*")]
    yield pa.RecordBatch.from_pydict({"folder": pa.array(found, pa.string())})


def spools(spark: SparkSession) -> list[str]:
    found = spark.range(1).mapInArrow(tell_folders, "folder string").collect()
    return [row["folder"] for row in found if any(Path(row["folder"]).iterdir())]


def test_a_mesh_has_a_table_of_memory_and_no_times(df: DataFrame) -> None:
    asked = request()
    config = dataclasses.replace(asked.config, parallelism=Mesh(data=2))
    found = explain(df, dataclasses.replace(asked, config=config, num_workers=None), PLAN_ONLY)
    assert [row.mesh for row in found.meshes] == [
        "none", "data=2", "shard=2",
    ]  # fmt: skip
    assert not found.scaling and found.recommendation is None
    text = str(found)
    assert "memory of a worker is not known" in text
    assert "times of a mesh are not predicted" in text
    assert max(map(len, found.lines())) <= 80


@pytest.mark.slow
def test_the_plan_is_the_one_of_fit(df: DataFrame) -> None:
    plan = explain(df, request(validation_col="held"), PLAN_ONLY).plan
    summary = fit(df, request(validation_col="held")).summary
    assert (plan.rows, plan.validation_rows) == (summary.rows, summary.validation_rows)
    assert plan.num_workers == summary.world_size
    assert plan.total_steps == summary.steps
    assert plan.slots == 2
    assert plan.parameters == 3 * 8 + 8 + 2 * 8 + 8 * 3 + 3


@pytest.mark.slow
def test_skew_is_that_of_the_spool(spark: SparkSession) -> None:
    from pyspark.sql import functions as F

    from sparkdl.explain.calibrate import shard_rows
    from sparkdl.spark.frames.prepare_columns import prepare

    features = F.array(F.when(F.col("id") % 2 == 0, F.lit(0)).otherwise(F.col("id")))
    many = spark.range(0, 1000, 1, 3).select(features.alias("features"))
    prepared = [prepare(many.schema, "features", "feature", float_dtype="float32")]
    sample = take_sample(many, prepared, None, 60.0)
    assert sample.is_all
    expected = shard_rows(sample.hashes, 1000, 5)
    spec = TableSpec(columns=tuple(prepared), num_shards=5, at_once=False)
    table = ShardTable(many, spec, run_id="skew")
    try:
        found = [part.shard.num_rows for part in table.collect()]
    finally:
        table.close()
    assert found == expected
    assert max(found) > 400


@pytest.mark.parametrize(
    ("sql", "changes", "kind"),
    [
        ("IF(label = 2, NULL, label)", {}, DataError),
        ("label", {"label_col": "none"}, DataError),
        ("label", {"num_workers": 64}, ClusterError),
        ("label", {"strategy": "alreduce"}, ConfigError),
    ],
)
def test_what_cannot_be_fitted_cannot_be_explained(
    df: DataFrame, sql: str, changes: dict[str, Any], kind: type[Exception]
) -> None:
    from pyspark.sql import functions as F

    changed = df.withColumn("label", F.expr(sql))
    with pytest.raises(kind) as by_fit:
        fit(changed, request(**changes))
    with pytest.raises(kind) as by_explain:
        explain(changed, request(**changes), PLAN_ONLY)
    # The numbers of partitions and rows differ: each looks at other rows first.
    first, told = (
        re.sub(r"\d+", "N", str(caught.value).split("(such as", maxsplit=1)[0])
        for caught in (by_fit, by_explain)
    )
    assert told == first


@pytest.mark.slow
def test_module_that_fails_on_the_workers(df: DataFrame) -> None:
    with pytest.raises(WorkerError, match="not on a worker"):
        explain(df, request(module=Broken), QUICK)


class Broken(nn.Module):
    """Can be run, but not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        if self.training and TaskContext.get() is not None:  # not on the driver, which tries it
            raise ValueError("not on a worker")
        return self.layer(features)


@pytest.fixture(scope="module")
def explained(spark: SparkSession) -> Explanation:
    """Measured with all that training has; a callback that refuses is left out."""
    with shown_by(lambda what, detail: SEEN.append(what)):
        return explain(rows(spark, 5000), request(callbacks=(Refusing(),), verbose=1), QUICK)


SEEN: list[str] = []


def test_it_says_what_it_does(explained: Explanation) -> None:
    phases = [
        "checking what is asked for",
        "looking at some rows",
        "counting the rows",
        "checking the executors",
        "writing a sample of the rows for the workers",
        "starting workers",
        "measuring steps and messages",
        "measuring rounds of averaging",
    ]
    assert [what for what in dict.fromkeys(SEEN) if what in phases] == phases


def test_all_that_was_measured_has_times(explained: Explanation, spark: SparkSession) -> None:
    assert [row.workers for row in explained.scaling][:2] == [1, 2]
    assert all(row.step_seconds > 0 for row in explained.scaling)
    assert explained.scaling[-1].workers == 64
    assert any("64 workers, more than were measured" in note for note in explained.notes)
    named = {row.strategy.split("(")[0] for row in explained.strategies}
    assert {"AllReduce", "LocalSGD", "AsyncSGD", "Gossip", "ParameterAveraging"} <= named
    assert explained.recommendation is not None
    assert explained.recommendation.num_workers in (1, 2)
    assert explained.recommendation.reasons
    assert explained.plan.peak_bytes is not None
    # Adam keeps two moments and a count for each of 4 + 2 tensors.
    trained = 3 * 8 + 8 + 2 * 8 + 8 * 3 + 3
    assert explained.plan.optimizer_bytes == 4 * (2 * trained + 6)
    assert spools(spark) == []
    assert "recommended" in str(explained)
    assert "<table>" in explained._repr_html_()
    assert json.loads(json.dumps(explained.to_dict(), allow_nan=False))["plan"]["rows"] == 5000


@pytest.mark.slow
@pytest.mark.classic
def test_a_cluster_without_gangs(
    df: DataFrame, monkeypatch: pytest.MonkeyPatch, spark: SparkSession
) -> None:
    real = spark.conf.get
    key = "spark.ssl.enabled"
    for module in (slots, measure_gang):
        monkeypatch.setattr(
            module, "conf", lambda _, asked: "true" if asked == key else real(asked, None)
        )
    found = explain(df, request(strategy="parameter_averaging"), QUICK)
    assert any("this cluster runs no gang" in note for note in found.notes)
    assert found.scaling
    assert found.recommendation is not None
    assert found.recommendation.strategy.startswith("ParameterAveraging")
    with pytest.raises(ClusterError, match=r"spark\.ssl\.enabled asks for encrypted traffic"):
        explain(df, request(), QUICK)


def with_executors(monkeypatch: pytest.MonkeyPatch, number: int | None) -> None:
    """Have the checks before the first job find so many executors."""

    def checked(*arguments: Any) -> Any:
        found = check_request(*arguments)
        cluster = replace(found.slots.cluster, num_executors=number)
        return replace(found, slots=replace(found.slots, cluster=cluster))

    monkeypatch.setattr(estimate, "check_request", checked)


def test_a_cluster_whose_executors_come_with_the_first_job(
    df: DataFrame, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_executors(monkeypatch, 0)
    found = explain(df, request(strategy="parameter_averaging"), PLAN_ONLY)
    assert found.plan.slots == 2
    assert found.scaling == ()


@pytest.mark.slow
def test_a_cluster_that_does_not_tell_its_slots(
    df: DataFrame, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_executors(monkeypatch, None)
    monkeypatch.setattr(Slots, "asked_again", lambda slots, _: slots)
    asked = request(strategy="parameter_averaging", num_workers=5)
    found = explain(df, asked, QUICK)
    assert found.plan.slots is None
    assert any("does not tell how many slots it has" in note for note in found.notes)
    assert [row.workers for row in found.scaling] == [1, 2, 5, 64]
    assert found.plan.mode == found.strategies[0].mode == "rounds"
    assert found.strategies[0].strategy == "ParameterAveraging()"
    refused = {row.strategy: row.why_not for row in found.strategies}
    assert refused["AllReduce()"] == "no gang was measured, see the notes"


@pytest.mark.slow
def test_an_interrupt_ends_it_and_leaves_nothing(
    spark: SparkSession, df: DataFrame, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = measure_gang.measure_rounds

    def pressed(*given: Any) -> Any:
        signal.raise_signal(signal.SIGINT)
        return real(*given)

    monkeypatch.setattr(measure_gang, "measure_rounds", pressed)
    with pytest.raises(KeyboardInterrupt, match="its temporary files are being removed"):
        explain(df, request(), QUICK)
    assert spools(spark) == []


@pytest.mark.slow
def test_a_source_with_fewer_rows_than_a_batch(spark: SparkSession, tmp_path: Path) -> None:
    from sparkdl import ParquetSource

    rows(spark, 20).select("features", "label").write.parquet(str(tmp_path / "rows"))
    found = explain(ParquetSource(str(tmp_path / "rows")), request(), QUICK)
    assert found.plan.steps_per_epoch == 1
    assert sum(found.plan.rows_by_shard) == found.plan.rows == 20
    assert found.scaling[0].step_seconds > 0
    assert any("ParquetSource" in note for note in found.notes)


@pytest.mark.slow
def test_equal_rows_leave_a_rank_without_any(spark: SparkSession) -> None:
    from pyspark.sql import functions as F

    equal = rows(spark, 200).withColumn("features", F.array(*map(F.lit, (1.0, 2.0, 3.0))))
    for label in range(3):
        one = equal.withColumn("label", F.lit(label))
        if explain(one, request(), PLAN_ONLY).plan.rows_by_shard[0] == 0:
            break
    else:
        pytest.fail("all of them are in the first shard")
    assert explain(one, request(), QUICK).scaling[0].step_seconds > 0


@pytest.mark.slow
def test_rows_are_counted_unless_their_number_is_given(spark: SparkSession) -> None:
    many = rows(spark, 9000)
    assert explain(many, request(), PLAN_ONLY).plan.rows == 9000
    given = explain(many, request(), ExplainOptions(calibrate=False, num_rows=50_000))
    assert given.plan.rows == 50_000
    assert given.plan.steps_per_epoch >= 50_000 / 2 / 16


def test_rows_are_held_out_once(spark: SparkSession) -> None:
    from sparkdl.sync.population.tournament import Tournament

    count = 10_000
    strategy = Tournament(holdout_fraction=0.1)
    plan = explain(rows(spark, count), request(strategy=strategy), PLAN_ONLY).plan
    assert plan.rows + plan.validation_rows == count
    assert plan.validation_rows == pytest.approx(0.1 * count, abs=2)
    assert sum(plan.rows_by_shard) == plan.rows


@pytest.mark.slow
def test_a_given_number_of_rows_is_divided_as_the_sample_is(spark: SparkSession) -> None:
    from pyspark.sql import functions as F

    asked = request(validation_col="held")
    config = replace(asked.config, early_stopping=EarlyStopping(patience=2))
    given = ExplainOptions(calibrate=False, num_rows=50_000)
    found = explain(rows(spark, 9000), replace(asked, config=config), given)
    assert found.plan.rows + found.plan.validation_rows == 50_000
    assert found.plan.validation_rows == pytest.approx(12_500, rel=0.05)
    assert any("as the sample's are" in note for note in found.notes)
    late = rows(spark, 9000).withColumn("held", F.col("text").cast("int") > 8000)
    assert explain(late, replace(asked, config=config), given).plan.rows == 50_000


@pytest.mark.parametrize(
    "wrong", [{"num_rows": 0}, {"num_workers": (0,)}, {"count_seconds": 0}, {"measure_seconds": -1}]
)
def test_options_are_checked(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        ExplainOptions(**wrong)


class Refusing(Callback):
    def on_train_begin(self, state: object) -> None:
        raise AssertionError("nothing is trained")
