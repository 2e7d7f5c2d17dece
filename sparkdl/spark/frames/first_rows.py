"""The first rows of a DataFrame, on which a fit is tried before the others are read."""

from __future__ import annotations

import logging
import re
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from sparkdl.data.column_stats import SpooledShard, merge_stats
from sparkdl.data.spool.head import Head
from sparkdl.data.spool.writer import SpoolWriter
from sparkdl.runtime.activity import doing
from sparkdl.spark.frames.deal_rows import selected
from sparkdl.spark.frames.example_rows import UserRows
from sparkdl.spark.frames.frame_sample import Look, take_look
from sparkdl.spark.frames.row_table import TableSpec
from sparkdl.spark.frames.shard_table import SpooledRows
from sparkdl.spark.session.background_job import BackgroundJob
from sparkdl.spark.session.compat import is_connect
from sparkdl.spark.session.failures import raise_unless_loss

logger = logging.getLogger(__name__)

_SECONDS = 30.0
"""Longest that first rows are looked for: a filter may leave none for long."""
_MOST_BYTES = 64 << 20
_ALL_PARTITIONS = ("TakeOrderedAndProjectExec", "CartesianProductExec", "CollectTailExec")
"""Physical operators that look at all rows, though they require nothing of how these lie."""
_NARROW = frozenset(
    ("AdaptiveSparkPlan", "ArrowEvalPython", "BatchEvalPython", "BatchScan", "CollectLimit",
     "Coalesce", "ColumnarToRow", "DeserializeToObject", "EmptyRelation", "Expand", "FileScan",
     "Filter", "Generate", "GlobalLimit", "InMemoryRelation",
     "InMemoryTableScan", "LocalLimit", "LocalTableScan", "MapElements", "MapInArrow",
     "MapInPandas", "MapPartitions", "OneRowRelation", "Project", "PythonMapInArrow", "Range",
     "RowToColumnar", "Sample", "Scan", "SerializeFromObject", "TableCacheQueryStage", "Union")
)  # fmt: skip
"""The operators that give a row as soon as they have one, by the names in which plans show them."""
_OPERATOR = re.compile(r"(?P<branch>[ :|]*(?:[+:]- )?)(?:\*(?:\(\d+\))? ?)?(?P<name>[A-Z]\w*)")
"""Pattern of a line of a plan, such as `` :  +- *(1) Project [id#1]``."""


class FirstRows(SpooledRows):
    """The first rows of a run's DataFrame, as its shards will have them, in one shard."""

    def __init__(
        self, spec: TableSpec, rows: pa.Table, shown: UserRows | None = None, *, is_all: bool
    ) -> None:
        """Take prepared rows, with the hash of each as their last column.

        Messages name rows of ``shown``; ``is_all`` is True if there are no others.
        """
        super().__init__(spec, shown, is_all=is_all)
        self._rows = rows
        with tempfile.TemporaryDirectory(prefix="sparkdl-") as folder:
            with SpoolWriter(
                Path(folder) / "rows",
                spec.columns,
                has_validation=False,
                where=" of the first ones",
                head_bytes=_MOST_BYTES,
            ) as writer:
                for batch in rows.combine_chunks().to_batches():
                    writer.write(batch)
            self.known = (writer.summary(),)

    def labels_outside(
        self, label_col: str, num_classes: int, index: int, shards: Sequence[SpooledShard]
    ) -> tuple[int | None, str] | None:
        """See `RowTable.labels_outside`; counts the first rows only."""
        stats = merge_stats([shard.columns[index] for shard in shards])
        if stats.maximum is None or stats.maximum < num_classes:
            return None
        values = self._rows.column(index).to_pylist()
        ignored = self._spec.columns[index].ignored
        high = [v for v in values if isinstance(v, int | float) and v >= num_classes]
        number = sum(value != ignored for value in high)
        where = (
            f"counted in the first {len(values)} rows alone, where {stats.maximum:g} is the highest"
        )
        return number, where


