"""Under which key the spool of a DataFrame is kept, and why it may not be.

Equal keys must mean equal rows, also in another session. So the key is made of the whole plan, the
files with their lengths and times of modification, and all that decides what a shard holds. What
Spark does not show, such as the code of a function, has no key.
"""

from __future__ import annotations

import hashlib
import json
import re
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from sparkdl.data.plan import SpoolColumn
from sparkdl.data.spool.kept_spools import Keep, clean
from sparkdl.errors import ConfigError
from sparkdl.runtime.versions import versions
from sparkdl.serialization.identity import identity
from sparkdl.spark.cluster.slots import await_executors
from sparkdl.spark.frames.row_table import TableSpec
from sparkdl.spark.session.compat import is_connect, num_slots, scala_context
from sparkdl.spark.session.settings import session_settings
from sparkdl.storage.hadoop_storage import java_errors
from sparkdl.storage.storage import scheme_of, without_password

_PASSES = 4
"""Tasks per slot that remove what is kept, so that every executor has some."""
_REMEDY = "write the DataFrame as Parquet, and fit on these files"
_FORMAT = 2
"""Version of the format of the key and of what it leads to."""
_PLANS = "org.apache.spark.sql.catalyst.plans.logical."
_CACHED = "org.apache.spark.sql.execution.columnar.InMemoryRelation"
_FILES = "org.apache.spark.sql.execution.datasources.LogicalRelation"
_EXPRESSIONS = "org.apache.spark.sql.catalyst.expressions."
_LITERAL = f"{_EXPRESSIONS}Literal"
_LAMBDA_VARIABLE = f"{_EXPRESSIONS}NamedLambdaVariable"
_ROW_BY_ROW = ("Project", "Filter", "SubqueryAlias", "View", "Union", "Generate")
_SAME_ROWS = (
    "Join", "Distinct", "Repartition", "RepartitionByExpression", "Sort", "ResolvedHint",
)  # fmt: skip
"""Nodes of a plan that give the same rows each time, in whatever order."""
_OF_NOW = ("Now", "LocalTimestamp")
"""Besides those whose names begin with ``Current``."""
_WORDS_OF_NOW = re.compile(r"\s*(now|today|tomorrow|yesterday)(\s.*)?", re.IGNORECASE | re.DOTALL)
"""Texts of which casts make the time of the query."""
_SETTINGS = ("spark.sql.session.timeZone", "spark.sql.ansi.enabled")
"""Entries of which the defaults count too; of all others of ``spark.sql`` what was set."""
_OF_NO_MATTER = ("spark.sql.warehouse.dir", "spark.sql.shuffle.partitions")


@dataclass(frozen=True, kw_only=True)
class KeepChoice:
    """The choice whether the spool of a fit is kept, and its reason."""

    reason: str
    keep: Keep | None = None

    def __str__(self) -> str:
        return f"not kept, because {self.reason}" if self.keep is None else f"kept {self.reason}"


def check_cache_dir(directory: str) -> None:
    """Refuse what is no folder of an executor's local disk; raises ConfigError."""
    if scheme_of(directory) is not None:
        raise ConfigError(
            f"cacheDir={directory!r} is a URL; spools are files of local disks that are mapped "
            "into memory: name a folder of the executors' disks, such as /data/sparkdl"
        )
    if not directory.startswith("/"):
        raise ConfigError(
            f"cacheDir={directory!r} is relative, and executors have folders of their own; write "
            "the whole path, such as /data/sparkdl"
        )


def choose_keep(
    df: DataFrame, spec: TableSpec, directory: str, limit_bytes: int | None
) -> KeepChoice:
    """Decide, without a job; raises ConfigError on Spark Connect."""
    if is_connect(df.sparkSession):
        raise ConfigError(
            "cacheDir needs classic Spark: Spark Connect does not show what a DataFrame is made "
            "of, so a kept spool could not be told from one of other rows; leave it unset"
        )
    for column in spec.columns:
        if column.kind.transform is not None or column.kind.own_kind is not None:
            return KeepChoice(
                reason=f'what the code for "{column.name}" makes of its rows may change unseen'
            )
    plan: Any = df._jdf.queryExecution().analyzed()
    nodes = json.loads(plan.toJSON())
    relations = _leaves(plan)
    reason = _unclear(plan, nodes, relations, _ROW_BY_ROW if spec.pieces else ())
    # Of a new query, as the job will be one: rows may be cached since this one was planned.
    query: Any = df.select("*")._jdf.queryExecution()
    if any(leaf.getClass().getName() == _CACHED for leaf in _leaves(query.withCachedData())):
        reason = reason or (
            "Spark has cached rows of it, which may be those of files as they were before; "
            "unpersist them"
        )
    if reason is not None:
        return KeepChoice(reason=reason)
    session: Any = df.sparkSession
    try:
        with java_errors():
            files = [_files_of(relation.relation(), session) for relation in relations]
    except OSError as error:
        return KeepChoice(reason=f"its files cannot be listed: {without_password(str(error))}")
    entries = session.conf.getAll
    settings = {name: value for name, value in entries.items() if name.startswith("spark.sql.")}
    settings.update({name: session.conf.get(name) for name in _SETTINGS})
    parts = [
        _FORMAT,
        versions(),
        _renumbered(nodes),
        # What the nodes leave out: whether a cast is a try_cast, for example.
        plan.canonicalized().treeString(True, False, 2**31 - 1, False, False),
        files,
        df.schema.jsonValue(),
        [list(_identity(column)) for column in spec.columns],
        [str(spec.validation), spec.num_shards, spec.pieces],
        {name: value for name, value in settings.items() if name not in _OF_NO_MATTER},
    ]
    if spec.pieces is not None:  # which rows a partition has
        partitions = df._jdf.queryExecution().toRdd().getNumPartitions()
        parts.append([spec.num_places, partitions, session.sparkContext.defaultParallelism])
    text = json.dumps(parts, sort_keys=True)
    key = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
    keep = Keep(directory=directory, key=key, limit_bytes=limit_bytes)
    return KeepChoice(reason=f"in {keep.folder}", keep=keep)


