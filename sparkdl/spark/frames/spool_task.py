"""The tasks of executors that write spools, describe them, and remove them."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import socket
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark import BarrierTaskContext, TaskContext

from sparkdl.data.column_stats import SpooledShard
from sparkdl.data.plan import SpoolColumn
from sparkdl.data.spool.local_disk import DiskFull, free_bytes, full_disk, remove_spool, roomiest
from sparkdl.data.spool.writer import SpoolWriter
from sparkdl.errors import SparkDLError
from sparkdl.runtime.process import memory_bytes
from sparkdl.worker.kept import KEPT
from sparkdl.worker.watcher import ended_when_hung

TABLE_SCHEMA = "shard_id int, payload string"
_ARROW_SCHEMA = pa.schema([("shard_id", pa.int32()), ("payload", pa.string())])


@dataclass(frozen=True, kw_only=True)
class SpoolTask:
    """The spooling task: writes its partition, yields its row. Runs on executors.

    Record batches of one data set have what `SpoolWriter` takes. Those of several have the columns
    ``set`` (number of the row's data set), ``set0``, ``set1``, ... (its columns, as a struct; null
    in the rows of the others) and ``hash``. The rows of a data set stand together.
    """

    run_id: str
    sets: tuple[tuple[SpoolColumn, ...], ...]
    """Columns of each data set, of which the partition has a shard each."""
    has_validation: bool = False
    heartbeat_timeout_seconds: float = 60.0
    """How long the task may neither run Python nor use the CPU, before its process is ended."""

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Spool one partition; a failure of ours travels in the row, not as a Spark failure."""
        with ended_when_hung(self.heartbeat_timeout_seconds):
            row = self._spool(batches)
        yield pa.RecordBatch.from_pydict(row, schema=_ARROW_SCHEMA)

    def _spool(self, batches: Iterator[pa.RecordBatch]) -> dict[str, list[Any]]:
        """Spool one partition; returns the row that says where it is."""
        shard_id, host = _place()
        try:
            root = roomiest(local_dirs())
            name = f"shard-{shard_id:05d}-{uuid.uuid4().hex[:8]}"
            directory = root / run_folder(self.run_id) / name
            shards = [
                replace(
                    spooled,
                    shard=replace(spooled.shard, shard_id=shard_id, host=host),
                    memory_bytes=memory_bytes(),
                ).to_dict()
                for spooled in self._write(root, directory, shard_id, batches)
            ]
            payload = {"path": str(directory), "shards": shards}
        except SparkDLError as error:
            for _ in batches:  # a worker whose input was not read to the end is not reused
                pass
            payload = {"error": type(error).__name__, "message": str(error)}
        return {"shard_id": [shard_id], "payload": [json.dumps(payload)]}

    def _write(
        self, root: Path, directory: Path, shard_id: int, batches: Iterator[pa.RecordBatch]
    ) -> list[SpooledShard]:
        """Write the files; those of several data sets into folders by their numbers."""
        writer_of = partial(
            SpoolWriter, has_validation=self.has_validation, where=f" of partition {shard_id}"
        )
        if len(self.sets) == 1:
            writers = [writer_of(directory, self.sets[0])]
            pieces = ((0, batch) for batch in batches)
        else:
            writers = [writer_of(directory / str(n), sets) for n, sets in enumerate(self.sets)]
            pieces = (piece for batch in batches for piece in _by_set(batch))
        free, rows = free_bytes(root), [0] * len(writers)
        try:
            with contextlib.ExitStack() as stack:
                for writer in writers:
                    stack.enter_context(writer)
                for number, piece in pieces:
                    rows[number] += piece.num_rows
                    writers[number].write(piece)
        except DiskFull as error:
            for number, piece in pieces:
                rows[number] += piece.num_rows
            needed = sum(n * w.row_bytes for n, w in zip(rows, writers, strict=True))
            raise full_disk(root, shard_id, needed=int(needed), free=free) from error
        return [writer.summary() for writer in writers]


def _by_set(batch: pa.RecordBatch) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Number of a data set and its rows, with its own columns and the hash."""
    numbers = batch.column("set").to_numpy()
    starts = [0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist(), len(numbers)]
    for start, stop in itertools.pairwise(starts):
        if start < stop:
            number, piece = int(numbers[start]), batch.slice(start, stop - start)
            columns = [*piece.column(f"set{number}").flatten(), piece.column("hash")]
            names = [f"c{index}" for index in range(len(columns))]
            yield number, pa.RecordBatch.from_arrays(columns, names)


@dataclass(frozen=True, kw_only=True)
class CleanTask:
    """Removes what runs have spooled on this executor; yields the paths that were there."""

    run_ids: tuple[str, ...]
    paths: tuple[str, ...]

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Remove the paths that the driver knows, and the runs' folders in every directory."""
        for _ in batches:
            pass
        KEPT.release()
        removed = [path for path in self.paths if remove_spool(Path(path))]
        for root in local_dirs():  # what the driver has not seen: of tasks that were lost
            for run_id in self.run_ids:
                shutil.rmtree(Path(root) / run_folder(run_id), ignore_errors=True)
        yield pa.RecordBatch.from_pydict({"path": pa.array(removed, pa.string())})


def _place() -> tuple[int, str]:
    """Number of this task's partition, and its host as Spark calls it, or as the host does."""
    context = TaskContext.get()
    assert context is not None
    number = context.partitionId()
    if not isinstance(context, BarrierTaskContext):
        return number, socket.gethostname()
    return number, context.getTaskInfos()[number].address.rsplit(":", 1)[0]


def local_dirs() -> list[str]:
    """Spark's local directories of the executor that runs this task."""
    return [name for name in os.environ.get("SPARK_LOCAL_DIRS", "").split(",") if name]


def run_folder(run_id: str) -> str:
    """Name of the folder of one run's spools, in every local directory."""
    return f"sparkdl-{run_id}"
