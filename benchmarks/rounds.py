"""What does a round on plain Spark stages cost beyond its steps? Against an empty job.

A round of one step on a network of a given size, with one sample per shard, is nearly all overhead:
the job, the state to every shard, the states back, their mean. The empty job runs over the same
cached shard table in the same session, and so does one that carries as many bytes both ways.
"""

from __future__ import annotations

import argparse
import os

import common
import pyarrow as pa
from common import Measurements, seconds, spark_session
from torch import nn

import sparkdl
from sparkdl.spark.rounds.round_driver import _Rounds as Rounds
from sparkdl.sync.averaging.parameter_averaging import ParameterAveraging


def main() -> None:
    """Measure, several times in turn."""
    options = common.arguments(12, shards=(2, "shards"), slots=(2, "task slots"))
    found = Measurements()
    spark = spark_session(options.slots)
    for megabytes in (0, 1, 50):
        common.wait_until_idle(options.patience)
        measure(spark, megabytes, options, found)
    found.report("rounds", options)
    spark.stop()


def measure(spark, megabytes: int, options: argparse.Namespace, found: Measurements) -> None:
    """Rounds of a fit, each followed by an empty job over the same table."""
    name = f"{megabytes} MB"
    ran = []
    original = Rounds._train_round

    def timed(rounds) -> None:
        took = seconds(lambda: original(rounds))
        table = rounds.run.table.df
        empty = seconds(lambda: table.mapInArrow(count, "rows long").collect())
        data = os.urandom(megabytes << 20)
        carrying = seconds(lambda: carry(spark, table, data))
        ran.append((took, empty, carrying))

    Rounds._train_round = timed
    try:
        fit(spark, megabytes, options)
    finally:
        Rounds._train_round = original
    for took, empty, carrying in ran[3:]:  # the first ones start processes and import torch
        found.add(f"{name}, round s", took)
        found.add(f"{name}, empty job s", empty)
        found.add(f"{name}, job with the bytes s", carrying)
    found.ratio(f"{name}, round / empty job", f"{name}, round s", f"{name}, empty job s")
    found.ratio(f"{name}, round / job with the bytes", f"{name}, round s",
                f"{name}, job with the bytes s")  # fmt: skip


def count(batches):
    """An empty job's task."""
    yield pa.RecordBatch.from_pydict({"rows": [sum(batch.num_rows for batch in batches)]})


def carry(spark, table, data: bytes) -> None:
    """A job whose tasks get as many bytes as the parameters have, give them back, and no more."""
    broadcast = spark.sparkContext.broadcast(data)

    def give_back(batches):
        rows = sum(batch.num_rows for batch in batches)
        yield pa.RecordBatch.from_pydict({"rows": [rows], "data": [broadcast.value]})

    table.mapInArrow(give_back, "rows long, data binary").toArrow()
    broadcast.destroy()


def fit(spark, megabytes: int, options: argparse.Namespace) -> None:
    """As many rounds of one step as there are runs."""
    # Plain SGD has no state: what travels are the parameters, of 4 bytes each.
    wide = max(1, megabytes * 2**20 // 4 // 64)
    module = nn.Sequential(nn.Linear(8, 64), nn.Linear(64, wide, bias=False), nn.Linear(wide, 1))
    rows = spark.range(0, 64 * options.shards, 1, options.shards)
    columns = [f"cast((id * {k}) % 7 as float)" for k in range(1, 9)]
    df = rows.selectExpr(f"array({', '.join(columns)}) as features", "cast(id % 5 as float) label")
    sparkdl.TorchRegressor(
        module=module,
        optimizer="sgd",
        learningRate=1e-6,
        batchSize=1,
        epochs=1,
        maxSteps=options.runs + 3,
        numWorkers=options.shards,
        syncStrategy=ParameterAveraging(averaging_period=1),
        verbose=0,
    ).fit(df)


if __name__ == "__main__":
    main()
