"""The parts of `make test` side by side: what failed, how long each took, the slowest tests.

Usage: python -m tests.suite [--jobs N] [--limit SECONDS] [--proof] PART ...

A part is a target of the Makefile. What it prints comes in one piece when it has ended, and can be
followed in build/tests/PART.log. A part that fails stops no other. When all have ended, the tests
that failed run once more, part by part; a part of which not all tests came to their end runs again
as a whole. What passes then is unsteady. It is named last, and up to three of these do not fail the
run. A commit is proven by a run of everything, without options of one's own for pytest.

pytest loads this module as a plugin, too, which writes down how its session has ended.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import fcntl
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from tests.promises import PROMISES

ROOT = Path(__file__).parent.parent
FOLDER = Path("build", "tests")
SLOWEST = 20
MOST_UNSTEADY = 3
OUT_OF_TIME = 124
"""Status of a part that took longer than it may; the program timeout has the same."""
ENDED_EARLY = 125
"""Status of a part that says it is fine, and of which not all tests came to their end."""
_PASSED = "passed"
"""Holds the commit on which everything has passed; a run of some parts says nothing about it."""
_STATUS_FILE = "SPARKDL_TEST_STATUS"
_NO_END = "no end"
"""Stands in the status file while pytest runs, and afterwards if it left tests out."""
_TESTS_FAILED = "1"
"""pytest's status when it came to its end and some tests failed."""
_OPTIONS = "PYTEST_ADDOPTS"
_OF_GIT = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_COMMON_DIR")
"""Variables, as hooks of git have them, that speak of another checkout."""
_PATIENCE_SECONDS = 10.0
"""So long may what a part has started outlive it; JVMs remove their files when they end."""
_LAST_LINES = 60
"""Of what an unsteady part said the first time."""


@dataclass(frozen=True)
class Result:
    """How a test went; its ``text`` tells a failure."""

    name: str
    outcome: str
    """``passed``, ``skipped``, ``xfailed`` or ``failed``."""
    seconds: float
    text: str = ""


@dataclass(frozen=True)
class Part:
    """How a part went."""

    name: str
    status: int
    seconds: float
    tests: Mapping[str, Result] = field(default_factory=dict)
    """Its tests by their names."""
    said: str = ""
    knows_what_failed: bool = False
    """True if pytest ran all tests to the end, so that nothing failed but those that it names."""

    @property
    def failed(self) -> list[str]:
        """The names of the tests that failed."""
        return [name for name, test in self.tests.items() if test.outcome == "failed"]

    @property
    def verdict(self) -> str:
        """How it went, in a word or a few."""
        if self.status == OUT_OF_TIME:
            return f"OUT OF TIME after {self.seconds:.0f} s"
        if self.status == ENDED_EARLY:
            return "ENDED before all of its tests did"
        return f"FAILED with status {self.status}" if self.status else "ok"


