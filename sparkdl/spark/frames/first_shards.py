"""The first shards that tasks have written, of which the driver hears while others write."""

from __future__ import annotations

import json
from collections.abc import Callable

from pyspark import Accumulator
from pyspark.accumulators import AccumulatorParam
from pyspark.sql import SparkSession

from sparkdl.data.column_stats import SpooledShard
from sparkdl.spark.session.compat import is_connect


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
    """Calls somebody with the first shards that have come, once."""

    def __init__(self, spark: SparkSession) -> None:
        """Make the session's accumulator; Spark Connect has none, and reports nothing."""
        self.told: Accumulator[list[str]] | None = None
        if not is_connect(spark):
            self.told = spark.sparkContext.accumulator([], _Lists())
        self.call: Callable[[list[SpooledShard]], None] | None = None
        """Function that is called with the shards of which there are rows at hand."""

    def look(self) -> bool:
        """Call if some have come, and return True then; raises what is raised."""
        call = self.call
        if call is None or self.told is None:
            return False
        payloads = [json.loads(text) for text in self.told.value]
        written = [shard for one in payloads for shard in one.get("shards", ()) if shard["head"]]
        if written:
            self.call = None
            call([SpooledShard.from_dict(values) for values in written])
        return bool(written)
