"""Versions that driver and workers share, and what a difference says."""

from __future__ import annotations

import platform

import pytest

from sparkdl.runtime.versions import difference, versions

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