@dataclass(frozen=True)
class Outcome:
    """How a run of parts went."""

    first: Sequence[Part]
    again: Sequence[Part]
    """Parts that failed, the second time."""

    @property
    def tests(self) -> list[Result]:
        """The last result of each test of each part."""
        last = {part.name: dict(part.tests) for part in self.first}
        for part in self.again:
            last[part.name] |= part.tests
        return [test for tests in last.values() for test in tests.values()]

    @property
    def unsteady(self) -> dict[str, str]:
        """What failed and then passed, and the text of its first failure."""
        found: dict[str, str] = {}
        for before, after in self._twice():
            if before.knows_what_failed:
                passed = [name for name in before.failed if _has_passed(after, name)]
                texts = {name: before.tests[name].text for name in passed}
                found |= {f"{name} (part {before.name})": text for name, text in texts.items()}
            elif not after.status:
                last = "\n".join(before.said.splitlines()[-_LAST_LINES:])
                found[f"the whole part {before.name}"] = f"{before.verdict}\n{last}"
        return found

    @property
    def failed(self) -> list[str]:
        """What failed twice: tests, or a part as a whole."""
        found: list[str] = []
        for before, after in self._twice():
            names = before.failed if before.knows_what_failed else after.failed
            left = [name for name in names if not _has_passed(after, name)]
            found += left or [f"the whole part {before.name}"] * bool(after.status)
        return found

    def proofs(self, promises: Mapping[str, str]) -> dict[str, str]:
        """What became of the proof of each promise: passed, skipped, failed or not run."""
        outcomes: dict[str, set[str]] = {}
        for test in self.tests:
            outcomes.setdefault(test.name, set()).add(test.outcome)
        worst = ("failed", "xfailed", "passed", "skipped")  # a proof may run in two parts
        return {
            promise: next((one for one in worst if one in found), "not run")
            for promise, proof in promises.items()
            for found in [outcomes.get(_junit_name(proof), set())]
        }

    def is_good(self, promises: Mapping[str, str]) -> bool:
        """True if nothing failed twice, few are unsteady, and all proofs were run and passed.

        Proofs that were left out on purpose are told by `report`, and fail no run.
        """
        are_kept = {*self.proofs(promises).values()} <= {"passed", "skipped"}
        return are_kept and not self.failed and len(self.unsteady) <= MOST_UNSTEADY

    def _twice(self) -> list[tuple[Part, Part]]:
        first = {part.name: part for part in self.first}
        return [(first[part.name], part) for part in self.again]


def _has_passed(part: Part, name: str) -> bool:
    return name in part.tests and part.tests[name].outcome == "passed"


def pytest_configure(config: Any) -> None:
    """Have it written down how this session ends; those that its tests start are no part of it."""
    os.environ.pop(_OPTIONS, None)
    if path := os.environ.pop(_STATUS_FILE, None):
        config.pluginmanager.register(_Course(Path(path)))


class _Course:
    """Notes pytest's own status when its process ends; make has the same one for every failure."""

    def __init__(self, path: Path) -> None:
        self._path, self._num_run, self._status = path, 0, _NO_END
        self._write()
        atexit.register(self._write)  # early, so that it comes after what tests register

    def pytest_runtest_logfinish(self) -> None:
        self._num_run += 1

    def pytest_sessionfinish(self, session: Any, exitstatus: int) -> None:
        if self._num_run == session.testscollected:
            self._status = str(int(exitstatus))

    def _write(self) -> None:
        self._path.write_text(self._status, encoding="utf-8")


