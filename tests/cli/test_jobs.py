from __future__ import annotations

import inspect
import json
import shutil
import signal
import threading
import time
from dataclasses import fields, replace
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from torch import nn

from sparkdl.cli import jobs
from sparkdl.cli.job_files.job_file import (
    DataSection,
    EvaluateJob,
    EvaluateOutput,
    EvaluationSection,
    ObjectRef,
    PredictJob,
    PredictOutput,
    SavedModel,
    TrainJob,
    TrainOutput,
    ValidationSection,
    load_job,
)
from sparkdl.cli.job_files.job_objects import VALIDATION_COLUMN
from sparkdl.cli.jobs import (
    _choose_columns,
    load_model,
    read_data,
    read_training_data,
    run_evaluate,
    run_explain,
    run_predict,
    run_train,
)
from sparkdl.config import ExplainOptions
from sparkdl.data.plan import Column
from sparkdl.errors import ConfigError, DataError, SparkDLError, StorageError
from sparkdl.estimator import TorchEstimator
from sparkdl.model import TorchClassifierModel
from sparkdl.runtime.activity import shown_by
from sparkdl.spark.params.stage_metadata import _parent, check_place

pytestmark = pytest.mark.spark

X = Column(name="x", role="feature", dtype="float32", shape=(2,))


def classifier() -> TorchClassifierModel:
    """Predicts class 1 where the second number is the larger one."""
    return TorchClassifierModel(nn.Identity(), [X], num_classes=2)


@pytest.fixture
def rows(spark: SparkSession) -> DataFrame:
    values = [
        ([1.0, 0.0], 0, 1.0),
        ([0.0, 2.0], 1, 2.0),
        ([3.0, 1.0], 1, 0.5),
        ([0.0, 1.0], 1, 1.0),
    ]
    return spark.createDataFrame(values, "x array<float>, label int, weight double")


@pytest.fixture
def files(rows: DataFrame, tmp_path: Path) -> str:
    rows.write.parquet(str(tmp_path / "rows"))
    return str(tmp_path / "rows")


@pytest.mark.parametrize("format", ["parquet", "json", "orc", "csv"])
def test_every_format_of_files_is_read(spark: SparkSession, tmp_path: Path, format: str) -> None:
    path = str(tmp_path / "files")
    spark.range(5).selectExpr("CAST(id AS INT) AS n").write.format(format).save(path)
    section = DataSection(format=format, path=path, schema="n INT", select=("n + 1 AS m",))
    assert sorted(row.m for row in read_data(spark, section).collect()) == [1, 2, 3, 4, 5]


def test_a_table_is_read(spark: SparkSession) -> None:
    spark.range(3).createOrReplaceTempView("job_rows")
    assert read_data(spark, DataSection(format="table", table="job_rows")).count() == 3


