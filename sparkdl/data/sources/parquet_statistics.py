"""Statistics of the columns of Parquet files, from footers and a sample, before any training.

Footers name the row groups that may hold what cannot be used: nulls, rows of another width, labels
out of range. Those alone are read, to say how many rows it is.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sparkdl.data.arrow_arrays import BINARY_TYPES, is_list
from sparkdl.data.column_readers import BadRows
from sparkdl.data.column_rules import count_bad, remedy_of_shapes, stored_dtype
from sparkdl.data.column_stats import ColumnStats
from sparkdl.data.kinds import Rows
from sparkdl.data.plan import Column, SpoolColumn
from sparkdl.data.ragged import Ragged
from sparkdl.data.sources.column_conversion import found_rows
from sparkdl.data.sources.parquet_files import (
    Chunk,
    ColumnPath,
    DataFile,
    Listing,
    Reader,
    RowGroup,
)
from sparkdl.data.sources.row_groups import Piece
from sparkdl.errors import DataError
from sparkdl.inputs import Tensor

_OFFSET_BYTES = 8


def row_size(column: Column, rows: Rows, arrays: Sequence[pa.Array]) -> tuple[int, float]:
    """Estimate how much memory the rows of a column need, by some of them.

    Args:
        column: as the plan has it.
        rows: some of its rows, in a dtype of their own.
        arrays: the columns of which they were made.

    Returns:
        About the bytes of a row; those of what is stored, see `Chunk.stored_units`, 0 if all
        rows need the same.
    """
    itemsize = np.dtype(column.dtype).itemsize
    if not isinstance(rows, Ragged):
        return math.prod(column.shape) * itemsize, 0
    *others, values = rows.own()
    num_bytes = values.size * itemsize + sum(part.nbytes for part in others)
    row_bytes = -(-num_bytes // max(1, len(rows))) + _OFFSET_BYTES
    return row_bytes, num_bytes / max(1, sum(map(_units, arrays)))


def _units(array: pa.Array) -> int:
    """Count what is stored of an array: bytes of strings and binary, else values."""
    kind = array.type
    if pa.types.is_dictionary(kind):
        return _units(array.dictionary_decode())
    if pa.types.is_struct(kind):
        return sum(map(_units, array.flatten()))
    if is_list(kind):
        return _units(array.flatten())
    strings = (pa.types.is_string, pa.types.is_large_string)
    if any(is_type(kind) for is_type in (*BINARY_TYPES, *strings)):
        return int(pc.sum(pc.binary_length(array)).as_py() or 0)
    return len(array)


_SAMPLE_ROWS = 256
"""Rows by which shapes are found."""


@dataclass
class ColumnSurvey:
    """Looks at columns, on the driver."""

    listing: Listing
    wanted: Sequence[SpoolColumn]
    """The columns that are asked for."""
    paths: Sequence[tuple[ColumnPath, ...]]
    """Paths of the columns of each one's specification."""

    def __post_init__(self) -> None:
        self._reader = Reader(self.listing.url)
        self._sizes: tuple[tuple[int, float], ...] = ()
        """See `row_size`."""
        self._known: dict[tuple[str, ColumnPath], tuple[int, ...]] = {}
        """See `_leaves`."""

    def check(self, groups: Sequence[RowGroup]) -> None:
        """Refuse columns with rows that cannot be used, as far as footers give reason to look.

        Raises:
            DataError: with column, count and an example, for all columns that have such rows.
        """
        found = [self._problem(index, groups) for index in range(len(self.wanted))]
        problems = [problem for problem in found if problem is not None]
        if problems:
            raise DataError("; ".join(problems))

    def columns(self, groups: Sequence[RowGroup]) -> tuple[Column, ...]:
        """The plan's columns, by the first rows of the first row group.

        Where these do not tell, since a column's sequences are all empty, by the first row groups
        that have others.

        Raises:
            DataError: rows cannot be used.
        """
        first = self._reader.read(groups[0], itertools.chain(*self.paths), _SAMPLE_ROWS)
        sample = [
            self._found(index, [first[path] for path in paths], groups[0])
            for index, paths in enumerate(self.paths)
        ]
        for index in range(len(sample)):
            for group in groups:
                rows = sample[index][0]
                if not isinstance(rows, Ragged) or len(rows.parts[0]) > 0:
                    break
                sample[index] = self._found(index, self._arrays(index, group), group)
        columns = tuple(self._column(index, rows) for index, (rows, _) in enumerate(sample))
        self._sizes = tuple(
            row_size(column, *both) for column, both in zip(columns, sample, strict=True)
        )
        return columns

    @property
    def row_bytes(self) -> int:
        """About the memory of a row, by those that `columns` has seen."""
        return sum(row_bytes for row_bytes, _ in self._sizes)

    def bytes_of(self, piece: Piece) -> int:
        """About the memory of a piece's rows; `columns` comes first.

        Not less than rows need that were seen: of what is cut off behind ``max_length``, or comes
        from a transform, what is stored does not tell.
        """
        group = piece.group
        num_rows, found = int(self.listing.footers[group.file.path].groups[group.number, 0]), 0
        for (row_bytes, unit_bytes), paths in zip(self._sizes, self.paths, strict=True):
            leaves = [leaf for path in paths for leaf in self._leaves(group.file, path)]
            stored = sum(self.listing.chunk(group, leaf).stored_units for leaf in leaves)
            ragged = math.ceil(stored * unit_bytes)
            ragged += num_rows * _OFFSET_BYTES * (unit_bytes > 0)
            found += max(num_rows * row_bytes, ragged)
        return -(-found * piece.num_rows // num_rows)

    def _arrays(self, index: int, group: RowGroup) -> list[pa.Array]:
        read = self._reader.read(group, self.paths[index])
        return [read[path] for path in self.paths[index]]

    def _found(
        self, index: int, arrays: list[pa.Array], group: RowGroup
    ) -> tuple[Rows, list[pa.Array]]:
        """Rows as the column's specification makes them, and what it makes them of."""
        try:
            return found_rows(arrays, self.wanted[index], where=f" of {group}"), arrays
        except BadRows as error:
            wanted = self.wanted[index]
            message = error.findings.message(wanted.name, remedy_of_shapes(wanted))
            raise DataError(message) from None

    def _column(self, index: int, rows: Rows) -> Column:
        wanted = self.wanted[index]
        values = rows.parts[-1] if isinstance(rows, Ragged) else rows
        return Column(
            name=wanted.name,
            role=wanted.role,
            dtype=stored_dtype(wanted, values.dtype).name,
            shape=(rows.shape or ()) if isinstance(rows, Ragged) else rows.shape[1:],
            specification=wanted.specification,
            longest=int(rows.lengths.max(initial=0)) if isinstance(rows, Ragged) else 0,
        )

    def _problem(self, index: int, groups: Sequence[RowGroup]) -> str | None:
        """Why rows of a column cannot be used, as far as the footers give reason to look."""
        wanted = self.wanted[index]
        if not isinstance(wanted.kind, Tensor) or wanted.kind.transform is not None:
            return None
        stats = ColumnStats()
        width = None
        for group in groups:
            about = self._about(group, index)
            if about is None:
                continue
            width = width if width is not None else about.num_values / group.num_rows
            is_low = (wanted.as_classes or wanted.role == "weight") and about.minimum < 0
            is_uneven = (
                about.num_values != group.num_rows * width or about.num_values % group.num_rows
            )
            if about.num_nulls or is_low or is_uneven:
                self._examine(index, group, stats)
        return stats.problem(wanted)

    def _examine(self, index: int, group: RowGroup, stats: ColumnStats) -> None:
        """Count what is wrong with a column in one row group."""
        wanted, where = self.wanted[index], f" of {group}"
        try:
            rows = found_rows(self._arrays(index, group), wanted, where=where)
        except BadRows as error:
            stats.nulls_and_shapes.merge(error.findings)
            return
        assert not isinstance(rows, Ragged)
        stats.nulls_and_shapes.note_shape(rows.shape[1:], f"row 0{where}", len(rows))
        count, first = count_bad(rows, wanted, lambda row: f"row {row}{where}")
        stats.bad_values += count
        stats.first_bad = stats.first_bad or first or None

    def _about(self, group: RowGroup, index: int) -> Chunk | None:
        """Return what footer or folder say of a column's only leaf in a row group."""
        (path,) = self.paths[index]
        if path[0] in group.file.constants:
            value = group.file.constants[path[0]].as_py()
            is_known = isinstance(value, (int, float))
            low, high = (value, value) if is_known else (math.inf, -math.inf)
            num_rows = group.num_rows
            return Chunk(num_rows, num_rows * (value is None), low, high, num_rows)
        leaves = self._leaves(group.file, path)
        return self.listing.chunk(group, leaves[0]) if len(leaves) == 1 else None

    def _leaves(self, file: DataFile, path: ColumnPath) -> tuple[int, ...]:
        """Numbers of a column's leaves in `Footer.leaves`; none of what the file's folder tells."""
        if path[0] in file.constants:
            return ()
        if (file.path, path) not in self._known:
            own, names = ".".join(path), enumerate(self.listing.footers[file.path].leaves)
            found = [number for number, n in names if n == own or n.startswith(f"{own}.")]
            self._known[file.path, path] = tuple(found)
        return self._known[file.path, path]

    def labels_outside(self, index: int, num_classes: int) -> tuple[int, str] | None:
        """Count the labels that are not below ``num_classes``, and say where the first one is."""
        count, first = 0, ""
        for group in self.listing.row_groups():
            about = self._about(group, index)
            if about is None or about.maximum < num_classes:
                continue
            rows, _ = self._found(index, self._arrays(index, group), group)
            assert not isinstance(rows, Ragged)
            high = (rows >= num_classes) & (rows != self.wanted[index].ignored)
            outside = np.flatnonzero(high.reshape(len(rows), -1).any(axis=1))
            if not len(outside):
                continue
            count += len(outside)
            first = first or f"row {int(outside[0])} of {group}"
        return (count, first) if count else None