class Runner:
    """Runs parts in a folder; their logs and results lie in its ``build/tests``."""

    def __init__(
        self, commands: Mapping[str, Sequence[str]], root: Path, limit_seconds: float
    ) -> None:
        """Take the commands, which pass PYTEST_ADDOPTS on to pytest; none may take longer."""
        self._commands, self._root, self._limit_seconds = commands, root, limit_seconds
        self._folder = root / FOLDER
        self._running: set[subprocess.Popen[bytes]] = set()

    def run_all(self, jobs: int) -> Outcome:
        """Run all parts, ``jobs`` at a time in their order, then what failed, one at a time."""
        first = self._run_each(list(self._commands), jobs)
        failed = {part.name: part.knows_what_failed for part in first if part.status}
        return Outcome(first, self._run_each(list(failed), 1, only_failed=failed))

    def _run_each(
        self, names: Sequence[str], jobs: int, only_failed: Mapping[str, bool] | None = None
    ) -> list[Part]:
        with ThreadPoolExecutor(jobs) as pool:
            try:
                return list(pool.map(partial(self._run, only_failed=only_failed), names))
            except BaseException:  # Ctrl-C does not reach the parts: each has a group of its own
                pool.shutdown(wait=False, cancel_futures=True)
                for process in list(self._running):
                    _end(process)
                raise

    def _run(self, name: str, only_failed: Mapping[str, bool] | None) -> Part:
        """Run a part, or once more what failed in it, then print what it said."""
        label = name if only_failed is None else f"{name}.again"
        place = self._folder / label
        options = ["-p", "tests.suite", f"--junit-xml={place}.xml"]
        options += ["-o", f"cache_dir={self._folder / name}.cache"]
        if only_failed is not None and only_failed[name]:
            options += ["--last-failed", "--last-failed-no-failures=none"]
        environment = {**os.environ, _STATUS_FILE: f"{place}.status"}
        given = os.environ.get(_OPTIONS)
        environment[_OPTIONS] = " ".join(filter(None, (given, shlex.join(options))))
        for variable in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL"):  # of the make that started this one
            environment.pop(variable, None)
        began = time.monotonic()
        print(f"==== {label} begins", flush=True)
        log = Path(f"{place}.log")
        with log.open("wb") as file:
            status = self._status_of(self._commands[name], environment, file.fileno())
        seconds = time.monotonic() - began
        said = log.read_text(encoding="utf-8", errors="replace").rstrip()
        ending, tests = _ending(place), results_of(place)
        if not status and ending == _NO_END:
            status = ENDED_EARLY
        is_known = ending == _TESTS_FAILED and any(t.outcome == "failed" for t in tests.values())
        part = Part(name, status, seconds, tests, said, is_known)
        print(f"==== {label}: {part.verdict}\n{said}", flush=True)
        return part

    def _status_of(self, command: Sequence[str], environment: Mapping[str, str], log: int) -> int:
        process = subprocess.Popen(
            command, cwd=self._root, env=environment, stdin=subprocess.DEVNULL, stdout=log,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        self._running.add(process)
        patience = 0.0
        try:
            status = process.wait(self._limit_seconds)
            patience = _PATIENCE_SECONDS
            return status
        except subprocess.TimeoutExpired:
            return OUT_OF_TIME
        finally:
            _end(process, patience)
            self._running.discard(process)


def _end(process: subprocess.Popen[bytes], patience_seconds: float = 0.0) -> None:
    """Kill a part with what it has started in its group, unless that ends by itself."""
    deadline = time.monotonic() + patience_seconds
    with contextlib.suppress(ProcessLookupError):
        while time.monotonic() < deadline:
            os.killpg(process.pid, 0)
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _ending(place: Path) -> str | None:
    """What pytest has noted of its end; None: there was no pytest."""
    status = Path(f"{place}.status")
    return status.read_text(encoding="utf-8") if status.exists() else None


def results_of(place: Path) -> dict[str, Result]:
    """Every test of a part, as pytest has written it to ``place``.xml; none if it could not."""
    path = Path(f"{place}.xml")
    found: dict[str, Result] = {}
    try:
        cases = list(ElementTree.parse(path).iter("testcase")) if path.exists() else []
    except ElementTree.ParseError:  # it was killed while it wrote, or the disk was full
        return {}
    for case in cases:
        failures = [child for child in case if child.tag in ("failure", "error")]
        skipped = case.find("skipped")
        outcome = "failed" if failures else "passed"
        if skipped is not None and not failures:
            outcome = "xfailed" if skipped.get("type") == "pytest.xfail" else "skipped"
        name = f"{case.get('classname')}.{case.get('name')}"
        texts = [child.text or child.get("message") or "" for child in failures]
        if name in found and failures:  # a test and its teardown may both be there
            texts.insert(0, found[name].text)
        if name not in found or failures:
            seconds = float(case.get("time", 0))
            found[name] = Result(name, outcome, seconds, "\n".join(filter(None, texts)))
    return found


def report(outcome: Outcome, promises: Mapping[str, str]) -> list[str]:
    """The lines that end a run, from what is looked at least to what is looked at most."""
    slowest = sorted(outcome.tests, key=lambda test: -test.seconds)[:SLOWEST]
    lines = [f"the slowest {len(slowest)} tests"] if slowest else []
    lines += [f"{test.seconds:8.1f} s  {test.name}" for test in slowest]
    lines += ["parts"]
    for parts, once_more in ((outcome.first, ""), (outcome.again, ", once more")):
        for part in parts:
            counted = f", {len(part.tests)} tests" if part.tests else ""
            lines.append(f"{part.seconds:8.1f} s  {part.name}{once_more}: {part.verdict}{counted}")
    proofs = outcome.proofs(promises)
    if promises:
        lines.append(
            f"{list(proofs.values()).count('passed')} of {len(proofs)} promises are proven"
        )
    for promise, result in proofs.items():
        if result != "passed":
            lines.append(f"  {result}: {promise} ({promises[promise]})")
    return lines + [f"failed twice: {name}" for name in outcome.failed]


def describe_unsteady(unsteady: Mapping[str, str]) -> list[str]:
    """The lines about what failed once, with the text of its failure."""
    if not unsteady:
        return []
    lines = [
        f"{len(unsteady)} unsteady: failed, and passed when run once more; see CONTRIBUTING.md"
    ]
    for name, text in unsteady.items():
        lines += [f"  {name}", *(f"    {line}".rstrip() for line in text.splitlines())]
    if len(unsteady) > MOST_UNSTEADY:
        lines.append(f"more than {MOST_UNSTEADY} are unsteady, so the run has FAILED")
    return lines


def clean_commit(folder: Path) -> str | None:
    """The commit that a checkout holds, with nothing changed and nothing new; None: no such one."""
    git = ["git", "-C", str(folder)]
    own = {key: value for key, value in os.environ.items() if key not in _OF_GIT}

    def asked(*arguments: str) -> str:
        done = subprocess.run([*git, *arguments], capture_output=True, check=True, env=own)
        return done.stdout.decode().strip()

    try:
        is_clean = not asked("status", "--porcelain", "--untracked-files=all")
        is_checkout = Path(asked("rev-parse", "--show-toplevel")).samefile(folder)
        return asked("rev-parse", "HEAD") if is_clean and is_checkout else None
    except (OSError, subprocess.CalledProcessError):  # no git, or no checkout
        return None


def _empty(folder: Path, keep: Sequence[str]) -> None:
    """Remove what an earlier run has left, but not the files to keep."""
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name not in keep:
            path.unlink()


def _junit_name(proof: str) -> str:
    path, _, name = proof.partition("::")
    name, bracket, values = name.partition("[")
    name = f"{name.replace('::', '.')}{bracket}{values}"
    return f"{path.removesuffix('.py').replace('/', '.')}.{name}"


def main(
    arguments: Sequence[str],
    say: Callable[[str], object] = print,
    root: Path = ROOT,
    promises: Mapping[str, str] = PROMISES,
) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--limit", type=float, default=3600.0, help="seconds for each part")
    parser.add_argument("--proof", action="store_true", help="every promise must be proven; if the "
                        "checkout is clean, its commit goes into build/tests/passed")  # fmt: skip
    parser.add_argument("parts", nargs="+")
    given = parser.parse_args(arguments)
    folder = root / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    with (folder.parent / "tests.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"another run is writing into {folder}; wait until it has ended")
            return 1
        return _run(given, say, root, promises if given.proof else {})


def _run(
    given: argparse.Namespace,
    say: Callable[[str], object],
    root: Path,
    promises: Mapping[str, str],
) -> int:
    commands = {name: ["make", "--no-print-directory", name] for name in given.parts}
    folder = root / FOLDER
    began, commit = time.monotonic(), None if os.environ.get(_OPTIONS) else clean_commit(root)
    _empty(folder, keep=() if given.proof else (_PASSED,))
    outcome = Runner(commands, root, given.limit).run_all(given.jobs)
    good = outcome.is_good(promises)
    for line in report(outcome, promises):
        say(line)
    say(f"{time.monotonic() - began:8.1f} s  in all: {'ok' if good else 'FAILED'}")
    unsteady = describe_unsteady(outcome.unsteady)
    (folder / "unsteady.txt").write_text("".join(f"{line}\n" for line in unsteady), "utf-8")
    if good and given.proof and commit is not None and clean_commit(root) == commit:
        (folder / _PASSED).write_text(f"{commit}\n", encoding="utf-8")
        say(f"proven: commit {commit}")
    for line in unsteady:
        say(line)
    return not good


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, lambda number, _: sys.exit(128 + number))  # which ends the parts
    sys.exit(main(sys.argv[1:]))
