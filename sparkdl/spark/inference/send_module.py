"""Sending a model's module to the executors; a large one is sent once per session.

Of a module whose weights lie in a storage only the rest is sent: executors read them by themselves,
unless they cannot open the storage. Then the driver reads them, and sends them too.
"""

from __future__ import annotations

import hashlib
import logging
import pickle
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql import SparkSession
from torch import nn

from sparkdl.errors import StorageError
from sparkdl.serialization.program.imported_values import ProgramValues, changed_values
from sparkdl.serialization.stored_module import StoredModule, WeightsAt
from sparkdl.serialization.travel import packed_module
from sparkdl.serialization.travel.pickling import sent_code
from sparkdl.spark.session.compat import described, is_connect, run_workers_here

logger = logging.getLogger(__name__)

BROADCAST_BYTES = 1 << 20
"""Larger modules travel in a broadcast variable, smaller ones inside the UDF."""
ARTIFACT_BYTES = 4 << 20
"""The same for Spark Connect, where messages are limited and a file costs a round trip."""

Fetch = Callable[[], packed_module.PackedModule]


@dataclass(frozen=True, kw_only=True)
class SentModule:
    """The things that tasks need to get a module."""

    values: ProgramValues
    """Values that the program has changed of modules that workers import; in front of all else."""
    digest: str
    """Names it, with its weights and these values."""
    fetch: Fetch
    weights: WeightsAt | None
    """Place of weights that are not sent."""


class Sender:
    """Sends modules, and remembers what it sent last."""

    def __init__(self) -> None:
        self._reached: dict[tuple[Any, WeightsAt], bool] = {}
        """(Session or context, place) -> True if its executors open the place by themselves."""
        self.sent: dict[str, tuple[Any, Fetch]] = {}
        """Digest -> the session or context that has it, and how workers get it."""

    def __reduce__(self) -> tuple[type[Sender], tuple[()]]:
        """A copy, which may be in another process, has sent nothing yet."""
        return Sender, ()

    def sent_module(
        self, spark: SparkSession, module: nn.Module | StoredModule, others: Any = None
    ) -> SentModule:
        """Send a module, or what of it does not lie in a storage that executors reach.

        ``others`` go to the same tasks, and may name values of the program, too.
        """
        code = sent_code((module.blank if isinstance(module, StoredModule) else module, others))
        values = changed_values(one for one, _ in code)
        weights = None
        if isinstance(module, StoredModule) and not self.reaches(spark, module):
            module = module.module
        if isinstance(module, StoredModule):
            packed, weights = module.packed, module.at
            digest = hashlib.sha256((packed.digest + weights.digest).encode()).hexdigest()
        else:
            packed = packed_module.pack(module)
            digest = packed.digest
        if values.values or values.code.values:
            digest = hashlib.sha256((digest + values.digest).encode()).hexdigest()
        return SentModule(
            values=values, digest=digest, fetch=self.fetch(spark, packed), weights=weights
        )

    def reaches(self, spark: SparkSession, module: StoredModule) -> bool:
        """True if executors open the place of the weights by themselves.

        Where no fit has seen it, a job of one small task finds out, once.
        """
        if module.is_reached is not None:
            return module.is_reached
        key = (spark if is_connect(spark) else spark.sparkContext, module.at)
        if key not in self._reached:
            run_workers_here(spark)
            with described(spark, "sparkdl: look for the weights"):
                rows = spark.range(1, numPartitions=1).mapInArrow(
                    _Look(module.at), "failure string"
                )
                failure = rows.collect()[0]["failure"]
            self._reached[key] = failure is None
            if failure is not None:
                logger.warning("executors do not reach the weights, so they are sent: %s", failure)
        return self._reached[key]

    def fetch(self, spark: SparkSession, packed: packed_module.PackedModule) -> Fetch:
        """Return how workers get the module. A large one is sent once per session and content."""
        connect = is_connect(spark)
        if packed.num_bytes <= (ARTIFACT_BYTES if connect else BROADCAST_BYTES):
            return partial(packed_module.given, packed)
        owner: Any = spark if connect else spark.sparkContext
        sent = self.sent.get(packed.digest)
        if sent is None or sent[0] is not owner:
            if connect:
                fetch = _as_artifact(spark, packed)
            else:
                fetch = partial(packed_module.from_broadcast, owner.broadcast(packed))
            sent = owner, fetch
            self.sent = {packed.digest: sent}
        return sent[1]


@dataclass(frozen=True)
class _Look:
    """Says why a task cannot read the weights, or null."""

    at: WeightsAt

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for _ in batches:
            pass
        failure = None
        try:
            self.at.open()
        except StorageError as error:
            failure = str(error)
        yield pa.RecordBatch.from_pydict({"failure": pa.array([failure], pa.string())})


def _as_artifact(spark: SparkSession, packed: packed_module.PackedModule) -> Fetch:
    name = f"sparkdl-{packed.digest[:32]}.module"
    with tempfile.TemporaryDirectory(prefix="sparkdl-") as folder:
        path = Path(folder) / name
        path.write_bytes(pickle.dumps(packed, protocol=5))
        spark.addArtifacts(str(path), file=True)
    return partial(packed_module.from_artifact, name)
