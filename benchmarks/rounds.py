"""What does a round on plain Spark stages cost beyond its steps? Against PySpark's treeReduce.

A round of one step on a network of a given size, with few samples per shard, is mostly overhead:
the job, the state to every shard, the states to the tasks that take their mean, the mean back. The
empty job runs over the same cached shard table in the same session. The peer is what one writes
without sparkdl: an array as a broadcast variable, an array from each task, and `treeReduce`.

``--large MB`` only trains two rounds of so many megabytes of parameters, with Adam and 8 shards,
and prints how long that takes: the driver's JVM has 2 GB, and a state is three times as large.
"""

from __future__ import annotations

import argparse
import math

import common
import numpy as np
import pyarrow as pa
from common import Measurements, seconds, spark_session
from torch import nn

import sparkdl
from sparkdl.spark.rounds.round_driver import _Rounds as Rounds
from sparkdl.sync.averaging.parameter_averaging import ParameterAveraging

MEGABYTES = (1, 10, 100)
SHARDS = (2, 8, 64)
MUCH = 700
"""Megabytes of all shards from which on fewer rounds are measured."""
PEER_MOST = 1000
"""`treeReduce` brings several arrays to the driver: beyond this they do not fit into 2 GB."""


def main() -> None:
    """Measure each size of state with each number of shards."""
    options = common.arguments(
        3, slots=(2, "task slots"), large=(0, "only two rounds of so many megabytes with Adam")
    )
    found = Measurements()
    spark = spark_session(options.slots)
    if options.large:
        took = seconds(lambda: fit(spark, options.large, 8, 2, optimizer="adam"))
        print(f"two rounds of {options.large} MB with Adam over 8 shards: {took:.1f} s")
        spark.stop()
        return
    common.wait_until_idle(options.patience)
    fit(spark, 0, 2, 3)  # starts processes and imports torch
    for megabytes in MEGABYTES:
        for shards in SHARDS:
            measure(spark, megabytes, shards, options, found)
    add_formula(found)
    found.report("rounds", options)
    spark.stop()


def measure(
    spark, megabytes: int, shards: int, options: argparse.Namespace, found: Measurements
) -> None:
    """Rounds of a fit, each followed by an empty job over the same table, and by the peer's."""
    name = cell(megabytes, shards)
    ran = []
    original = Rounds._train_round

    def timed(rounds) -> None:
        took = seconds(lambda: original(rounds))
        table = rounds.run.table.df
        empty = seconds(lambda: table.mapInArrow(count, "rows long").collect())
        peer = math.nan
        if ran and megabytes * shards <= PEER_MOST:
            peer = seconds(lambda: tree_reduce(spark.sparkContext, megabytes, shards))
        ran.append((took, empty, peer))

    Rounds._train_round = timed
    try:
        fit(spark, megabytes, shards, 1 + (options.runs if megabytes * shards < MUCH else 1))
    finally:
        Rounds._train_round = original
    for took, empty, peer in ran[1:]:  # the first one makes the module in each process
        found.add(f"{name}, round s", took)
        found.add(f"{name}, empty job s", empty)
        if not math.isnan(peer):
            found.add(f"{name}, treeReduce s", peer)


def cell(megabytes: int, shards: int) -> str:
    """How values of this size and number are called."""
    return f"{megabytes} MB x {shards} shards"


def add_formula(found: Measurements) -> None:
    """Fit seconds = job + shards * task + megabytes of all shards * byte, by relative errors."""
    rows, rounds = [], []
    for megabytes in MEGABYTES:
        for shards in SHARDS:
            rows.append([1.0, shards, megabytes * shards])
            rounds.append(found.median(f"{cell(megabytes, shards)}, round s"))
    weights = 1 / np.array(rounds)
    costs, *_ = np.linalg.lstsq(np.array(rows) * weights[:, None], np.ones(len(rows)), rcond=None)
    for name, cost in zip(("job", "task", "MB of a shard"), costs, strict=True):
        found.add(f"formula, s per {name}", float(cost))
    errors = np.abs(np.array(rows) @ costs * weights - 1)
    found.add("formula, largest relative error", float(errors.max()))


def count(batches):
    """An empty job's task."""
    yield pa.RecordBatch.from_pydict({"rows": [sum(batch.num_rows for batch in batches)]})


def tree_reduce(context, megabytes: int, shards: int) -> None:
    """The sum of arrays of as many bytes as the parameters have, one from each task."""
    broadcast = context.broadcast(np.ones(megabytes << 18, np.float32))
    context.parallelize(range(shards), shards).map(lambda _: broadcast.value * 2).treeReduce(np.add)
    broadcast.destroy()


def fit(spark, megabytes: int, shards: int, rounds: int, optimizer: str = "sgd") -> None:
    """As many rounds of one step."""
    # Plain SGD has no state: what travels are the parameters, of 4 bytes each.
    wide = max(1, megabytes * 2**20 // 4 // 64)
    module = nn.Sequential(nn.Linear(8, 64), nn.Linear(64, wide, bias=False), nn.Linear(wide, 1))
    rows = spark.range(0, 32 * shards, 1, 2)
    columns = [f"cast((id * {k}) % 1009 as float)" for k in range(1, 9)]
    df = rows.selectExpr(f"array({', '.join(columns)}) as features", "cast(id % 5 as float) label")
    sparkdl.TorchRegressor(
        module=module,
        optimizer=optimizer,
        learningRate=1e-6,
        batchSize=8,  # every shard has samples in each step
        epochs=1,
        maxSteps=rounds,
        numWorkers=shards,
        syncStrategy=ParameterAveraging(averaging_period=1),
        verbose=0,
    ).fit(df)


if __name__ == "__main__":
    main()
