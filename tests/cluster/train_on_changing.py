"""A driver program for `test_elastic.py`: trains on a cluster that may change.

Usage: train_on_changing.py rounds|gangs|competing|query MASTER DIRECTORY [KEY=VALUE ...]

With ``gangs``, one that grows (range) and one that loses a worker (gang) train one after the other.
With ``query`` nothing trains: a job of Spark SQL takes all slots that it gets for some time.
In the directory each fit leaves a file of its own name when what it waits for has come.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pyarrow as pa
from pyspark.resource import (
    ExecutorResourceRequests,
    ResourceProfileBuilder,
    TaskResourceRequests,
)
from pyspark.sql import SparkSession

from sparkdl.spark.cluster import let_go
from sparkdl.spark.fit import gang_fit
from sparkdl.spark.fit.fit import fit
from sparkdl.spark.run.run import FitRequest
from sparkdl.sync.averaging.parameter_averaging import ParameterAveraging
from sparkdl.train.callbacks import Callback, CallbackState
from tests import jvm
from tests.cluster import faults
from tests.cluster.test_recovery import digest, request, training_rows


def in_rounds(*callbacks: faults.Fault) -> FitRequest:
    """More shards than slots, in three rounds."""
    wanted = request(*callbacks, num_workers=5)
    strategy = ParameterAveraging(averaging_period=8)
    return replace(wanted, config=replace(wanted.config, sync_strategy=strategy))


def wanted(mode: str, marker: str) -> FitRequest:
    """What is trained: rounds with a slow task, a gang with a lost worker, or one that grows."""
    if mode == "rounds":
        return in_rounds(faults.Straggle(marker, 3, 10))
    if mode == "competing":
        let_go._HOLD = 0.5
        return request(Slow())
    if mode == "gang":
        return request(faults.KillWorker(marker, 1, 17))
    return request(Grows(marker), num_workers=3, min_workers=1)


@dataclass
class Grows(Callback):
    """Takes its time, so that it pays to grow; another job ends when the gang has a checkpoint."""

    marker: str

    def on_step_end(self, state: CallbackState) -> None:
        if state.step >= 6:
            Path(self.marker).touch()
        time.sleep(1.0 if state.world_size == 1 else 0)


@dataclass
class Slow(Callback):
    """Takes its time, so that a competitor is met."""

    def on_step_end(self, state: CallbackState) -> None:
        time.sleep(0.2)


def until_there(marker: str, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """A task that says that it runs, and ends when the file is there."""
    yield from batches
    Path(f"{marker}-waits").touch()
    while not Path(marker).exists():
        time.sleep(0.1)


def slowly(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Five seconds of a slot."""
    time.sleep(5)
    yield from batches


def occupy(spark: SparkSession, marker: str) -> None:
    """Have an executor of another kind, so that the gang gets one only, until the file is there."""
    tasks = ResourceProfileBuilder().require(TaskResourceRequests().cpus(1))
    profile = tasks.require(ExecutorResourceRequests().cores(1).memory("601m")).build
    task = spark.range(0, 1, 1, 1).mapInArrow(
        partial(until_there, marker), "id long", profile=profile
    )
    threading.Thread(target=task.collect, daemon=True).start()
    while not Path(f"{marker}-waits").exists():
        time.sleep(0.1)


def main(mode: str, master: str, directory: str, *settings: str) -> None:
    builder = SparkSession.builder.master(master).config("spark.ui.enabled", "false")
    builder = builder.config("spark.driver.host", "127.0.0.1").config("spark.cores.max", "2")
    builder = builder.config("spark.executor.memory", "600m").config("spark.executor.cores", "1")
    builder = builder.config("spark.python.daemon.module", "sparkdl.spark.daemon")
    builder = builder.config("spark.executor.extraJavaOptions", jvm.OPTIONS)
    for setting in settings:
        builder = builder.config(*setting.split("=", 1))
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("OFF")
    if mode == "query":
        rows = spark.range(0, 100, 1, 8).mapInArrow(slowly, "id long").groupBy().sum("id")
        print("sum", rows.collect()[0][0], flush=True)
    for kind in {"gangs": ("range", "gang"), "query": ()}.get(mode, (mode,)):
        marker = str(Path(directory) / kind)
        print(f"{kind}:")
        if kind == "range":
            gang_fit._WORTH = 0.0
            occupy(spark, marker)
        result = fit(training_rows(spark), wanted(kind, marker))
        print("restarts", result.summary.restarts)
        print("sizes", result.summary.gang_sizes)
        print("digest", digest(result), flush=True)
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
