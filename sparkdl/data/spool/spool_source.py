"""Shards that Spark tasks have written to a disk of this host, as a source of rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from sparkdl.data.plan import Column, Shard, Split, TrainPlan
from sparkdl.data.ragged import Array, Ragged
from sparkdl.data.source import ShardRows, rows_of
from sparkdl.data.spool.local_disk import disk_error
from sparkdl.data.spool.page_cache import FilePart, MappedFile, Pages
from sparkdl.data.spool.writer import column_parts, column_path
from sparkdl.errors import ShardLost

if TYPE_CHECKING:
    import torch

    from sparkdl.data.spool.mapped import ShardData


@dataclass(frozen=True)
class SpoolSource:
    """The default: shards that a Spark task has written to a disk of this host."""

    def open(self, plan: TrainPlan, shards: Sequence[Shard], split: Split) -> ShardRows:
        """See `ShardSource.open`: maps the files into memory."""
        from sparkdl.data.spool.mapped import MappedRows

        opened = [
            open_spool(
                Path(shard.path),
                plan.columns,
                num_rows=rows_of(shard, split),
                split=split,
                fingerprint=shard.fingerprint,
            )
            for shard in shards
        ]
        return MappedRows(opened, plan).begin()

    def is_here(self, shard: Shard) -> bool:
        """See `ShardSource.is_here`: whether the files lie on this host, if there are any."""
        return not shard.num_all_rows or Path(shard.path).is_dir()


def open_spool(
    directory: Path,
    columns: Sequence[Column],
    *,
    num_rows: int,
    split: Split,
    fingerprint: str = "",
) -> ShardData:
    """Map a split of a shard into memory: private to this process, read on demand.

    Args:
        directory: the shard's spool.
        columns: the spool's columns, in the order in which they were written.
        num_rows: rows of the split, as the shard table says.
        split: which split.
        fingerprint: the shard's.

    Raises:
        ShardLost: a file is missing or has another size than the table says.
        StorageError: a file cannot be opened.
    """
    import torch

    from sparkdl.data.spool.mapped import ShardData

    opened: dict[str, torch.Tensor | Ragged] = {}
    parts: list[FilePart] = []
    for index, column in enumerate(columns):
        if column.kind.num_parts:
            opened[column.key] = _map_ragged(directory, split, index, column, num_rows, parts)
            continue
        path, shape = column_path(directory, split, index), (num_rows, *column.shape)
        opened[column.key] = torch.from_numpy(_map(path, column.dtype, shape, parts))
    return ShardData(fingerprint, opened, Pages(parts))


def _map_ragged(
    directory: Path,
    split: Split,
    index: int,
    column: Column,
    num_rows: int,
    parts: list[FilePart],
) -> Ragged:
    *names, offsets_name = column_parts(column.kind)
    offsets, own = np.zeros(1, dtype=np.int64), list[FilePart]()
    if num_rows:  # otherwise the split need not be there
        path = column_path(directory, split, index, offsets_name)
        offsets = _map(path, "int64", (num_rows + 1,), own)
    total, arrays = int(offsets[-1]), []
    for name, (dtype, inner) in zip(names, column.stored_parts, strict=True):
        path, found = column_path(directory, split, index, name), list[FilePart]()
        arrays.append(_map(path, dtype, (total, *inner), found))
        parts += [replace(part, offsets=offsets) for part in found]
    parts += own  # last: they say where the values are
    return Ragged(tuple(arrays), offsets, column.shape)


def _map(path: Path, dtype: str, shape: tuple[int, ...], parts: list[FilePart]) -> Array:
    """The file's values; adds the file to ``parts`` unless it is empty."""
    expected = math.prod(shape) * np.dtype(dtype).itemsize
    if expected == 0:
        return np.empty(shape, dtype)
    try:
        size = path.stat().st_size
        if size != expected:
            raise ShardLost(f"spool file {path} has {size} bytes, expected {expected}")
        file = MappedFile(path, size)
    except FileNotFoundError:
        raise ShardLost(f"spool file {path} is not on this host") from None
    except OSError as error:
        raise disk_error(error, "read", path) from error
    parts.append(FilePart(file, expected // shape[0]))
    return file.values(dtype).reshape(shape)
