"""How do the workers of a run start together on Spark, and how do their results come back?

One barrier stage over the shard table. A worker never raises into Spark: whatever happens, it
yields rows that say so, because Spark would abort the job, rebuild the traceback, and throw the
Python worker away. This file knows nothing of training: it runs any picklable ``work``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark import BarrierTaskContext
from pyspark.sql import DataFrame

from sparkdl.comm.channel import Address, ChannelServer, Hub
from sparkdl.comm.worker_environment import WorkerEnvironment
from sparkdl.spark.session.compat import unbracketed

if TYPE_CHECKING:
    from pyspark.resource import ResourceProfile

RESULT_SCHEMA = "rank int, kind string, payload binary"
_ARROW_SCHEMA = pa.schema([("rank", pa.int32()), ("kind", pa.string()), ("payload", pa.binary())])
_CHUNK_BYTES = 4 * 2**20

Work = Callable[[WorkerEnvironment, Any], Iterator[tuple[str, bytes]]]
"""``work(environment, order)`` yields (kind, payload): a worker's results, of any size."""


@dataclass(frozen=True, kw_only=True)
class GangTask:
    """The task of one rank. Runs on executors."""

    work: Work
    order: Any
    channel: Address | None
    """The driver's channel; None: rank 0 hosts one and announces it."""
    keeps_process: bool = True
    """Whether Spark may use this Python worker again. Not where the work is code of the user's,
    which may have changed what all of the process shares: folder, environment, torch's modes."""

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Run the work and yield its results in chunks."""
        next(batches, None)  # the spool's only row: when it has come, the shard is there
        if self.keeps_process:
            for _ in batches:  # to the end, or Spark does not use this Python worker again
                pass
        context = BarrierTaskContext.get()
        server = None
        try:
            channel = self.channel
            if channel is None:
                server, channel = _host_channel(context)
            for kind, payload in self.work(_environment(context, channel), self.order):
                yield from _rows(context.partitionId(), kind, payload)
        finally:
            if server is not None:
                server.shutdown()


def launch(
    table: DataFrame,
    work: Work,
    order: Any,
    *,
    channel: Address | None,
    profile: ResourceProfile | None,
    keeps_process: bool = True,
) -> list[tuple[int, str, bytes]]:
    """Run ``work(environment, order)`` on one worker per partition of ``table``, all at once.

    Args:
        table: a row per partition.
        work: runs on the workers.
        order: what ``work`` gets; picklable.
        channel: the driver's; None: rank 0 hosts one.
        profile: resources of a task.
        keeps_process: see `GangTask`.

    Returns:
        (rank, kind, payload) of everything the workers yielded, chunks joined.

    Raises:
        Exception: Spark's own, when a worker or executor was lost.
    """
    task = GangTask(work=work, order=order, channel=channel, keeps_process=keeps_process)
    rows = table.mapInArrow(task, RESULT_SCHEMA, barrier=True, profile=profile).collect()
    return _joined([(row["rank"], row["kind"], bytes(row["payload"])) for row in rows])


def _environment(context: BarrierTaskContext, channel: Address) -> WorkerEnvironment:
    infos = context.getTaskInfos()
    rank = context.partitionId()
    gpu = context.resources().get("gpu")
    return WorkerEnvironment(
        rank=rank,
        world_size=len(infos),
        address=_host(infos[rank].address),
        gpu_addresses=tuple(gpu.addresses) if gpu is not None else (),
        channel=channel,
    )


def _host(address: str) -> str:
    return unbracketed(address.rsplit(":", 1)[0])


def _host_channel(context: BarrierTaskContext) -> tuple[ChannelServer | None, Address]:
    """Rank 0 opens a channel; one allGather (a second, in Spark) tells the others."""
    server, message = None, ""
    if context.partitionId() == 0:
        address = _host(context.getTaskInfos()[0].address)
        server = ChannelServer(Hub(keeps_events=False), bind=address, announce=address)
        message = json.dumps(asdict(server.address))
    announced = context.allGather(message)[0]
    return server, Address(**json.loads(announced))


def _rows(rank: int, kind: str, payload: bytes) -> Iterator[pa.RecordBatch]:
    for at in range(0, max(1, len(payload)), _CHUNK_BYTES):
        chunk: dict[str, Sequence[Any]] = {
            "rank": [rank],
            "kind": [kind],
            "payload": [payload[at : at + _CHUNK_BYTES]],
        }
        yield pa.RecordBatch.from_pydict(chunk, schema=_ARROW_SCHEMA)


def _joined(rows: Sequence[tuple[int, str, bytes]]) -> list[tuple[int, str, bytes]]:
    parts: dict[tuple[int, str], list[bytes]] = {}
    for rank, kind, payload in rows:
        parts.setdefault((rank, kind), []).append(payload)
    return [(rank, kind, b"".join(chunks)) for (rank, kind), chunks in parts.items()]
