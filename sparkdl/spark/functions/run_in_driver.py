"""A training function in the driver's own process, for debugging.

It runs as rank 0 of one, with the data sets brought to the driver. What the function raises comes
out as it is, and breakpoints work.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from functools import partial
from pathlib import Path

from pyspark.sql import SparkSession

from sparkdl.comm.channel import Hub
from sparkdl.report.recorder import Recorder
from sparkdl.runtime.activity import doing
from sparkdl.runtime.hardware import choose_device, hardware
from sparkdl.spark.frames.user_data import user_data
from sparkdl.spark.functions.function_data import local_data_sets
from sparkdl.spark.functions.run_function import (
    RUN_KEY,
    FunctionRequest,
    FunctionResult,
    check_folder,
)
from sparkdl.spark.run.resume import newest, patiently
from sparkdl.spark.session.termination import removed_at_termination
from sparkdl.storage.checkpoint_format import Writer, load_shared
from sparkdl.storage.hadoop_storage import open_on_driver
from sparkdl.storage.lease import Lease
from sparkdl.storage.retried import Retried
from sparkdl.storage.storage import Storage, check_writable, open_storage
from sparkdl.worker.context import Context, entered
from sparkdl.worker.function_rank import called, checkpoints, default_group, environment_variables

_SECONDS = 600.0
"""Longest wait for a checkpoint to be written."""


def in_driver(
    spark: SparkSession | None, run_id: str, request: FunctionRequest, recorder: Recorder
) -> FunctionResult:
    """Run a function in this process; what concerns several workers has no effect."""
    with tempfile.TemporaryDirectory(prefix="sparkdl-") as folder, contextlib.ExitStack() as stack:
        stack.enter_context(removed_at_termination(folder))
        storage = _storage(spark, request, folder)
        check_folder(storage, request)
        data = {name: user_data(one) for name, one in request.data.items()}
        sets = local_data_sets(data, request.inputs, Path(folder))
        device = choose_device(request.device, (), 0, os.environ)
        stack.enter_context(default_group(device, _SECONDS))
        found = newest(storage, RUN_KEY) if request.resume else None
        lease = stack.enter_context(Lease(storage, RUN_KEY, run_id))
        lease.begin(0, None if found is None else found.path)
        manager = stack.enter_context(
            checkpoints(
                storage,
                request.keep_checkpoints,
                Writer(run_key=RUN_KEY, run_id=run_id, attempt=0),
                Hub(),
                _SECONDS,
                is_required=request.checkpoint_dir is not None,
            )
        )
        place = Context(
            rank=0,
            nodes=(0,),
            device=device,
            num_restarts=0,
            sets=sets,
            resumed=None if found is None else patiently(partial(load_shared, found)),
            save=lambda number, state: manager.save(number, state, {}),
            show=recorder.epoch,
        )
        recorder.facts(world_size=1, mode="the driver's own process")
        recorder.fact(0, {"kind": "hardware", "hardware": hardware(device)})
        recorder.phase("train")
        doing("")
        with environment_variables(place), entered(place):
            value = called(request.function)
        return FunctionResult(values=[value], history=place.history, restarts=0)


def _storage(spark: SparkSession | None, request: FunctionRequest, folder: str) -> Storage:
    place = request.checkpoint_dir
    if place is None:
        return open_storage(str(Path(folder) / "checkpoints"))
    storage = Retried(open_storage(place) if spark is None else open_on_driver(spark, place))
    check_writable(storage)
    return storage