@dataclass(frozen=True, kw_only=True)
class CleanKeptTask:
    """Removes what is kept on the host of this executor; yields what it has done."""

    directory: str
    older_than_seconds: float

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Remove it."""
        for _ in batches:
            pass
        removed, left = clean(self.directory, self.older_than_seconds)
        yield pa.RecordBatch.from_pydict(
            {"host": [socket.gethostname()], "removed": [removed], "left": [left]}
        )


def clean_executors(
    spark: SparkSession, directory: str, older_than_seconds: float
) -> dict[str, tuple[int, int]]:
    """Have executors remove what is kept; by host the bytes that were removed, and are left."""
    await_executors(spark, session_settings(spark))
    num_tasks = _PASSES * max(1, num_slots(spark))
    task = CleanKeptTask(directory=directory, older_than_seconds=older_than_seconds)
    rows = spark.range(0, num_tasks, 1, num_tasks).mapInArrow(
        task, "host string, removed long, left long"
    )
    found: dict[str, tuple[int, int]] = {}
    for host, removed, left in sorted(rows.collect()):
        before, least = found.get(host, (0, left))
        found[host] = (before + removed, min(least, left))
    return found


def _identity(column: SpoolColumn) -> Iterator[Any]:
    yield from (column.name, column.role, column.dtype, column.as_classes, column.argument)
    yield column.ignored
    yield str(column.expression)
    yield identity(column.specification)


def _unclear(
    plan: Any, nodes: list[Any], relations: list[Any], only: tuple[str, ...]
) -> str | None:
    """Why a later fit could not know whether it has the same rows; None: it can."""
    for leaf in relations:
        if leaf.getClass().getName() != _FILES:
            return (
                f"its rows come from memory or a table ({leaf.getClass().getSimpleName()}) and "
                f"have no key; {_REMEDY}"
            )
        relation = leaf.relation()
        kind = relation.getClass().getSimpleName()
        if kind != "HadoopFsRelation":
            return f"the rows of a {kind} may change unseen"
        listed = relation.location().getClass().getSimpleName()
        if listed != "InMemoryFileIndex":
            return f"its files are those of a {listed}, which may read them otherwise"
    allowed = only or (*_ROW_BY_ROW, *_SAME_ROWS)
    for name in (part["class"] for part in _parts(nodes) if "num-children" in part):
        short = name.rpartition(".")[2]
        if name.startswith(_PLANS) and short not in allowed:
            return f"a {short} may give other rows each time; {_REMEDY}"
        if not name.startswith(_EXPRESSIONS):
            continue
        if short.endswith(("UDF", "UDAF", "Aggregator")) or "." in name[len(_EXPRESSIONS) :]:
            return (
                f"the DataFrame calls a function whose code Spark does not show ({short}), as "
                f"stages such as VectorAssembler do too; {_REMEDY}"
            )
        if short.startswith("Current") or short in _OF_NOW or "Subquery" in short:
            return f"{short} may be another value each time"
    literals = (part for part in _parts(nodes) if part.get("class") == _LITERAL)
    for text in (part["value"] or "" for part in literals if part["dataType"] == "string"):
        if _WORDS_OF_NOW.fullmatch(text):
            return f"{text!r} may be another time each time"
    if not plan.deterministic():
        return "the DataFrame has an expression such as rand()"
    return None


def _parts(value: Any) -> Iterator[dict[str, Any]]:
    """All objects in the JSON of a plan: nodes, expressions and what these hold."""
    if isinstance(value, dict):
        yield value
    if isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _parts(inner)


def _leaves(plan: Any) -> list[Any]:
    leaves = plan.collectLeaves()
    return [leaves.apply(number) for number in range(leaves.size())]


def _renumbered(nodes: Any) -> Any:
    """The same plan with its columns numbered as they come, as in every session."""
    numbers: dict[tuple[Any, Any], int] = {}

    def walk(value: Any) -> Any:
        if isinstance(value, list):
            return [walk(inner) for inner in value]
        if not isinstance(value, dict):
            return value
        if "jvmId" in value:
            return numbers.setdefault((value["id"], value["jvmId"]), len(numbers))
        if value.get("class") == _LAMBDA_VARIABLE:  # pyspark counts their names up
            value = {**value, "name": None}
        return {name: walk(inner) for name, inner in value.items()}

    return walk(nodes)


def _files_of(relation: Any, session: Any) -> Any:
    """Return how files are read, and which: as they are now, and as Spark has listed them before.

    Spark goes by its list, and of a file that has grown since it may read the beginning alone.
    """
    listed = relation.location().allFiles()
    files = [listed.apply(number) for number in range(listed.size())]
    paths = [file.getPath() for file in files]
    before = [[file.getLen(), file.getModificationTime()] for file in files]
    hadoop = scala_context(session).hadoopConfiguration()
    found = {}
    for folder in {path.getParent().toString(): path.getParent() for path in paths}.values():
        for status in folder.getFileSystem(hadoop).listStatus(folder):
            place = status.getPath().toString()
            found[place] = [status.getLen(), status.getModificationTime()]
    return [
        relation.fileFormat().getClass().getName(),
        relation.schema().json(),
        relation.partitionSchema().json(),
        relation.options().toString(),
        [[path.toString(), found.get(path.toString())] for path in paths],
        before,
    ]
