"""The plan of the Parquet files: which image file becomes a row of which.

It follows from paths, labels and options alone, so a run that was killed is planned again as it
was. Rows are in an order that the hash of the path gives: each file is a sample of its split.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from sparkdl.cli.job_files.prepare_file import SPLITS, PrepareJob, Split, SplitSection

VERSION = 1
"""Version of the layout of the output; raised when equal options give other rows than before."""
_WHOLE = 2.0**64


@dataclass(frozen=True, kw_only=True)
class ImagePart:
    """One Parquet file to be written."""

    split: Split
    number: int
    """Counted in its split."""
    rows: np.ndarray
    """int64 ``(rows,)``: the files' numbers in the source's table, in the order to write."""

    @property
    def name(self) -> str:
        """Name of the split and number, for records."""
        return f"{self.split}-{self.number:05d}"

    @property
    def path(self) -> str:
        """Path of the Parquet file, below the output's folder."""
        return f"{self.split}/part-{self.number:05d}.parquet"


def make_parts(
    paths: Sequence[str], split: SplitSection, rows_per_file: int
) -> tuple[ImagePart, ...]:
    """Cut files, by their paths below the source's folder, into splits and Parquet files."""
    # Two random numbers for each path: one chooses the split, one the place in it.
    digests = b"".join(
        hashlib.blake2b(f"{split.seed}\0{path}".encode(), digest_size=16).digest() for path in paths
    )
    drawn = np.frombuffer(digests, dtype="<u8").reshape(-1, 2)
    chance = drawn[:, 0] / _WHOLE
    # Test first: its files stay the same while the share for validation is being tried out.
    owner = np.where(chance < split.test, 2, np.where(chance < split.test + split.validation, 1, 0))
    order = np.lexsort((np.asarray(paths, dtype=object), drawn[:, 1]))
    parts = []
    for number, name in enumerate(SPLITS):
        rows = order[owner[order] == number]
        for start in range(0, len(rows), rows_per_file):
            chosen = rows[start : start + rows_per_file]
            parts.append(ImagePart(split=name, number=start // rows_per_file, rows=chosen))
    return tuple(parts)


def digest_of(source: pa.Table, names: Sequence[str], job: PrepareJob) -> Mapping[str, Any]:
    """Return what must be equal to go on where a run stopped: files, classes, options."""
    content = hashlib.blake2b(digest_size=16)
    order = np.argsort(np.asarray(source["path"].to_pylist(), dtype=object))
    for batch in source.take(pa.array(order)).to_batches(max_chunksize=65536):
        content.update(repr(batch.to_pydict()).encode())
    return {
        "version": VERSION,
        "source": content.hexdigest(),
        "files": source.num_rows,
        "labels": list(names),
        "options": json.loads(json.dumps(job.result_options)),  # tuples as JSON has them
    }


def difference(before: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """Describe a difference between two runs in words; None if there is none."""
    if before.get("version") != now["version"]:
        return "it was prepared by another version of sparkdl"
    for section, value in now["options"].items():
        earlier = before["options"].get(section)
        if earlier == value:
            continue
        if isinstance(value, dict) and isinstance(earlier, dict):
            key = next(key for key in value if earlier.get(key) != value[key])
            return f"{section}.{key} was {earlier.get(key)!r} and is {value[key]!r} now"
        return f"output.{section} was {earlier!r} and is {value!r} now"
    if before["labels"] != now["labels"]:
        return f"the classes were {before['labels']} and are {now['labels']} now"
    if before["source"] != now["source"]:
        changed = f"the source has changed: {before['files']:,} files before, {now['files']:,} now"
        if before["files"] == now["files"]:
            changed += ", with other names, sizes, times of change or labels"
        return changed
    return None
