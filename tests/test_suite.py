"""The runner of the parts, on small test files that fail in each way; the table of the promises."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.on_connect import AGAIN
from tests.promises import PROMISES, is_there
from tests.suite import (
    FOLDER,
    OUT_OF_TIME,
    Outcome,
    Part,
    Result,
    Runner,
    clean_commit,
    main,
    report,
)

PYTEST = [sys.executable, "-m", "pytest", "-q", "-c", os.devnull]
FIRST = """
import os, pathlib, time, pytest
def is_first(name):
    path = pathlib.Path(__file__).with_name(name)
    is_new = not path.exists()
    path.touch()
    return is_new
"""
"""Begins each file: tells whether a name is asked for the first time."""

Run = Callable[..., Outcome]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Write test files in which only `FIRST` stands already, and run each as a part."""
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)

    def run(jobs: int = 1, limit_seconds: float = 60, **files: str) -> Outcome:
        commands: dict[str, Sequence[str]] = {}
        for name, text in files.items():
            file = tmp_path / f"test_{name}.py"
            file.write_text(FIRST + text, encoding="utf-8")
            commands[name] = [*PYTEST, "--rootdir", str(tmp_path), str(file)]
        (tmp_path / FOLDER).mkdir(parents=True)
        return Runner(commands, tmp_path, limit_seconds).run_all(jobs)

    return run


