"""A driver program for `test_full_disk.py`: fits whose files do not fit on Spark's local disk.

Usage: fill_the_disk.py DIRECTORY MIB. Mounts a disk of so many MiB there, in a mount namespace of
its own (``unshare --mount``), and prints what came of each fit as a line of JSON.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from torch import nn

from sparkdl import TorchRegressor
from sparkdl.errors import SparkDLError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

WIDTH = 1024


def make_net() -> nn.Module:
    return nn.Linear(WIDTH, 1)


def rows(spark: SparkSession, number: int, *, compressible: bool) -> DataFrame:
    """Rows of 8 KiB; those of equal values take little room in Spark's own shuffle files."""
    value = F.col("id").cast("double")
    if compressible:
        features = F.array_repeat(value, WIDTH)
    else:
        values = F.sequence(F.lit(1), F.lit(WIDTH))
        features = F.transform(values, lambda i: F.hash(i, F.col("id")).cast("double"))
    return spark.range(number).select(features.alias("features"), value.alias("label"))


def fit(df: DataFrame, directory: Path, spark: SparkSession) -> dict[str, Any]:
    """Type and message of the error, or none, and what is left behind."""
    tried = TorchRegressor(module=make_net, numWorkers=2, verbose=0, maxRestarts=1, maxSteps=2)
    error: SparkDLError | None = None
    try:
        tried.fit(df)
    except SparkDLError as caught:
        error = caught
    context: Any = spark.sparkContext
    return {
        "error": type(error).__name__ if error else None,
        "message": str(error),
        "spools": [str(path) for path in directory.glob("*/sparkdl-*")],
        "persisted": int(context._jsc.getPersistentRDDs().size()),
    }


def main(place: str, mib: str) -> None:
    directory = Path(place)
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={mib}m", "tmpfs", place], check=True, timeout=10
    )
    builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
    builder = builder.config("spark.local.dir", place).config("spark.driver.host", "127.0.0.1")
    builder = builder.config("spark.python.daemon.module", "sparkdl.spark.daemon")
    spark = builder.config("spark.sql.shuffle.partitions", "2").getOrCreate()
    spark.sparkContext.setLogLevel("OFF")
    too_many = int(mib) << 8  # of 8 KiB each as doubles, 4 KiB in the spool: twice what fits
    for number, compressible in ((too_many, True), (too_many, False), (64, False)):
        df = rows(spark, number, compressible=compressible)
        print(json.dumps(fit(df, directory, spark)), flush=True)
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
