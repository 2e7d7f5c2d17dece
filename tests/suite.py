"""The parts of `make test` side by side: who failed, how long each took, the slowest tests.

Usage: python -m tests.suite [--jobs N] PART ...

A part is a target of the Makefile. What it prints comes in one piece when it has ended, and can be
followed in build/tests/PART.log. A part that fails stops no other, and makes the whole fail; so
does a promise whose proof was not run.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests.promises import PROMISES

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "build" / "tests"
SLOWEST = 20


@dataclass(frozen=True)
class Part:
    """How a part went."""

    name: str
    status: int
    seconds: float


@dataclass(frozen=True)
class Result:
    """How a test went; its ``outcome`` is passed, skipped or failed."""

    name: str
    part: str
    outcome: str
    seconds: float


def run(name: str, command: Sequence[str], folder: Path) -> Part:
    """Run a part to its end, then print what it said; log and results lie in ``folder``."""
    results = shlex.quote(f"--junit-xml={folder / name}.xml")
    options = " ".join(filter(None, (os.environ.get("PYTEST_ADDOPTS"), results)))
    environment = {**os.environ, "PYTEST_ADDOPTS": options}
    for variable in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL"):  # of the make that has started this one
        environment.pop(variable, None)
    began = time.monotonic()
    print(f"==== {name} begins", flush=True)
    log = folder / f"{name}.log"
    with log.open("wb") as file:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=file,
            stderr=subprocess.STDOUT, check=False,
        )  # fmt: skip
    part = Part(name, done.returncode, time.monotonic() - began)
    said = log.read_text(encoding="utf-8", errors="replace").rstrip()
    print(f"==== {name}: {_verdict(part)}\n{said}", flush=True)
    return part


def run_all(commands: Mapping[str, Sequence[str]], jobs: int, folder: Path) -> list[Part]:
    """Run all parts, ``jobs`` at a time, in the order in which they are given."""
    with ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(lambda name: run(name, commands[name], folder), commands))


def results_of(folder: Path) -> Iterator[Result]:
    """Every test of every part, as pytest has written it down."""
    for path in sorted(folder.glob("*.xml")):
        for case in ElementTree.parse(path).iter("testcase"):
            kinds = {child.tag for child in case}
            outcome = "failed" if kinds & {"failure", "error"} else "passed"
            if "skipped" in kinds:
                outcome = "skipped"
            name = f"{case.get('classname')}.{case.get('name')}"
            yield Result(name, path.stem, outcome, float(case.get("time", 0)))


def report(
    parts: Sequence[Part], tests: Sequence[Result], promises: Mapping[str, str]
) -> list[str]:
    """The lines that end a run, from what is looked at least to what is looked at most."""
    slowest = sorted(tests, key=lambda test: -test.seconds)[:SLOWEST]
    lines = [f"the slowest {len(slowest)} tests"] if slowest else []
    lines += [f"{test.seconds:8.1f} s  {test.name}" for test in slowest]
    lines += ["parts"]
    for part in parts:
        count = sum(test.part == part.name for test in tests)
        counted = f", {count} tests" if count else ""
        lines.append(f"{part.seconds:8.1f} s  {part.name}: {_verdict(part)}{counted}")
    outcomes = {test.name: test.outcome for test in tests}
    shown = {promise: outcomes.get(_junit_name(proof)) for promise, proof in promises.items()}
    if promises:
        lines.append(f"{list(shown.values()).count('passed')} of {len(shown)} promises are proven")
    for promise, outcome in shown.items():
        if outcome != "passed":
            lines.append(f"  {outcome or 'not run'}: {promise} ({promises[promise]})")
    return lines


def is_good(parts: Sequence[Part], tests: Sequence[Result], promises: Mapping[str, str]) -> bool:
    """Whether all parts ended well and every proof was run; those left out on purpose are told."""
    names = {test.name for test in tests}
    all_run = all(_junit_name(proof) in names for proof in promises.values())
    return all_run and not any(part.status for part in parts)


def _junit_name(proof: str) -> str:
    path, _, name = proof.partition("::")
    return f"{path.removesuffix('.py').replace('/', '.')}.{name.replace('::', '.')}"


def _verdict(part: Part) -> str:
    return f"FAILED with status {part.status}" if part.status else "ok"


def main(arguments: Sequence[str], say: Callable[[str], object] = print) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("parts", nargs="+")
    given = parser.parse_args(arguments)
    commands = {name: ["make", "--no-print-directory", name] for name in given.parts}
    began = time.monotonic()
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    parts = run_all(commands, given.jobs, FOLDER)
    tests = list(results_of(FOLDER))
    for line in report(parts, tests, PROMISES):
        say(line)
    good = is_good(parts, tests, PROMISES)
    say(f"{time.monotonic() - began:8.1f} s  in all: {'ok' if good else 'FAILED'}")
    return not good


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
