from __future__ import annotations

from pathlib import Path

import pytest

from sparkdl.cli.job_files.job_file import (
    DataSection,
    EvaluateJob,
    ObjectRef,
    PredictJob,
    SparkSection,
    TrainJob,
    ValidationSection,
    brings_modules,
    check_reference,
    load_job,
)
from sparkdl.config import EarlyStopping
from sparkdl.errors import ConfigError

CONF = Path(__file__).parents[3] / "conf"

SMALLEST = """
[data]
path = "data/train"
[model]
factory = "package.module:Net"
[output]
path = "models/m"
"""


@pytest.fixture
def smallest(tmp_path: Path) -> Path:
    path = tmp_path / "job.toml"
    path.write_text(SMALLEST, encoding="utf-8")
    return path


def test_the_files_of_conf_are_valid() -> None:
    assert load_job(TrainJob, CONF / "digits.toml").estimator.input_shape == (1, 8, 8)
    assert load_job(EvaluateJob, CONF / "evaluate.toml").model.path == "models/digits"
    assert load_job(PredictJob, CONF / "predict.toml").output.mode == "overwrite"


def test_the_smallest_job_leaves_the_rest_to_the_defaults(smallest: Path) -> None:
    job = load_job(TrainJob, smallest)
    assert job.data == DataSection(path="data/train")
    assert job.estimator.given == {}
    assert job.validation is None
    assert not job.output.overwrite


def test_given_holds_what_was_set_and_not_the_kind(smallest: Path) -> None:
    settings = [
        "estimator.kind=regressor",
        "estimator.epochs=3",
        "estimator.learning_rate=1",
        "estimator.optimizer_params.momentum=0.9",
        "estimator.early_stopping.patience=2",
        "estimator.metrics={f1 = {factory = 'm:F1'}}",
        "estimator.input_cols=['a', 'b']",
    ]
    job = load_job(TrainJob, smallest, settings)
    assert job.estimator.kind == "regressor"
    assert job.estimator.given == {
        "epochs": 3,
        "learning_rate": 1.0,
        "optimizer_params": {"momentum": 0.9},
        "early_stopping": EarlyStopping(patience=2),
        "metrics": {"f1": ObjectRef(factory="m:F1")},
        "input_cols": ("a", "b"),
    }


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("estimator.epoch=3", "unknown key 'epoch' in [estimator]; did you mean 'epochs'?"),
        ("trainer.epochs=3", "unknown section [trainer]; known: data, model, output, validation"),
        ("data.format=avro", "data.format must be one of 'parquet', 'csv', 'json', 'orc', 'table'"),
        ("data.format=table", "[data] format 'table' needs the key 'table'"),
        ("data.table=t", "[data] format 'parquet' does not take the key 'table'"),
        ("estimator.epochs=many", "estimator.epochs must be an integer; received 'many'"),
        ("validation.fraction=1.5", "[validation] fraction must be between 0 and 1"),
        ("model.factory=Net", "[model] factory must have the form 'package.module:name'"),
        ("estimator.early_stopping.patience=0", "[estimator.early_stopping] patience must be at"),
    ],
)
def test_errors_begin_with_what_is_wrong_and_say_what_to_do(
    smallest: Path, setting: str, message: str
) -> None:
    with pytest.raises(ConfigError) as error:
        load_job(TrainJob, smallest, ["spark.app_name=x", setting])
    assert str(error.value).startswith(f"--set {setting}: ")
    assert message in str(error.value)


