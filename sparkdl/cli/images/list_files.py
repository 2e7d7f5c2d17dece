"""Spark lists and reads a folder of image files, wherever it lies."""

from __future__ import annotations

import contextlib
import posixpath
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

import pyarrow as pa
from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, SparkSession

from sparkdl.cli.job_files.prepare_file import FolderSection
from sparkdl.errors import DataError
from sparkdl.spark.session.compat import conf, is_connect, num_slots
from sparkdl.storage.hadoop_storage import HadoopStorage

_GLOB = frozenset("[]{}*?\\")
_HOST = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:(//[^/]*)?")
_TASKS_ON_CONNECT = 16
"""Tasks that look for files, where the number of slots is not known."""


def qualified(spark: SparkSession, path: str) -> str:
    """A path with scheme and host, as Spark has it; for a Spark Connect client a local one."""
    if not is_connect(spark):
        return HadoopStorage(spark, path).url
    return path if ":" in path else f"file:{Path(path).expanduser().absolute()}"


@contextlib.contextmanager
def tuned(spark: SparkSession) -> Iterator[None]:
    """Settings for many large files, inside; afterwards those that there were."""
    tasks = 2 * num_slots(spark) or _TASKS_ON_CONNECT
    settings = {
        # Images are large: 10,000 in a record batch, the default, would be gigabytes.
        "spark.sql.execution.arrow.maxRecordsPerBatch": "64",
        # Spark looks for the files that are named, by default with a task for each.
        "spark.sql.sources.parallelPartitionDiscovery.parallelism": str(tasks),
    }
    before = {key: conf(spark, key) for key in settings}
    for key, value in settings.items():
        spark.conf.set(key, value)
    try:
        yield
    finally:
        for key, earlier in before.items():
            if earlier is None:
                spark.conf.unset(key)
            else:
                spark.conf.set(key, earlier)


@dataclass(frozen=True, kw_only=True)
class Listed:
    """The contents of a folder of image files."""

    root: str
    """The folder's URL."""
    table: pa.Table
    """Columns ``path`` (below the folder), ``length`` (bytes) and ``modified`` (microseconds since
    1970), sorted by path."""
    empty: tuple[str, ...]
    """Image files without a byte, sorted."""
    num_others: int
    """Files with other endings."""


def list_files(spark: SparkSession, section: FolderSection) -> Listed:
    """The files in a folder and below it; none is opened. Raises DataError if it is not there."""
    root = qualified(spark, section.path)
    reader = spark.read.format("binaryFile").option("recursiveFileLookup", True)
    try:
        # Without the column ``content`` no file is opened.
        rows = reader.load(escaped(root)).select("path", "length", "modificationTime")
        listed = rows.toArrow()
    except AnalysisException as error:
        raise DataError(f"cannot read {section.path}: {str(error).splitlines()[0]}") from error
    # Spark has no row for a file without bytes, but knows its name, as a URL with escapes.
    _, all_paths = below(root, [unquote(url) for url in rows.inputFiles()])
    root, paths = below(root, listed["path"].to_pylist())
    endings = tuple(ending.lower() for ending in section.extensions)
    chosen = sorted(
        (row for row, path in enumerate(paths) if path.lower().endswith(endings)),
        key=lambda row: paths[row],
    )
    empty = sorted(path for path in set(all_paths) - set(paths) if path.lower().endswith(endings))
    files = listed.take(pa.array(chosen, pa.int64()))
    modified = files["modificationTime"].cast(pa.timestamp("us", "UTC")).cast("int64")
    table = pa.table(
        {
            "path": pa.array([paths[row] for row in chosen], pa.string()),
            "length": files["length"],
            "modified": modified,
        }
    )
    num_others = len(all_paths) - len(chosen) - len(empty)
    return Listed(root=root, table=table, empty=tuple(empty), num_others=num_others)


def read_files(spark: SparkSession, urls: Sequence[str]) -> DataFrame:
    """Columns ``path`` (the URL) and ``content`` of the files; raises DataError if one is gone."""
    reader = spark.read.format("binaryFile")
    try:
        return reader.load([escaped(url) for url in urls]).select("path", "content")
    except AnalysisException as error:
        raise DataError(
            f"a file has vanished since it was listed: {str(error).splitlines()[0]}; run again "
            "once nothing changes data.path any more"
        ) from error


def below(root: str, urls: Sequence[str]) -> tuple[str, list[str]]:
    """The folder as the files' own URLs have it, and their paths below it."""
    if not urls:
        return root, []
    host = _end_of_host(urls[0])
    common = posixpath.commonpath([posixpath.dirname(url[host:]) for url in urls]) + "/"
    # Spark may add scheme, host or home folder in front of what it was given.
    name = f"/{root[_end_of_host(root) :].strip('/')}/"
    assert name in common, f"{common} is not below {root}"
    cut = host + common.index(name) + len(name)
    return urls[0][: cut - 1], [url[cut:] for url in urls]


def _end_of_host(url: str) -> int:
    """Return the index at which the path of a URL begins."""
    found = _HOST.match(url)
    return found.end() if found is not None else 0


def escaped(url: str) -> str:
    """A path in which Hadoop shall see no pattern."""
    return "".join(f"\\{letter}" if letter in _GLOB else letter for letter in url)
