"""How is a partition written once to local disk, and opened many times as tensors?

One contiguous raw file per column and split, so that a whole shard is one memory-mapped tensor
per column. Bad rows do not raise here: they are counted, because the driver reports them for all
shards together, with column, count and an example.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import math
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal

import numpy as np
import pyarrow as pa

from sparkdl.data.arrow import Findings, NotUniform, examine, uniform
from sparkdl.errors import ShardLost, StorageError
from sparkdl.plan import Column, Role

if TYPE_CHECKING:
    import torch

Split = Literal["train", "validation"]


@dataclass(frozen=True, kw_only=True)
class SpoolColumn:
    """A column as it is asked for: its shape is found while spooling."""

    name: str
    role: Role
    dtype: str
    as_classes: bool = False
    """Values must be whole, non-negative numbers."""


@dataclass(kw_only=True)
class ColumnStats:
    """What was seen of one column in one shard."""

    shape: tuple[int, ...] | None = None
    """Shape of a row; None when the shard has no row."""
    nulls_and_shapes: Findings = field(default_factory=Findings)
    bad_values: int = 0
    """Labels that are infinite, NaN, or no class numbers where these are wanted; bad weights."""
    first_bad: str | None = None
    minimum: float | None = None
    maximum: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """As plain values."""
        values = {name: getattr(self, name) for name in self.__dataclass_fields__}
        values["nulls_and_shapes"] = self.nulls_and_shapes.to_dict()
        return values

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> ColumnStats:
        """Inverse of `to_dict`."""
        shape = values["shape"]
        return cls(
            **{
                **values,
                "shape": None if shape is None else tuple(shape),
                "nulls_and_shapes": Findings.from_dict(values["nulls_and_shapes"]),
            }
        )


@dataclass(frozen=True, kw_only=True)
class SpoolSummary:
    """What a finished spool holds."""

    num_rows: int
    num_validation_rows: int
    fingerprint: str
    """Hash of the rows' hashes in their order, and of which are for validation."""
    content: int
    """Sum of the rows' hashes modulo 2**64: equal for equal rows in any order and sharding."""
    num_bytes: int
    columns: tuple[ColumnStats, ...]

    def to_dict(self) -> dict[str, Any]:
        """As plain values."""
        flat = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return {**flat, "columns": [column.to_dict() for column in self.columns]}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> SpoolSummary:
        """Inverse of `to_dict`."""
        columns = tuple(ColumnStats.from_dict(column) for column in values["columns"])
        return cls(**{**values, "columns": columns})


class SpoolWriter:
    """Writes one shard. Use as a context manager: a failure removes what was written.

    Record batches hold the columns in the given order, then the boolean validation indicator if
    there is one, then the int64 hash of each row.

    Raises:
        StorageError: the disk is full or cannot be written.
    """

    def __init__(
        self,
        directory: Path,
        columns: Sequence[SpoolColumn],
        *,
        has_validation: bool,
        where: str = "",
    ) -> None:
        self._directory = directory
        self._columns = tuple(columns)
        self._has_validation = has_validation
        self._where = where
        self._stats = tuple(ColumnStats() for _ in self._columns)
        self._files: dict[tuple[Split, int], IO[bytes]] = {}
        self._rows = 0
        self._kept: dict[Split, int] = {"train": 0, "validation": 0}
        self._bytes = 0
        self._content = 0
        self._rows_digest = hashlib.blake2b(digest_size=16)
        self._mask_digest = hashlib.blake2b(digest_size=16)
        self._sound = True
        self._indicator_nulls = ColumnStats()

    def __enter__(self) -> SpoolWriter:
        with _disk_errors(self._directory):
            self._directory.mkdir(parents=True)
            for split in self._splits():
                for index in range(len(self._columns)):
                    path = column_path(self._directory, split, index)
                    self._files[split, index] = path.open("wb", buffering=0)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for file in self._files.values():
            file.close()
        if kind is not None:
            shutil.rmtree(self._directory, ignore_errors=True)

    def write(self, batch: pa.RecordBatch) -> None:
        """Append the rows of a record batch."""
        if batch.num_rows == 0:
            return
        hashes = np.asarray(batch.column(batch.num_columns - 1).to_numpy(zero_copy_only=False))
        mask = self._validation_mask(batch)
        self._rows_digest.update(hashes.tobytes())
        if mask is not None:
            self._mask_digest.update(mask.tobytes())
        self._content = (self._content + int(hashes.view(np.uint64).sum(dtype=np.uint64))) % 2**64
        for index, column in enumerate(self._columns):
            values = self._values(index, column, batch.column(index))
            if values is not None:
                self._append(index, values, mask)
        num_validation = 0 if mask is None else int(mask.sum())
        self._kept["validation"] += num_validation
        self._kept["train"] += batch.num_rows - num_validation
        self._rows += batch.num_rows

    def summary(self) -> SpoolSummary:
        """What was written; call it after the last record batch."""
        return SpoolSummary(
            num_rows=self._kept["train"],
            num_validation_rows=self._kept["validation"],
            fingerprint=self._fingerprint(),
            content=self._content,
            num_bytes=self._bytes,
            columns=(*self._stats, self._indicator_nulls) if self._has_validation else self._stats,
        )

    def _fingerprint(self) -> str:
        # Two digests, joined at the end: how Spark cuts rows into record batches must not tell.
        joined = self._rows_digest.digest() + self._mask_digest.digest()
        return hashlib.blake2b(joined, digest_size=16).hexdigest()

    def _splits(self) -> tuple[Split, ...]:
        return ("train", "validation") if self._has_validation else ("train",)

    def _validation_mask(self, batch: pa.RecordBatch) -> np.ndarray | None:
        if not self._has_validation:
            return None
        array = batch.column(len(self._columns))
        if array.null_count:
            self._sound = False
            self._indicator_nulls.nulls_and_shapes.merge(self._examine(array))
            array = array.fill_null(False)
        return np.asarray(array.to_numpy(zero_copy_only=False))

    def _values(self, index: int, column: SpoolColumn, array: pa.Array) -> np.ndarray | None:
        """The rows as ``(rows, *shape)``, or None if some are not usable."""
        stats = self._stats[index]
        try:
            values = uniform(array)
        except NotUniform:
            values = None
        if values is None or (stats.shape is not None and values.shape[1:] != stats.shape):
            self._sound = False
            stats.nulls_and_shapes.merge(self._examine(array))
            return None
        stats.shape = values.shape[1:]
        # Counted too, so that the usual shape is known if a later batch turns out ragged.
        stats.nulls_and_shapes.shapes[str(stats.shape)] += len(values)
        first = stats.nulls_and_shapes.first_of_shape
        first.setdefault(str(stats.shape), f"row {self._rows}{self._where}")
        if column.role != "feature":
            self._check(stats, column, values)
        if not self._sound:
            return None
        return values.astype(column.dtype, copy=False)

    def _check(self, stats: ColumnStats, column: SpoolColumn, values: np.ndarray) -> None:
        bad = _bad_values(column, values)
        if bad.any():
            self._sound = False
            row = int(bad.argmax())
            stats.bad_values += int(bad.sum())
            stats.first_bad = stats.first_bad or (
                f"{values[row].tolist()} in row {self._rows + row}{self._where}"
            )
            return
        low, high = (float(values.min()), float(values.max())) if values.size else (0.0, 0.0)
        stats.minimum = low if stats.minimum is None else min(low, stats.minimum)
        stats.maximum = high if stats.maximum is None else max(high, stats.maximum)

    def _append(self, index: int, values: np.ndarray, mask: np.ndarray | None) -> None:
        with _disk_errors(self._directory):
            if mask is None or not mask.any():
                self._put("train", index, values)
            else:
                self._put("train", index, values[~mask])
                self._put("validation", index, values[mask])

    def _put(self, split: Split, index: int, values: np.ndarray) -> None:
        data = np.ascontiguousarray(values).data.cast("B") if values.size else memoryview(b"")
        file = self._files[split, index]
        self._bytes += len(data)
        while len(data):
            data = data[file.write(data) :]

    def _examine(self, array: pa.Array) -> Findings:
        return examine(array, where=self._where, first_row=self._rows)


