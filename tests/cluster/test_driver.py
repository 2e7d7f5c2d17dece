"""A new driver goes on where the last one stopped."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = [pytest.mark.spark, pytest.mark.slow]

ROOT = Path(__file__).parent.parent.parent
PROGRAM = "tests.cluster.train_and_die"


def run(directory: Path, seconds_per_step: float) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", PROGRAM, str(directory), str(seconds_per_step)]
    return subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def digest_of(process: subprocess.Popen[str]) -> str:
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err[-3000:]
    return out.split("digest ")[1].strip()


def wait_for_checkpoint(directory: Path, process: subprocess.Popen[str]) -> str:
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        whole = sorted(path.parent.name for path in directory.glob("*/*/step-*/manifest.json"))
        if whole:
            return whole[-1]
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    raise AssertionError("no checkpoint in time")


@pytest.mark.timeout(300)
def test_a_killed_driver_is_succeeded_by_a_new_one(tmp_path: Path) -> None:
    undisturbed = digest_of(run(tmp_path / "undisturbed", 0.0))
    killed = run(tmp_path / "c", 0.2)
    step = wait_for_checkpoint(tmp_path / "c", killed)
    killed.send_signal(signal.SIGKILL)
    killed.communicate(timeout=60)
    assert not step.endswith("-final")
    successor = run(tmp_path / "c", 0.0)
    assert digest_of(successor) == undisturbed
    finals = list((tmp_path / "c").glob("*/*/step-*-final"))
    assert len(finals) == 1