def test_what_fails_twice_fails_the_run_and_hides_no_other(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = run(
        jobs=2,
        broken="""
def test_quick(): assert is_first("quick")
def test_skipped(): pytest.skip("left out")
def test_wrong(): assert False
@pytest.mark.parametrize("x", [1])
def test_each(x): pass
""",
        fine="def test_fine(): print('I am fine')",
    )
    printed = capsys.readouterr().out
    assert "==== broken: FAILED with status 1\n" in printed and "assert False" in printed
    assert "==== fine: ok\n" in printed
    assert "==== broken.again: FAILED with status 1\n" in printed
    assert outcome.failed == ["test_broken.test_wrong"]
    assert outcome.unsteady == {}
    assert not outcome.is_good({})
    assert [len(part.tests) for part in outcome.again] == [1]  # nothing but what failed

    kept = {"a": "test_broken.py::test_each[1]", "b": "test_broken.py::test_skipped"}
    lines = report(outcome, kept)
    assert lines[0] == "the slowest 5 tests"
    shown = [re.sub(r"^ *[0-9.]+ s", "N s", line) for line in lines[lines.index("parts") :]]
    assert shown == [
        "parts",
        "N s  broken: FAILED with status 1, 4 tests",
        "N s  fine: ok, 1 tests",
        "N s  broken, once more: FAILED with status 1, 1 tests",
        "1 of 2 promises are proven",
        "  skipped: b (test_broken.py::test_skipped)",
        "failed twice: test_broken.test_wrong",
    ]


def test_a_test_that_passes_once_more_is_unsteady_and_told(run: Run) -> None:
    outcome = run(
        shaky="""
def test_shaky(): assert not is_first("shaky"), "only the first time"
def test_steady(): assert is_first("steady")
@pytest.fixture
def fixture():
    yield
    assert not is_first("fixture"), "in the teardown"
def test_teardown(fixture): assert not is_first("call"), "in the test"
"""
    )
    assert list(outcome.unsteady) == [
        f"test_shaky.{name} (part shaky)" for name in ("test_shaky", "test_teardown")
    ]
    first, second = outcome.unsteady.values()
    assert "only the first time" in first
    assert "in the test" in second and "in the teardown" in second
    assert outcome.failed == []
    assert outcome.is_good({"proof": "test_shaky.py::test_shaky"})
    assert not outcome.is_good({"proof": "test_shaky.py::test_forgotten"})
    assert "  not run: proof (x.py::test_x)" in report(outcome, {"proof": "x.py::test_x"})


def test_a_crash_of_the_interpreter_runs_the_whole_part_once_more(run: Run) -> None:
    outcome = run(
        jobs=2,
        crashed="""
def test_before(): is_first("before")
def test_crash():
    if is_first("crash"):
        os.abort()
def test_after(): pass
""",
        always="def test_crash(): os.abort()",
    )
    assert [len(part.tests) for part in outcome.again] == [3, 0]
    assert list(outcome.unsteady) == ["the whole part crashed"]
    text = outcome.unsteady["the whole part crashed"]
    assert text.startswith("FAILED with status -6\n") and "in test_crash" in text
    assert outcome.failed == ["the whole part always"]


SHAKY = "def test_one(): assert not is_first('one')\n"


@pytest.mark.parametrize(
    "text",
    [
        "def test_two(): os._exit(0)",
        f"{SHAKY}def test_two(): atexit.register(os.abort)",
        f"{SHAKY}def test_two(): pytest.exit('enough', returncode=1)",
        f"{SHAKY}def test_two(): atexit.register(pathlib.Path(RESULTS).write_text, '<testsuites>')",
    ],
    ids=["ends as if well", "crashes at exit", "leaves tests out", "damages its results"],
)
def test_a_part_that_hides_how_it_ended_runs_once_more_as_a_whole(
    run: Run, text: str, tmp_path: Path
) -> None:
    """Nothing is known of the tests after that, or of those that were to come."""
    begin = f"import atexit\nRESULTS = {str(tmp_path / FOLDER / 'hidden.xml')!r}\n"
    outcome = run(hidden=f"{begin}{text}\ndef test_last(): assert False")
    (first,), (second,) = outcome.first, outcome.again
    assert first.status != 0 and not first.knows_what_failed
    assert outcome.failed and not outcome.is_good({})
    assert second.status != 0


def test_options_and_places_are_those_of_the_part_alone(run: Run) -> None:
    """A test that starts a pytest of its own overwrites nothing."""
    outcome = run(
        nested=f"""
import subprocess
def test_nested(tmp_path):
    inner = tmp_path / "test_inner.py"
    inner.write_text("def test_inner(): assert False")
    command = {PYTEST} + ["--rootdir", str(tmp_path), str(inner)]
    assert subprocess.run(command, cwd=tmp_path).returncode == 1
def test_crash():
    if is_first("crash"): os._exit(3)
"""
    )
    assert list(outcome.unsteady) == ["the whole part nested"]
    assert {test.name for test in outcome.tests} == {
        "test_nested.test_nested",
        "test_nested.test_crash",
    }


def test_a_proof_that_may_fail_is_none(run: Run) -> None:
    outcome = run(
        marked="""
@pytest.mark.xfail(reason="some day")
def test_later(): assert False
@pytest.mark.parametrize("x", ["a::b"])
def test_each(x): pass
"""
    )
    assert outcome.is_good({"proof": "test_marked.py::test_each[a::b]"})
    assert not outcome.is_good({"proof": "test_marked.py::test_later"})


def test_a_test_counts_in_each_part() -> None:
    tests = {way: {"t": Result("t", way, 0.1)} for way in ("failed", "passed")}
    first = [Part(name, 1, 1.0, tests["failed"], knows_what_failed=True) for name in "ab"]
    again = [Part(name, 0, 1.0, tests["passed"]) for name in "ab"]
    assert list(Outcome(first, again).unsteady) == ["t (part a)", "t (part b)"]


@pytest.mark.parametrize(
    "text",
    [
        "def test_one(): assert not is_first('one')\nif is_first('file'): import absent_module",
        "def test_one(): assert False\ndef test_two(): raise KeyboardInterrupt",
        "def test_one(): assert not is_first('one')\n"
        "def test_two():\n    if is_first('two'): pytest.exit('at once')",
    ],
    ids=["collection", "interrupt", "exit"],
)
def test_a_part_in_which_not_all_tests_ran_runs_once_more_as_a_whole(run: Run, text: str) -> None:
    outcome = run(cut=f"{text}\ndef test_last(): pass")
    assert not outcome.first[0].knows_what_failed
    names = set(outcome.again[0].tests)
    if "KeyboardInterrupt" in text:
        assert outcome.failed == ["test_cut.test_one"]
    elif "absent_module" in text:  # it is the first time of the test in it
        assert names == {"test_cut.test_one", "test_cut.test_last"}
        assert outcome.failed == ["test_cut.test_one"]
    else:
        assert names == {"test_cut.test_one", "test_cut.test_two", "test_cut.test_last"}
        assert list(outcome.unsteady) == ["the whole part cut"]
        assert outcome.is_good({})


def test_a_part_that_is_out_of_time_ends_with_all_that_it_has_started(tmp_path: Path) -> None:
    hangs = "test -e there && exit; touch there; sleep 600 & echo $! > pid; echo hangs; wait"
    (tmp_path / FOLDER).mkdir(parents=True)
    outcome = Runner({"slow": ["sh", "-c", hangs]}, tmp_path, 1.0).run_all(1)
    assert [part.status for part in outcome.first] == [OUT_OF_TIME]
    assert list(outcome.unsteady) == ["the whole part slow"]
    text = outcome.unsteady["the whole part slow"]
    assert text.startswith("OUT OF TIME after ") and text.endswith("hangs")
    assert outcome.is_good({})
    assert not is_alive(int((tmp_path / "pid").read_text()))


def test_what_a_part_leaves_behind_ends_when_it_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.suite._PATIENCE_SECONDS", 0.3)
    (tmp_path / FOLDER).mkdir(parents=True)
    leaves = "sleep 600 & echo $! > pid"
    outcome = Runner({"left": ["sh", "-c", leaves]}, tmp_path, 60).run_all(1)
    assert outcome.is_good({})
    assert not is_alive(int((tmp_path / "pid").read_text()))


def test_ctrl_c_ends_the_parts(tmp_path: Path) -> None:
    (tmp_path / FOLDER).mkdir(parents=True)
    runner = Runner({"slow": ["sh", "-c", "sleep 600 & echo $! > pid; wait"]}, tmp_path, 600)

    def press() -> None:
        deadline = time.monotonic() + 30
        while not written(tmp_path / "pid") and time.monotonic() < deadline:
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    pressing = threading.Thread(target=press)
    pressing.start()
    with pytest.raises(KeyboardInterrupt):
        runner.run_all(2)
    pressing.join()
    assert not is_alive(int((tmp_path / "pid").read_text()))


def written(path: Path) -> bool:
    return path.exists() and path.read_text().endswith("\n")


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that nobody has waited for yet does not."""
    deadline = time.monotonic() + 10
    while (stat := Path(f"/proc/{pid}/stat")).exists():
        if stat.read_text().rpartition(")")[2].split()[0] in "ZX":
            return False
        if time.monotonic() > deadline:
            return True
        time.sleep(0.02)
    return False


MAKEFILE = f"""
one:
\t@{" ".join(PYTEST)} --rootdir . test_one.py
two:
\t@echo fine
"""


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository of its own, whose part ``one`` has a promise's proof and shaky tests."""
    if shutil.which("git") is None:
        pytest.skip("there is no git")
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    (tmp_path / "Makefile").write_text(MAKEFILE, encoding="utf-8")
    shaky = "\n".join(f"def test_{n}(): assert not is_first('{n}'), 'round {n}'" for n in range(4))
    (tmp_path / "test_one.py").write_text(f"{FIRST}\n{shaky}\n", encoding="utf-8")
    (tmp_path / ".gitignore").write_text("build\n__pycache__\n[0-9]\n", encoding="utf-8")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "-c", "user.name=x", "-c", "user.email=x@y", "commit", "-q", "-m", "first")
    return tmp_path