def open_spool(
    directory: Path, columns: Sequence[Column], *, num_rows: int, split: Split
) -> dict[str, torch.Tensor]:
    """Map a split of a shard into memory.

    Args:
        directory: the shard's spool.
        columns: the plan's columns, in the order in which they were written.
        num_rows: rows of this split, as the shard table says.
        split: ``train`` or ``validation``.

    Returns:
        Column name -> tensor ``(num_rows, *shape)``; private to this process, read on demand.

    Raises:
        ShardLost: a file is missing or has another size than the table says.
    """
    return {
        column.name: _map(column_path(directory, split, index), column, num_rows)
        for index, column in enumerate(columns)
    }


def _map(path: Path, column: Column, num_rows: int) -> torch.Tensor:
    import torch

    dtype: torch.dtype = getattr(torch, column.dtype)
    count = num_rows * math.prod(column.shape)
    if count == 0:
        return torch.empty((num_rows, *column.shape), dtype=dtype)
    expected = count * np.dtype(column.dtype).itemsize
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        raise ShardLost(f"spool file {path} is not on this host") from None
    if size != expected:
        raise ShardLost(f"spool file {path} has {size} bytes, expected {expected}")
    stored = torch.uint8 if dtype == torch.bool else dtype
    flat = torch.from_file(str(path), shared=False, size=count, dtype=stored)
    return (flat.view(torch.bool) if dtype == torch.bool else flat).view(num_rows, *column.shape)


def column_path(directory: Path, split: Split, index: int) -> Path:
    """File of column number ``index``."""
    return directory / f"{split}-{index:03d}.bin"


def _bad_values(column: SpoolColumn, values: np.ndarray) -> np.ndarray:
    """``(rows,)``: True where a label or weight cannot be used."""
    flat = values.reshape(len(values), -1)
    if values.dtype.kind == "f":
        bad = ~np.isfinite(flat)
        if column.as_classes:
            bad |= np.floor(flat) != flat
    else:
        bad = np.zeros(flat.shape, dtype=bool)
    if column.as_classes or column.role == "weight":
        bad |= flat < 0
    return np.asarray(bad.any(axis=1))


@contextlib.contextmanager
def _disk_errors(directory: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StorageError(
                f"the disk of {directory} is full while spooling; free space there, or give Spark "
                "larger local directories (spark.local.dir, SPARK_LOCAL_DIRS)"
            ) from error
        raise StorageError(f"cannot write the spool {directory}: {error}") from error


def roomiest(directories: Sequence[str]) -> Path:
    """The directory with the most free space.

    Raises:
        StorageError: none of them exists.
    """
    free = {}
    for name in directories:
        with contextlib.suppress(OSError):
            free[name] = shutil.disk_usage(name).free
    if not free:
        raise StorageError(f"none of Spark's local directories exists: {list(directories)}")
    return Path(max(free, key=lambda name: free[name]))


def remove_spool(directory: Path) -> bool:
    """Delete a spool if it is there. Returns whether it was."""
    if not directory.is_dir():
        return False
    shutil.rmtree(directory, ignore_errors=True)
    with contextlib.suppress(OSError):  # the run's folder goes with its last shard
        os.rmdir(directory.parent)  # noqa: PTH106 - must fail when not empty
    return True
