"""What do footers and a sample tell of the columns of Parquet files, before anything is trained?

Footers name the row groups that may hold what cannot be used: nulls, rows of another width, labels
out of range. Those alone are read, to say how many rows it is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa

from sparkdl.data.convert import column_at, found_rows
from sparkdl.data.parquetfiles import Listing, Reader
from sparkdl.data.ragged import Ragged
from sparkdl.data.readers import BadRows, Rows
from sparkdl.data.rowgroups import Group, place
from sparkdl.data.spool import SpoolColumn
from sparkdl.data.stats import ColumnStats, bad_values, bad_values_message, made_dtype
from sparkdl.errors import DataError
from sparkdl.inputs import Image, Tensor
from sparkdl.plan import Column

_SAMPLE_ROWS = 256
"""Rows by which shapes are found."""


class ColumnSurvey:
    """Looks at columns, on the driver.

    Args:
        listing: the files.
        reader: reads them.
        wanted: the columns that are asked for.
        paths: of each, where its specification's columns lie.
    """

    def __init__(
        self,
        listing: Listing,
        reader: Reader,
        wanted: Sequence[SpoolColumn],
        paths: Sequence[tuple[tuple[str, ...], ...]],
    ) -> None:
        self._listing = listing
        self._reader = reader
        self._wanted = wanted
        self._paths = paths

    def check(self, groups: Sequence[Group]) -> None:
        """Refuse columns with rows that cannot be used, as far as footers give reason to look.

        Raises:
            DataError: with column, count and an example, for all columns that have such rows.
        """
        found = [self._problem(index, groups) for index in range(len(self._wanted))]
        problems = [problem for problem in found if problem is not None]
        if problems:
            raise DataError("; ".join(problems))

    def columns(self, group: Group) -> tuple[tuple[Column, ...], int]:
        """The plan's columns and about the bytes of a row, by the first rows of a row group.

        Raises:
            DataError: these cannot be used.
        """
        sample = self._sample(group)
        columns = tuple(self._column(index, rows) for index, rows in enumerate(sample))
        return columns, sum(_row_bytes(*both) for both in zip(columns, sample, strict=True))

    def _read(self, file: int, group: int, index: int) -> list[pa.Array]:
        paths = self._paths[index]
        names = sorted({".".join(path) for path in paths})
        table = self._reader.read(self._listing.files[file], group, names)
        return [column_at(table, path) for path in paths]

    def _sample(self, group: tuple[int, int, int]) -> list[Rows]:
        """The first rows of each column, as its specification makes them."""
        file = self._listing.files[group[0]]
        names = sorted({".".join(path) for several in self._paths for path in several})
        table = self._reader.first_rows(file, group[1], names, _SAMPLE_ROWS)
        found = []
        for column, paths in zip(self._wanted, self._paths, strict=True):
            arrays = [column_at(table, path) for path in paths]
            try:
                found.append(found_rows(arrays, column, where=f" of {place(file, group[1])}"))
            except BadRows as error:
                raise DataError(error.findings.message(column.name)) from None
        return found

    def _column(self, index: int, rows: Rows) -> Column:
        wanted = self._wanted[index]
        values = rows.parts[-1] if isinstance(rows, Ragged) else rows
        dtype = np.dtype(wanted.dtype)
        if isinstance(wanted.kind, Image):
            dtype = values.dtype
        elif wanted.kind.transform is not None:
            dtype = made_dtype(values.dtype, wanted.role, wanted.dtype)
        return Column(
            name=wanted.name,
            role=wanted.role,
            dtype=dtype.name,
            shape=(rows.shape or ()) if isinstance(rows, Ragged) else rows.shape[1:],
            specification=wanted.specification,
            longest=int(rows.lengths.max(initial=0)) if isinstance(rows, Ragged) else 0,
        )

    def _problem(self, index: int, groups: Sequence[tuple[int, int, int]]) -> str | None:
        """Why rows of a column cannot be used, as far as the footers give reason to look."""
        wanted = self._wanted[index]
        if not isinstance(wanted.kind, Tensor) or wanted.kind.transform is not None:
            return None
        stats = ColumnStats()
        width = None
        suspects = []
        for file, group, num_rows in groups:
            about = self._statistics(file, group, index)
            if about is None:
                continue
            values, statistics = about
            width = width if width is not None else values / num_rows
            has_nulls = statistics is not None and bool(statistics.null_count)
            is_low = (
                wanted.role != "feature"
                and statistics is not None
                and _is_number(statistics.min)
                and (wanted.as_classes or wanted.role == "weight")
                and statistics.min < 0
            )
            if has_nulls or is_low or values != num_rows * width or values % num_rows:
                suspects.append((file, group))
        for file, group in suspects:
            self._examine(index, file, group, stats)
        if stats.nulls_and_shapes:
            return stats.nulls_and_shapes.message(wanted.name)
        if stats.bad_values:
            return bad_values_message(
                wanted.name,
                as_classes=wanted.as_classes,
                role=wanted.role,
                count=stats.bad_values,
                first=str(stats.first_bad),
            )
        return None

    def _examine(self, index: int, file: int, group: int, stats: ColumnStats) -> None:
        """Count what is wrong with a column in one row group."""
        wanted = self._wanted[index]
        where = f" of {place(self._listing.files[file], group)}"
        try:
            rows = found_rows(self._read(file, group, index), wanted, where=where)
        except BadRows as error:
            stats.nulls_and_shapes.merge(error.findings)
            return
        assert not isinstance(rows, Ragged)
        stats.nulls_and_shapes.note_shape(rows.shape[1:], f"row 0{where}", len(rows))
        if wanted.role == "feature" or rows.dtype.kind not in "biuf":
            return
        bad = bad_values(rows, wanted.role, as_classes=wanted.as_classes)
        if bad.any():
            row = int(bad.argmax())
            stats.bad_values += int(bad.sum())
            stats.first_bad = stats.first_bad or f"{rows[row].tolist()} in row {row}{where}"

    def _statistics(self, file: int, group: int, index: int) -> tuple[int, Any] | None:
        """Number of values and statistics of a column's only leaf in a row group."""
        (path,) = self._paths[index]
        footer = self._listing.footers[file].row_group(group)
        leaf = self._leaves.get(path)
        if leaf is None:
            return None
        column = footer.column(leaf)
        return column.num_values, column.statistics

    @cached_property
    def _leaves(self) -> dict[tuple[str, ...], int]:
        """Path of a column -> number of its leaf in the footers, where it has but one."""
        found: dict[tuple[str, ...], int] = {}
        schema = self._listing.footers[0].schema
        names = [schema.column(i).path for i in range(len(schema))]
        for several in self._paths:
            for path in several:
                own = ".".join(path)
                leaves = [i for i, n in enumerate(names) if n == own or n.startswith(f"{own}.")]
                if len(leaves) == 1:
                    found[path] = leaves[0]
        return found

    def labels_outside(self, index: int, num_classes: int) -> tuple[int, str] | None:
        """How many labels are not below ``num_classes``, and where the first of them is."""
        count, first = 0, ""
        for number, file in enumerate(self._listing.files):
            for group in file.row_groups:
                about = self._statistics(number, group.number, index) if group.num_rows else None
                if about is None or about[1] is None or not _is_number(about[1].max):
                    continue
                if about[1].max < num_classes:
                    continue
                rows = found_rows(self._read(number, group.number, index), self._wanted[index])
                assert not isinstance(rows, Ragged)
                outside = np.flatnonzero(rows.reshape(len(rows), -1).max(axis=1) >= num_classes)
                count += len(outside)
                first = first or f"row {int(outside[0])} of {place(file, group.number)}"
        return (count, first) if count else None


def _row_bytes(column: Column, rows: Rows) -> int:
    if isinstance(rows, Ragged):
        return -(-rows.num_bytes // max(1, len(rows))) + 8
    return math.prod(column.shape) * np.dtype(column.dtype).itemsize


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float))
