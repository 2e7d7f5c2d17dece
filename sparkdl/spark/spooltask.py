"""What do executors do about spools? They write them, tell of them, and remove them."""

from __future__ import annotations

import json
import os
import shutil
import socket
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark import BarrierTaskContext, TaskContext

from sparkdl.data.disk import DiskFull, free_bytes, full_disk, remove_spool, roomiest
from sparkdl.data.spool import SpoolColumn, SpoolWriter
from sparkdl.data.stats import SpoolSummary
from sparkdl.errors import SparkDLError
from sparkdl.process import memory_bytes

TABLE_SCHEMA = "shard_id int, payload string"
_ARROW_SCHEMA = pa.schema([("shard_id", pa.int32()), ("payload", pa.string())])


@dataclass(frozen=True, kw_only=True)
class SpoolTask:
    """The spooling task: writes its partition, yields its row. Runs on executors."""

    run_id: str
    columns: tuple[SpoolColumn, ...]
    has_validation: bool

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Spool one partition; a failure of ours travels in the row, not as a Spark failure."""
        shard_id, host = _place()
        try:
            root = roomiest(local_dirs())
            directory = root / run_folder(self.run_id) / _attempt_name(shard_id)
            summary = self._write(root, directory, shard_id, batches)
            payload = {
                "host": host,
                "path": str(directory),
                "memory_bytes": memory_bytes(),
                "summary": summary.to_dict(),
            }
        except SparkDLError as error:
            for _ in batches:  # a worker whose input was not read to the end is not reused
                pass
            payload = {"error": type(error).__name__, "message": str(error)}
        row: dict[str, list[Any]] = {"shard_id": [shard_id], "payload": [json.dumps(payload)]}
        yield pa.RecordBatch.from_pydict(row, schema=_ARROW_SCHEMA)

    def _write(
        self, root: Path, directory: Path, shard_id: int, batches: Iterator[pa.RecordBatch]
    ) -> SpoolSummary:
        where = f" of partition {shard_id}"
        writer = SpoolWriter(
            directory, self.columns, has_validation=self.has_validation, where=where
        )
        free, rows = free_bytes(root), 0
        try:
            with writer:
                for batch in batches:
                    rows += batch.num_rows
                    writer.write(batch)
        except DiskFull as error:
            rows += sum(batch.num_rows for batch in batches)
            needed = int(rows * writer.row_bytes)
            raise full_disk(root, shard_id, needed=needed, free=free) from error
        return writer.summary()


@dataclass(frozen=True, kw_only=True)
class CleanTask:
    """Removes what a run has spooled on this executor; yields the paths that were there."""

    run_id: str
    paths: tuple[str, ...]

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Remove the paths that the driver knows, and the run's folder in every directory."""
        for _ in batches:
            pass
        if "sparkdl.roundworker" in sys.modules:
            sys.modules["sparkdl.roundworker"].cool_down()
        removed = [path for path in self.paths if remove_spool(Path(path))]
        for root in local_dirs():  # what the driver has not seen: of tasks that were lost
            shutil.rmtree(Path(root) / run_folder(self.run_id), ignore_errors=True)
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


def _attempt_name(shard_id: int) -> str:
    return f"shard-{shard_id:05d}-{uuid.uuid4().hex[:8]}"
