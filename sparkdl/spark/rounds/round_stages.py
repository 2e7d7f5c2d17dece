"""A round as a Spark job: a plain stage over the shard table, and one that takes the mean.

Spark may run tasks one after the other, twice, or again after a loss. The state travels as a
broadcast variable, and on Spark Connect, which has none, as a broadcast join. States come back in
pieces. Each task of the second stage takes the mean of some pieces of all shards, in the order of
shards, so that no process holds several states, and the driver gets one.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import NamedTuple

import pyarrow as pa
from pyspark import TaskContext
from pyspark.core.broadcast import Broadcast
from pyspark.errors import PythonException
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from sparkdl.comm import file_chunks
from sparkdl.comm.access import OF_DRIVER, Address
from sparkdl.comm.channel import ChannelStorage
from sparkdl.comm.file_chunks import JobResults
from sparkdl.spark.cluster.gang import task_of
from sparkdl.spark.frames.shard_table import parse_shards
from sparkdl.spark.run.run import Run
from sparkdl.spark.session.compat import is_connect
from sparkdl.spark.session.failures import TaskLost, is_loss, spark_message
from sparkdl.sync.averaging.state_pieces import FRAME, Pieces
from sparkdl.worker import round_task
from sparkdl.worker.population_member import pack_parts
from sparkdl.worker.round_task import RoundOrder, RoundPlace
from sparkdl.worker.watcher import ended_when_hung

AT_ONCE_BYTES = 8 << 20
"""States that are not larger than this all together come to the driver as they are: one more stage
would cost more."""
_MERGED_BYTES = 64 << 20
"""Size of what a task that takes means gets, where there are enough shards."""
PATH = "path"
"""Kind of the row that says where a task has found its shard."""


@dataclass(frozen=True, kw_only=True)
class RoundTask:
    """One shard's part of a round. Runs on executors."""

    order: RoundOrder
    channel: Address | None
    state: Broadcast[bytes] | str | None
    """The round's state; a folder of the driver's files, which has one for each shard; None: it
    comes in the rows, in columns ``seq`` and ``chunk``."""

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Run every shard of the partition, which is one, and yield its results in chunks."""
        shards: dict[int, str] = {}
        chunks: dict[int, bytes] = {}
        with self._watched():
            for batch in batches:
                for row in batch.to_pylist():
                    shards[row["shard_id"]] = row["payload"]
                    if self.state is None:
                        chunks[row["seq"]] = row["chunk"]
        context = TaskContext.get()
        assert context is not None
        gpu = context.resources().get("gpu")
        for shard_id, payload in shards.items():
            (spooled,) = parse_shards(json.loads(payload))
            place = RoundPlace(
                shard=spooled.shard,
                gpu_addresses=tuple(gpu.addresses) if gpu is not None else (),
                channel=self.channel,
                task=task_of(context),
            )
            with self._watched():
                data = self._state_of(shard_id, chunks)
            yield from file_chunks.result_batches(shard_id, PATH, place.shard.path.encode())
            for kind, result in round_task.run(place, self.order, data):
                yield from file_chunks.result_batches(shard_id, kind, result)

    def _watched(self) -> contextlib.AbstractContextManager[None]:
        """Until it has heard a word of this process the driver would not notice that it hangs."""
        return ended_when_hung(self.order.heartbeat_timeout_seconds)

    def _state_of(self, shard_id: int, chunks: dict[int, bytes]) -> bytes:
        if self.state is None:
            return file_chunks.joined(chunks)
        if not isinstance(self.state, str):
            return self.state.value
        assert self.channel is not None
        with contextlib.closing(ChannelStorage(self.channel)) as files:
            return files.read(f"{self.state}/{shard_id}")


@dataclass(frozen=True, kw_only=True)
class Merge:
    """The pieces and the tasks in which executors take the mean of the replicas' states."""

    pieces: Pieces
    num_tasks: int
    """See `num_merge_tasks`."""


@dataclass(frozen=True, kw_only=True)
class MeanOfPieces:
    """Takes the mean of the states' pieces, and passes on all other results. Runs on executors.

    Spark gives it the results of several names, and of each name those of all shards in their
    order, whatever the order in which they were made.
    """

    pieces: Pieces
    heartbeat_timeout_seconds: float = 60.0

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield one row for all replicas' pieces of a name, under the first replica's number."""
        with ended_when_hung(self.heartbeat_timeout_seconds):
            for kind, group in itertools.groupby(_rows(batches), key=lambda row: row.kind):
                found = _by_rank(group)
                if is_of_state(kind):
                    found = {min(found): self.pieces.mean(kind, list(found.values()))}
                for rank, data in found.items():
                    yield from file_chunks.result_batches(rank, kind, data)


class _Row(NamedTuple):
    kind: str
    rank: int
    payload: bytes


def _rows(batches: Iterable[pa.RecordBatch]) -> Iterator[_Row]:
    """One row at a time, without copies of the others."""
    for batch in batches:
        columns = [batch.column(batch.schema.get_field_index(name)) for name in _Row._fields]
        for values in zip(*columns, strict=True):
            yield _Row(*(value.as_py() for value in values))


def _by_rank(rows: Iterable[_Row]) -> dict[int, bytes]:
    """Rank -> what its rows, which follow each other, say together."""
    by_rank = itertools.groupby(rows, key=lambda row: row.rank)
    return {rank: b"".join(row.payload for row in own) for rank, own in by_rank}


def is_of_state(kind: str) -> bool:
    """True for a row with a part of a replica's state."""
    return kind == FRAME or kind.startswith(f"{FRAME}/")


