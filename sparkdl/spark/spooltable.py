"""How does the driver get the spools of a run, keep track of them, and remove them?

A spool table is a persisted DataFrame of one small row per shard, whose tasks write files. The
cached row lives and dies with the executor that holds the files, so Spark knows what must be
rebuilt from lineage, and runs workers where their files are.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from typing import Any

from pyspark.sql import DataFrame, SparkSession

from sparkdl.spark.session import described, num_slots
from sparkdl.spark.spooltask import CleanTask

logger = logging.getLogger(__name__)

_PASSES = 4
"""Tasks per shard that look for spools which a first round of tasks has not met."""
_KILL_SECONDS = 3.0
"""A task that Spark has given up is dead by then (`spark.python.task.killTimeout` is 2 s)."""


class SpoolTable:
    """The spools of one run. ``close`` removes them from the executors."""

    df: DataFrame
    """Columns of `spooltask.TABLE_SCHEMA`; persisted."""

    def __init__(self, spark: SparkSession, *, run_id: str, num_shards: int) -> None:
        """Of a table that the class itself describes in ``df``."""
        self._spark = spark
        self._run_id = run_id
        self.num_shards = num_shards
        self._seen: set[str] = set()
        self._spooling = threading.RLock()
        self._stragglers = False

    def _payloads(self) -> dict[int, dict[str, Any]]:
        """Spool what is not there (everything at first, then what was lost); rows by shard id.

        One thread at a time: two jobs would both write what they find missing.
        """
        with self._spooling, described(self._spark, f"sparkdl {self._run_id}: spool"):
            try:
                # A new query each time: one that has failed gives its failure again, from memory.
                rows = self.df.select("shard_id", "payload").collect()
            except BaseException:
                self._stragglers = True
                raise
        payloads = {row["shard_id"]: json.loads(row["payload"]) for row in rows}
        self._seen.update(values["path"] for values in payloads.values() if "path" in values)
        return dict(sorted(payloads.items()))

    def rebuild(self) -> None:
        """Forget all spools, so that the next job writes them anew."""
        self.df.unpersist()
        self.df.persist()

    def note(self, paths: set[str]) -> None:
        """Take note of where tasks found their shards; what was lost, Spark has written anew."""
        self._stragglers |= not paths <= self._seen
        self._seen |= paths

    def close(self) -> None:
        """Delete all spools of the run on all executors that are there, and forget the table.

        Raises nothing: it must not hide what went wrong before, nor spoil what went well.
        """
        for action in (self._remove_spools, self.df.unpersist):
            try:
                action()
            except Exception as error:
                logger.warning("could not clean up after run %s: %s", self._run_id, error)
        if self._seen:
            logger.warning(
                "spools remain where no executor could be asked to remove them, until Spark "
                "removes its own directories: %s",
                ", ".join(sorted(self._seen)),
            )

    def _remove_spools(self) -> None:
        with described(self._spark, f"sparkdl {self._run_id}: clean up"):
            # As many tasks as shards usually meet the executors that spooled; else all slots,
            # or, where Spark does not tell how many there are, several times as many tasks.
            self._clean(self.num_shards)
            if self._seen or self._stragglers:
                # Something was lost or cancelled, so tasks that Spark has given up may go on
                # writing for a moment, and keep the slots from which they would be met.
                time.sleep(_KILL_SECONDS)
                self._clean(max(num_slots(self._spark), _PASSES * self.num_shards))

    def _clean(self, num_tasks: int) -> None:
        task = CleanTask(run_id=self._run_id, paths=tuple(sorted(self._seen)))
        tasks = self._spark.range(0, num_tasks, 1, num_tasks)
        removed = tasks.mapInArrow(task, "path string").collect()
        self._seen.difference_update(row["path"] for row in removed)
