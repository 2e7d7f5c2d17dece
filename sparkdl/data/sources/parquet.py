"""Parquet files as a source that workers read by themselves.

No Spark job reads them and nothing is written to local disks. The driver reads footers: they tell
the row groups, and which of them have nulls, rows of another width or labels out of range; the
columns of those alone are then read to say how many. Workers check every row that they read.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass

import pyarrow as pa

from sparkdl.data.source import Contents, Wanted, with_shapes
from sparkdl.data.sources.column_conversion import as_spark, path_of
from sparkdl.data.sources.parquet_files import Listing, Reader, list_files
from sparkdl.data.sources.parquet_statistics import ColumnSurvey
from sparkdl.data.sources.row_groups import (
    Group,
    RowGroupShards,
    ShardPieces,
    check_options,
    content_of,
    deal_both,
    describe_shards,
    groups_of,
    hold_out,
    marks,
    pieces_together,
    place,
)
from sparkdl.errors import ConfigError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ParquetSource:
    """Parquet files that workers read by themselves, for data larger than their disks.

    Given to ``fit`` in place of a DataFrame::

        model = TorchClassifier(module=make_net, epochs=3).fit(ParquetSource("s3://bucket/train"))

    The estimator's Params name columns as they do for a DataFrame of these files. Each epoch reads
    the row groups in random order and mixes the rows of several; see `buffer_bytes`.
    """

    path: str | os.PathLike[str]
    """A file or a folder: a path that driver and executors see, or a URL."""
    _: KW_ONLY
    buffer_bytes: int = 512 << 20
    """Memory of a worker for rows: half of it holds those that are mixed, half those that are read
    ahead. A row group that is larger than half is held whole all the same."""
    validation_fraction: float = 0.0
    """Part of the rows that is used for validation: whole row groups, always the same ones. In
    place of ``validationIndicatorCol``."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", os.fspath(self.path))
        check_options(self.buffer_bytes, self.validation_fraction)

    def schema(self) -> pa.Schema:
        schema = list_files(str(self.path)).schema
        fields = [field.with_type(as_spark(field.type)) for field in schema]
        return pa.schema(fields, metadata=schema.metadata)

    def contents(self, wanted: Wanted) -> Contents:
        if wanted.validation is not None and self.validation_fraction:
            raise ConfigError("set either validation_fraction or validationIndicatorCol, not both")
        return _Survey(self, wanted, list_files(str(self.path))).contents()


class _Survey:
    """One look at the files, on the driver."""

    def __init__(self, source: ParquetSource, wanted: Wanted, listing: Listing) -> None:
        self._source = source
        self._wanted = wanted
        self._listing = listing
        self._names = [file.digest for file in listing.files]
        self._reader = Reader(str(source.path))
        self._paths = tuple(
            tuple(path_of(listing.schema, name) for name in column.kind.columns)
            for column in wanted.columns
        )
        self._validation = None
        if wanted.validation is not None:
            self._validation = path_of(listing.schema, wanted.validation)

    def contents(self) -> Contents:
        groups = groups_of(self._listing, str(self._source.path))
        wanted, limit = self._wanted, self._source.buffer_bytes
        used = [path for several in self._paths for path in several]
        self._listing.require_alike([*used, *filter(None, [self._validation])])
        survey = ColumnSurvey(self._listing, self._reader, wanted.columns, self._paths)
        survey.check(groups)
        columns = survey.columns(groups)
        pieces = deal_both(*self._split(groups), wanted, self._names)
        sizes = self._sizes(survey, pieces)
        together = pieces_together(sizes, limit, pieces)
        self._say_memory(max(sizes), survey.row_bytes, together)
        return Contents(
            columns=columns,
            shards=describe_shards(
                pieces, self._names, together=together, about=self._validation, num_bytes=limit
            ),
            content=content_of(self._names, [self._validation, self._source.validation_fraction]),
            reader=RowGroupShards(
                url=str(self._source.path),
                files=self._listing.files,
                pieces=pieces,
                wanted=with_shapes(wanted.columns, columns),
                paths=self._paths,
                validation=self._validation,
                together=together,
                row_bytes=survey.row_bytes,
            ),
            labels_outside=survey.labels_outside,
        )

    def _sizes(self, survey: ColumnSurvey, shards: Sequence[ShardPieces]) -> list[int]:
        """Memory of the rows of each piece."""
        return [
            -(-survey.bytes_of(piece.file, piece.row_group) * piece.num_rows // rows)
            for shard in shards
            for piece in (*shard.train, *shard.validation)
            for rows in [self._listing.files[piece.file].row_groups[piece.row_group]]
        ]

    def _split(self, groups: Sequence[Group]) -> tuple[list[Group], list[Group]]:
        """Rows of each row group for training, and for validation."""
        if self._validation is not None:
            counted = list(self._counted(groups))
            return [(f, g, rows) for f, g, rows, _ in counted if rows], [
                (f, g, marked) for f, g, _, marked in counted if marked
            ]
        return hold_out(groups, self._source.validation_fraction, self._names)

    def _counted(self, groups: Sequence[Group]) -> Iterator[tuple[int, int, int, int]]:
        """Rows for training and for validation of each row group, by reading that one column."""
        assert self._validation is not None
        name = ".".join(self._validation)
        for number, group, num_rows in groups:
            file = self._listing.files[number]
            table = self._reader.read(file, group, [name])
            marked = int(marks(table, self._validation, place(file, group)).sum())
            yield number, group, num_rows - marked, marked

    def _say_memory(self, largest: int, row_bytes: int, together: int) -> None:
        """Tell the user what to expect; ``largest`` is the memory of the largest row group."""
        limit = self._source.buffer_bytes
        if 2 * largest > limit:
            logger.warning(
                "the largest row group needs about %d MiB of memory, more than half of "
                "buffer_bytes (%d MiB): workers will hold two row groups of that size, and rows of "
                "one row group alone are mixed; write smaller row groups or raise buffer_bytes",
                -(-largest >> 20),
                limit >> 20,
            )
        logger.info(
            "workers read Parquet by themselves: about %d bytes per row, rows of %d row group(s) "
            "mixed, at most %d MiB of rows in memory",
            row_bytes,
            together,
            limit >> 20,
        )
