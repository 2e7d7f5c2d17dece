"""The tasks of executors that write spools, describe them, and remove them.

The driver hears of the first shards while others are written.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import shutil
import socket
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark import Accumulator, BarrierTaskContext, TaskContext
from pyspark.accumulators import AccumulatorParam
from pyspark.sql import SparkSession

from sparkdl.data.column_stats import SpooledShard
from sparkdl.data.plan import Shard, SpoolColumn
from sparkdl.data.spool.kept_spools import Keep, held
from sparkdl.data.spool.local_disk import (
    DiskFull,
    free_bytes,
    full_disk,
    local_dirs,
    remove_spool,
    roomiest,
    run_folder,
)
from sparkdl.data.spool.spool_source import SpoolSource
from sparkdl.data.spool.writer import SpoolWriter
from sparkdl.errors import SparkDLError
from sparkdl.runtime.process import memory_bytes
from sparkdl.spark.session.compat import is_connect
from sparkdl.worker.held_shards import found_here
from sparkdl.worker.kept import KEPT
from sparkdl.worker.watcher import ended_when_hung

TABLE_SCHEMA = "shard_id int, payload string"
_ARROW_SCHEMA = pa.schema([("shard_id", pa.int32()), ("payload", pa.string())])
_SPACE = 8
"""Bytes that may come of one byte of a record batch, as decoded images do."""
_HEAD_SHARDS = 4
"""Shards of which the driver gets the first rows: the very first may be empty."""
_HEAD_BYTES = 1 << 20
_BLOCK = 64
"""Neighbouring rows of a partition that go to the same shard where it has several."""

Part = tuple[int, int]
"""The number of a shard, and that of a data set."""


class _Lists(AccumulatorParam[list[str]]):
    """Lists, one behind the other."""

    def zero(self, value: list[str]) -> list[str]:
        """Nothing."""
        return []

    def addInPlace(self, value1: list[str], value2: list[str]) -> list[str]:
        """Both; the first is changed."""
        value1 += value2
        return value1


class FirstShards:
    """Calls somebody with the first shards that tasks have written, once. Lives on the driver."""

    def __init__(self, spark: SparkSession) -> None:
        """Make the session's accumulator; Spark Connect has none, and reports nothing."""
        self.told: Accumulator[list[str]] | None = None
        if not is_connect(spark):
            self.told = spark.sparkContext.accumulator([], _Lists())
        self.call: Callable[[list[SpooledShard]], None] | None = None
        """Function that is called with the shards of which rows are at hand, or cannot be used."""

    def look(self) -> bool:
        """Call if some have come, and return True then; raises what is raised."""
        call = self.call
        if call is None or self.told is None:
            return False
        payloads = [json.loads(text) for text in self.told.value]
        written = [SpooledShard.from_dict(one) for p in payloads for one in p.get("shards", ())]
        found = [shard for shard in written if shard.head or not shard.is_sound]
        if found:
            self.call = None
            call(found)
        return bool(found)


