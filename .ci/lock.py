"""Which versions does ``make lock`` pin? The newest that setup.py's ranges allow together.

pip resolves the ``dev`` extra without installing anything and without regard to what is installed.
Left out are the CUDA packages that torch itself pins on Linux: with them the lock would not serve
a machine that takes torch's CPU build.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HEADER = """\
# Every version that .venv gets. Made by `make lock` from the ranges of setup.py; do not edit.
# torch brings its own pins of CUDA packages on Linux, where its CPU build is not asked for.
"""
# The version that the project is tested and measured on; raised by hand.
HELD = ["torch==2.13.0"]
PINNED_BY_TORCH = re.compile(r"^(nvidia-|cuda-|triton$)")


def resolve() -> dict[str, str]:
    """Name and version of every package that the dev extra needs."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed"]
        command += [
            "--quiet",
            "--report",
            str(report),
            "--no-build-isolation",
            *HELD,
            f"{ROOT}[dev]",
        ]
        subprocess.run(command, check=True)
        installs = json.loads(report.read_text(encoding="utf-8"))["install"]
    return {
        re.sub(r"[-_.]+", "-", item["metadata"]["name"]).lower(): item["metadata"]["version"]
        for item in installs
    }


def lock_text(versions: dict[str, str]) -> str:
    """The lock file: one ``name==version`` a line, without the local part such as ``+cpu``."""
    lines = [
        f"{name}=={version.split('+')[0]}"
        for name, version in sorted(versions.items())
        if name != "sparkdl-torch" and not PINNED_BY_TORCH.match(name)
    ]
    return HEADER + "\n".join(lines) + "\n"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(lock_text(resolve()), encoding="utf-8")
