"""The choice of the rows of a shard: dealt by their hash, or the DataFrame's own partitions.

Rows that are dealt cross the network once, and equal data gives equal shards whatever its
partitions. Partitions stay where Spark reads them, but are the same again only if their source is:
files that are read and mapped, no more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pyspark.sql import DataFrame

from sparkdl.errors import ConfigError
from sparkdl.spark.session.compat import is_connect

_LARGE_BYTES = 1 << 30
"""Size of the files from which on ``"auto"`` saves the shuffle; see docs/sources.md."""
_MOST_FOR_PART = 8
"""Shards for each of ``numShards`` at most; partitions that are more are packed together."""
_LEAST_FOR_PART = 4
"""Fewer are cut, so that workers can have nearly equally many rows."""
_OPEN_FILES = 512
"""Files that a task may write at a time; most systems allow 1,024."""
_NARROW = ("Project", "Filter", "SubqueryAlias", "View", "Union", "Generate")
"""Nodes of a plan that give each row by itself, and in its order."""


@dataclass(frozen=True, kw_only=True)
class FrameFacts:
    """The facts that Spark tells of a DataFrame without running a job."""

    unstable: str | None
    """Why its partitions may not be the same again; None: they are files, row by row."""
    num_bytes: int = 0
    """Size of these files."""
    num_partitions: int = 0


@dataclass(frozen=True, kw_only=True)
class ShardChoice:
    """The choice of the rows that make a shard, and its reason."""

    reason: str
    num_places: int = 0
    """Partitions, after some were packed together."""
    pieces: int | None = None
    """Shards of each partition; None: rows are dealt by their hash."""

    def __str__(self) -> str:
        return f"{'rows' if self.pieces is None else 'partitions'}: {self.reason}"


def choose_shards(
    asked: str, facts: FrameFacts, *, num_parts: int, num_executors: float, num_workers: int,
    num_files: int,
) -> ShardChoice:  # fmt: skip
    """Decide; see `ShardChoice`.

    Args:
        asked: the Param, ``"auto"`` or ``"partitions"``.
        facts: of the DataFrame.
        num_parts: equal shards that the rows would be dealt to.
        num_executors: that may spool, 0 if it is not known.
        num_workers: of the gang, at most.
        num_files: that a shard takes.
    """
    if facts.unstable is not None:
        return ShardChoice(reason=f"the partitions may change, since {facts.unstable}")
    if num_executors > num_workers:
        return ShardChoice(
            reason=f"{num_executors:g} executors may spool, and only {num_workers} worker(s) read"
        )
    size = f"{facts.num_bytes / 2**20:,.0f} MiB of files"
    if asked == "auto" and facts.num_bytes < _LARGE_BYTES:
        return ShardChoice(reason=f"{size} are quickly dealt")
    num_places = max(1, min(facts.num_partitions, _MOST_FOR_PART * num_parts))
    pieces = -(-_LEAST_FOR_PART * num_parts // num_places)
    pieces = max(1, min(pieces, _OPEN_FILES // max(1, num_files)))
    how = "" if num_places == facts.num_partitions else f", packed to {num_places}"
    how += "" if pieces == 1 else f", each cut into {pieces}"
    return ShardChoice(
        reason=f"{size} in {facts.num_partitions} partitions{how}, stay where Spark reads them",
        num_places=num_places,
        pieces=pieces,
    )


def require_partitions(asked: str, obstacle: str | None) -> None:
    """Refuse partitions where they cannot be shards; raises ConfigError."""
    if asked == "partitions" and obstacle is not None:
        raise ConfigError(f"shards='partitions' cannot be: {obstacle}; use shards='rows'")


def frame_facts(df: DataFrame) -> FrameFacts:
    """Look at the plan of a DataFrame, for which no job is run."""
    if is_connect(df.sparkSession):
        return FrameFacts(unstable="Spark Connect does not show what the DataFrame is made of")
    query: Any = df._jdf.queryExecution()
    plan = query.analyzed()  # what the user has cached is still made of this
    sizes: list[int] = []
    unstable = _look(plan, sizes)
    if unstable is None and not plan.deterministic():
        unstable = "the DataFrame has an expression such as rand()"
    if unstable is not None:
        return FrameFacts(unstable=unstable)
    partitions = int(query.toRdd().getNumPartitions())
    return FrameFacts(unstable=None, num_bytes=sum(sizes), num_partitions=partitions)


def _look(plan: Any, sizes: list[int]) -> str | None:
    """Why the rows of a plan may come otherwise, None if not; notes the sizes of the files."""
    name = plan.getClass().getSimpleName()
    if name == "LogicalRelation":
        relation = plan.relation()
        kind = relation.getClass().getSimpleName()
        if kind != "HadoopFsRelation":
            return f"they come from a {kind}"
        sizes.append(int(relation.sizeInBytes()))
        return None
    children = plan.children()
    if not children.size():
        return f"they come from a {name} and not from files"
    if name not in _NARROW:
        return f"they are made by a {name}"
    if not plan.subqueries().isEmpty():
        return "they depend on a subquery"
    found = (_look(children.apply(number), sizes) for number in range(children.size()))
    return next((reason for reason in found if reason is not None), None)
