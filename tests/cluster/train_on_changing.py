"""A driver program for `test_elastic.py`: trains on a cluster that may change.

Usage: train_on_changing.py rounds|gang|range MASTER MARKER [KEY=VALUE ...]
"""

from __future__ import annotations

import sys
from dataclasses import replace

from pyspark.sql import SparkSession

from sparkdl.spark.fit.fit import fit
from sparkdl.spark.run.run import FitRequest
from sparkdl.sync.averaging.parameter_averaging import ParameterAveraging
from tests import jvm
from tests.cluster import faults
from tests.cluster.test_recovery import digest, request, training_rows


def in_rounds(*callbacks: faults.Fault) -> FitRequest:
    """More shards than slots, in three rounds."""
    wanted = request(*callbacks, num_workers=5)
    strategy = ParameterAveraging(averaging_period=8)
    return replace(wanted, config=replace(wanted.config, sync_strategy=strategy))


def wanted(mode: str, marker: str) -> FitRequest:
    """What is trained: rounds with a slow task, a gang with a lost worker, or of four workers."""
    if mode == "rounds":
        return in_rounds(faults.Straggle(marker, 3, 10))
    if mode == "gang":
        return request(faults.KillWorker(marker, 1, 17))
    return request(num_workers=4, min_workers=1)


def main(mode: str, master: str, marker: str, *settings: str) -> None:
    builder = SparkSession.builder.master(master).config("spark.ui.enabled", "false")
    builder = builder.config("spark.driver.host", "127.0.0.1").config("spark.cores.max", "2")
    builder = builder.config("spark.executor.memory", "600m").config("spark.executor.cores", "1")
    builder = builder.config("spark.python.daemon.module", "sparkdl.spark.daemon")
    builder = builder.config("spark.executor.extraJavaOptions", jvm.OPTIONS)
    for setting in settings:
        builder = builder.config(*setting.split("=", 1))
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("OFF")
    result = fit(training_rows(spark), wanted(mode, marker))
    print("restarts", result.summary.restarts)
    print("sizes", result.summary.gang_sizes)
    print("digest", digest(result), flush=True)
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
