"""The stage in which the workers of a run work together and give their results back.

It is a barrier stage, unless Spark refuses these, as it does under dynamic allocation: then it is a
plain one, whose tasks wait for each other. It runs over the shard table, or over nothing. A worker
never raises into Spark: whatever happens, it yields rows that say so, because Spark would abort the
job, rebuild the traceback, and throw the Python worker away. This file knows nothing of training:
it runs any picklable ``work``.
"""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark import BarrierTaskContext, TaskContext
from pyspark.sql import DataFrame

from sparkdl.comm.access import Address
from sparkdl.comm.certificates import Certificate
from sparkdl.comm.channel import ChannelServer, Hub
from sparkdl.comm.file_chunks import RESULT_COLUMNS, joined_results, result_batches
from sparkdl.comm.worker_environment import SparkTask, WorkerEnvironment
from sparkdl.spark.session.compat import unbracketed

if TYPE_CHECKING:
    from pyspark.resource import ResourceProfile


Work = Callable[[WorkerEnvironment, Any], Iterator[tuple[str, bytes]]]
"""``work(environment, order)`` yields (kind, payload): a worker's results, of any size."""


@dataclass(frozen=True, kw_only=True)
class GangTask:
    """The task of one rank. Runs on executors."""

    work: Work
    order: Any
    channel: Address | None
    """The driver's channel; None: rank 0 hosts one and announces it."""
    attempt: int = 0
    """Number of the submission."""
    num_tasks: int | None = None
    """Tasks of a plain stage; None: a barrier stage, which tells by itself."""
    keeps_process: bool = True
    """True if Spark may use this Python worker again. Not where the work is code of the user's,
    which may have changed what all of the process shares: folder, environment, torch's modes."""

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Run the work and yield its results in chunks."""
        next(batches, None)  # a row of the table, of which Spark has made the shard, or of a range
        if self.keeps_process:
            for _ in batches:  # to the end, or Spark does not use this Python worker again
                pass
        context = TaskContext.get() if self.num_tasks is not None else BarrierTaskContext.get()
        assert context is not None
        rank = context.partitionId()
        if self.num_tasks is not None and context.attemptNumber() > 0:
            # Its peers have lost the worker that it replaces, and begin again together.
            yield from result_batches(rank, "error", json.dumps(_lost(rank)).encode())
            return
        with contextlib.ExitStack() as stack:
            for kind, payload in self.work(self._environment(context, stack), self.order):
                yield from result_batches(rank, kind, payload)

    def _environment(self, context: TaskContext, stack: contextlib.ExitStack) -> WorkerEnvironment:
        if self.num_tasks is None:
            assert isinstance(context, BarrierTaskContext)
            return barrier_environment(context, stack, self.channel, self.attempt)
        assert self.channel is not None
        address = _address_towards(self.channel)
        return _environment(context, self.num_tasks, address, self.channel)


def barrier_environment(
    context: BarrierTaskContext,
    stack: contextlib.ExitStack,
    channel: Address | None = None,
    attempt: int = 0,
) -> WorkerEnvironment:
    """Return the environment of the worker that runs in a task of a barrier stage.

    Args:
        context: of the task.
        stack: closes the channel if this task hosts it.
        channel: None: rank 0 hosts one and announces it.
        attempt: number of the submission.
    """
    addresses = [_host(info.address) for info in context.getTaskInfos()]
    channel = channel or _host_channel(context, stack, attempt)
    return _environment(context, len(addresses), addresses[context.partitionId()], channel)


def _environment(
    context: TaskContext, world_size: int, address: str, channel: Address
) -> WorkerEnvironment:
    gpu = context.resources().get("gpu")
    return WorkerEnvironment(
        rank=context.partitionId(),
        world_size=world_size,
        address=address,
        gpu_addresses=tuple(gpu.addresses) if gpu is not None else (),
        channel=channel.of_rank(context.partitionId()),
        task=task_of(context),
    )


def task_of(context: TaskContext) -> SparkTask:
    """The task in which this process runs."""
    return SparkTask(
        stage_id=context.stageId(),
        partition=context.partitionId(),
        attempt_id=context.taskAttemptId(),
    )


def launch(
    table: DataFrame, task: GangTask, profile: ResourceProfile | None
) -> list[tuple[int, str, bytes]]:
    """Run a task on one worker per partition of ``table``, all at once; raises Spark's own errors.

    Returns:
        (rank, kind, payload) of everything the workers yielded, chunks joined.
    """
    is_barrier = task.num_tasks is None
    rows = table.mapInArrow(task, RESULT_COLUMNS, barrier=is_barrier, profile=profile).collect()
    return joined_results(rows)


def _lost(rank: int) -> dict[str, Any]:
    """Return the report of the task that Spark has started in place of a lost one."""
    message = "its worker or executor was lost, and Spark has begun its task again"
    return {
        "rank": rank, "kind": "gang", "type": "WorkerLost", "message": message, "traceback": "",
    }  # fmt: skip


def _address_towards(channel: Address) -> str:
    """This host's address on its way to the channel. Nothing is sent."""
    family = socket.AF_INET6 if ":" in channel.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((channel.host, channel.port))
        return str(probe.getsockname()[0])


def _host(address: str) -> str:
    return unbracketed(address.rsplit(":", 1)[0])


def _host_channel(
    context: BarrierTaskContext, stack: contextlib.ExitStack, attempt: int
) -> Address:
    """Rank 0 opens a channel; one allGather (a second, in Spark) announces it to the others."""
    message = ""
    if context.partitionId() == 0:
        address = _host(context.getTaskInfos()[0].address)
        hub = Hub(keeps_events=False)
        hub.begin(attempt)
        server = ChannelServer(hub, bind=address, announce=address)
        stack.callback(server.shutdown)
        message = json.dumps(asdict(server.address))
    told = json.loads(context.allGather(message)[0])
    return Address(**{**told, "worker": Certificate(**told["worker"])})
