"""A partition written once to local disk, and opened many times as tensors.

There is one contiguous raw file per column and split, so that a whole shard is one memory-mapped
tensor per column. Bad rows do not raise here: they are counted, because the driver reports them for
all shards together, with column, count and an example.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa

from sparkdl.data.arrow_arrays import examine
from sparkdl.data.column_readers import BadRows, read, read_usable
from sparkdl.data.column_rules import count_bad, stored_dtype
from sparkdl.data.column_stats import ColumnStats, SpooledShard
from sparkdl.data.kinds import Rows
from sparkdl.data.plan import Shard, Split, SpoolColumn
from sparkdl.data.ragged import Array, Ragged
from sparkdl.data.spool.head import Head
from sparkdl.data.spool.local_disk import disk_errors, make_private, open_private
from sparkdl.inputs import Image, Specification

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
        head_bytes: int = 0,
    ) -> None:
        """Write to a directory; messages end the number of a row by ``where``.

        The summary has up to `Head.ROWS` rows, if two of them take at most ``head_bytes``.
        """
        self._directory = directory
        self._head = Head(head_bytes)
        self._columns = [_ColumnWriter(column, where) for column in columns]
        self._splits: tuple[Split, ...] = ("train", "validation") if has_validation else ("train",)
        self._where = where
        self._indicator = ColumnStats()
        is_made = any(c.kind.transform is not None or c.kind.keeps_dtype for c in columns)
        self._rows_at_once = _ROWS_AT_ONCE if is_made else None
        self._num_begun = 0
        self._kept: dict[Split, int] = {"train": 0, "validation": 0}
        self._content = 0
        self._rows_digest = hashlib.blake2b(digest_size=16)
        self._mask_digest = hashlib.blake2b(digest_size=16)
        self._places: list[str] = []
        self._hashes: dict[str, int] = {}
        self._is_sound = True
        """False once some row cannot be used: then rows are looked at, but not written."""

    def __enter__(self) -> SpoolWriter:
        try:
            with disk_errors(self._directory):
                make_private(self._directory)
                for split in self._splits:
                    for index, column in enumerate(self._columns):
                        column.open(self._directory, split, index)
        except BaseException as error:
            self.__exit__(type(error), error)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for column in self._columns:
            column.close()
        if kind is not None:
            shutil.rmtree(self._directory, ignore_errors=True)

    def write(self, batch: pa.RecordBatch) -> None:
        """Append the rows of a record batch."""
        step = self._rows_at_once or batch.num_rows
        for start in range(0, batch.num_rows, max(1, step)):
            self._write(batch.slice(start, step))

    @property
    def num_rows(self) -> int:
        """Rows so far, with those that are left out."""
        return self._num_begun

    @property
    def row_bytes(self) -> float:
        """Mean size of the rows so far; after a failure about that of those that were written."""
        return self._num_bytes / max(1, self._num_begun)

    @property
    def _num_bytes(self) -> int:
        return sum(column.num_bytes for column in self._columns)

    def _write(self, batch: pa.RecordBatch) -> None:
        first = self._num_begun
        self._num_begun += batch.num_rows
        found = {
            index: column.read(batch.column(index), first)
            for index, column in enumerate(self._columns)
            if column.skips
        }
        self._note_hashes(batch, first)
        kept = np.ones(batch.num_rows, dtype=bool)
        for _, usable in found.values():
            kept &= True if usable is None else usable
        if not kept.all():
            batch = batch.filter(pa.array(kept))
            for index, (rows, usable) in found.items():
                found[index] = rows if usable is None else _chosen(rows, kept[usable]), None
        if not batch.num_rows:
            return
        mask = self._note_rows(batch, first)
        values: list[Rows] = []
        for index, column in enumerate(self._columns):
            array = batch.column(index)
            rows, _ = found[index] if column.skips else column.read(array, first)
            checked = None if rows is None else column.checked(rows, first)
            values += [] if checked is None else [checked]
        self._is_sound &= len(values) == len(self._columns)
        if not self._is_sound or not first:  # rows of another shard may have another shape
            self._note_hashes(batch, first)
        if self._is_sound:
            self._head.add(values)
            with disk_errors(self._directory):
                for column, rows in zip(self._columns, values, strict=True):
                    column.append(rows, mask)

    def _note_hashes(self, batch: pa.RecordBatch, first: int) -> None:
        """Keep the hashes of rows that messages name, by which they can be found again."""
        columns = [*(column.stats for column in self._columns), self._indicator]
        places = [place for stats in columns for place in stats.places()]
        if places == self._places:
            return
        self._places = places
        text, hashes = "; ".join(places), batch.column(batch.num_columns - 1).to_pylist()
        for row, value in enumerate(hashes, start=first):
            if (place := f"row {row}{self._where}") in text:
                self._hashes.setdefault(place, value)

    def _note_rows(self, batch: pa.RecordBatch, first: int) -> Array | None:
        """Take note of which rows there are; which of them are for validation, None if none can be.

        What identifies the rows does not depend on how Spark cuts them into record batches.
        """
        hashes = np.asarray(batch.column(batch.num_columns - 1).to_numpy(zero_copy_only=False))
        self._rows_digest.update(hashes.tobytes())
        self._content = (self._content + int(hashes.view(np.uint64).sum(dtype=np.uint64))) % 2**64
        mask, num_validation = None, 0
        if len(self._splits) > 1:
            array = batch.column(len(self._columns))
            if array.null_count:
                self._is_sound = False
                nulls = examine(array, where=self._where, first_row=first)
                self._indicator.nulls_and_shapes.merge(nulls)
                array = array.fill_null(False)
            mask = np.asarray(array.to_numpy(zero_copy_only=False))
            num_validation = int(mask.sum())
            self._mask_digest.update(mask.tobytes())
        self._kept["validation"] += num_validation
        self._kept["train"] += batch.num_rows - num_validation
        return mask

    def summary(self) -> SpooledShard:
        """Return a summary of what was written; call it after the last record batch."""
        digests = [self._rows_digest, self._mask_digest]
        for column in self._columns:
            digests += column.made_digests
        joined = b"".join(digest.digest() for digest in digests)
        indicator = [self._indicator] * (len(self._splits) > 1)
        return SpooledShard(
            shard=Shard(
                shard_id=0,
                path=str(self._directory),
                num_rows=self._kept["train"],
                num_validation_rows=self._kept["validation"],
                fingerprint=hashlib.blake2b(joined, digest_size=16).hexdigest(),
                num_bytes=self._num_bytes,
            ),
            content=self._content,
            columns=(*(column.stats for column in self._columns), *indicator),
            hashes=self._hashes,
            num_skipped_rows=self._num_begun - sum(self._kept.values()),
            head=self._head.packed(),
        )


class _ColumnWriter:
    """Checks one column's rows, and writes them."""

    def __init__(self, column: SpoolColumn, where: str) -> None:
        self.stats = ColumnStats()
        self.num_bytes = 0
        self.made_digests: list[Any] = []
        """Digests of a transform's results, which identify the rows too: its code may change."""
        self._column = column
        self._where = where
        self._files: dict[Split, list[IO[bytes]]] = {}
        self._ends: dict[Split, int] = {}

    @property
    def skips(self) -> bool:
        """True if rows that cannot be used are left out."""
        return self._column.kind.skips

    def open(self, directory: Path, split: Split, index: int) -> None:
        """Make the files of a split."""
        files = self._files[split] = list[IO[bytes]]()
        for part in column_parts(self._column.kind):
            path = column_path(directory, split, index, part)
            files.append(open(path, "wb", buffering=0, opener=open_private))  # noqa: SIM115
        self._ends[split] = 0
        if self._column.kind.num_parts:
            self._put(files[-1], np.zeros(1, dtype=np.int64))

    def close(self) -> None:
        """Close all files."""
        for files in self._files.values():
            for file in files:
                file.close()

    def read(self, array: pa.Array, first: int) -> tuple[Rows | None, Array | None]:
        """Read the column, of which the first row has that number.

        Returns:
            The rows; None, and a note, if some cannot be used. Then which rows these are, bool
            ``(rows,)``, if the others are left out; None: all.
        """
        kind = self._column.kind
        try:
            if not self.skips:
                return read(array, kind, where=self._where, first_row=first), None
            assert isinstance(kind, Image)
            rows, usable, skipped = read_usable(array, kind, where=self._where, first_row=first)
        except BadRows as error:
            self.stats.nulls_and_shapes.merge(error.findings)
            return None, None
        self.stats.skipped.merge(skipped)
        return rows, usable

    def checked(self, rows: Rows, first: int) -> Rows | None:
        """The rows in the dtype of the spool; None, and a note, if some cannot be used."""
        stats, place = self.stats, f"row {first}{self._where}"
        shape = rows.shape if isinstance(rows, Ragged) else rows.shape[1:]
        if shape is not None:
            # Counted also while all is well, so that the usual shape is known if it changes.
            stats.nulls_and_shapes.note_shape(shape, place, len(rows))
            stats.shape = shape if stats.shape is None else stats.shape
            if stats.shape != shape:
                return None
        if isinstance(rows, Ragged):
            stats.longest = max(stats.longest, int(rows.lengths.max(initial=0)))
        elif not self._note_values(rows, first):
            return None
        values = rows.parts[-1] if isinstance(rows, Ragged) else rows
        if isinstance(rows, Ragged) and not len(values):
            return rows
        dtype = stored_dtype(self._column, values.dtype)
        stats.dtype = stats.dtype or dtype.name
        if stats.dtype != dtype.name:
            cause = f"{dtype.name} where others have {stats.dtype}: let the transform cast them"
            stats.nulls_and_shapes.note_cause(cause, place)
            return None
        values = values.astype(dtype, copy=False)
        if isinstance(rows, Ragged):
            return Ragged((*rows.parts[:-1], values), rows.offsets, rows.shape)
        return values

    def _note_values(self, values: Array, first: int) -> bool:
        """Look at labels and weights; False if some cannot be used."""
        if self._column.role == "feature" or values.dtype.kind not in "biuf":
            return True
        stats = self.stats
        count, example = count_bad(
            values, self._column, lambda row: f"row {first + row}{self._where}"
        )
        if count:
            stats.bad_values += count
            stats.first_bad = stats.first_bad or example
            return False
        if self._column.ignored is not None:
            values = values[values != self._column.ignored]
            if not values.size:
                return True
        low, high = (float(values.min()), float(values.max())) if values.size else (0.0, 0.0)
        stats.minimum = low if stats.minimum is None else min(low, stats.minimum)
        stats.maximum = high if stats.maximum is None else max(high, stats.maximum)
        return True

    def append(self, rows: Rows, mask: Array | None) -> None:
        """Write rows; ``mask`` says which are for validation, None: none."""
        if self._column.kind.transform is not None:
            arrays = (*rows.own(), rows.lengths) if isinstance(rows, Ragged) else (rows,)
            self.made_digests = self.made_digests or [
                hashlib.blake2b(digest_size=16) for _ in arrays
            ]
            for digest, values in zip(self.made_digests, arrays, strict=True):
                digest.update(_bytes_of(values))
        if mask is None or not mask.any():
            self._put_rows("train", rows)
        else:
            self._put_rows("train", _chosen(rows, ~mask))
            self._put_rows("validation", _chosen(rows, mask))

    def _put_rows(self, split: Split, rows: Rows) -> None:
        arrays: tuple[Array, ...] = (rows,) if not isinstance(rows, Ragged) else rows.own()
        if isinstance(rows, Ragged):
            arrays = (*arrays, self._ends[split] + np.cumsum(rows.lengths))
            self._ends[split] += int(rows.lengths.sum())
        for file, values in zip(self._files[split], arrays, strict=True):
            self._put(file, values)

    def _put(self, file: IO[bytes], values: Array) -> None:
        data = _bytes_of(values)
        self.num_bytes += len(data)
        while len(data):
            data = data[file.write(data) :]


def _bytes_of(values: Array) -> memoryview:
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8).data


def _chosen(rows: Any, mask: Array) -> Any:
    """The rows at which ``mask``, bool ``(rows,)``, is True."""
    return rows.where(mask) if isinstance(rows, Ragged) else rows[mask]


def column_path(directory: Path, split: Split, index: int, part: str = "") -> Path:
    """File of column number ``index``, or of a part of it."""
    return directory / f"{split}-{index:03d}{part}.bin"


def column_parts(kind: Specification) -> list[str]:
    """Suffixes of a column's files: of the values, then of the offsets where rows may differ."""
    if not kind.num_parts:
        return [""]
    return [*("" if part == 0 else f"-{part}" for part in range(kind.num_parts)), OFFSETS]