@dataclass(frozen=True, kw_only=True)
class SpoolTask:
    """The spooling task: writes its partition, yields its row. Runs on executors.

    Record batches of one data set have what `SpoolWriter` takes. Those of several have the columns
    ``set`` (number of the row's data set), ``set0``, ``set1``, ... (its columns, as a struct; null
    in the rows of the others) and ``hash``. Where a partition holds several shards, the first
    column is ``shard``, the row's. The rows of a shard stand together, and in them those of a data
    set.
    """

    run_id: str
    sets: tuple[tuple[SpoolColumn, ...], ...]
    """Columns of each data set; the partition has of each the shards of the same numbers."""
    shards_by_place: tuple[tuple[int, ...], ...] | None = None
    """Shards of each partition; None: one each, of the partition's number."""
    pieces: int | None = None
    """Shards among which the rows of each partition are dealt as they come; None: rows come with
    their shards."""
    is_numbered: bool = False
    """True if the task has several such partitions, one after the other, and the first column is
    the number of the row's partition. Partitions without rows yield no shard."""
    has_validation: bool = False
    keep: Keep | None = None
    """Place where the shards, then of one data set, are kept; None: they go with the run."""
    heartbeat_timeout_seconds: float = 60.0
    """Time after which the task's process is ended if it neither runs Python nor uses the CPU."""
    told: Accumulator[list[str]] | None = None
    """Tells the driver of the first shards when their task ends, and not when all have ended."""

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Spool one partition; a failure of ours travels in the row, not as a Spark failure."""
        with ended_when_hung(self.heartbeat_timeout_seconds):
            row = self._spool(batches)
        if self.told is not None and row["shard_id"][0] < _HEAD_SHARDS:
            self.told.add(row["payload"])
        yield pa.RecordBatch.from_pydict(row, schema=_ARROW_SCHEMA)

    def _spool(self, batches: Iterator[pa.RecordBatch]) -> dict[str, list[Any]]:
        """Spool one partition; returns the row that says where it is."""
        place, host = place_here()
        try:
            if self.keep is None:
                root = roomiest(local_dirs())
            else:
                root, batches = self.keep.root(), _with_space(self.keep, batches)
            name = f"shard-{place:05d}-{uuid.uuid4().hex[:8]}"
            directory = root / run_folder(self.run_id) / name
            with contextlib.nullcontext() if self.keep is None else held(directory.parent):
                written = self._write(root, directory, place, batches)
                found = [_at_host(one, host) for one in written]
                if self.keep is not None:
                    found = [self.keep.put(spooled) for spooled in found]
            if self.keep is not None:
                for folder in (directory, directory.parent):  # unless something stays there
                    with contextlib.suppress(OSError):
                        folder.rmdir()
            payload: dict[str, Any] = {"shards": [spooled.to_dict() for spooled in found]}
            if directory.is_dir():
                payload["path"] = str(directory)
        except SparkDLError as error:
            for _ in batches:  # a worker whose input was not read to the end is not reused
                pass
            payload = {"error": type(error).__name__, "message": str(error)}
        return {"shard_id": [place], "payload": [json.dumps(payload)]}

    def _write(
        self, root: Path, directory: Path, place: int, batches: Iterator[pa.RecordBatch]
    ) -> list[SpooledShard]:
        """Write the files; those of several data sets or shards into folders by their numbers."""
        free = free_bytes(root)
        writers = {} if self.is_numbered else self._writers(directory, place)
        try:
            if self.is_numbered:
                rows = (pair for batch in batches for pair in _by_number(batch))
                for number, pairs in itertools.groupby(rows, key=itemgetter(0)):
                    own = self._writers(directory, number)
                    writers |= own
                    _deal((piece for _, piece in pairs), list(own.values()))
            elif self.pieces is not None:
                _deal(batches, list(writers.values()))
            else:
                _write_in_turn((p for b in batches for p in self._numbered(place, b)), writers)
        except DiskFull as error:
            shutil.rmtree(directory, ignore_errors=True)
            rest = sum(batch.num_rows for batch in batches)
            begun = sum(writer.num_rows for writer in writers.values())
            written = sum(writer.num_rows * writer.row_bytes for writer in writers.values())
            needed = written + rest * written / max(1, begun)
            kept = self.keep is not None
            raise full_disk(root, place, needed=int(needed), free=free, is_kept=kept) from error
        except BaseException:
            shutil.rmtree(directory, ignore_errors=True)
            raise
        summaries = {part: writer.summary() for part, writer in writers.items()}
        return [
            replace(found, shard=replace(found.shard, shard_id=shard_id))
            for (shard_id, _), found in summaries.items()
        ]

    def _writers(self, directory: Path, place: int) -> dict[Part, SpoolWriter]:
        """A writer for each shard of the partition, of each data set; none is open yet."""
        if self.pieces is not None:
            shard_ids: Sequence[int] = range(place * self.pieces, (place + 1) * self.pieces)
        else:
            shard_ids = [place] if self.shards_by_place is None else self.shards_by_place[place]
        parts = [(shard_id, number) for shard_id in shard_ids for number in range(len(self.sets))]
        return {
            (shard_id, number): SpoolWriter(
                directory
                if len(parts) == 1 and not self.is_numbered
                else directory / f"{shard_id}-{number}",
                self.sets[number],
                has_validation=self.has_validation,
                where=f" of partition {shard_id}",
                head_bytes=_HEAD_BYTES if shard_id < _HEAD_SHARDS else 0,
            )
            for shard_id, number in parts
        }

    def _numbered(self, place: int, batch: pa.RecordBatch) -> Iterator[tuple[Part, pa.RecordBatch]]:
        """Rows of one shard of one data set, with the numbers of both."""
        shards = [(place, batch)] if self.shards_by_place is None else _by_number(batch)
        for shard_id, rows in shards:
            for number, piece in [(0, rows)] if len(self.sets) == 1 else _by_set(rows):
                yield (shard_id, number), piece


def _write_in_turn(
    pieces: Iterator[tuple[Part, pa.RecordBatch]], writers: Mapping[Part, SpoolWriter]
) -> None:
    """Write rows that come part by part, in the order of the writers."""
    following = next(pieces, None)
    for part, writer in writers.items():
        with writer:
            while following is not None and following[0] == part:
                writer.write(following[1])
                following = next(pieces, None)
    assert following is None, "rows of a shard that is not this partition's"


def _deal(batches: Iterator[pa.RecordBatch], writers: Sequence[SpoolWriter]) -> None:
    """Write rows as they come, some to each writer in turn.

    Which rows a shard gets does not depend on how Spark cuts them into record batches.
    """
    first = 0
    with contextlib.ExitStack() as stack:
        for writer in writers:
            stack.enter_context(writer)
        for batch in batches:
            piece = np.arange(first, first + batch.num_rows) // _BLOCK % len(writers)
            for number, writer in enumerate(writers):
                own = batch if len(writers) == 1 else batch.take(np.flatnonzero(piece == number))
                writer.write(own)
            first += batch.num_rows


def _with_space(keep: Keep, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The record batches; before each, older spools make way if the disk is nearly full."""
    for batch in batches:
        keep.make_space(_SPACE * batch.nbytes)
        yield batch


