"""Versions that driver and workers share, and what a difference says."""

from __future__ import annotations

import platform
from importlib import metadata

import pytest

from sparkdl.runtime.versions import TESTED, difference, distance, untested, versions

DRIVER = {"python": "3.12.3", "sparkdl": "1", "torch": "2.13.0", "pyspark": "4.3", "pyarrow": "26"}


def test_versions_of_this_process() -> None:
    import sparkdl

    found = versions()
    assert found["python"] == platform.python_version()
    assert found["sparkdl"] == sparkdl.__version__
    assert set(found) == set(DRIVER)
    assert difference(found, found, "here") is None


@pytest.mark.parametrize(
    ("worker", "message"),
    [
        (
            {"torch": "2.12.0"},
            "rank 1 on h has torch 2.12.0, the driver has torch 2.13.0; install the same version",
        ),
        ({"python": "3.11.9"}, "has python 3.11.9, the driver has python 3.12.3; point PYSPARK_"),
        ({"torch": "none"}, "has no torch, the driver has torch 2.13.0; install torch 2.13.0"),
        ({"sparkdl": "2"}, "has sparkdl 2, the driver has sparkdl 1"),
        ({"pyspark": "4.2"}, "has pyspark 4.2, the driver has pyspark 4.3"),
    ],
)
def test_a_difference_is_one_sentence_with_a_remedy(worker: dict[str, str], message: str) -> None:
    found = difference(DRIVER, {**DRIVER, **worker}, "rank 1 on h")
    assert found is not None
    assert message in found
    assert "\n" not in found


@pytest.mark.parametrize(
    "worker", [{"python": "3.12.9"}, {"pyspark": "none"}, {"torch": "2.13.0+cu126"}]
)
def test_what_may_differ(worker: dict[str, str]) -> None:
    # Spark puts its own pyspark on the workers' path, where pip knows nothing of it.
    assert difference(DRIVER, {**DRIVER, **worker}, "there") is None


def test_a_package_that_the_worker_does_not_mention_is_missing() -> None:
    found = difference(DRIVER, {"python": "3.12.3", "sparkdl": "1"}, "there")
    assert found is not None
    assert found.startswith("there has no torch")


@pytest.mark.parametrize(
    ("version", "said"),
    [
        ("2.8.9", "2.8.9 is older than the oldest tested, 2.9"),
        ("2.9.0.dev3", None),
        ("2.10.1+cu128", None),
        ("2.14.7", None),
        ("2.16", "2.16 is newer than the newest tested, 2.14"),
        ("3", "3 is newer than the newest tested, 2.14"),
    ],
)
def test_versions_that_nobody_has_tested(
    version: str, said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(TESTED, "torch", ("2.9", "2.14"))
    assert distance("torch", version) == said


def test_what_is_installed_and_untested_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in TESTED:
        monkeypatch.setitem(TESTED, name, ("0", "99999"))
    assert untested() == ""
    monkeypatch.setitem(TESTED, "torch", ("0.1", "0.2"))
    monkeypatch.setitem(TESTED, "python", ("98", "99"))
    monkeypatch.setitem(TESTED, "no-such-package", ("1", "1"))
    assert untested() == (
        f"; python {platform.python_version()} is older than the oldest tested, 98"
        f"; torch {metadata.version('torch')} is newer than the newest tested, 0.2"
    )
