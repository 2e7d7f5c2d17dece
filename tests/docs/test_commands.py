"""Shell commands of the pages name what is there, and every job runs."""

from __future__ import annotations

import itertools
import os
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from tests.docs.blocks import ROOT, Block, blocks, blocks_of
from tests.docs.commands import commands_of, problem, runnable
from tests.docs.conftest import working_in

SHELL = [block for block in blocks("bash") if block.excuse is None]
OF_TUTORIAL = ("--set", "model.path=models/tutorial")
JOBS = [
    ["spark-submit", f"jobs/{job}.py", "--config", f"conf/{job}.toml", *settings]
    for job, *settings in (
        ("evaluate", *OF_TUTORIAL), ("predict", *OF_TUTORIAL), ("prepare",), ("tune",),
    )
]  # fmt: skip
"""Jobs with job files of the repository, which run whether or not a page shows the command."""
SUBMITTED = ("train digits",)
"""The job that starts a JVM of its own.

A job's program is a table's row and a call, so the others show no more of ``spark-submit``.
"""

READS = {
    "prepare prepare": "digits --files",
    "train images": "prepare prepare",
    "evaluate evaluate": "train digits",
    "predict predict": "train digits",
}
"""Of a command the one that writes what it reads, which runs before it if it has not."""


def _block(text: str) -> Block:
    return Block(page="a.md", line=1, language="bash", text=text, excuse=None)


def _to_run() -> list[tuple[str, ...]]:
    """Each command once, with the most that pages set; those that others read from come first."""
    shown = [command for block in SHELL for command in commands_of(block)]
    found = [runnable(command) for command in [*JOBS, *shown]]
    by_job: dict[tuple[str, ...], tuple[str, ...]] = {}
    for words in sorted((tuple(one) for one in found if one is not None), key=len):
        by_job[_without_settings(words)] = words
    order = ["digits", "prepare", "train", "evaluate", "predict", "tune"]
    return sorted(by_job.values(), key=lambda words: order.index(Path(words[1]).stem))


def _without_settings(words: tuple[str, ...]) -> tuple[str, ...]:
    pairs = itertools.pairwise(("", *words))
    return tuple(word for before, word in pairs if "--set" not in (before, word))


def _name_of(words: tuple[str, ...]) -> str:
    """The job, its file, and what else is asked."""
    stems = [Path(word).stem for word in words[1:] if word.endswith((".py", ".toml"))]
    return " ".join([*stems, *(word for word in words if word in ("--explain", "--files"))])


@pytest.mark.parametrize("block", SHELL, ids=str)
def test_commands_name_what_is_there(block: Block) -> None:
    for command in commands_of(block):
        assert problem(command) is None, " ".join(command)


def test_a_block_is_taken_apart() -> None:
    text = "A=1 make train  # first\ncd x && spark-submit \\\n  --conf a=b jobs/train.py\n"
    assert list(commands_of(_block(text))) == [
        ["A=1", "make", "train"],
        ["cd", "x"],
        ["spark-submit", "--conf", "a=b", "jobs/train.py"],
    ]
    assert list(commands_of(_block("a 'b\nc'\n\nd\n"))) == [["a", "b\nc"], ["d"]]
    with pytest.raises(ValueError, match="never closed"):
        list(commands_of(_block("a 'b\n")))


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("make trains", "no target"),
        ("pip install '.[sparks]'", "no extras"),
        ("pip install -r requirements.txt", "there is no"),
        ("spark-submit --master yarn jobs/trains.py", "there is no"),
        ("spark-submit jobs/train.py --config conf/a.toml", "cannot read the job file"),
        ("spark-submit jobs/train.py --config conf/digits.toml --set a.b=1", "unknown section"),
        ("python jobs/none.py", "there is no"),
        ("spark-submit --master local", "needs a program"),
        ("docker compose --file docker/none.yaml up", "there is no docker/none.yaml"),
        ("spark-submit --properties-file conf/none.conf a.py", "there is no conf/none.conf"),
        ("spark-submit local:///opt/sparkdl/jobs/none.py", "there is no jobs/none.py"),
        ("ls -l", "nobody knows"),
    ],
)
def test_what_is_wrong_is_found(command: str, expected: str) -> None:
    (words,) = commands_of(_block(command))
    assert expected in (problem(words) or "")


@pytest.mark.parametrize(
    "command", ["kubectl get pods", "A=b spark-submit mine.py", "python -m this", "cd x"]
)
def test_what_is_the_readers_own_is_left_alone(command: str) -> None:
    (words,) = commands_of(_block(command))
    assert problem(words) is None


@pytest.fixture(scope="module")
def run(workspace: Path, spark: SparkSession) -> Callable[[tuple[str, ...]], None]:
    """Runs a command, unless it has run already, and before it the one of which it reads."""
    by_name = {_name_of(command): command for command in _to_run()}
    done: set[str] = set()

    def once(command: tuple[str, ...]) -> None:
        name = _name_of(command)
        if name in done:
            return
        if name in READS:
            once(by_name[READS[name]])
        if command[0] != "spark-submit" or name in SUBMITTED:
            submitted(command, workspace)
        else:
            run_here(command, workspace, spark)
        done.add(name)

    return once


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory, digits: Path) -> Path:
    """One folder for all commands: what one writes another reads (`READS`)."""
    folder = tmp_path_factory.mktemp("docs-commands")
    for name in ("conf", "jobs"):
        (folder / name).symlink_to(ROOT / name)
    (job,) = (block for block in blocks_of("docs/tutorial.md") if block.language == "toml")
    (folder / "digits.toml").write_text(job.text, encoding="utf-8")  # as the page says
    (folder / "data").mkdir()
    shutil.copytree(digits, folder / "data" / "digits")  # a command writes them once more
    return folder


def submitted(command: Sequence[str], workspace: Path) -> None:
    """Run a command as a reader does."""
    environment = {
        **os.environ,
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "PYTHONPATH": str(ROOT),
        "SPARK_LOCAL_IP": "127.0.0.1",
    }
    result = subprocess.run(
        command, cwd=workspace, env=environment, capture_output=True, text=True, timeout=280
    )
    assert result.returncode == 0, result.stderr[-3000:]


def run_here(command: Sequence[str], workspace: Path, spark: SparkSession) -> None:
    """Run a job's program in a session that is there already and goes on."""
    partitions = spark.conf.get("spark.sql.shuffle.partitions")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SparkSession, "stop", lambda session: None)
        patch.setattr(sys, "argv", list(command[1:]))
        with working_in(workspace, spark), pytest.raises(SystemExit) as ended:
            runpy.run_path(command[1], run_name="__main__")
    spark.conf.set("spark.sql.shuffle.partitions", partitions)
    assert ended.value.code == 0


# The commands run as the pages have them, but for `runnable`'s settings.
@pytest.mark.spark
@pytest.mark.classic
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("command", _to_run(), ids=_name_of)
def test_jobs_run(command: tuple[str, ...], run: Callable[[tuple[str, ...]], None]) -> None:
    run(command)
