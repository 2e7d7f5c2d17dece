"""Shards that Spark tasks have written to a disk of this host, as a source of rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from sparkdl.data.plan import Column, Shard, Split, TrainPlan
from sparkdl.data.ragged import Array, Ragged
from sparkdl.data.source import ShardRows, rows_of
from sparkdl.data.spool.local_disk import disk_error
from sparkdl.data.spool.writer import column_parts, column_path
from sparkdl.errors import ShardLost

if TYPE_CHECKING:
    import torch

    from sparkdl.data.spool.mapped import ShardData


@dataclass(frozen=True)
class SpoolSource:
    """The default: shards that a Spark task has written to a disk of this host."""

    def open(self, plan: TrainPlan, shard: Shard, split: Split) -> ShardRows:
        """See `ShardSource.open`: maps the files into memory."""
        from sparkdl.data.spool.mapped import MappedRows

        opened = open_spool(
            Path(shard.path),
            plan.columns,
            num_rows=rows_of(shard, split),
            split=split,
            fingerprint=shard.fingerprint,
        )
        return MappedRows(opened, plan)

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

    from sparkdl.data.spool.mapped import MappedFile, ShardData

    files: dict[str, list[MappedFile]] = {column.key: [] for column in columns}

    def mapped(index: int, part: str, dtype: str, shape: tuple[int, ...]) -> Array:
        path = column_path(directory, split, index, part)
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
        files[columns[index].key].append(file)
        return file.values(dtype).reshape(shape)

    def ragged(index: int, column: Column) -> Ragged:
        *names, offsets_name = column_parts(column.kind)
        offsets = np.zeros(1, dtype=np.int64)
        if num_rows:  # otherwise the split need not be there
            offsets = mapped(index, offsets_name, "int64", (num_rows + 1,))
            files[column.key].clear()  # what says where rows are stays in memory
        parts = zip(names, column.stored_parts, strict=True)
        total = int(offsets[-1])
        values = [mapped(index, name, dtype, (total, *inner)) for name, (dtype, inner) in parts]
        return Ragged(tuple(values), offsets, column.shape)

    opened: dict[str, torch.Tensor | Ragged] = {
        column.key: ragged(index, column)
        if column.kind.num_parts
        else torch.from_numpy(mapped(index, "", column.dtype, (num_rows, *column.shape)))
        for index, column in enumerate(columns)
    }
    return ShardData(fingerprint, opened, files)
