"""The GPU discovery script tells Spark what nvidia-smi sees, and says why where it sees none."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent.parent / "conf" / "clusters" / "discover_gpus.sh"


def discover(tmp_path: Path, nvidia_smi: str | None) -> subprocess.CompletedProcess[str]:
    """Run the script where nvidia-smi has this body, or is missing."""
    if nvidia_smi is not None:
        program = tmp_path / "nvidia-smi"
        program.write_text(f"#!/bin/sh\n{nvidia_smi}\n")
        program.chmod(0o755)
    shell = shutil.which("sh")
    assert shell is not None
    return subprocess.run(
        [shell, str(SCRIPT)],
        env={"PATH": str(tmp_path)}, capture_output=True, text=True, timeout=20,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("lines", "addresses"),
    [("0", ["0"]), (r"0\n1\n2\n", ["0", "1", "2"]), (r"  3 \n 11\n", ["3", "11"])],
)
def test_it_lists_the_numbers_of_nvidia_smi(
    tmp_path: Path, lines: str, addresses: list[str]
) -> None:
    asked = '[ "$*" = "--query-gpu=index --format=csv,noheader" ] || exit 9'
    done = discover(tmp_path, f"{asked}\nprintf '{lines}'")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"name": "gpu", "addresses": addresses}
    assert done.stdout.count("\n") == 1


@pytest.mark.parametrize(
    ("nvidia_smi", "reason"),
    [
        (None, "there is no nvidia-smi"),
        ("echo 'NVIDIA-SMI has failed' >&2; exit 9", "nvidia-smi failed: NVIDIA-SMI has failed"),
        ("echo 'No devices were found'", "lists no GPUs: No devices were found"),
        ("exit 0", "lists no GPUs"),
    ],
)
def test_no_gpu_is_an_error_with_the_reason(
    tmp_path: Path, nvidia_smi: str | None, reason: str
) -> None:
    done = discover(tmp_path, nvidia_smi)
    assert done.returncode == 1 and not done.stdout
    assert done.stderr.startswith("discover_gpus.sh: ") and reason in done.stderr
