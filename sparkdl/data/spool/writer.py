"""A partition written once to local disk, and opened many times as tensors.

There is one contiguous raw file per column and split, so that a whole shard is one memory-mapped
tensor per column. Bad rows do not raise here: they are counted, because the driver reports them for
all shards together, with column, count and an example.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa

from sparkdl.data.arrow_arrays import examine
from sparkdl.data.column_readers import BadRows, read, read_usable
from sparkdl.data.column_rules import count_bad, stored_dtype
from sparkdl.data.column_stats import ColumnStats, SpoolSummary
from sparkdl.data.kinds import Rows
from sparkdl.data.plan import Split, SpoolColumn
from sparkdl.data.ragged import Array, Ragged
from sparkdl.data.spool.local_disk import disk_errors
from sparkdl.inputs import Image, Specification


def leave_out(
    batch: pa.RecordBatch,
    kinds: Sequence[Specification],
    stats: Sequence[ColumnStats],
    *,
    where: str,
    first: int,
) -> tuple[pa.RecordBatch, dict[int, Rows | None]]:
    """Leave out the rows of which some column says that they shall be skipped.

    Args:
        batch: the columns, and whatever comes behind them.
        kinds: specifications of the columns.
        stats: where the columns' findings are added.
        where: suffix of a row's description.
        first: number of the first row.

    Returns:
        The other rows, and by column's number what has been read of them on the way; None where
        they cannot be used.
    """
    found: dict[int, tuple[Rows, Array]] = {}
    ready: dict[int, Rows | None] = {}
    kept = np.ones(batch.num_rows, dtype=bool)
    for index, kind in enumerate(kinds):
        if not isinstance(kind, Image) or not kind.skips:
            continue
        try:
            rows, usable, skipped = read_usable(
                batch.column(index), kind, where=where, first_row=first
            )
        except BadRows as error:
            stats[index].nulls_and_shapes.merge(error.findings)
            ready[index] = None
            continue
        stats[index].skipped.merge(skipped)
        found[index] = rows, usable
        kept &= usable
    for index, (rows, usable) in found.items():
        ready[index] = rows if kept.all() else chosen(rows, kept[usable])
    return (batch if kept.all() else batch.filter(pa.array(kept))), ready


def read_noting(
    array: pa.Array, kind: Specification, stats: ColumnStats, *, where: str, first: int
) -> Rows | None:
    """The rows of a column; or None, and a note, if some cannot be used. See `leave_out`."""
    try:
        return read(array, kind, where=where, first_row=first)
    except BadRows as error:
        stats.nulls_and_shapes.merge(error.findings)
        return None


def chosen(rows: Rows, mask: Array) -> Rows:
    """The rows at which ``mask``, bool ``(rows,)``, is True."""
    return rows.where(mask) if isinstance(rows, Ragged) else rows[mask]


OFFSETS = "-offsets"
"""Suffix of the file that says where rows end."""
_ROWS_AT_ONCE = 256
"""Rows that are made at a time: images, once decoded, need many times their bytes."""


class SpoolWriter:
    """Writes one shard. Use as a context manager: a failure removes what was written.

    Record batches hold the columns in the given order, then the boolean validation indicator if
    there is one, then the int64 hash of each row.

    Raises:
        DiskFull: the disk is full.
        StorageError: it cannot be written.
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
        self._files: dict[tuple[Split, int, str], IO[bytes]] = {}
        self._ends: dict[tuple[Split, int], int] = {}
        self._rows = 0
        self._begun = 0
        self._kept: dict[Split, int] = {"train": 0, "validation": 0}
        self._bytes = 0
        self._content = 0
        self._rows_digest = hashlib.blake2b(digest_size=16)
        self._mask_digest = hashlib.blake2b(digest_size=16)
        self._made_digests: dict[tuple[int, str], Any] = {}
        self._is_made = any(_is_made(column) for column in self._columns)
        self._sound = True
        self._indicator_nulls = ColumnStats()

    def __enter__(self) -> SpoolWriter:
        try:
            with disk_errors(self._directory):
                self._open()
        except BaseException as error:
            self.__exit__(type(error), error)
            raise
        return self

    def _open(self) -> None:
        self._directory.mkdir(parents=True)
        splits: tuple[Split, ...] = ("train", "validation") if self._has_validation else ("train",)
        for split in splits:
            for index, column in enumerate(self._columns):
                for part in column_parts(column.kind):
                    path = column_path(self._directory, split, index, part)
                    self._files[split, index, part] = path.open("wb", buffering=0)
                if column.kind.num_parts:
                    self._put(split, index, OFFSETS, np.zeros(1, dtype=np.int64))

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for file in self._files.values():
            file.close()
        if kind is not None:
            shutil.rmtree(self._directory, ignore_errors=True)

    def write(self, batch: pa.RecordBatch) -> None:
        """Append the rows of a record batch."""
        step = _ROWS_AT_ONCE if self._is_made else batch.num_rows
        for start in range(0, batch.num_rows, max(1, step)):
            self._write(batch.slice(start, step))

    @property
    def row_bytes(self) -> float:
        """Mean size of the rows so far; after a failure about that of those that were written."""
        return self._bytes / max(1, self._begun)

    def _write(self, batch: pa.RecordBatch) -> None:
        self._begun += batch.num_rows
        num_rows = batch.num_rows
        kinds = [column.kind for column in self._columns]
        batch, ready = leave_out(batch, kinds, self._stats, where=self._where, first=self._rows)
        if batch.num_rows:
            self._write_usable(batch, ready)
        self._rows += num_rows

    def _write_usable(self, batch: pa.RecordBatch, ready: Mapping[int, Rows | None]) -> None:
        hashes = np.asarray(batch.column(batch.num_columns - 1).to_numpy(zero_copy_only=False))
        mask = self._validation_mask(batch)
        self._rows_digest.update(hashes.tobytes())
        if mask is not None:
            self._mask_digest.update(mask.tobytes())
        self._content = (self._content + int(hashes.view(np.uint64).sum(dtype=np.uint64))) % 2**64
        for index, column in enumerate(self._columns):
            rows = ready[index] if index in ready else self._read(index, batch.column(index))
            self._sound &= rows is not None
            values = None if rows is None else self._values(index, column, rows)
            if values is not None:
                self._append(index, values, mask)
        num_validation = 0 if mask is None else int(mask.sum())
        self._kept["validation"] += num_validation
        self._kept["train"] += batch.num_rows - num_validation

    def summary(self) -> SpoolSummary:
        """What was written; call it after the last record batch."""
        return SpoolSummary(
            num_rows=self._kept["train"],
            num_validation_rows=self._kept["validation"],
            fingerprint=self._fingerprint(),
            content=self._content,
            num_bytes=self._bytes,
            columns=(*self._stats, self._indicator_nulls) if self._has_validation else self._stats,
            num_skipped_rows=self._rows - sum(self._kept.values()),
        )

    def _fingerprint(self) -> str:
        # Two digests, joined at the end: how Spark cuts rows into record batches must not tell.
        joined = self._rows_digest.digest() + self._mask_digest.digest()
        for _, digest in sorted(self._made_digests.items()):
            joined += digest.digest()
        return hashlib.blake2b(joined, digest_size=16).hexdigest()

    def _validation_mask(self, batch: pa.RecordBatch) -> np.ndarray | None:
        if not self._has_validation:
            return None
        array = batch.column(len(self._columns))
        if array.null_count:
            self._sound = False
            found = examine(array, where=self._where, first_row=self._rows)
            self._indicator_nulls.nulls_and_shapes.merge(found)
            array = array.fill_null(False)
        return np.asarray(array.to_numpy(zero_copy_only=False))

    def _read(self, index: int, array: pa.Array) -> Rows | None:
        kind, stats = self._columns[index].kind, self._stats[index]
        return read_noting(array, kind, stats, where=self._where, first=self._rows)

    def _values(self, index: int, column: SpoolColumn, rows: Rows) -> Rows | None:
        """The rows as they shall lie in the spool, or None if some are not usable."""
        stats = self._stats[index]
        if rows.shape is not None:
            self._note_shape(stats, rows)
        if isinstance(rows, Ragged):
            stats.longest = max(stats.longest, int(rows.lengths.max(initial=0)))
        elif column.role != "feature" and rows.dtype.kind in "biuf":
            self._check(stats, column, rows)
        if not self._sound:
            return None
        rows = self._typed(stats, column, rows)
        return rows if self._sound else None

    def _note_shape(self, stats: ColumnStats, rows: Rows) -> None:
        """Counted also while all is well, so that the usual shape is known if it changes."""
        shape = rows.shape if isinstance(rows, Ragged) else rows.shape[1:]
        stats.nulls_and_shapes.note_shape(
            "?" if shape is None else shape, f"row {self._rows}{self._where}", len(rows)
        )
        stats.shape = shape if stats.shape is None else stats.shape
        self._sound &= stats.shape == shape

    def _typed(self, stats: ColumnStats, column: SpoolColumn, rows: Rows) -> Rows:
        """The rows with values of the dtype that the spool has."""
        values = rows.parts[-1] if isinstance(rows, Ragged) else rows
        if not len(values) and isinstance(rows, Ragged):
            return rows
        dtype = stored_dtype(column, values.dtype)
        stats.dtype = stats.dtype or dtype.name
        if stats.dtype != dtype.name:
            self._sound = False
            cause = f"{dtype.name} where others have {stats.dtype}: let the transform cast them"
            stats.nulls_and_shapes.note_cause(cause, f"row {self._rows}{self._where}")
        values = values.astype(dtype, copy=False)
        if isinstance(rows, Ragged):
            return Ragged((*rows.parts[:-1], values), rows.offsets, rows.shape)
        return values

    def _check(self, stats: ColumnStats, column: SpoolColumn, values: np.ndarray) -> None:
        count, first = count_bad(values, column, lambda row: f"row {self._rows + row}{self._where}")
        if count:
            self._sound = False
            stats.bad_values += count
            stats.first_bad = stats.first_bad or first
            return
        low, high = (float(values.min()), float(values.max())) if values.size else (0.0, 0.0)
        stats.minimum = low if stats.minimum is None else min(low, stats.minimum)
        stats.maximum = high if stats.maximum is None else max(high, stats.maximum)

    def _append(self, index: int, rows: Rows, mask: Array | None) -> None:
        if self._columns[index].kind.transform is not None:
            self._note_made(index, rows)
        with disk_errors(self._directory):
            if mask is None or not mask.any():
                self._put_rows("train", index, rows)
            else:
                self._put_rows("train", index, chosen(rows, ~mask))
                self._put_rows("validation", index, chosen(rows, mask))

    def _note_made(self, index: int, rows: Rows) -> None:
        """What a transform made of the rows counts too: its code may change."""
        arrays = (*rows.own(), rows.lengths) if isinstance(rows, Ragged) else (rows,)
        for part, values in zip(column_parts(self._columns[index].kind), arrays, strict=True):
            digest = self._made_digests.setdefault((index, part), hashlib.blake2b(digest_size=16))
            digest.update(np.ascontiguousarray(values).reshape(-1).view(np.uint8))

    def _put_rows(self, split: Split, index: int, rows: Rows) -> None:
        if not isinstance(rows, Ragged):
            self._put(split, index, "", rows)
            return
        for part, values in zip(
            column_parts(self._columns[index].kind)[:-1], rows.own(), strict=True
        ):
            self._put(split, index, part, values)
        ends = np.cumsum(rows.lengths) + self._ends.get((split, index), 0)
        self._put(split, index, OFFSETS, ends)
        self._ends[split, index] = int(ends[-1]) if len(ends) else self._ends.get((split, index), 0)

    def _put(self, split: Split, index: int, part: str, values: np.ndarray) -> None:
        data = np.ascontiguousarray(values).data.cast("B") if values.size else memoryview(b"")
        file = self._files[split, index, part]
        self._bytes += len(data)
        while len(data):
            data = data[file.write(data) :]


def column_path(directory: Path, split: Split, index: int, part: str = "") -> Path:
    """File of column number ``index``, or of a part of it."""
    return directory / f"{split}-{index:03d}{part}.bin"


def column_parts(kind: Specification) -> list[str]:
    """Suffixes of a column's files: of the values, then of the offsets where rows may differ."""
    if not kind.num_parts:
        return [""]
    return [*("" if part == 0 else f"-{part}" for part in range(kind.num_parts)), OFFSETS]


def _is_made(column: SpoolColumn) -> bool:
    """Whether a decoder or the user's code makes the rows."""
    return column.kind.transform is not None or column.kind.keeps_dtype
