"""What the jobs print when they are done."""

from __future__ import annotations

import os
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sparkdl.cli.images.ledger import Report
from sparkdl.cli.job_commands import (
    TRAIN,
    Form,
    next_commands,
    options_to_repeat,
    prepared_lines,
)
from sparkdl.cli.job_files.job_file import (
    DataSection,
    EvaluateJob,
    PredictJob,
    SparkSection,
    load_job,
)
from sparkdl.cli.jobs import TrainReport
from sparkdl.report.summary import TrainingSummary, WeightsOf

PLAIN = DataSection(path="data/rows")
ROOT = Path(__file__).parent.parent.parent


def test_training_says_which_weights_the_model_has(capsys: pytest.CaptureFixture[str]) -> None:
    weights = WeightsOf(
        values={"epoch": 7, "steps": 9, "loss": 0.25, "val_loss": 0.123, "seconds": 1.0},
        best="val_loss",
        planned_epochs=40,
        last_epoch=10,
        stopped_early=True,
    )
    summary = TrainingSummary(history=[{"epoch": 7}], weights_of=weights)
    job: Any = SimpleNamespace(data=PLAIN, spark=SparkSection())
    TRAIN.show(job, TrainReport(path="m", summary=summary, scores=None), Form.COMMAND)
    assert (
        "weights of epoch 7 (best val_loss 0.123), of 40 epochs; stopped early after epoch 10\n"
        "  loss 0.25, val_loss 0.123\n"
    ) in capsys.readouterr().out


def test_the_commands_after_training_name_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VIRTUAL_ENV", os.sep)
    commands = next_commands("models/m", Form.SCRIPT, PLAIN)
    assert [command.split()[1] for command in commands] == ["jobs/evaluate.py", "jobs/predict.py"]
    assert all(command.endswith("--set model.path=models/m") for command in commands)


def test_from_another_folder_they_name_files_that_are_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "argv", [str(ROOT / "jobs" / "train.py")])
    monkeypatch.delenv("VIRTUAL_ENV", raising=False)
    monkeypatch.chdir(tmp_path)
    *_, evaluate = next_commands("m", Form.SCRIPT, PLAIN)[:-1]
    _, script, _, file, *_ = shlex.split(evaluate)
    assert (tmp_path / script).is_file() and (tmp_path / file).is_file()


def test_they_begin_with_the_environment_that_make_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VIRTUAL_ENV", raising=False)
    monkeypatch.setattr(sys, "prefix", str(ROOT / ".venv"))
    monkeypatch.setattr(sys, "base_prefix", "/usr")
    monkeypatch.chdir(ROOT)
    assert next_commands("m", Form.SCRIPT, PLAIN)[0].startswith("source .venv/bin/activate")


def test_from_the_command_they_need_no_file_of_the_repository() -> None:
    commands = next_commands("models/m", Form.COMMAND, PLAIN)
    assert all(command.startswith("sparkdl ") and "models/m" in command for command in commands)
    assert not any("conf/" in command or "jobs/" in command for command in commands)


def test_they_read_rows_as_training_did() -> None:
    """The model takes columns that only data.select makes."""
    data = DataSection(
        path="d", format="csv", options={"header": True}, select=("array(`x 1`) AS features", "y")
    )
    evaluate, predict, _ = next_commands("my models/m", Form.COMMAND, data)
    for command, kind in ((evaluate, EvaluateJob), (predict, PredictJob)):
        _, name, *words = shlex.split(command)
        assert name == kind.__name__.removesuffix("Job").lower()
        assert set(words[::2]) == {"--set"}
        job = load_job(kind, None, words[1::2])
        assert job.data == replace(data, path="ROWS")
        assert job.model.path == "my models/m"
    in_catalog = DataSection(format="table", table="db.t")
    assert "table" not in next_commands("m", Form.COMMAND, in_catalog)[0]


def test_they_run_where_training_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    section = SparkSection(master="local[3]")
    evaluate, *_ = next_commands("m", Form.COMMAND, PLAIN, section)
    words = shlex.split(evaluate)[3::2]
    assert load_job(EvaluateJob, None, words).spark == section
    conf = {"spark.master": "spark://h:7077"}
    monkeypatch.setattr("pyspark.SparkConf", lambda: conf)
    monkeypatch.setenv("PYSPARK_GATEWAY_PORT", "1")
    assert "--properties-file" in options_to_repeat(Form.SCRIPT)
    assert options_to_repeat(Form.COMMAND) == ""
    conf["spark.master"] = "local[2]"
    assert options_to_repeat(Form.SCRIPT) == ""


def report(num_bad: int = 7) -> Report:
    return Report(
        path="/data/o",
        files={"train": 2, "test": 1},
        rows={"train": 1500, "test": 9},
        rows_by_label={"train": {"cat": 1000, "dog": 500}, "test": {"cat": 9, "dog": 0}},
        bad=tuple((f"cat/{number}.png", "is broken") for number in range(num_bad)),
    )


def test_a_report_names_splits_classes_bad_files_and_the_next_command() -> None:
    text = "\n".join(prepared_lines(report(), Form.SCRIPT))
    assert "train          1,500 images in 2 files" in text
    assert "test               9 images in 1 file\n" in text
    assert "0 cat                      1,000" in text
    assert "7 bad files skipped, listed in bad_files.jsonl" in text
    assert "cat/4.png: is broken" in text and "cat/5.png" not in text and "and 2 more" in text
    command = text.split("next:")[1]
    assert "spark-submit jobs/train.py --config conf/images.toml" in command
    assert "--set data.path=/data/o/train" in command
    assert "--set test.path=/data/o/test" in command
    assert "--set model.args.num_classes=2" in command
    assert "validation" not in command


def test_without_bad_files_the_report_has_none() -> None:
    text = "\n".join(prepared_lines(report(num_bad=0), Form.COMMAND))
    assert "bad" not in text
    assert "sparkdl train --config FILE" in text
