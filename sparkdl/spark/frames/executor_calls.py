"""Many small reads of a source, on executors."""

from __future__ import annotations

import math
import uuid
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import cloudpickle
import pyarrow as pa
from pyspark.sql import SparkSession

from sparkdl.data.source import in_threads
from sparkdl.errors import SparkDLError
from sparkdl.serialization.travel.pickling import loads
from sparkdl.spark.session.background_job import BackgroundJob
from sparkdl.spark.session.compat import num_slots
from sparkdl.worker.watcher import ended_when_hung

if TYPE_CHECKING:
    from pyspark.resource import ResourceProfile

A = TypeVar("A")
B = TypeVar("B")

_FEW = 256
"""Items for which a job does not pay: it takes a second before it begins, and the threads of the
driver 17 ms for each footer by WebHDFS, 3.5 ms from a storage that answers after 50 ms."""
_FIRST = 1024
"""Items of the first job, whose results tell how large those of the others are."""
_ITEMS_PER_TASK = 32
"""At least; more if tasks would not all begin soon, since one takes 0.1 s before it reads."""
_TASKS_PER_SLOT = 2
_UNKNOWN_SLOTS = 16
_JOB_BYTES = 128 << 20
"""Size of a job's results, far below the default of ``spark.driver.maxResultSize`` (1 GiB)."""
_SCHEMA = pa.schema([("number", pa.int64()), ("answer", pa.binary())])


@dataclass(frozen=True)
class ExecutorCalls:
    """Calls a function on executors where items are many, else here; see `source.Spread`."""

    spark: SparkSession
    profile: ResourceProfile | None
    queue_timeout_seconds: float
    heartbeat_timeout_seconds: float = 60.0
    """See `SpoolTask`."""

    def __call__(self, call: Callable[[A], B], items: Sequence[A]) -> list[B]:
        """Return the results of ``call`` by item; raises the first SparkDLError that it raises."""
        if len(items) <= _FEW:
            return in_threads(call, items)
        found: list[B] = []
        count = _FIRST
        while len(found) < len(items):
            part = items[len(found) : len(found) + count]
            answers = self._answers(CallTask(call, part, self.heartbeat_timeout_seconds))
            found += map(_opened, answers)
            count = max(1, _JOB_BYTES * len(part) // sum(map(len, answers)))
        return found

    def _answers(self, task: CallTask) -> list[bytes]:
        num_items = len(task.items)
        slots = num_slots(self.spark, self.profile) or _UNKNOWN_SLOTS
        num_tasks = min(-(-num_items // _ITEMS_PER_TASK), _TASKS_PER_SLOT * slots)
        rows = self.spark.range(0, num_items, 1, num_tasks)
        asked = rows.mapInArrow(task, "number long, answer binary", profile=self.profile)
        job = BackgroundJob(
            self.spark,
            asked.collect,
            tag=f"sparkdl-calls-{uuid.uuid4().hex[:12]}",
            name="sparkdl: look at the files of a source",
        )
        found = job.watched(math.inf, queue_seconds=self.queue_timeout_seconds)
        return [bytes(row["answer"]) for row in sorted(found)]


@dataclass(frozen=True)
class CallTask:
    """Calls a function for the items whose numbers a task gets."""

    call: Callable[[Any], Any]
    items: Sequence[Any]
    heartbeat_timeout_seconds: float

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield what it gives, packed."""
        with ended_when_hung(self.heartbeat_timeout_seconds):
            for batch in batches:
                (numbers,) = batch.columns
                answers = in_threads(self._packed, numbers.to_pylist())
                yield pa.record_batch([numbers, pa.array(answers, pa.binary())], schema=_SCHEMA)

    def _packed(self, number: int) -> bytes:
        try:
            found = self.call(self.items[number])
        except SparkDLError as error:  # raised on the driver, without Spark's words around it
            found = error
        return zlib.compress(cloudpickle.dumps(found), 1)


def _opened(answer: bytes) -> Any:
    found = loads(zlib.decompress(answer))
    if isinstance(found, SparkDLError):
        raise found
    return found