def _at_host(spooled: SpooledShard, host: str) -> SpooledShard:
    """The shard with what is known of the host that has it, which is this one."""
    shard = replace(spooled.shard, host=host)
    return replace(spooled, shard=shard, memory_bytes=memory_bytes())


def _runs(numbers: Any) -> Iterator[tuple[int, int, int]]:
    """Each run of equal numbers: the number, and where the run begins and ends."""
    starts = [0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist(), len(numbers)]
    for start, stop in itertools.pairwise(starts):
        if start < stop:
            yield int(numbers[start]), start, stop


def _by_number(batch: pa.RecordBatch) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Number of a shard, or of a partition, and its rows, without that number."""
    rest = batch.select(batch.schema.names[1:])
    for number, start, stop in _runs(batch.column(0).to_numpy()):
        yield number, rest.slice(start, stop - start)


def _by_set(batch: pa.RecordBatch) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Number of a data set and its rows, with its own columns and the hash."""
    for number, start, stop in _runs(batch.column("set").to_numpy()):
        piece = batch.slice(start, stop - start)
        columns = [*piece.column(f"set{number}").flatten(), piece.column("hash")]
        names = [f"c{index}" for index in range(len(columns))]
        yield number, pa.RecordBatch.from_arrays(columns, names)


@dataclass(frozen=True, kw_only=True)
class FindTask:
    """Tells by their places in ``shards`` which of them can be opened on this executor."""

    run_id: str
    shards: tuple[Shard, ...]
    heartbeat_timeout_seconds: float = 60.0
    """See `SpoolTask`."""

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Look for all of them."""
        with ended_when_hung(self.heartbeat_timeout_seconds):
            for _ in batches:
                pass
            source = SpoolSource()
            found = [
                place
                for place, shard in enumerate(self.shards)
                if found_here(shard, source, self.run_id) is not None
            ]
        yield pa.RecordBatch.from_pydict({"place": pa.array(found, pa.int32())})


@dataclass(frozen=True, kw_only=True)
class KeptTask:
    """Tells which kept shards are on the host of this executor, a row for each."""

    keep: Keep
    heartbeat_timeout_seconds: float = 60.0
    """See `SpoolTask`."""

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Look into the folder of the key; rows are as those of `SpoolTask`."""
        with ended_when_hung(self.heartbeat_timeout_seconds):
            for _ in batches:
                pass
            _, host = place_here()
            found = [_at_host(spooled, host) for spooled in self.keep.find()]
        rows = {
            "shard_id": [spooled.shard.shard_id for spooled in found],
            "payload": [json.dumps({"shards": [spooled.to_dict()]}) for spooled in found],
        }
        yield pa.RecordBatch.from_pydict(rows, schema=_ARROW_SCHEMA)


@dataclass(frozen=True, kw_only=True)
class CleanTask:
    """Removes what runs have spooled on this executor; yields the paths that were there."""

    run_ids: tuple[str, ...]
    paths: tuple[str, ...]
    keep: Keep | None = None
    """Place where shards are kept; those that could not be kept lie beside them."""

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Remove the paths that the driver knows, and the runs' folders in every directory."""
        for _ in batches:
            pass
        KEPT.release()
        removed = [path for path in self.paths if remove_spool(Path(path))]
        roots = local_dirs() if self.keep is None else [*local_dirs(), self.keep.directory]
        for root in roots:  # what the driver has not seen: of tasks that were lost
            for run_id in self.run_ids:
                shutil.rmtree(Path(root) / run_folder(run_id), ignore_errors=True)
        yield pa.RecordBatch.from_pydict({"path": pa.array(removed, pa.string())})


def place_here() -> tuple[int, str]:
    """Return this task's partition, and its host as Spark calls it, or as the host does."""
    context = TaskContext.get()
    assert context is not None
    number = context.partitionId()
    if not isinstance(context, BarrierTaskContext):
        return number, socket.gethostname()
    return number, context.getTaskInfos()[number].address.rsplit(":", 1)[0]
