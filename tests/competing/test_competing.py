"""Three gangs and a job of Spark SQL share two slots, in every order of start: all end well.

Each case takes some minutes, so `make competing` runs them, and `make test-all` has two gangs only.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.cluster.standalone import standalone
from tests.cluster.test_elastic import DYNAMIC, train

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(1500)]

SETTINGS = [*DYNAMIC, "spark.dynamicAllocation.minExecutors=0", "spark.sparkdl.startTimeout=60"]
GANGS = ("one", "two", "three")
ORDERS = {
    "together": {"one": 0, "two": 0, "three": 0, "sql": 0},
    "the query first": {"sql": 0, "one": 10, "two": 10, "three": 10},
    "the gangs first": {"one": 0, "two": 0, "three": 0, "sql": 25},
    "one by one": {"one": 0, "sql": 6, "two": 12, "three": 18},
    "two gangs, and others once they train": {"one": 0, "two": 0, "sql": 40, "three": 40},
}
"""Seconds after which each begins."""


@pytest.fixture(scope="module")
def master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with standalone(tmp_path_factory.mktemp("cluster"), ["127.0.0.1", "127.0.0.2"]) as url:
        yield url


@pytest.fixture(scope="module")
def alone(master: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The bits of a gang that has the cluster for itself."""
    said = train("competing", master, tmp_path_factory.mktemp("alone"), *SETTINGS)
    return said.split("digest ")[1].strip()


@pytest.mark.parametrize("order", ORDERS)
def test_gangs_and_a_query_share_a_cluster(
    order: str, master: str, alone: str, tmp_path: Path
) -> None:
    def begin(name: str, seconds: float) -> str:
        time.sleep(seconds)
        return train("query" if name == "sql" else "competing", master, tmp_path, *SETTINGS)

    with ThreadPoolExecutor(len(ORDERS[order])) as pool:
        begun: dict[str, Future[str]] = {
            name: pool.submit(begin, name, seconds) for name, seconds in ORDERS[order].items()
        }
        said = {name: future.result() for name, future in begun.items()}
    assert "sum 4950" in said["sql"]
    for name in GANGS:
        assert "restarts 0" in said[name]
        assert said[name].split("digest ")[1].strip() == alone