def num_merge_tasks(num_shards: int, state_bytes: int) -> int:
    """Tasks that take the mean of the states on executors; 0: the driver gets them as they are."""
    together = num_shards * state_bytes
    if num_shards == 1 or together <= AT_ONCE_BYTES:
        return 0
    return min(num_shards, -(-together // _MERGED_BYTES))


def run_stage(
    run: Run, order: RoundOrder, state: Callable[[], bytes], merge: Merge | None = None
) -> JobResults:
    """Run one round's job; raises TaskLost if a task cannot find its shard, or Spark's own errors.

    ``state`` makes what all tasks get. With ``merge`` executors take the mean of what they return.
    Returns what the tasks yielded, (shard id, kind, payload), in the order of shards.
    """
    table, broadcast = run.table.df, None
    if is_connect(run.spark):
        table = table.crossJoin(F.broadcast(_as_rows(table, state())))
    else:
        broadcast = run.spark.sparkContext.broadcast(state())
    task = RoundTask(order=order, channel=run.link.address(), state=broadcast)
    try:
        results = table.mapInArrow(task, file_chunks.RESULT_COLUMNS, profile=run.slots.profile)
        if merge is not None and merge.num_tasks:
            results = results.repartition(merge.num_tasks, "kind")
            results = results.sortWithinPartitions("kind", "rank", "seq")
            seconds = order.heartbeat_timeout_seconds
            mean = MeanOfPieces(pieces=merge.pieces, heartbeat_timeout_seconds=seconds)
            results = results.mapInArrow(mean, file_chunks.RESULT_COLUMNS)
        return collected(results)
    finally:
        if broadcast is not None:
            broadcast.destroy()


def collected(results: DataFrame) -> JobResults:
    """Run the job, and put the chunks of each result together; see `run_stage`."""
    try:
        return sorted(file_chunks.joined_results(results.toArrow().to_pylist()))
    except PythonException as error:
        if not is_loss(error):
            raise  # a stage of the user's, which has made a lost shard anew
        # Tasks report what the user's code does; they raise for lost shards only.
        raise TaskLost(spark_message(error)) from error


def _as_rows(table: DataFrame, state: bytes) -> DataFrame:
    chunks = file_chunks.cut(state)
    columns = {
        "seq": pa.array(range(len(chunks)), pa.int32()),
        "chunk": pa.array(chunks, pa.binary()),
    }
    return table.sparkSession.createDataFrame(pa.table(columns))


def run_member_stage(
    run: Run, order: RoundOrder, parts: Mapping[int, Mapping[str, bytes]]
) -> JobResults:
    """As `run_stage`, but each shard trains the member that is sent to it.

    ``parts`` has the state of each shard's member, as `population_member.work` takes it; other
    shards have nothing to do.
    """
    table, folder = run.table.df.where(F.col("shard_id").isin(list(parts))), None
    with contextlib.ExitStack() as stack:
        if run.link.channel is None:
            table = table.join(F.broadcast(_as_member_rows(table, parts)), "shard_id")
        else:
            folder = f"{OF_DRIVER}/members-{order.run_id}-{order.attempt}"
            stack.callback(run.link.files.remove, folder)
            for shard_id, own in parts.items():
                run.link.files.write(f"{folder}/{shard_id}", pack_parts(own))
        task = RoundTask(order=order, channel=run.link.address(), state=folder)
        columns = file_chunks.RESULT_COLUMNS
        return collected(table.mapInArrow(task, columns, profile=run.slots.profile))


def _as_member_rows(table: DataFrame, parts: Mapping[int, Mapping[str, bytes]]) -> DataFrame:
    """A row for every chunk of each state, each in a partition of its own."""
    frames = []
    for shard_id, own in parts.items():
        for seq, chunk in enumerate(file_chunks.cut(pack_parts(own))):
            columns = {
                "shard_id": pa.array([shard_id], pa.int32()),
                "seq": pa.array([seq], pa.int32()),
                "chunk": pa.array([chunk], pa.binary()),
            }
            frames.append(table.sparkSession.createDataFrame(pa.table(columns)))
    return reduce(DataFrame.union, frames)
