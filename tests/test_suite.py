"""The runner of the parts, on parts that take no time; and the table of the promises."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.on_connect import AGAIN
from tests.promises import PROMISES, is_there
from tests.suite import Part, is_good, report, results_of, run_all

SOME = """
def test_quick(): pass
def test_skipped(): pytest.skip("left out")
def test_wrong(): assert False
@pytest.mark.parametrize("x", [1])
def test_each(x): pass
"""


@pytest.fixture
def folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """Where the results of two parts lie, the first of which has failed; capsys has the rest."""
    file = tmp_path / "test_some.py"
    file.write_text(f"import pytest\n{SOME}")
    of_pytest = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    of_pytest += ["--rootdir", str(tmp_path), "-c", "/dev/null", str(file)]
    parts = run_all(
        {"broken": of_pytest, "fine": [sys.executable, "-c", "print('I am fine')"]}, 2, tmp_path
    )
    assert [(part.name, bool(part.status)) for part in parts] == [("broken", True), ("fine", False)]
    return tmp_path


def test_a_part_that_fails_hides_no_other(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    printed = capsys.readouterr().out
    assert "==== broken: FAILED with status 1\n" in printed and "assert False" in printed
    assert "==== fine: ok\nI am fine\n" in printed
    tests = list(results_of(folder))
    assert [(test.name, test.outcome) for test in tests] == [
        ("test_some.test_quick", "passed"),
        ("test_some.test_skipped", "skipped"),
        ("test_some.test_wrong", "failed"),
        ("test_some.test_each[1]", "passed"),
    ]


def test_what_is_reported_and_what_makes_a_run_good(folder: Path) -> None:
    tests = list(results_of(folder))
    good, bad = Part("fine", 0, 2.0), Part("broken", 1, 61.04)
    kept = {"a": "test_some.py::test_each[1]", "b": "test_some.py::test_skipped"}
    lines = report([good, bad], tests, kept)
    assert lines[0] == "the slowest 4 tests"
    assert lines[-5:] == [
        "parts",
        "     2.0 s  fine: ok",
        "    61.0 s  broken: FAILED with status 1, 4 tests",
        "1 of 2 promises are proven",
        "  skipped: b (test_some.py::test_skipped)",
    ]
    assert is_good([good], tests, kept)
    assert not is_good([good, bad], tests, kept)
    forgotten = {"c": "test_some.py::test_each[2]"}
    assert not is_good([good], tests, forgotten)
    assert "  not run: c (test_some.py::test_each[2])" in report([good], tests, forgotten)


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
