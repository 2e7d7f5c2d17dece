"""Writes the two locks: the newest versions that setup.py's ranges allow together.

    python .ci/lock.py requirements.lock requirements-dev.lock

The first is what training needs. The second is what development needs, so it holds the first, in
the same versions. pip resolves the extras without installing anything and without regard to what
is installed. Left out are the CUDA packages that torch itself pins on Linux: with them the locks
would not serve a machine that takes torch's CPU build.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HEADER = """\
# Every version that {users}. `make lock` wrote it from the ranges of setup.py.
# torch brings its own pins of CUDA packages on Linux, where its CPU build is not asked for.
"""
TRAINING = "spark,torch,demo"
"""The extras that ``make train`` needs; all of ``make tools`` is in ``dev``."""
# The version that the project is tested and measured on; raised by hand.
HELD = ["torch==2.13.0"]
PINNED_BY_TORCH = re.compile(r"^(nvidia-|cuda-|triton$)")


def resolve(extras: str, constraints: str) -> dict[str, str]:
    """Name and version of every package that the extras need.

    Args:
        extras: of sparkdl, divided by commas.
        constraints: the text of a constraints file of pip.
    """
    with tempfile.TemporaryDirectory() as folder:
        report, file = Path(folder) / "report.json", Path(folder) / "constraints.txt"
        file.write_text(constraints, encoding="utf-8")
        command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed"]
        command += ["--quiet", "--no-build-isolation", "--report", str(report)]
        command += ["--constraint", str(file), f"{ROOT}[{extras}]"]
        subprocess.run(command, check=True)
        installs = json.loads(report.read_text(encoding="utf-8"))["install"]
    return {
        re.sub(r"[-_.]+", "-", item["metadata"]["name"]).lower(): item["metadata"]["version"]
        for item in installs
    }


def lock_text(versions: Mapping[str, str], users: str) -> str:
    """The lock file: one ``name==version`` a line, without the local part such as ``+cpu``.

    Args:
        versions: of all packages.
        users: who gets them, with the verb, for the first line.
    """
    lines = [
        f"{name}=={version.split('+')[0]}"
        for name, version in sorted(versions.items())
        if name != "sparkdl-torch" and not PINNED_BY_TORCH.match(name)
    ]
    return HEADER.format(users=users) + "\n".join(lines) + "\n"


def main(training: Path, development: Path) -> None:
    """Write both files; the second is resolved first, and the first with its versions."""
    everything = lock_text(resolve("dev", "\n".join(HELD)), "`make tools` installs")
    needed = lock_text(resolve(TRAINING, everything), "`make train` installs")
    development.write_text(everything, encoding="utf-8")
    training.write_text(needed, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