def git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=folder, check=True, capture_output=True)
    return done.stdout.decode().strip()


def test_a_run_ends_with_what_is_unsteady_and_notes_a_commit_that_is_proven(checkout: Path) -> None:
    said: list[str] = []
    promises = {"kept": "test_one.py::test_0"}
    arguments = ["--proof", "one", "two"]
    assert main(arguments, said.append, checkout, promises) == 1  # four are unsteady
    assert said[-1] == "more than 3 are unsteady, so the run has FAILED"
    assert "  test_one.test_3 (part one)" in said and any("round 3" in line for line in said)
    kept = (checkout / FOLDER / "unsteady.txt").read_text(encoding="utf-8")
    assert kept.splitlines() == said[-len(kept.splitlines()) :]
    assert not (checkout / FOLDER / "passed").exists()

    (checkout / "0").unlink()  # one is shaky again
    assert main(arguments, said.append, checkout, promises) == 0
    commit = git(checkout, "rev-parse", "HEAD")
    assert (checkout / FOLDER / "passed").read_text(encoding="utf-8") == f"{commit}\n"
    assert f"proven: commit {commit}" in said

    assert main(["two"], said.append, checkout, promises) == 0  # of some parts: it says nothing
    assert (checkout / FOLDER / "passed").exists()
    (checkout / "new").touch()
    assert clean_commit(checkout) is None
    assert main(["--proof", "two"], said.append, checkout, {}) == 0
    assert not (checkout / FOLDER / "passed").exists()


