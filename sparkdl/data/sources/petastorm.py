"""A petastorm dataset as a source.

petastorm reads single row groups for us, in a shard count that is their number; which row group is
read when, and how rows are mixed, is as for `ParquetSource`, so that runs resume exactly, which
petastorm's own readers cannot. https://github.com/uber/petastorm
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pyarrow as pa

from sparkdl.data.plan import Split, TrainPlan
from sparkdl.data.source import Contents, Wanted, with_shapes
from sparkdl.data.sources.dataset_rows import (
    Fields,
    Sampler,
    check_kinds,
    column_of,
    named,
    row_bytes,
    schema_of,
)
from sparkdl.data.sources.locality import Places
from sparkdl.data.sources.parquet_files import Listing, RowGroup, list_files
from sparkdl.data.sources.row_groups import (
    Piece,
    PieceShards,
    check_options,
    deal_both,
    describe_shards,
    hold_out,
    pieces_together,
)
from sparkdl.errors import ConfigError, DataError, StorageError
from sparkdl.storage.storage import without_password

if TYPE_CHECKING:
    from sparkdl.data.collate import Rows

_READERS = ("make_batch_reader", "make_reader")


@dataclass(frozen=True)
class PetastormSource:
    """A dataset that petastorm reads, by its URL.

    Given to ``fit`` in place of a DataFrame::

        fit(PetastormSource("hdfs:///data/mnist", reader="make_reader"))

    petastorm unpickles the metadata of a dataset: read only datasets that you trust. It needs an
    environment of its own (``requirements-petastorm.txt``).
    """

    url: str
    """``file:///...``, ``hdfs://...``, ``s3://...``."""
    _: KW_ONLY
    reader: Literal["make_batch_reader", "make_reader"] = "make_batch_reader"
    """``make_batch_reader`` for any Parquet; ``make_reader`` for what petastorm has written, with
    images and arrays in its codecs."""
    transform_spec: Any = None
    """petastorm's ``TransformSpec``; it must keep the number of rows."""
    storage_options: Mapping[str, Any] | None = None
    """For petastorm's file system."""
    buffer_bytes: int = 512 << 20
    """See `ParquetSource.buffer_bytes`."""
    validation_fraction: float = 0.0
    """See `ParquetSource.validation_fraction`."""

    def __post_init__(self) -> None:
        if "://" not in os.fspath(self.url):
            raise ConfigError(
                f"petastorm takes URLs, such as file:///data; received "
                f"{without_password(self.url)!r}"
            )
        if self.reader not in _READERS:
            raise ConfigError(f"reader must be one of {_READERS}; received {self.reader!r}")
        check_options(self.buffer_bytes, self.validation_fraction)

    def schema(self) -> pa.Schema:
        return schema_of(self._first(list_files(self.url, ()), None))

    def contents(self, wanted: Wanted) -> Contents:
        if wanted.validation is not None:
            raise ConfigError(
                "validationIndicatorCol needs a DataFrame or a ParquetSource; use "
                "PetastormSource(validation_fraction=...)"
            )
        check_kinds(wanted.columns)
        names = [column.name for column in wanted.columns]
        listing = list_files(self.url, names, wanted.spread)
        places = Places.of(listing, wanted.locate)
        if self.transform_spec is None:
            _refuse_nulls(listing, names)
        pieces, homes = deal_both(
            *hold_out(listing.row_groups(), self.validation_fraction), wanted, places
        )
        sample = self._first(listing, names)
        columns = tuple(column_of(column, sample) for column in wanted.columns)
        sizes = [p.num_rows * row_bytes(columns) for shard in pieces for p in shard["train"]]
        together = pieces_together(sizes, self.buffer_bytes, pieces)
        about = [self.reader, self.validation_fraction]
        return Contents(
            columns=columns,
            homes=homes,
            shards=describe_shards(
                pieces, places, together=together, about=about, num_bytes=self.buffer_bytes
            ),
            content=listing.content(about),
            reader=PetastormShards(
                source=self,
                counts=_counts(listing),
                pieces=pieces,
                wanted=with_shapes(wanted.columns, columns),
                together=together,
                row_bytes=row_bytes(columns),
            ),
            transform=self.transform_spec,
        )

    def _first(self, listing: Listing, names: Sequence[str] | None) -> Fields:
        """The parts of the first row of which tensors can be made."""
        with opened(self, _counts(listing), listing.row_groups()[0], names) as reader:
            row = next(iter(reader))._asdict()
        if self.reader == "make_batch_reader":
            row = {name: values[0] for name, values in row.items()}
        found: Fields = {}
        for name, value in row.items():
            with contextlib.suppress(DataError):  # matters only if it is asked for
                found.update(named({name: value}, ()))
        return found


