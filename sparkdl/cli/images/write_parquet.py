"""Spark writes image files as Parquet files of given rows, under given names.

It writes several at a time into a folder of their own, from where what is whole is moved.
"""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from sparkdl.cli.images.image_bytes import convert_rows, explain_rows
from sparkdl.cli.images.ledger import WORK, Record
from sparkdl.cli.images.list_files import read_files
from sparkdl.cli.images.parts import ImagePart
from sparkdl.cli.job_files.prepare_file import ImageSection
from sparkdl.spark.session.settings import session_settings
from sparkdl.storage.storage import Folder
from sparkdl.worker.watcher import ended_when_hung

_STRUCT = "struct<origin string, height int, width int, nChannels int, mode int, data binary>"
_STAGED = "staged-"
_Work = Callable[[Iterator[pa.RecordBatch], ImageSection], Iterator[pa.RecordBatch]]


@dataclass(frozen=True, kw_only=True)
class ImageFiles:
    """The files to prepare."""

    table: pa.Table
    """Columns ``path`` below the root, ``length``, ``modified`` and, with labels, ``label``."""
    root: str
    """The folder's URL; ``<root>/<path>`` is a file."""
    names: tuple[str, ...] = ()
    """The classes; empty where labels are numbers, or there are none."""
    unusable: tuple[tuple[str, str], ...] = ()
    """Path and reason of files that are not in the table, since there is nothing to read."""


@dataclass
class PartWriter:
    """Writes parts, several at a time."""

    spark: SparkSession
    source: ImageFiles
    options: ImageSection
    """Options of how each image is prepared."""
    place: str
    """The output's folder as Spark knows it."""
    storage: Folder
    """The same folder."""
    _numbers: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._staged = f"{WORK}/{_STAGED}{uuid.uuid4().hex[:8]}"
        self._url = f"{self.place.rstrip('/')}/{self._staged}"

    def write(self, parts: Sequence[ImagePart]) -> dict[str, Record]:
        """Write parts into the folder of staged files; return what is in them; raises DataError."""
        self._numbers = {part.name: number for number, part in enumerate(parts)}
        plan = pa.concat_tables([self._plan(part) for part in parts])
        files = read_files(self.spark, plan["url"].to_pylist()).withColumnRenamed("path", "url")
        planned = self.spark.createDataFrame(plan)
        rows = files.join(F.broadcast(planned), "url").drop("url")
        others = planned.drop("url")
        image = _STRUCT if self.options.encoding == "struct" else "binary"
        schema = ", ".join([f"image {image}", *(f"{name} {kind}" for name, kind in others.dtypes)])
        made = rows.select("content", *others.columns).mapInArrow(
            self._watched(convert_rows), schema
        )
        gathered = made.repartitionById(len(parts), F.col("part"))
        ordered = gathered.sortWithinPartitions("part", "position")
        columns = [F.col("image"), F.col("path"), F.col("part")]
        if "label" in self.source.table.column_names:
            # With the classes' names as Spark ML writes and reads them.
            names = list(self.source.names)
            about = {"ml_attr": {"type": "nominal", "name": "label", "vals": names}}
            columns.insert(1, F.col("label").alias("label", metadata=about if names else {}))
        writer = ordered.select(*columns).write.mode("overwrite").partitionBy("part")
        # One file for each part, whatever limit the session has set.
        writer.option("maxRecordsPerFile", 0).parquet(self._url)
        return self._look(parts)

    def put_in_place(self, part: ImagePart, record: Record) -> None:
        """Move what was written for a part to its place."""
        if not record.rows:
            return
        folder = f"{self._staged}/part={self._numbers[part.name]}"
        files = [name for name in self.storage.list(folder) if name.startswith("part-")]
        assert len(files) == 1, f"{folder} should hold one Parquet file; it holds {files}"
        self.storage.move(f"{folder}/{files[0]}", part.path)

    def clear(self) -> None:
        """Remove staged files, also of runs that were killed."""
        for name in self.storage.list(WORK):
            if name.startswith(_STAGED):
                self.storage.remove(f"{WORK}/{name}")

    def _plan(self, part: ImagePart) -> pa.Table:
        """A row per file of a part: ``path``, ``label``, ``part``, ``position``, ``url``."""
        files = self.source.table.take(pa.array(part.rows)).drop_columns(["length", "modified"])
        number = np.full(files.num_rows, self._numbers[part.name], dtype=np.int32)
        urls = [f"{self.source.root}/{path}" for path in files["path"].to_pylist()]
        return (
            files.append_column("part", pa.array(number))
            .append_column("position", pa.array(np.arange(files.num_rows, dtype=np.int32)))
            .append_column("url", pa.array(urls))
        )

    def _look(self, parts: Sequence[ImagePart]) -> dict[str, Record]:
        """Count the rows that were written; what is missing there was bad."""
        label_of: dict[str, Any] = {}
        if any(name.startswith("part=") for name in self.storage.list(self._staged)):
            rows = self.spark.read.parquet(self._url).drop("image").toArrow().to_pylist()
            label_of = {row["path"]: row.get("label") for row in rows}
        of = self.source.table["path"]
        files = {part.name: of.take(pa.array(part.rows)).to_pylist() for part in parts}
        missing = [path for paths in files.values() for path in paths if path not in label_of]
        reasons = self._explain(missing)
        records = {}
        for name, paths in files.items():
            labels = [label_of[path] for path in paths if path in label_of]
            counts = sorted(Counter(labels).items()) if self.source.names else []
            records[name] = Record(
                rows=len(labels),
                rows_by_label={str(number): rows for number, rows in counts},
                bad=tuple((path, reasons[path]) for path in paths if path not in label_of),
            )
        return records

    def _explain(self, paths: Sequence[str]) -> dict[str, str]:
        if not paths:
            return {}
        urls = {f"{self.source.root}/{path}": path for path in paths}
        files = read_files(self.spark, list(urls))
        schema = "path string, reason string"
        rows = files.mapInArrow(self._watched(explain_rows), schema).collect()
        return {urls[row["path"]]: row["reason"] for row in rows}

    def _watched(self, work: _Work) -> partial[Iterator[pa.RecordBatch]]:
        """Return the function of a task, whose process is ended if it hangs."""
        seconds = session_settings(self.spark).heartbeat_timeout_seconds
        return partial(_work_watched, work=work, options=self.options, seconds=seconds)


def _work_watched(
    batches: Iterator[pa.RecordBatch], *, work: _Work, options: ImageSection, seconds: float
) -> Iterator[pa.RecordBatch]:
    with ended_when_hung(seconds):
        yield from work(batches, options)
