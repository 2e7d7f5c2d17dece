"""What is not there, or is in the way, is told in one line before Spark starts."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from sparkdl.cli.job_files import spark_session
from sparkdl.cli.job_files.job_file import SparkSection
from sparkdl.cli.job_files.places import here
from sparkdl.cli.main import main

VARIABLES = ("HADOOP_CONF_DIR", "YARN_CONF_DIR", "SPARK_CONF_DIR", "SPARK_HOME", "SPARK_REMOTE",
             "PYSPARK_GATEWAY_PORT", "PYSPARK_SUBMIT_ARGS")  # fmt: skip


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with rows, a model, and no configuration of Hadoop's."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for place in ("rows", "model/metadata", "images"):
        (tmp_path / place).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


MODEL, ROWS = "--set model.path=model", "--set data.path=rows"
TRAINS = (
    "--set model.factory=torch.nn:Linear --set model.args={in_features=1,out_features=2} "
    "--set estimator.num_workers=2"
)
NO_FILE = "there is no such file or folder; check"
MISTAKES = {
    "evaluate --set model.path=modle --set data.path=rows": (
        "there is no saved model at modle; check model.path, or train first"
    ),
    f"evaluate --set model.path=rows {ROWS}": (
        "there is no saved model at rows; check model.path, or train first"
    ),
    f"evaluate {MODEL} --set data.path=row": f"cannot read 'row': {NO_FILE} data.path",
    f"predict --set model.path=file:/none {ROWS} --set output.path=new": (
        "there is no saved model at file:/none; check model.path, or train first"
    ),
    f"predict {MODEL} {ROWS} --set output.path=images": (
        "there is something at images already; choose another output.path, or output.mode "
        "'overwrite' or 'append'"
    ),
    f"explain {TRAINS} --set output.path=model --set data.path=row": (
        f"cannot read 'row': {NO_FILE} data.path"
    ),
    f"train {TRAINS} {ROWS} --set output.path=model": (
        "there is something at model already; choose another output.path, or replace it with "
        "--set output.overwrite=true"
    ),
    f"train {TRAINS} {ROWS} --set output.path=new --set validation.path=held": (
        f"cannot read 'held': {NO_FILE} validation.path"
    ),
    f"train {TRAINS} {ROWS} --set output.path=new --set test.path=held": (
        f"cannot read 'held': {NO_FILE} test.path"
    ),
    "prepare --set data.path=image --set output.path=new": (
        f"cannot read 'image': {NO_FILE} data.path"
    ),
    "prepare --set data.path=images --set output.path=new --set labels.source=table --set "
    "labels.table={path='t.csv',format='csv'}": f"cannot read 't.csv': {NO_FILE} labels.table.path",
}  # fmt: skip


@pytest.mark.parametrize("command", MISTAKES)
def test_one_line_before_spark_starts(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spark_session, "make_session", pytest.fail)
    assert main(command.split()) == 1
    said = capsys.readouterr().err.removeprefix("checking the job file\n")
    assert said == f"error: {MISTAKES[command]}\n"


def test_what_spark_may_find_elsewhere_is_left_to_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_there = here(SparkSection())
    assert is_there("rows") is is_there(f"file://{folder}/rows") is True
    assert is_there("none") is False
    for unknown in ("hdfs:///rows", "s3://bucket/rows", "row*", "{rows,images}"):
        assert is_there(unknown) is None
    remote = {"spark.remote": "sc://host:15002"}
    for section in (SparkSection(master="sc://host:15002"), SparkSection(conf=remote)):
        assert here(section)("file:/none") is None
    assert here(SparkSection(master="yarn"))("none") is None
    default = SparkSection(conf={"spark.hadoop.fs.defaultFS": "hdfs://name-node:8020"})
    assert (here(default)("none"), here(default)("file:/none")) == (None, False)
    (folder / "conf").mkdir()
    for name, text in (
        ("core-site.xml", "<name>fs.defaultFS</name>"),
        ("spark-defaults.conf", "spark.hadoop.fs.default.name hdfs://name-node:8020"),
        ("spark-env.sh", "export HADOOP_CONF_DIR=/etc/hadoop/conf"),
    ):
        (folder / "conf" / name).write_text(text, encoding="utf-8")
        with monkeypatch.context() as patch:
            patch.setenv("SPARK_CONF_DIR", str(folder / "conf"))
            assert here(SparkSection())("none") is None
            patch.setenv("SPARK_CONF_DIR", str(folder))
            patch.setenv("SPARK_HOME", str(folder))
            assert here(SparkSection())("none") is None
        (folder / "conf" / name).unlink()
    for variable, known in (("HADOOP_CONF_DIR", False), ("PYSPARK_GATEWAY_PORT", None)):
        with monkeypatch.context() as patch:
            patch.setenv(variable, "1")
            assert here(SparkSection())("none") is None
            assert here(SparkSection())("file:/none") is known


def test_a_search_without_optuna_does_not_start_spark(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spark_session, "make_session", pytest.fail)
    monkeypatch.setitem(sys.modules, "optuna", None)
    search = "--set study.search={'estimator.epochs'={choices=[1]}} --set study.metric=loss"
    assert main(f"tune {TRAINS} {ROWS} {search} --set output.path=new".split()) == 1
    assert capsys.readouterr().err.removeprefix("checking the job file\n") == (
        "error: a search for hyperparameters needs Optuna; install it on the driver: pip install "
        "optuna\n"
    )
