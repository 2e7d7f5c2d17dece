"""A driver program for `test_driver.py`: trains with a checkpointDir, and prints the weights.

Usage: train_and_die.py CHECKPOINT_DIR SECONDS_PER_STEP
"""

from __future__ import annotations

import sys

from pyspark.sql import SparkSession

from sparkdl.config import CheckpointConfig
from sparkdl.spark.fit.fit import fit
from tests.cluster import faults
from tests.cluster.test_recovery import digest, request, training_rows


def main(directory: str, seconds_per_step: float) -> None:
    spark = (
        SparkSession.builder.master("local[2]")
        .config("spark.ui.enabled", "false")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("OFF")
    checkpoint = CheckpointConfig(directory=directory, interval=5)
    slow = faults.Slow(seconds=seconds_per_step)
    result = fit(training_rows(spark), request(slow, checkpoint=checkpoint))
    print("digest", digest(result), flush=True)
    spark.stop()


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