def test_reader_options_have_an_effect(spark: SparkSession, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("n;m\n1;2\n", encoding="utf-8")
    options = {"header": True, "sep": ";", "inferSchema": True}
    section = DataSection(format="csv", path=str(tmp_path / "a.csv"), options=options)
    assert [row.asDict() for row in read_data(spark, section).collect()] == [{"n": 1, "m": 2}]


@pytest.mark.slow
def test_missing_files_and_columns_are_named(
    spark: SparkSession, files: str, tmp_path: Path
) -> None:
    above = tmp_path / "above"
    (above / "train").mkdir(parents=True)
    with pytest.raises(DataError) as caught:
        read_data(spark, DataSection(path=str(above)))
    assert str(caught.value) == (
        f"cannot read '{above}': it has no parquet files; name the folder that they lie in"
    )
    with pytest.raises(DataError, match=r"cannot read '/none'"):
        read_data(spark, DataSection(path="/none"))
    with pytest.raises(DataError, match="no_such"):
        read_data(spark, DataSection(path=files, select=("no_such",)))


def test_a_file_of_another_format_is_one_sentence(spark: SparkSession, tmp_path: Path) -> None:
    """It was 180 lines of Java's."""
    (tmp_path / "a.csv").write_text("n,m\n1,2\n" * 9, encoding="utf-8")
    with pytest.raises(DataError, match="see that its files are of the format") as caught:
        read_data(spark, DataSection(path=str(tmp_path / "a.csv")))
    assert len(str(caught.value).splitlines()) == 1


def training(path: str, validation: ValidationSection | None) -> TrainJob:
    return TrainJob(
        data=DataSection(path=path),
        model=ObjectRef(factory="sparkdl.models.demo:DigitsNet"),
        output=TrainOutput(path=path),
        validation=validation,
    )


@pytest.mark.slow
@pytest.mark.gang
def test_a_training_job_is_explained(spark: SparkSession, files: str, tmp_path: Path) -> None:
    output = TrainOutput(path=str(tmp_path / "model"))
    asked = replace(training(files, None), output=output)
    model = ObjectRef(factory="torch.nn:Linear", args={"in_features": 2, "out_features": 2})
    estimator = replace(asked.estimator, features_col="x", num_workers=1)
    found = run_explain(replace(asked, model=model, estimator=estimator), spark)
    assert found.plan.rows == 4
    assert "recommended" in found.lines()
    assert not Path(asked.output.path).exists()


@pytest.mark.slow
def test_a_job_says_how_much_is_measured(spark: SparkSession, tmp_path: Path) -> None:
    rows = spark.range(5000).select(
        F.array(F.col("id").cast("float"), F.lit(1.0)).alias("x"), (F.col("id") % 2).alias("label")
    )
    rows.write.parquet(str(tmp_path / "rows"))
    settings = [
        f"data.path={tmp_path / 'rows'}", "model.factory=torch.nn:Linear",
        "model.args={in_features=2, out_features=2}", f"output.path={tmp_path / 'model'}",
        "estimator.features_col=x", "estimator.num_workers=1", "explain.num_rows=70_000",
        "explain.count_seconds=50", "explain.calibrate=false", "explain.num_workers=[64]",
    ]  # fmt: skip
    job = load_job(TrainJob, None, settings)
    assert job.explain == ExplainOptions(
        num_rows=70_000, count_seconds=50, calibrate=False, num_workers=(64,)
    )
    found = run_explain(job, spark)
    assert found.plan.rows == 70_000
    assert found.scaling == ()
    with pytest.raises(ConfigError, match=r"\[explain\] num_rows must be at least 1"):
        load_job(TrainJob, None, [*settings, "explain.num_rows=0"])


def test_the_section_has_all_options_of_explain() -> None:
    given = set(inspect.signature(TorchEstimator.explain).parameters)
    assert {item.name for item in fields(ExplainOptions)} == given - {"self", "dataset"}


def test_validation_files_are_marked(spark: SparkSession, tmp_path: Path) -> None:
    spark.range(4).write.parquet(str(tmp_path / "train"))
    spark.range(10, 12).write.parquet(str(tmp_path / "validation"))
    section = ValidationSection(path=str(tmp_path / "validation"))
    marked = read_training_data(spark, training(str(tmp_path / "train"), section))
    assert sorted(marked.filter(VALIDATION_COLUMN).toPandas()["id"]) == [10, 11]
    assert sorted(marked.filter(f"NOT {VALIDATION_COLUMN}").toPandas()["id"]) == [0, 1, 2, 3]
    plain = read_training_data(spark, training(str(tmp_path / "train"), None))
    assert VALIDATION_COLUMN not in plain.columns


@pytest.mark.slow
def test_an_existing_model_is_not_replaced_unasked(spark: SparkSession, files: str) -> None:
    with pytest.raises(ConfigError, match=r"--set output\.overwrite=true"):
        run_train(training(files, None), spark)


@pytest.mark.parametrize("is_url", [True, False])
def test_a_place_that_cannot_be_written_is_found_before_anything_is_read(
    spark: SparkSession, tmp_path: Path, is_url: bool
) -> None:
    (tmp_path / "file").write_text("no folder")
    place = f"{'file:' * is_url}{tmp_path}/file/models/m"
    job = replace(training("/there is no such data", None), output=TrainOutput(path=place))
    with pytest.raises(StorageError, match="cannot write"):
        run_train(job, spark)


def test_a_place_that_can_be_written_is_left_as_it_was(spark: SparkSession, tmp_path: Path) -> None:
    for folder, left in (("new/m", []), ("old", ["x"])):
        path = tmp_path / folder
        for name in left:
            (path / name).mkdir(parents=True)
        check_place(f"{path}/", spark)
        assert path.exists() == bool(left)
        assert [entry.name for entry in path.parent.iterdir() if entry != path] == []
        assert not left or [entry.name for entry in path.iterdir()] == left
        shutil.rmtree(tmp_path / folder.split("/")[0])


@pytest.mark.parametrize(
    ("path", "parent"),
    [
        ("m", "."), ("a/m", "a"), ("/m", "/"), ("/a/m/", "/a"), ("file:/m", "file:/"),
        ("hdfs:/a/m", "hdfs:/a"), ("s3://bucket/m", "s3://bucket"), ("s3://bucket", "s3://bucket"),
    ],
)  # fmt: skip
def test_the_folder_that_a_place_lies_in(path: str, parent: str) -> None:
    assert _parent(path) == parent


@pytest.fixture
def saved(tmp_path: Path) -> SavedModel:
    path = str(tmp_path / "model")
    classifier().write().save(path)
    return SavedModel(path=path)


@pytest.mark.slow
def test_a_saved_model_is_evaluated(
    spark: SparkSession, files: str, saved: SavedModel, tmp_path: Path
) -> None:
    target = tmp_path / "new" / "scores.json"
    job = EvaluateJob(
        data=DataSection(path=files),
        model=saved,
        evaluation=EvaluationSection(weight_col="weight"),
        output=EvaluateOutput(path=str(target)),
    )
    scores = run_evaluate(job, spark)
    assert scores["accuracy"] == pytest.approx(4 / 4.5)
    assert json.loads(target.read_text(encoding="utf-8")) == scores.to_dict()


@pytest.mark.slow
def test_scores_go_where_a_url_says(
    spark: SparkSession, files: str, saved: SavedModel, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    place = tmp_path / "new" / "scores.json"
    job = EvaluateJob(
        data=DataSection(path=files), model=saved, output=EvaluateOutput(path=f"file://{place}")
    )
    scores = run_evaluate(job, spark)
    assert json.loads(place.read_text(encoding="utf-8")) == scores.to_dict()
    run_evaluate(replace(job, output=EvaluateOutput(path="here.json")), spark)
    assert sorted(
        path.name for path in tmp_path.iterdir() if path.name not in ("model", "rows")
    ) == ["here.json", "new"]


@pytest.mark.parametrize(
    ("path", "kind"), [("runs/", ConfigError), ("nowhere://a/scores.json", StorageError)]
)
def test_scores_that_cannot_be_written_are_not_computed(
    spark: SparkSession, files: str, saved: SavedModel, path: str, kind: type[Exception],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(jobs, "load_model", lambda *_: pytest.fail("evaluates"))
    asked = EvaluateJob(data=DataSection(path=files), model=saved, output=EvaluateOutput(path=path))
    with pytest.raises(kind):
        run_evaluate(asked, spark)


@pytest.mark.slow
@pytest.mark.gang
def test_a_default_place_for_reports_that_cannot_be_written(
    spark: SparkSession, files: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    (tmp_path / "file").touch()
    below = str(tmp_path / "file" / "runs")
    monkeypatch.setattr(jobs, "REPORT_DIR", below)
    asked = replace(training(files, None), output=TrainOutput(path=str(tmp_path / "model")))
    model = ObjectRef(factory="torch.nn:Linear", args={"in_features": 2, "out_features": 2})
    estimator = replace(asked.estimator, features_col="x", num_workers=1, epochs=1, verbose=0)
    seen: list[str] = []
    with shown_by(lambda what, detail: seen.append(what)):
        report = run_train(replace(asked, model=model, estimator=estimator), spark)
    assert seen == ["looking at the rows and at the output's place", "saving the model"]
    assert report.summary.report_path is None
    assert "leave no report" in caplog.text
    named = replace(asked, model=model, estimator=replace(estimator, report_dir=below))
    with pytest.raises(StorageError, match="cannot write"):
        run_train(replace(named, output=TrainOutput(path=str(tmp_path / "other"))), spark)


@pytest.mark.slow
def test_predictions_are_written_as_arrays(
    spark: SparkSession, files: str, saved: SavedModel, tmp_path: Path
) -> None:
    output = PredictOutput(path=str(tmp_path / "p"), columns=("label", "probability"))
    job = PredictJob(data=DataSection(path=files), model=saved, output=output)
    seen: list[str] = []
    with shown_by(lambda what, detail: seen.append(what)):
        assert run_predict(job, spark).count() == 4
    assert seen == ["loading the model", "predicting and writing the rows"]
    written = spark.read.parquet(output.path)
    assert [kind for _, kind in written.dtypes] == ["int", "array<double>"]
    with pytest.raises(ConfigError, match=r"output\.mode 'overwrite' or 'append'"):
        run_predict(job, spark)


@pytest.mark.classic  # a Spark Connect client does not cancel its jobs at Ctrl-C
@pytest.mark.slow
def test_ctrl_c_while_predicting_shows_no_frames_of_py4j(
    spark: SparkSession, files: str, saved: SavedModel, tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    def slowly(value: float) -> float:
        time.sleep(60)
        return value

    def press() -> None:
        while not spark.sparkContext.statusTracker().getActiveStageIds():
            time.sleep(0.1)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    spark.udf.register("slowly", slowly, "double")
    select = ("x", "label", "slowly(weight) AS weight")
    output = PredictOutput(path=str(tmp_path / "p"), columns=("weight", "prediction"))
    job = PredictJob(data=DataSection(path=files, select=select), model=saved, output=output)
    threading.Thread(target=press, daemon=True).start()
    with pytest.raises(KeyboardInterrupt, match="its Spark jobs were cancelled"):
        run_predict(job, spark)
    assert "py4j" not in caplog.text
    assert spark.range(3).count() == 3  # py4j takes no late answer for that of this call


@pytest.mark.slow
def test_csv_takes_plain_columns_only(
    spark: SparkSession, files: str, saved: SavedModel, tmp_path: Path
) -> None:
    def job(*columns: str) -> PredictJob:
        path = str(tmp_path / "csv")
        output = PredictOutput(path=path, format="csv", columns=columns, options={"header": True})
        return PredictJob(data=DataSection(path=files), model=saved, output=output)

    with pytest.raises(ConfigError, match=r"CSV cannot hold the columns \['x', 'rawPrediction'"):
        run_predict(job(), spark)
    with pytest.raises(ConfigError, match=r"names \['no_such'\], which are not there; known: x"):
        run_predict(job("no_such"), spark)
    dotted = spark.read.parquet(files).withColumn("a.b", F.lit(1))
    assert _choose_columns(dotted, ("a.b", "LABEL")).columns == ["a.b", "LABEL"]
    written = run_predict(job("label", "prediction"), spark)
    assert sorted((row.label, row.prediction) for row in written.collect()) == [
        (0, 0.0), (1, 0.0), (1, 1.0), (1, 1.0)
    ]  # fmt: skip


def test_a_path_without_a_model_is_named(spark: SparkSession, tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="there is no saved model at"):
        load_model(spark, str(tmp_path))


def test_passwords_in_paths_are_not_shown(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = "file://me:secret@localhost/none"
    monkeypatch.setattr(jobs, "is_there", lambda path, _: "metadata" not in path)
    for work in (
        lambda: load_model(spark, url),
        lambda: read_data(spark, DataSection(format="table", table=f"`{url}`")),
        lambda: run_train(replace(training("/", None), output=TrainOutput(path=url)), spark),
    ):
        with pytest.raises(SparkDLError, match=r"//\*\*\*@localhost") as caught:
            work()
        assert "secret" not in str(caught.value)
