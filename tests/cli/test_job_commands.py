from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType

import pytest

from sparkdl.cli.command_line import ended
from sparkdl.cli.job_commands import Form, JobCommand, run_job
from sparkdl.cli.job_files.job_file import EvaluateJob
from sparkdl.errors import DataError
from sparkdl.runtime.activity import is_shown

CONFIG = str(Path(__file__).parents[2] / "conf" / "evaluate.toml")


@dataclass(frozen=True, kw_only=True)
class Recording(JobCommand[EvaluateJob]):
    """Keeps the jobs that it is asked to do, or fails at them."""

    jobs: list[EvaluateJob] | None = None

    def do(self, job: EvaluateJob, form: Form) -> None:
        assert form is Form.SCRIPT
        if self.jobs is None:
            raise DataError(f"nothing at {job.data.path}")
        self.jobs.append(job)


def command(jobs: list[EvaluateJob] | None = None) -> Recording:
    return Recording(
        name="evaluate",
        kind=EvaluateJob,
        work="sparkdl.cli.jobs:run_evaluate",
        show=print,
        description="Do it.",
        config="conf/evaluate.toml",
        starter="evaluate.toml",
        settings=("", "--set data.format=orc"),
        jobs=jobs,
    )


def run(*arguments: str, jobs: list[EvaluateJob] | None = None) -> int:
    return run_job(command(jobs), arguments)


def test_the_job_gets_the_file_with_the_settings_over_it() -> None:
    jobs: list[EvaluateJob] = []
    assert (
        run("--config", CONFIG, "--set", "data.path=x", "--set", "data.format=orc", jobs=jobs) == 0
    )
    assert (jobs[0].data.path, jobs[0].data.format) == ("x", "orc")


def test_what_takes_long_before_spark_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """A check imports torch; a line is there before."""
    shown: list[bool] = []
    module = ModuleType("some_check")
    monkeypatch.setattr(module, "check", lambda job: shown.append(is_shown()), raising=False)
    monkeypatch.setitem(sys.modules, "some_check", module)
    run_job(replace(command([]), check="some_check:check"), ("--config", CONFIG))
    assert shown == [True]


def test_settings_alone_are_a_job_too() -> None:
    jobs: list[EvaluateJob] = []
    assert run("--set", "data.path=x", "--set", "model.path=m", jobs=jobs) == 0
    assert (jobs[0].data.path, jobs[0].model.path) == ("x", "m")


def test_our_own_errors_end_with_one_line_and_status_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--config", CONFIG) == 1
    assert capsys.readouterr().err == "error: nothing at data/digits/test\n"


def test_a_wrong_file_is_reported_the_same_way(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--config", "none.toml", jobs=[]) == 1
    assert capsys.readouterr().err.startswith("error: cannot read the job file none.toml")


def test_without_a_job_the_way_to_one_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(jobs=[]) == 2
    text = capsys.readouterr().err
    assert "name it with --config FILE" in text
    assert "'spark-submit jobs/evaluate.py --starter > evaluate.toml' writes one" in text


def test_a_starter_is_a_job_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run("--starter") == 0
    path = tmp_path / "evaluate.toml"
    path.write_text(capsys.readouterr().out, encoding="utf-8")
    jobs: list[EvaluateJob] = []
    assert run("--config", str(path), jobs=jobs) == 0
    assert jobs[0].model.path == "models/model"


def test_help_shows_the_examples(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--help") == 0
    text = capsys.readouterr().out
    assert "Do it." in text
    start = "  spark-submit jobs/evaluate.py --config conf/evaluate.toml"
    assert f"example:\n{start}\n{start} --set data.format=orc\n" in text
    assert "SECTION.KEY=VALUE" in text


def test_the_examples_of_the_command_begin_with_a_starter() -> None:
    lines = command().examples(Form.COMMAND).splitlines()
    assert lines[1:] == [
        "  sparkdl evaluate --starter > evaluate.toml",
        "  sparkdl evaluate --config evaluate.toml",
        "  sparkdl evaluate --config evaluate.toml --set data.format=orc",
    ]


def test_an_unknown_log_level_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--config", CONFIG, "--log-level", "loud") == 2
    assert "known: DEBUG" in capsys.readouterr().err


def raising(error: BaseException) -> Callable[[], None]:
    def action() -> None:
        raise error

    return action


@pytest.mark.parametrize(("name", "package"), [("py4j.protocol", "pyspark"), ("torch", "torch")])
def test_a_missing_package_is_named_as_pip_knows_it(
    capsys: pytest.CaptureFixture[str], name: str, package: str
) -> None:
    error = ModuleNotFoundError(f"No module named {name!r}", name=name)
    assert ended(raising(error)) == 1
    text = capsys.readouterr().err
    assert text.startswith(f"error: this needs {name.partition('.')[0]}, which is not installed")
    assert f"; pip install {package}, in a version" in text


def test_a_missing_module_of_the_user_is_not_taken_for_ours() -> None:
    with pytest.raises(ModuleNotFoundError):
        ended(raising(ModuleNotFoundError("No module named 'mine'", name="mine")))


def test_an_interrupt_ends_without_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert ended(raising(KeyboardInterrupt())) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_jobs_that_can_be_explained_are_not_done(capsys: pytest.CaptureFixture[str]) -> None:
    done: list[EvaluateJob] = []
    explained: list[EvaluateJob] = []
    explains = replace(command(done), explain=command(explained))
    assert run_job(explains, ("--config", CONFIG, "--explain")) == 0
    assert (len(done), len(explained)) == (0, 1)
    assert run_job(explains, ("--config", CONFIG)) == 0
    assert (len(done), len(explained)) == (1, 1)
    assert run("--config", CONFIG, "--explain", jobs=done) == 2
    assert "o such option" in capsys.readouterr().err


TERMINATED = """
import sys, time
from sparkdl.cli import job_commands

def do(self, job, form):
    print("going", flush=True)
    time.sleep(60)

job_commands.JobCommand.do = do
job_commands.run_job(job_commands.EVALUATE, ["--config", sys.argv[1]])
"""


def test_what_sigterm_has_ended_is_said() -> None:
    pipe = subprocess.PIPE
    line = [sys.executable, "-c", TERMINATED, CONFIG]
    with subprocess.Popen(line, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "going\n"
        process.terminate()
        _, said = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGTERM  # 143, as a shell has it
    assert said.splitlines()[-1] == "SIGTERM has ended spark-submit jobs/evaluate.py"
