"""A round as a Spark job: a plain stage over the shard table, and a tree of stages that merge.

Spark may run tasks one after the other, twice, or again after a loss. The state travels as a
broadcast variable, and on Spark Connect, which has none, as a broadcast join.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import pyarrow as pa
from pyspark import TaskContext
from pyspark.core.broadcast import Broadcast
from pyspark.errors import PythonException
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from sparkdl.comm import file_chunks
from sparkdl.comm.access import OF_DRIVER, Address
from sparkdl.comm.channel import ChannelStorage
from sparkdl.spark.frames.shard_table import parse_shards
from sparkdl.spark.run.run import Run
from sparkdl.spark.session.compat import is_connect
from sparkdl.spark.session.failures import TaskLost, spark_message
from sparkdl.worker import round_task
from sparkdl.worker.population_member import pack_parts
from sparkdl.worker.round_task import RoundOrder, RoundPlace

Rows = list[tuple[int, str, bytes]]

STATE = "state"
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
            )
            data = self._state_of(shard_id, chunks)
            yield from file_chunks.result_batches(shard_id, PATH, place.shard.path.encode())
            for kind, result in round_task.run(place, self.order, data):
                yield from file_chunks.result_batches(shard_id, kind, result)

    def _state_of(self, shard_id: int, chunks: dict[int, bytes]) -> bytes:
        if self.state is None:
            return file_chunks.joined(chunks)
        if not isinstance(self.state, str):
            return self.state.value
        assert self.channel is not None
        with contextlib.closing(ChannelStorage(self.channel)) as files:
            return files.read(f"{self.state}/{shard_id}")


def merge_groups(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Merge each group's states, under its first shard's number; pass on the rest. On executors."""
    rows: list[dict[str, Any]] = [row for batch in batches for row in batch.to_pylist()]
    groups: dict[int, list[tuple[int, bytes]]] = {}
    group_of = {row["rank"]: row["group"] for row in rows}
    for rank, kind, payload in sorted(file_chunks.joined_results(rows)):
        if kind == STATE:
            groups.setdefault(group_of[rank], []).append((rank, payload))
        else:
            yield from file_chunks.result_batches(rank, kind, payload)
    for members in groups.values():
        merged = merge_payloads([payload for _, payload in members])
        yield from file_chunks.result_batches(members[0][0], STATE, merged)


def merge_payloads(payloads: Sequence[bytes]) -> bytes:
    """The weighted mean of states that `round_task.run` gave, with the sum of their weights."""
    from sparkdl.storage.checkpoint_format import encode
    from sparkdl.storage.tensor_tree import snapshot

    if len(payloads) == 1:
        return payloads[0]
    weight, state = merge_states(payloads)
    return file_chunks.gathered(encode(snapshot({"weight": weight, "state": state})))


def merge_states(payloads: Sequence[bytes]) -> tuple[float, Any]:
    """As `merge_payloads`, decoded: the sum of weights, and the mean."""
    from sparkdl.storage.checkpoint_format import decode
    from sparkdl.sync.averaging.mean import merge

    parts = [decode(payload, "a replica's state") for payload in payloads]
    weights = [part["weight"] for part in parts]
    return sum(weights), merge([part["state"] for part in parts], weights)


def run_stage(run: Run, order: RoundOrder, state: bytes, *, depth: int) -> Rows:
    """Run one round's job; raises TaskLost if a task cannot find its shard, or Spark's own errors.

    ``depth`` counts the levels of the tree that merges states; 1: the driver merges all of them.
    Returns what the tasks yielded, (shard id, kind, payload), in the order of shards.
    """
    table, num_shards, broadcast = run.table.df, order.plan.world_size, None
    if is_connect(run.spark):
        table = table.crossJoin(F.broadcast(_as_rows(table, state)))
    else:
        broadcast = run.spark.sparkContext.broadcast(state)
    task = RoundTask(order=order, channel=run.link.address(), state=broadcast)
    try:
        results = table.mapInArrow(task, file_chunks.RESULT_COLUMNS, profile=run.slots.profile)
        for num_groups in tree_levels(num_shards, depth):
            group = F.floor(F.col("rank") * num_groups / num_shards).cast("int").alias("group")
            results = results.select("*", group).repartition(num_groups, "group")
            results = results.mapInArrow(merge_groups, file_chunks.RESULT_COLUMNS)
        return collected(results)
    finally:
        if broadcast is not None:
            broadcast.destroy()


def collected(results: DataFrame) -> Rows:
    """Run the job, and put the chunks of each result together; see `run_stage`."""
    try:
        return sorted(file_chunks.joined_results(results.toArrow().to_pylist()))
    except PythonException as error:
        # Tasks report what the user's code does; they raise for lost shards only.
        raise TaskLost(spark_message(error)) from error


def tree_levels(num_shards: int, depth: int) -> list[int]:
    """Groups at each level below the driver, as Spark's treeAggregate chooses them."""
    scale = max(2, round(num_shards ** (1 / depth) + 0.499))
    levels, count = [], num_shards
    while depth > 1 and count > scale + -(-count // scale):
        count = -(-count // scale)
        levels.append(count)
    return levels


def _as_rows(table: DataFrame, state: bytes) -> DataFrame:
    chunks = file_chunks.cut(state)
    columns = {
        "seq": pa.array(range(len(chunks)), pa.int32()),
        "chunk": pa.array(chunks, pa.binary()),
    }
    return table.sparkSession.createDataFrame(pa.table(columns))


def run_member_stage(run: Run, order: RoundOrder, parts: Mapping[int, Mapping[str, bytes]]) -> Rows:
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