@dataclass(frozen=True, kw_only=True)
class PetastormShards(PieceShards):
    """Opens shards of petastorm's datasets."""

    source: PetastormSource
    counts: Mapping[str, int]
    """Row groups of each file, by its path."""

    def reader(self, plan: TrainPlan, split: Split) -> Callable[[Piece], Mapping[str, Rows]]:
        return partial(self._rows, Sampler(plan.columns, self.wanted, ()))

    def _rows(self, sampler: Sampler, piece: Piece) -> Mapping[str, Rows]:
        names = [column.name for column in self.wanted]
        with opened(self.source, self.counts, piece.group, names) as reader:
            rows = [row._asdict() for row in reader]
        if self.source.reader == "make_batch_reader":
            columns = {name: np.concatenate([row[name] for row in rows]) for name in names}
            rows = [
                {name: values[number] for name, values in columns.items()}
                for number in range(len(columns[names[0]]))
            ]
        places = [f"row {number} of {piece.group}" for number in range(piece.first, piece.stop)]
        return sampler.rows(rows[piece.first : piece.stop], places)


def _counts(listing: Listing) -> dict[str, int]:
    return {path: len(footer.groups) for path, footer in listing.footers.items()}


def _refuse_nulls(listing: Listing, names: Sequence[str]) -> None:
    """Refuse columns with nulls, as far as footers tell: petastorm makes NaN of them.

    Raises:
        DataError: with column, count and an example.
    """
    for name in names:
        count, first = 0, ""
        for group in listing.row_groups():
            nulls = _num_nulls(listing, group, name)
            count += nulls
            first = first or str(group) * bool(nulls)
        if count:
            raise DataError(
                f'column "{name}" has {count} null value(s) (the first in {first}); drop or fill '
                "them before fit, or in a transform_spec"
            )


def _num_nulls(listing: Listing, group: RowGroup, name: str) -> int:
    leaves = enumerate(listing.footers[group.file.path].leaves)
    own = [leaf for leaf, path in leaves if path.split(".")[0] == name]
    return sum(listing.chunk(group, leaf).num_nulls for leaf in own)


@contextlib.contextmanager
def opened(
    source: PetastormSource,
    counts: Mapping[str, int],
    group: RowGroup,
    names: Sequence[str] | None,
) -> Iterator[Any]:
    """Petastorm's reader of one row group, in this thread.

    Raises:
        ConfigError: petastorm is not installed.
        StorageError: it cannot read the dataset.
    """
    petastorm = _petastorm()
    storage_options = None if source.storage_options is None else dict(source.storage_options)
    number, count = group.number, counts[group.file.path]
    where: Any = [f"{source.url.partition('://')[0]}://{group.file.path}"]
    if source.reader == "make_reader":  # it needs the dataset's metadata, beside all files
        number += sum(n for path, n in counts.items() if path < group.file.path)
        where, count = source.url, sum(counts.values())
    try:
        reader = getattr(petastorm, source.reader)(
            where,
            schema_fields=None if names is None else list(names),
            cur_shard=number,
            shard_count=count,
            shuffle_row_groups=False,
            reader_pool_type="dummy",
            num_epochs=1,
            transform_spec=source.transform_spec,
            storage_options=storage_options,
        )
    except Exception as error:  # petastorm's own, and those of its file systems
        text = without_password(f"petastorm cannot read {source.url}: {error}")
        raise StorageError(text) from error
    with reader:
        yield reader


def _petastorm() -> Any:
    try:
        import petastorm
    except ImportError as error:
        raise ConfigError(
            f"PetastormSource needs petastorm ({error}), in an environment of its own: pip install "
            "-r requirements-petastorm.txt (of sparkdl's repository), then pip install --no-deps "
            "petastorm==0.13.1"
        ) from error
    return petastorm
