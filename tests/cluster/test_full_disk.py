"""A disk that fills up while spooling ends the fit with the remedy, and nothing stays on it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.spark, pytest.mark.slow]

ROOT = Path(__file__).parent.parent.parent
MIB = 24


def mount_namespace() -> list[str]:
    """How this system lets a test mount a disk that nobody else sees."""
    for command in (["unshare", "--mount"], ["unshare", "--map-root-user", "--mount"]):
        probe = [*command, "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
        try:
            if subprocess.run(probe, capture_output=True, timeout=10).returncode == 0:
                return command
        except FileNotFoundError:
            break
    pytest.skip("this system lets nobody mount a small disk; tests/data has the fault by hand")


def test_a_full_disk_is_told_and_emptied(tmp_path: Path) -> None:
    program = [sys.executable, "-m", "tests.cluster.fill_the_disk", str(tmp_path), str(MIB)]
    process = subprocess.run(
        [*mount_namespace(), *program], cwd=ROOT, capture_output=True, text=True, timeout=240
    )
    assert process.returncode == 0, process.stderr[-3000:]
    lines = [line[line.index("{") :] for line in process.stdout.splitlines() if "{" in line]
    by_spool, by_shuffle, small = [json.loads(line) for line in lines]
    assert by_spool["error"] == by_shuffle["error"] == "StorageError"
    for part in (str(tmp_path), "is full: the spool of shard", "MiB were free", "spark.local.dir"):
        assert part in by_spool["message"]
    for part in ("local disk of Spark's is full", "No space left on device", "spark.local.dir"):
        assert part in by_shuffle["message"]
    assert small["error"] is None
    for one in (by_spool, by_shuffle, small):
        assert one["spools"] == []
        assert one["persisted"] == 0
    assert "trying again" not in process.stderr