class FirstLook:
    """A look at the first rows of a DataFrame, in a thread of its own.

    It takes them where Spark answers that from few of its partitions.
    """

    def __init__(self, df: DataFrame, spec: TableSpec, run_id: str) -> None:
        """Prepare it; `begin` starts it."""
        self._df, self._spec = df, spec
        self._deadline = 0.0
        self._job: BackgroundJob[Look] | None = None
        hashed = selected(df, spec.columns)
        hashed = hashed.withColumn("hash", F.xxhash64(*[F.col(name) for name in hashed.columns]))
        if not is_answered_early(hashed):
            return
        if is_connect(df.sparkSession):  # where a limit would take so many rows of every partition
            hashed = hashed.coalesce(1)
        self._job = BackgroundJob(
            df.sparkSession,
            partial(take_look, hashed, Head.ROWS),
            tag=f"sparkdl-{run_id}-first-rows",
            name=f"sparkdl {run_id}: look at the first rows",
        )

    def begin(self) -> None:
        """Start it, and wait until Spark has its job: those that follow come after it."""
        if self._job is not None:
            doing("looking at the first rows")
            self._deadline = time.monotonic() + _SECONDS
            self._job.begin()
            self._job.wait(_SECONDS, until=self._job.progress.is_submitted)

    def rows(self) -> FirstRows | None:
        """Return the first rows; None: Spark does not give them, or not soon, or there are none.

        Raises DataError if a stage before cannot make them.
        """
        job = self._job
        if job is None:
            return None
        doing("looking at the first rows")
        try:
            job.wait(self._deadline - time.monotonic())
        finally:  # also if the user interrupts
            job.end()
        if job.is_cancelled:
            return None
        try:
            if job.error is not None:
                raise_unless_loss(job.error)
            look = job.result()
        except (PySparkException, Py4JError) as error:  # an executor was lost, for one
            logger.debug("the first rows cannot be looked at: %s", error)
            return None
        if not look.num_rows:
            return None
        shown = UserRows(self._df, self._spec.columns, self._spec.validation, is_of_first=True)
        found = FirstRows(self._spec, look.rows, shown, is_all=look.is_all)
        return found if found.known[0].shard.num_all_rows else None

    def end(self) -> None:
        """Give it up, if it goes on."""
        if self._job is not None and self._job.is_started:
            self._job.end()


def is_answered_early(df: DataFrame) -> bool:
    """True if no operator of the plan needs rows of all partitions before it gives one."""
    if is_connect(df.sparkSession):
        of_connect: Any = df
        return is_shown_narrow(of_connect._explain_string(mode="simple"))
    of_java: Any = df
    return _is_narrow(of_java._jdf.queryExecution().sparkPlan())


def is_shown_narrow(shown: str) -> bool:
    """The same of a plan as Spark shows it, where all operators must be known; see `_NARROW`."""
    cached: int | None = None
    for line in shown.splitlines():
        found = _OPERATOR.match(line)
        if found is None:
            if line.strip() and not line.startswith("=="):
                return False
            continue
        depth = len(found["branch"])
        if cached is not None and depth > cached:
            continue  # the plan of what is cached, which may be made already
        cached = depth if found["name"] == "InMemoryRelation" else None
        if found["name"] not in _NARROW or "Subquery" in line or "subquery" in line:
            return False
    return True


def _is_narrow(plan: Any) -> bool:
    name = plan.getClass().getSimpleName()
    if "Exchange" in name or name in _ALL_PARTITIONS or not plan.subqueries().isEmpty():
        return False
    required = plan.requiredChildDistribution()
    wants = (required.apply(n).getClass().getSimpleName() for n in range(required.size()))
    if any(want != "UnspecifiedDistribution$" for want in wants):
        return False
    children = plan.children()
    return all(_is_narrow(children.apply(number)) for number in range(children.size()))