def test_what_is_no_run_of_a_clean_checkout_proves_nothing(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    passed, said = checkout / FOLDER / "passed", list[str]()
    assert main(["--proof", "two"], said.append, checkout, {}) == 0
    assert passed.exists()
    monkeypatch.setenv("PYTEST_ADDOPTS", "-x")
    assert main(["--proof", "two"], said.append, checkout, {}) == 0
    assert not passed.exists()

    copy = checkout / "build" / "copy"  # ignored by the repository around it
    copy.mkdir()
    assert clean_commit(copy) is None
    commit = git(checkout, "rev-parse", "HEAD")
    other = checkout / "build" / "other"
    git(checkout, "clone", "-q", str(checkout), str(other))
    git(other, "-c", "user.name=x", "-c", "user.email=x@y", "commit", "-qm", "s", "--allow-empty")
    monkeypatch.setenv("GIT_DIR", str(other / ".git"))  # as in a hook of that one
    monkeypatch.setenv("GIT_WORK_TREE", str(other))
    assert clean_commit(checkout) == commit
    monkeypatch.delenv("GIT_DIR")
    monkeypatch.delenv("GIT_WORK_TREE")
    git(checkout, "config", "status.showUntrackedFiles", "no")
    (checkout / "conftest.py").touch()
    assert clean_commit(checkout) is None


def test_two_runs_in_one_folder_do_not_mix(checkout: Path) -> None:
    said: list[str] = []
    (checkout / FOLDER).mkdir(parents=True)
    with (checkout / "build" / "tests.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert main(["two"], said.append, checkout, {}) == 1
    assert len(said) == 1 and "another run" in said[0]
    assert main(["two"], said.append, checkout, {}) == 0


def test_every_promise_has_a_proof_of_its_own() -> None:
    assert [proof for proof in PROMISES.values() if not is_there(proof)] == []
    assert len(set(PROMISES.values())) == len(PROMISES)


def test_what_runs_again_on_connect_is_there() -> None:
    assert [name for name in sorted(AGAIN) if not is_there(name)] == []


def test_the_makefile_names_tests_that_are_there() -> None:
    root = Path(__file__).parent.parent
    named = re.findall(r"tests/[\w./]+", (root / "Makefile").read_text(encoding="utf-8"))
    assert [path for path in named if not (root / path).exists()] == []
    assert len(named) > 10


def test_a_part_that_there_is_not_is_refused_before_anything_is_made() -> None:
    program = shutil.which("make")
    assert program is not None

    def said(parts: str) -> str:
        done = subprocess.run(
            [program, "-n", "test-all", f"PARTS={parts}"],
            cwd=Path(__file__).parent.parent, capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        return done.stdout + done.stderr

    assert "there is no fautls; there are: lint spark cluster faults " in said("cluster fautls")
    assert "--limit 3600 cluster plain\n" in said("cluster plain")
