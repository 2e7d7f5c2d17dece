"""What real shells offer after ``sparkdl``."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from sparkdl.cli.completion import keys, settings
from sparkdl.cli.job_files.job_file import TrainJob
from sparkdl.cli.job_files.prepare_file import PrepareJob
from sparkdl.cli.job_files.study_file import TuneJob

ROOT = Path(__file__).parent.parent.parent
SECONDS = 60

# What bash does when the user hits the tab key behind the last word of LINE.
BASH = """
source <(sparkdl completion bash)
COMP_LINE="$1"; COMP_POINT=${#COMP_LINE}
function=$(complete -p sparkdl | sed 's/.*-F \\([^ ]*\\) .*/\\1/')
"$function" sparkdl 2>/dev/null
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture
def shell(tmp_path: Path) -> dict[str, str]:
    """An environment whose PATH begins with the command."""
    script = tmp_path / "bin" / "sparkdl"
    script.parent.mkdir()
    script.write_text(f'#!/bin/sh\nexec {sys.executable} -m sparkdl "$@"\n', encoding="utf-8")
    script.chmod(0o755)
    path = f"{script.parent}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "HOME": str(tmp_path)}


def offered(line: str, shell: dict[str, str], folder: Path = ROOT) -> list[str]:
    done = subprocess.run(
        ["bash", "--norc", "-c", BASH, "bash", line],
        env=shell,
        cwd=folder,
        check=True,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    return [word for word in done.stdout.splitlines() if word]


def test_bash_offers_the_commands(shell: dict[str, str]) -> None:
    words = ["train", "doctor", "export", "completion", "ui"]
    assert set(offered("sparkdl ", shell)) >= {f"{word} " for word in words}
    assert offered("sparkdl ev", shell) == ["evaluate "]


def test_bash_offers_the_options_of_a_command(shell: dict[str, str]) -> None:
    assert set(offered("sparkdl train --", shell)) >= {"--config ", "--set ", "--starter "}
    assert offered("sparkdl doctor --check", shell) == ["--checkpoint-dir "]


def test_bash_offers_job_files_and_folders(shell: dict[str, str], tmp_path: Path) -> None:
    folder = tmp_path / "work"
    (folder / "jobs").mkdir(parents=True)
    for name in ("mine.toml", "mine.txt", "jobs/a file.toml"):
        (folder / name).touch()
    assert offered("sparkdl train --config ", shell, folder) == ["jobs/", "mine.toml "]
    assert offered("sparkdl train --config=jobs/", shell, folder) == ["jobs/a\\ file.toml "]


def test_bash_offers_the_keys_of_a_job_file(shell: dict[str, str]) -> None:
    assert offered("sparkdl train --set estimator.epo", shell) == ["estimator.epochs="]
    assert offered("sparkdl tune --set study.tri", shell) == ["study.trials="]


def test_bash_offers_the_values_of_a_key(shell: dict[str, str]) -> None:
    # What stands before the = is a word of its own to bash.
    assert offered("sparkdl prepare --set output.on_error=", shell) == ["fail ", "skip "]
    quoted = (
        "sparkdl prepare --set 'output.on_error=f"  # to which bash adds the quote and the space
    )
    assert offered(quoted, shell) == ["output.on_error=fail"]


@pytest.mark.skipif(shutil.which("zsh") is None, reason="there is no zsh")
def test_zsh_takes_the_script(shell: dict[str, str]) -> None:
    code = (
        "autoload -U compinit; compinit -u; source <(sparkdl completion zsh)\n"
        "print $_comps[sparkdl]"
    )
    done = subprocess.run(
        ["zsh", "-f", "-c", code],
        env=shell,
        check=True,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.stdout == "_sparkdl_completion\n"
    assert done.stderr == ""


@pytest.mark.skipif(shutil.which("fish") is None, reason="there is no fish")
def test_fish_offers_the_commands(shell: dict[str, str]) -> None:
    code = "sparkdl completion fish | source; complete --do-complete 'sparkdl ev'"
    done = subprocess.run(
        ["fish", "--no-config", "-c", code],
        env=shell,
        check=True,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.stdout.split()[0] == "evaluate"


def test_keys_are_those_of_sections_and_of_tables_in_them() -> None:
    names = [name for name, _ in keys(TrainJob)]
    assert {"data.path", "model.args", "estimator.epochs", "spark.conf"} <= set(names)
    assert "estimator.early_stopping.patience" in names
    assert "data" not in names
    assert len(set(names)) == len(names)


def test_sections_of_every_kind_of_job_are_offered() -> None:
    assert "study.trials=" in list(settings(TuneJob, "study."))
    assert list(settings(PrepareJob, "labels.table.fo")) == ["labels.table.format="]


def test_values_are_offered_where_they_can_be_listed() -> None:
    assert list(settings(TrainJob, "output.overwrite=")) == [
        "output.overwrite=true",
        "output.overwrite=false",
    ]
    assert list(settings(TrainJob, "data.format=j")) == ["data.format=json"]
    assert list(settings(TrainJob, "estimator.epochs=")) == []
    assert list(settings(TrainJob, "no.such")) == []
