"""How long until something happens? ``import sparkdl``, and what a shell waits for."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import common
from common import Measurements

COMMANDS = {
    "python alone s": ["-c", "pass"],
    "import sparkdl s": ["-c", "import sparkdl"],
    "sparkdl --version s": ["-m", "sparkdl", "--version"],
    "sparkdl train --help s": ["-m", "sparkdl", "train", "--help"],
    "tab key s": ["-m", "sparkdl"],
}
"""Name -> arguments of Python. The last one runs as a shell's completion does."""
TAB = {
    "_ARGCOMPLETE": "1",
    "_ARGCOMPLETE_IFS": "\n",
    "_ARGCOMPLETE_STDOUT_FILENAME": os.devnull,
    "COMP_LINE": "sparkdl train --set estimator.",
    "COMP_POINT": "30",
}


def main() -> None:
    """Start Python anew for each, several times in turn."""
    options = common.arguments(10)
    common.wait_until_idle(options.patience)
    found = Measurements()
    for name, arguments in COMMANDS.items():  # once unmeasured, for the compiled files
        seconds(name, arguments)
    for _ in range(options.runs):
        for name, arguments in COMMANDS.items():
            found.add(name, seconds(name, arguments))
    found.report("importing", options)


def seconds(name: str, arguments: list[str]) -> float:
    """Of a process from its start to its end."""
    environ = {**os.environ, **(TAB if name == "tab key s" else {})}
    began = time.perf_counter()
    subprocess.run(
        [sys.executable, *arguments], env=environ, check=True, stdout=subprocess.DEVNULL, timeout=60
    )
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
