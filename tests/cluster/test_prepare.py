"""A driver that prepares images is killed, and a new one goes on."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow.parquet as pq
import pytest

from tests.cli.images.trees import digit_files, job
from tests.cluster.prepare_files import OPTIONS

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.slow]

ROOT = Path(__file__).parent.parent.parent
PROGRAM = "tests.cluster.prepare_files"
NUM_FILES = 100


def start(data: Path, output: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", PROGRAM, str(data), str(output)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def rows_by_file(output: Path) -> dict[str, object]:
    files = sorted(output.rglob("*.parquet"))
    return {str(path.relative_to(output)): pq.read_table(path).to_pydict() for path in files}


def wait_for_records(output: Path, count: int, process: subprocess.Popen[str]) -> set[str]:
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        done = {path.stem for path in output.glob("_prepare/done/*.json")}
        if len(done) >= count:
            return done
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    raise AssertionError("no records in time")


@pytest.mark.timeout(400)
def test_after_kill_9_a_second_run_goes_on_and_ends_with_the_same_rows(
    cluster: SparkSession, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from sparkdl.cli.images.prepare import prepare

    digit_files(tmp_path / "files", NUM_FILES)
    prepare(cluster, job(tmp_path / "files", tmp_path / "undisturbed", **OPTIONS))
    whole = rows_by_file(tmp_path / "undisturbed")
    output = tmp_path / "killed"
    killed = start(tmp_path / "files", output)
    done = wait_for_records(output, 3, killed)
    killed.send_signal(signal.SIGKILL)
    killed.communicate(timeout=60)
    assert len(done) < len(whole)
    times = {name: (output / path_of(name)).stat().st_mtime_ns for name in done}
    capsys.readouterr()
    prepare(cluster, job(tmp_path / "files", output, **OPTIONS))
    err = capsys.readouterr().err
    assert rows_by_file(output) == whole
    assert not (output / "_prepare").exists()
    # What was recorded is not written again, and the bar begins where the run was killed.
    assert all((output / path_of(name)).stat().st_mtime_ns == t for name, t in times.items())
    assert f"/{NUM_FILES}" in err
    assert f"| 0/{NUM_FILES}" not in err


def path_of(name: str) -> str:
    split, number = name.rsplit("-", 1)
    return f"{split}/part-{number}.parquet"
