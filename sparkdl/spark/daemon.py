"""Starts Spark's Python workers with torch in memory: their daemon imports it first.

Spark keeps Python workers for a minute; every later one would import torch anew. Opt-in, when the
session is built::

    SparkSession.builder.config("spark.python.daemon.module", "sparkdl.spark.daemon")

What is loaded is left out of the garbage collections that Spark's workers make after every task,
which would take 0.2 s each. Nothing here may start a thread: none survives a fork.
"""

from __future__ import annotations

import contextlib
import importlib

from sparkdl.runtime.process import freeze_once

DAEMON = "sparkdl.spark.daemon"
"""The value of ``spark.python.daemon.module``."""
PRELOADED = (
    "torch",
    "pandas",  # of which pyarrow asks with the first array
    "sparkdl.worker.function_rank",
    "sparkdl.worker.function_loader",
    "sparkdl.spark.cluster.gang",
    "sparkdl.spark.cluster.probe",
    "sparkdl.spark.frames.shard_table",
    "sparkdl.spark.inference.evaluate_task",
    "sparkdl.train.loop",
    "sparkdl.worker.training",
)


def preload() -> None:
    """Import what training needs; what is not installed is reported by those who need it."""
    for name in PRELOADED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    freeze_once()


if __name__ == "__main__":
    from pyspark.daemon import manager

    preload()
    manager()
