"""The command ``sparkdl``: what it takes, and how it ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import sparkdl
from sparkdl.cli.job_commands import EXPLAIN, Form
from sparkdl.cli.job_files import spark_session
from sparkdl.cli.job_files.job_file import EvaluateJob, PredictJob, TrainJob, load_job
from sparkdl.cli.job_files.prepare_file import PrepareJob
from sparkdl.cli.job_files.study_file import TuneJob
from sparkdl.cli.main import main

ROOT = Path(__file__).parent.parent.parent
JOBS = {
    "train": TrainJob,
    "evaluate": EvaluateJob,
    "predict": PredictJob,
    "tune": TuneJob,
    "prepare": PrepareJob,
}
COMMANDS = [*JOBS, "explain", "doctor", "export", "ui", "clean", "completion"]


@pytest.fixture(autouse=True)
def own_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command adds the working directory."""
    monkeypatch.setattr(sys, "path", [*sys.path])


def run_python(code: str, **variables: str) -> str:
    environ = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environ, check=True, capture_output=True, text=True)
    return done.stdout


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"sparkdl {sparkdl.__version__}\n"


def test_help_lists_all_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"\n  {name} " in text for name in COMMANDS)
    assert "sparkdl train --starter > train.toml" in text


@pytest.mark.parametrize("name", [name for name in COMMANDS if name != "ui"])
def test_every_command_has_help_with_an_example_of_itself(
    capsys: pytest.CaptureFixture[str], name: str
) -> None:
    assert main([name, "--help"]) == 0
    example = capsys.readouterr().out.split("example:\n")[1]
    assert f"sparkdl {name} " in example


@pytest.mark.parametrize("name", JOBS)
def test_every_starter_is_a_valid_job(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str
) -> None:
    assert main([name, "--starter"]) == 0
    path = tmp_path / f"{name}.toml"
    path.write_text(capsys.readouterr().out, encoding="utf-8")
    job = load_job(JOBS[name], path)
    assert job.spark.conf == {"spark.log.level": "ERROR"}


def test_no_arguments_are_too_few(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "COMMAND" in capsys.readouterr().err


def test_a_command_without_a_job_file_names_the_starter(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train"]) == 2
    assert "'sparkdl train --starter > train.toml' writes one" in capsys.readouterr().err


def test_a_users_mistake_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--config", "conf/digits.toml", "--set", "estimator.epoch=3"]) == 1
    text = capsys.readouterr().err
    assert text.startswith("error: --set estimator.epoch=3: unknown key 'epoch' in [estimator]; d")
    assert text.count("\n") == 1


def test_a_wrong_value_is_found_before_spark_is_started(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spark_session, "make_session", pytest.fail)
    setting = "estimator.learning_rate=-1"
    assert main(["train", "--config", "conf/digits.toml", "--set", setting]) == 1
    said = f"error: --set {setting}: estimator.learning_rate must be positive; received -1.0\n"
    # A file has a line for the check where that takes a second.
    assert capsys.readouterr().err.removeprefix("checking the job file\n") == said


def test_help_and_parsing_import_neither_torch_nor_pyspark() -> None:
    code = (
        "import json, sys\nfrom sparkdl.cli.main import main\nmain(['train', '--help'])\n"
        "heavy = {'torch', 'pyspark', 'pandas', 'pyarrow', 'numpy'}\n"
        "print(json.dumps(sorted(heavy & set(sys.modules))))"
    )
    assert json.loads(run_python(code).splitlines()[-1]) == []


def test_the_working_directory_can_hold_a_users_modules(tmp_path: Path) -> None:
    (tmp_path / "own_module.py").write_text("VALUE = 3\n", encoding="utf-8")
    code = (
        "import os, sys\nsys.path = [p for p in sys.path if p]\n"
        f"os.chdir({str(tmp_path)!r})\n"
        "from sparkdl.cli.main import main\nmain(['train', '--starter'])\n"
        "import own_module\nprint(own_module.VALUE)"
    )
    assert run_python(code).endswith("\n3\n")


def test_explain_reads_a_training_job() -> None:
    command = EXPLAIN.command(Form.COMMAND)
    given = command.make_context("explain", ["--set", "data.path=x"])
    assert given.params["settings"] == ("data.path=x",)


def test_python_dash_m_is_the_same_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "sparkdl", "--version"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    assert done.stdout == f"sparkdl {sparkdl.__version__}\n"


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_command_ends_when_nobody_reads_its_output(stream: str) -> None:
    """As by SIGPIPE: it does not train on for nobody, and has nothing to complain of."""
    code = (
        "import sys, time; from sparkdl.cli.command_line import ended, while_read\n"
        "def work():\n"
        f"    print('a line', file=sys.{stream}, flush=True)\n"
        "    time.sleep(60)\n"  # which the interruption ends
        "sys.exit(while_read(lambda: ended(work)))"
    )
    ours, theirs = os.pipe()
    os.close(ours)
    out, err = (theirs if name == stream else subprocess.PIPE for name in ("stdout", "stderr"))
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([sys.executable, "-c", code], env=environ, stdout=out, stderr=err)
    os.close(theirs)
    found = process.communicate(timeout=30)
    assert process.returncode == 141
    assert not any(found)


def test_help_that_nobody_reads_ends_so_too() -> None:
    ours, theirs = os.pipe()
    os.close(ours)
    line = [sys.executable, "-m", "sparkdl", "--help"]
    done = subprocess.run(line, cwd=ROOT, stdout=theirs, stderr=subprocess.PIPE, timeout=30)
    os.close(theirs)
    assert (done.returncode, done.stderr.strip()) == (141, b"")


def test_what_executors_run_does_not_import_click() -> None:
    modules = "sparkdl.cli.doctor.cluster_checks, sparkdl.cli.images.write_parquet"
    assert run_python(f"import sys, {modules}\nprint('click' in sys.modules)") == "False\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trian"], "unknown command 'trian'; did you mean 'train'? known: doctor, train"),
        (["train", "--confg", "x"], "Did you mean '--config'?"),
        (["completion", "basf"], "'basf' is not one of 'bash', 'zsh', 'fish'"),
        (["train", "--epochs", "3"], "no such option '--epochs'; write --set estimator.epochs="),
        (["train", "--lr=3"], "'--lr'; write --set estimator.learning_rate=VALUE\n"),
        (["train", "--nothing"], "No such option '--nothing'."),
        (["doctor", "--nothing"], "No such option '--nothing'."),
        (["predict", "--model", "m"], "no such option '--model'; write --set model.path=VALUE\n"),
        (["train", "--model", "m"], "no such option '--model'; write --set model.factory=VALUE\n"),
        (["predict", "m"], "(m); a job's values are in its file, see --keys: write --set SECTI"),
        (["train", "job.toml"], "name the job file by its option: --config job.toml\n"),
        (["train", "--config", "a.toml", "b.toml"], "unexpected extra argument (b.toml)"),
        (["doctor", "--no-cluster", "--num-workers", "3"], "--num-workers is about a cluster; lea"),
    ],
)
def test_what_is_misspelt_is_suggested(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


def test_a_command_needs_no_streams() -> None:
    code = (
        "import sys; sys.stdout = sys.stderr = None; from sparkdl.cli.main import main; "
        "status = main(['train', '--starter']); sys.exit(0 if status == 0 else 3)"
    )
    assert run_python(code) == ""
