"""A driver program for `test_elastic.py`: trains in rounds on a cluster that may change.

Usage: train_in_rounds.py MASTER MARKER [KEY=VALUE ...]
"""

from __future__ import annotations

import sys
from dataclasses import replace

from pyspark.sql import SparkSession

from sparkdl.spark.fit.fit import fit
from sparkdl.sync.averaging.parameter_averaging import ParameterAveraging
from tests.cluster import faults
from tests.cluster.test_recovery import digest, request, training_rows


def main(master: str, marker: str, *settings: str) -> None:
    builder = SparkSession.builder.master(master).config("spark.ui.enabled", "false")
    builder = builder.config("spark.driver.host", "127.0.0.1").config("spark.cores.max", "2")
    builder = builder.config("spark.executor.memory", "600m").config("spark.executor.cores", "1")
    for setting in settings:
        builder = builder.config(*setting.split("=", 1))
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("OFF")
    wanted = request(faults.Straggle(marker, 3, 8), num_workers=5)
    strategy = ParameterAveraging(averaging_period=3)
    result = fit(
        training_rows(spark), replace(wanted, config=replace(wanted.config, sync_strategy=strategy))
    )
    print("restarts", result.summary.restarts)
    print("digest", digest(result), flush=True)
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
