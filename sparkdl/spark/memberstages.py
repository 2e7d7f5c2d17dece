"""How does each task get the state of its own member, and only that?

It asks the driver's channel for it. A broadcast variable for each member would do so too as far as
Python goes, but every executor gets all of them: with 6 members of 50 MB on two executors a round
took five times as long. Where tasks do not reach the channel, the states are joined to the shard
table; executors then hold those of all members, but a task still gets its own only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import reduce
from typing import TYPE_CHECKING

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from sparkdl.spark.link import Link
from sparkdl.spark.stages import RESULT_SCHEMA, RoundTask, Rows, collected
from sparkdl.worker.population_member import pack_parts
from sparkdl.worker.round_task import RoundOrder

if TYPE_CHECKING:
    from pyspark.resource import ResourceProfile

_CHUNK_BYTES = 16 << 20
"""Spark sends a DataFrame's rows within its tasks, each of which may have 128 MB."""


def run_member_stage(
    table: DataFrame,
    order: RoundOrder,
    parts: Mapping[int, Mapping[str, bytes]],
    *,
    link: Link,
    profile: ResourceProfile | None,
) -> Rows:
    """Run one job in which each shard trains the member that is sent to it.

    Args:
        table: the shard table.
        order: what every task shall do.
        parts: shard -> the parts of its member's state, as `memberworker.work` takes them; shards
            that are not in it have nothing to do.
        link: where tasks report, and get their states.
        profile: resources of a task.

    Returns:
        (shard id, kind, payload) of everything the tasks yielded.

    Raises:
        TaskLost: a task could not find its shard anywhere, or not reach the driver.
        Exception: Spark's own, when tasks were lost too often.
    """
    order = replace(order, is_population=True)
    table = table.where(F.col("shard_id").isin(list(parts)))
    if link.channel is None:
        table = table.join(F.broadcast(_as_member_rows(table, parts)), "shard_id")
        task = RoundTask(order=order, channel=None, state=None)
        return collected(table.mapInArrow(task, RESULT_SCHEMA, profile=profile))
    folder = f"members-{order.run_id}-{order.attempt}"
    try:
        for shard_id, own in parts.items():
            link.files.write(f"{folder}/{shard_id}", pack_parts(own))
        task = RoundTask(order=order, channel=link.channel, state=folder)
        return collected(table.mapInArrow(task, RESULT_SCHEMA, profile=profile))
    finally:
        link.files.remove(folder)


def _as_member_rows(table: DataFrame, parts: Mapping[int, Mapping[str, bytes]]) -> DataFrame:
    """A row for every chunk of each state, each in a partition of its own."""
    frames = []
    for shard_id, own in parts.items():
        state = pack_parts(own)
        for seq, at in enumerate(range(0, len(state), _CHUNK_BYTES)):
            columns = {
                "shard_id": pa.array([shard_id], pa.int32()),
                "seq": pa.array([seq], pa.int32()),
                "chunk": pa.array([state[at : at + _CHUNK_BYTES]], pa.binary()),
            }
            frames.append(table.sparkSession.createDataFrame(pa.table(columns)))
    return reduce(DataFrame.union, frames)
