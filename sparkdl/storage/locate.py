"""The storage for a path or URL, opened through Spark's JVM if this process has one.

This is for functions that are given no session, and for processes in which Spark need not even be
installed. Who has a session calls `hadoop_storage.open_on_driver`.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from sparkdl.storage.hadoop_storage import open_on_driver
from sparkdl.storage.storage import Storage, open_storage, scheme_of


def open_place(path_or_url: str | os.PathLike[str]) -> Storage:
    """The storage for a path or URL, as this process reaches it.

    On the driver of classic Spark a URL is the place that Spark itself reads and writes, with the
    same credentials; elsewhere it is opened by `open_storage`.

    Raises:
        StorageError: the URL's scheme is unknown, its package is missing, or the place refuses.
    """
    text = os.fspath(path_or_url)
    spark = _session() if scheme_of(text) is not None else None
    if spark is None:
        return open_storage(text)
    return open_on_driver(spark, text)


def open_parent(path_or_url: str | os.PathLike[str]) -> tuple[Storage, str]:
    """The folder that a file lies in, see `open_place`, and the file's name; empty if none."""
    text = os.fspath(path_or_url)
    name = text.rpartition("/")[2]
    return open_place(text.removesuffix(name) or "."), name


def _session() -> Any:
    """The Spark session that this process has, or None; none is ever started."""
    if sys.modules.get("pyspark.sql") is None:
        return None
    from pyspark.errors import PySparkRuntimeError
    from pyspark.sql import SparkSession

    try:
        return SparkSession.active()
    except PySparkRuntimeError:  # also in Spark's workers
        return None
