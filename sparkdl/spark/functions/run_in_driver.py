"""A training function in the driver's own process, for debugging.

It runs as rank 0 of one, with the data sets brought to the driver. What the function raises comes
out as it is, and breakpoints work.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import uuid
from collections.abc import Sequence
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from sparkdl.comm.channel import Hub
from sparkdl.data.column_stats import no_rows
from sparkdl.data.plan import Shard
from sparkdl.data.spool.spool_source import SpoolSource
from sparkdl.data.spool.writer import SpoolWriter
from sparkdl.errors import DataError
from sparkdl.report.live.choose_view import choose_view
from sparkdl.report.recorder import Recorder
from sparkdl.runtime.hardware import choose_device, hardware
from sparkdl.spark.frames.columns import Prepared
from sparkdl.spark.frames.row_table import SpooledShard, TableSpec, spool_columns
from sparkdl.spark.frames.shard_table import columns_of
from sparkdl.spark.frames.user_data import UserData, user_data
from sparkdl.spark.functions.function_data import data_set, prepare_sets, warn_of_skipped
from sparkdl.spark.functions.run_function import (
    RUN_KEY,
    FunctionRequest,
    FunctionResult,
    check_folder,
)
from sparkdl.spark.run.run_facts import record_run
from sparkdl.storage.checkpoint_format import latest, load_shared
from sparkdl.storage.hadoop_storage import open_on_driver
from sparkdl.storage.storage import Storage, check_writable, open_storage
from sparkdl.worker.context import Context, entered
from sparkdl.worker.function_rank import called, checkpoints, default_group, environment_variables
from sparkdl.worker.loader import DataSet

_SECONDS = 600.0
"""Longest wait for a checkpoint to be written."""


def run_here(spark: SparkSession | None, request: FunctionRequest) -> FunctionResult:
    """Run a function in this process.

    Args:
        spark: the session; None: there is none, and none is needed.
        request: what is asked for; what concerns several workers has no effect.

    Raises:
        DataError: a data set cannot be used.
        StorageError: checkpoints cannot be kept.
    """
    with record_run(spark, uuid.uuid4().hex[:12], request) as recorder:
        result = _run(spark, request, recorder)
        recorder.succeeded(result.history)
    return result


def _run(
    spark: SparkSession | None, request: FunctionRequest, recorder: Recorder
) -> FunctionResult:
    """See `run_here`."""
    view = choose_view(None, request.verbose)
    recorder.show(view)
    with tempfile.TemporaryDirectory(prefix="sparkdl-") as folder, contextlib.ExitStack() as stack:
        stack.callback(view.close)
        storage = _storage(spark, request, folder)
        check_folder(storage, request)
        sets = {}
        if request.data:
            data = {name: user_data(one) for name, one in request.data.items()}
            sets = {
                name: _data_set(name, data[name], prepared, folder)
                for name, prepared in prepare_sets(data, request.inputs).items()
            }
        device = choose_device(request.device, (), 0, os.environ)
        stack.enter_context(default_group(device, _SECONDS))
        found = latest(storage, RUN_KEY, lambda _: True)
        manager = stack.enter_context(
            checkpoints(storage, request.keep_checkpoints, RUN_KEY, Hub(), _SECONDS)
        )
        place = Context(
            rank=0,
            nodes=(0,),
            device=device,
            num_restarts=0,
            sets=sets,
            resumed=None if found is None else load_shared(found),
            save=lambda number, state: manager.save(number, state, {}),
            show=recorder.epoch,
        )
        recorder.facts(world_size=1, mode="the driver's own process")
        recorder.fact(0, {"kind": "hardware", "hardware": hardware(device)})
        recorder.phase("train")
        with environment_variables(place), entered(place):
            value = called(request.function)
        return FunctionResult(values=[value], history=place.history, restarts=0)


def _storage(spark: SparkSession | None, request: FunctionRequest, folder: str) -> Storage:
    place = request.checkpoint_dir
    if place is None:
        return open_storage(str(Path(folder) / "checkpoints"))
    storage = open_storage(place) if spark is None else open_on_driver(spark, place)
    check_writable(storage)
    return storage


def _data_set(name: str, rows: UserData, prepared: tuple[Prepared, ...], folder: str) -> DataSet:
    if rows.source is None:
        directory = Path(tempfile.mkdtemp(dir=folder)) / "spool"
        return _spooled(name, rows.frame, prepared, directory)
    return data_set(rows.table(TableSpec(columns=prepared, num_shards=1), "driver"))


def _spooled(name: str, df: DataFrame, prepared: Sequence[Prepared], directory: Path) -> DataSet:
    """All rows as one shard, in the order of a run with one worker."""
    columns = [p.expression.alias(f"c{index}") for index, p in enumerate(prepared)]
    selected = df.select(*columns)
    hashed = selected.withColumn("hash", F.xxhash64(*selected.columns))
    ordered = hashed.repartition(1, "hash").sortWithinPartitions("hash", *selected.columns)
    table = ordered.toArrow()
    with SpoolWriter(directory, spool_columns(prepared), has_validation=False) as writer:
        for batch in table.to_batches():
            writer.write(batch)
    summary = writer.summary()
    shard = Shard(
        shard_id=0,
        host="",
        path=str(directory),
        num_rows=summary.num_rows,
        num_validation_rows=0,
        fingerprint=summary.fingerprint,
        num_bytes=summary.num_bytes,
    )
    part = SpooledShard(shard=shard, summary=summary, memory_bytes=0)
    found = columns_of(prepared, [part])
    if not summary.num_rows:
        raise DataError(f"data set {name!r}: {no_rows([summary])}")
    data = DataSet(columns=found, shards=(shard,), source=SpoolSource())
    warn_of_skipped(name, data, [part])
    return data
