"""After the end of a driver a new one goes on, and ends with the bits of the undisturbed run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.faults.cluster import PATIENCE, Cluster
from tests.faults.faults import Fault, Faults, Victim
from tests.faults.oracle import Outcome

pytestmark = [pytest.mark.spark, pytest.mark.gang, pytest.mark.slow, pytest.mark.timeout(400)]

ROOT = Path(__file__).parent.parent.parent
_SECONDS = 120 * PATIENCE


@contextmanager
def driver(cluster: Cluster, directory: Path, tmp: Path) -> Iterator[subprocess.Popen[str]]:
    """A driver program, with a temporary folder of its own, in the network of the first host."""
    tmp.mkdir()
    places = [cluster.url, cluster.driver.address, str(cluster.folder), str(directory)]
    command = [sys.executable, "-m", "tests.faults.drive", *places]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "TMPDIR": str(tmp)},
    ) as process:  # fmt: skip
        try:
            yield process
        finally:
            process.kill()


def digest_of(process: subprocess.Popen[str]) -> str:
    out, err = process.communicate(timeout=_SECONDS)
    assert process.returncode == 0, err[-3000:]
    return out.split("digest ")[1].strip()


def signalled(process: subprocess.Popen[str], number: signal.Signals) -> Fault:
    """The driver gets a signal when a worker comes to a moment."""

    @contextmanager
    def strike(_: Victim) -> Iterator[None]:
        process.send_signal(number)
        yield

    return strike


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_new_driver_goes_on(
    undisturbed: Outcome, cluster: Cluster, faults: Faults, tmp_path: Path, number: signal.Signals
) -> None:
    directory = tmp_path / "checkpoints"
    with driver(cluster, directory, tmp_path / "first") as first:
        # At the end of the first epoch there are checkpoints.
        with faults.at("evaluate", 0, signalled(first, number)):
            first.communicate(timeout=_SECONDS)
        assert first.returncode != 0
    assert faults.struck
    whole = sorted(path.parent.name for path in directory.glob("*/step-*/manifest.json"))
    assert whole and not whole[-1].endswith("-final")
    with driver(cluster, directory, tmp_path / "second") as second:
        assert digest_of(second) == undisturbed.digest


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGINT,
        pytest.param(
            signal.SIGTERM,
            marks=pytest.mark.xfail(reason="defect 14: files stay after SIGTERM", strict=False),
        ),
    ],
)
def test_a_driver_that_is_asked_to_end_leaves_no_file(
    undisturbed: Outcome, cluster: Cluster, faults: Faults, tmp_path: Path, number: signal.Signals
) -> None:
    tmp = tmp_path / "tmp"
    with (
        driver(cluster, tmp_path / "checkpoints", tmp) as first,
        faults.at("evaluate", 0, signalled(first, number)),
    ):
        first.communicate(timeout=_SECONDS)
    assert faults.struck
    assert [path.name for path in tmp.iterdir() if "sparkdl" in path.name] == []
