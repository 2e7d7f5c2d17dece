from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from sparkdl.cli import run_job
from sparkdl.errors import DataError
from sparkdl.jobfile import EvaluateJob

CONFIG = str(Path(__file__).parent.parent / "conf" / "evaluate.toml")


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    logger = logging.getLogger("sparkdl")
    before = list(logger.handlers), logger.level, logger.propagate
    yield
    logger.handlers[:], logger.level, logger.propagate = before


def run(*arguments: str, jobs: list[EvaluateJob] | None = None) -> int:
    action = jobs.append if jobs is not None else fail
    return run_job(EvaluateJob, action, description="Do it.", example="do", arguments=arguments)


def fail(job: EvaluateJob) -> None:
    raise DataError(f"nothing at {job.data.path}")


def test_the_job_gets_the_file_with_the_settings_over_it() -> None:
    jobs: list[EvaluateJob] = []
    assert (
        run("--config", CONFIG, "--set", "data.path=x", "--set", "data.format=orc", jobs=jobs) == 0
    )
    assert (jobs[0].data.path, jobs[0].data.format) == ("x", "orc")


def test_our_own_errors_end_with_one_line_and_status_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--config", CONFIG) == 1
    assert capsys.readouterr().err == "error: nothing at data/digits/test\n"


def test_a_wrong_file_is_reported_the_same_way(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--config", "none.toml", jobs=[]) == 1
    assert capsys.readouterr().err.startswith("error: cannot read the job file none.toml")


def test_help_shows_the_example(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        run("--help")
    text = capsys.readouterr().out
    assert "Do it." in text
    assert "example:\n  do" in text
    assert "SECTION.KEY=VALUE" in text


def test_an_unknown_log_level_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        run("--config", CONFIG, "--log-level", "loud")
    assert "known: DEBUG" in capsys.readouterr().err
