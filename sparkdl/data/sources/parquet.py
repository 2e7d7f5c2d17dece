"""Parquet files as a source that workers read by themselves.

No Spark job reads them and nothing is written to local disks. Footers come first: they tell the
row groups, and which of them have nulls, rows of another width or labels out of range; the
columns of those alone are then read to say how many. Workers check every row that they read.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, replace
from itertools import chain, groupby

import pyarrow as pa

from sparkdl.data.source import Contents, Spread, Wanted, with_shapes
from sparkdl.data.sources.column_conversion import as_spark, path_of
from sparkdl.data.sources.locality import Places
from sparkdl.data.sources.parquet_files import (
    ColumnPath,
    Reader,
    RowGroup,
    list_files,
    schema_under,
)
from sparkdl.data.sources.parquet_statistics import ColumnSurvey
from sparkdl.data.sources.row_groups import (
    RowGroupShards,
    check_options,
    deal_both,
    describe_shards,
    hold_out,
    marks,
    pieces_together,
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
    """Memory of a worker for the rows of each of its shards: half of it holds those that are mixed,
    half those that are read ahead. A row group that is larger than half is held whole all the same.
    """
    validation_fraction: float = 0.0
    """Part of the rows that is used for validation: whole row groups, always the same ones. In
    place of ``validationIndicatorCol``."""

    def __post_init__(self) -> None:
        if not isinstance(self.path, str | os.PathLike):
            raise ConfigError(
                "ParquetSource takes the path of a file or a folder; received "
                f"{type(self.path).__name__}; give a DataFrame to fit itself: fit(df)"
            )
        object.__setattr__(self, "path", os.fspath(self.path))
        check_options(self.buffer_bytes, self.validation_fraction)

    def schema(self) -> pa.Schema:
        schema = schema_under(str(self.path))
        fields = [field.with_type(as_spark(field.type)) for field in schema]
        return pa.schema(fields, metadata=schema.metadata)

    def contents(self, wanted: Wanted) -> Contents:
        if wanted.validation is not None and self.validation_fraction:
            raise ConfigError("set either validation_fraction or validationIndicatorCol, not both")
        names = [name for column in wanted.columns for name in column.kind.columns]
        listing = list_files(str(self.path), names, wanted.spread)
        groups = listing.row_groups()
        paths = tuple(
            tuple(path_of(listing.schema, name) for name in column.kind.columns)
            for column in wanted.columns
        )
        used = [path for several in paths for path in several]
        marker = None
        if wanted.validation is not None:
            marker = path_of(listing.schema, wanted.validation)
            used.append(marker)
        listing.require_alike(used)
        survey = ColumnSurvey(listing, wanted.columns, paths)
        survey.check(groups)
        columns = survey.columns(groups)
        if marker is None:
            split = hold_out(groups, self.validation_fraction)
        else:
            split = _marked(groups, MarkedRows(listing.url, marker), wanted.spread)
        places = Places.of(listing, wanted.locate)
        pieces, homes = deal_both(*split, wanted, places)
        sizes = [
            survey.bytes_of(piece)
            for shard in pieces
            for piece in (*shard["train"], *shard["validation"])
        ]
        together = pieces_together(sizes, self.buffer_bytes, pieces)
        _say_memory(max(sizes), survey.row_bytes, together, self.buffer_bytes)
        return Contents(
            columns=columns,
            homes=homes,
            shards=describe_shards(
                pieces, places, together=together, about=marker, num_bytes=self.buffer_bytes
            ),
            content=listing.content([marker, self.validation_fraction]),
            reader=RowGroupShards(
                url=listing.url,
                pieces=pieces,
                wanted=with_shapes(wanted.columns, columns),
                paths=paths,
                validation=marker,
                together=together,
                row_bytes=survey.row_bytes,
            ),
            labels_outside=survey.labels_outside,
        )


@dataclass(frozen=True)
class MarkedRows:
    """Counts the rows for validation, by reading one column, on the driver or on executors."""

    url: str
    marker: ColumnPath

    def __call__(self, groups: Sequence[RowGroup]) -> list[int]:
        """Count the rows for validation of row groups of one file."""
        reader, path = Reader(self.url), self.marker
        return [int(marks(reader.read(g, [path])[path], path, g).sum()) for g in groups]


def _marked(
    groups: Sequence[RowGroup], count: MarkedRows, spread: Spread
) -> tuple[list[RowGroup], list[RowGroup]]:
    """Rows of each row group for training and for validation."""
    by_file = [list(of_file) for _, of_file in groupby(groups, key=lambda group: group.file.path)]
    train, validation = [], []
    for group, marked in zip(groups, chain(*spread(count, by_file)), strict=True):
        train.append(replace(group, num_rows=group.num_rows - marked))
        validation.append(replace(group, num_rows=marked))
    return [g for g in train if g.num_rows], [g for g in validation if g.num_rows]


def _say_memory(largest: int, row_bytes: int, together: int, limit: int) -> None:
    """Tell the user what to expect; ``largest`` is the memory of the largest row group."""
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
        "mixed, at most %d MiB of rows in memory for each shard",
        row_bytes,
        together,
        limit >> 20,
    )