def test_all_that_is_wrong_is_told_at_once_each_with_its_place(smallest: Path) -> None:
    with smallest.open("a", encoding="utf-8") as file:
        file.write("\n[estimator]\nlr = 1\nbatchSize = 3\nepochs = 'x'\n[sprak]\n")
    with pytest.raises(ConfigError) as error:
        load_job(TrainJob, smallest, ["estimator.n_epochs=3", "data.format=csv"])
    lines = str(error.value).splitlines()
    assert lines[0] == f"{smallest}: unknown section [sprak]; did you mean 'spark'?"
    wanted = {
        f"{smallest}: unknown key 'lr' in [estimator]; did you mean 'learning_rate'?",
        f"{smallest}: unknown key 'batchSize' in [estimator]; did you mean 'batch_size'?",
        f"{smallest}: estimator.epochs must be an integer; received 'x'",
        "--set estimator.n_epochs=3: unknown key 'n_epochs' in [estimator]; did you mean 'epochs'?",
    }
    assert set(lines[1:]) == wanted
    assert len(lines) == 5


def test_a_tilde_in_a_path_is_the_home(smallest: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    job = load_job(TrainJob, smallest, ["output.path=~/models/m", "data.path=hdfs:///~/x"])
    assert (job.output.path, job.data.path) == ("/home/me/models/m", "hdfs:///~/x")


def test_the_file_is_blamed_for_what_is_in_it(smallest: Path) -> None:
    with smallest.open("a", encoding="utf-8") as file:
        file.write("\n[estimator]\nepochs = 0\n")

    def check(job: TrainJob) -> None:
        if job.estimator.epochs is not None and job.estimator.epochs < 1:
            raise ConfigError(f"epochs must be at least 1; received {job.estimator.epochs}")

    def blamed(*settings: str) -> str:
        with pytest.raises(ConfigError) as error:
            load_job(TrainJob, smallest, settings, check)
        return str(error.value).partition(":")[0]

    assert blamed() == blamed("spark.app_name=x") == str(smallest)
    assert blamed("spark.app_name=x", "estimator.epochs=-1") == "--set estimator.epochs=-1"
    assert load_job(TrainJob, smallest, ["estimator.epochs=2"], check).estimator.epochs == 2


def test_modules_that_only_the_session_brings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPARK_CONF_DIR", str(tmp_path))
    monkeypatch.delenv("SPARK_HOME", raising=False)
    assert not brings_modules(SparkSection())
    assert brings_modules(SparkSection(conf={"spark.submit.pyFiles": "own.py"}))
    (tmp_path / "spark-defaults.conf").write_text("spark.submit.pyFiles own.py", encoding="utf-8")
    assert brings_modules(SparkSection())


def test_validation_rows_are_marked_in_one_way_only(smallest: Path) -> None:
    for key in ("validation_indicator_col='held_out'", "validation_fraction=0.2"):
        settings = ["validation.fraction=0.1", f"estimator.{key}"]
        with pytest.raises(ConfigError, match=r"either the section \[validation\] or est"):
            load_job(TrainJob, smallest, settings)


def test_a_source_is_either_files_or_a_table() -> None:
    assert DataSection(format="table", table="db.t").path is None
    assert DataSection(path=("a", "b")).path == ("a", "b")
    with pytest.raises(ConfigError, match="needs the key 'path'"):
        DataSection()
    with pytest.raises(ConfigError, match="either 'fraction' or 'path'"):
        ValidationSection(fraction=0.1, path="p")


@pytest.mark.parametrize("reference", ["Net", "package:", ":Net", "a-b:Net", "a.b:1", "a:b:c"])
def test_what_names_no_object_is_refused(reference: str) -> None:
    with pytest.raises(ConfigError, match=r"must have the form 'package\.module:name'"):
        check_reference(reference, "factory")


def test_an_object_is_named_by_module_and_name() -> None:
    check_reference("package.module:Class.method", "factory")


def test_the_settings_alone_can_be_a_job() -> None:
    job = load_job(EvaluateJob, None, ["model.path=models/m", "data.path=data/test"])
    assert (job.model.path, job.data.path) == ("models/m", "data/test")
    with pytest.raises(ConfigError, match=r"the command line: missing section \[data\]"):
        load_job(EvaluateJob, None, ["model.path=models/m"])
