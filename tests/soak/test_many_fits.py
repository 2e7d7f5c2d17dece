"""Fits without end in one session: the last one finds what the first one found."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

import pytest

from sparkdl import TorchRegressor
from tests.cluster.processes import descendants
from tests.soak.usage import SHARE, Usage, own_threads, usage
from tests.test_multiplefits import make_net, weights

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

NUM_FITS, WARM = round(200 * SHARE), round(50 * SHARE)
MEMORY_MIB = 12.0
"""May come to more on the driver from then on: 80 KiB a fit, of 200."""
HEAP_MIB = 32.0
"""Likewise in the JVM, which keeps what its UI shows of the last thousand jobs and stages."""
SLOTS = 2
"""Of the tests' session."""


def heap_mib(spark: SparkSession) -> float:
    """What the JVM uses, after it was cleaned up."""
    java: Any = spark.sparkContext._jvm
    java.System.gc()
    runtime = java.Runtime.getRuntime()
    return round((runtime.totalMemory() - runtime.freeMemory()) / 2**20, 1)


@pytest.mark.slow
@pytest.mark.classic
@pytest.mark.timeout(900)
def test_what_a_session_holds_does_not_grow_with_its_fits(spark: SparkSession) -> None:
    df = spark.range(0, 32, 1, 1).selectExpr(
        "array(id % 7 - 3.0, id % 5 - 2.0, 1.0) AS features", "id % 3 - 1.0 AS label"
    )
    estimator = TorchRegressor(module=make_net, epochs=1, seed=3, numWorkers=1, verbose=0)
    expected = weights(estimator.fit(df))
    found: dict[int, tuple[Usage, float, int]] = {}
    began = time.monotonic()
    for number in range(1, NUM_FITS + 1):
        model = estimator.fit(df)
        if number in (WARM, NUM_FITS):
            found[number] = usage(), heap_mib(spark), len(descendants(os.getpid()))
            assert weights(model) == expected
            assert own_threads() == []
    (warm, heap, processes), (last, last_heap, last_processes) = found.values()
    assert last.grown(warm, memory_mib=MEMORY_MIB) == []
    assert last_heap - heap <= HEAP_MIB
    assert last_processes <= processes + SLOTS  # Spark forks workers and ends them as it likes
    seconds = time.monotonic() - began
    print(f"\n{NUM_FITS} fits in {seconds:.0f} s: {warm} -> {last}; JVM {heap} -> {last_heap} MiB")
