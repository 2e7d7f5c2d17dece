"""Sending a model's module to the executors; a large one is sent once per session."""

from __future__ import annotations

import pickle
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

from sparkdl.serialization import packed_module
from sparkdl.spark.session.compat import is_connect

BROADCAST_BYTES = 1 << 20
"""Larger modules travel in a broadcast variable, smaller ones inside the UDF."""
ARTIFACT_BYTES = 4 << 20
"""The same for Spark Connect, where messages are limited and a file costs a round trip."""

Fetch = Callable[[], packed_module.PackedModule]


class Sender:
    """Sends modules, and remembers what it sent last."""

    def __init__(self) -> None:
        self.sent: dict[str, tuple[Any, Fetch]] = {}
        """Digest -> the session or context that has it, and how workers get it."""

    def fetch(self, spark: SparkSession, packed: packed_module.PackedModule) -> Fetch:
        """How workers get the packed module. A large one is sent once per session and content."""
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


def _as_artifact(spark: SparkSession, packed: packed_module.PackedModule) -> Fetch:
    name = f"sparkdl-{packed.digest[:32]}.module"
    with tempfile.TemporaryDirectory(prefix="sparkdl-") as folder:
        path = Path(folder) / name
        path.write_bytes(pickle.dumps(packed, protocol=5))
        spark.addArtifacts(str(path), file=True)
    return partial(packed_module.from_artifact, name)
