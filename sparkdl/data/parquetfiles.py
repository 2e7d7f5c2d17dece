"""Which Parquet files and row groups lie under a path, and what do their footers tell?"""

from __future__ import annotations

import contextlib
import hashlib
from collections import OrderedDict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
from pyarrow import fs

from sparkdl.data.files import open_files
from sparkdl.errors import DataError, StorageError

_FOOTERS_AT_ONCE = 16
_INSTANT = pa.timestamp("us", tz="UTC")
_FOOTERS_KEPT = 256
"""Files whose footers a reader does not read again."""


@dataclass(frozen=True, kw_only=True)
class RowGroup:
    """A row group of a file, as its footer describes it."""

    number: int
    """In its file."""
    num_rows: int


@dataclass(frozen=True, kw_only=True)
class DataFile:
    """A Parquet file."""

    path: str
    """In its file system."""
    digest: str
    """Hash of the footer, which changes with the content."""
    row_groups: tuple[RowGroup, ...]
    constants: tuple[tuple[str, Any], ...] = ()
    """Columns that the folders' names tell (``year=2024``)."""

    @property
    def name(self) -> str:
        """As errors show it."""
        return self.path.rsplit("/", 1)[-1]


@dataclass(frozen=True, kw_only=True)
class Listing:
    """All files under a path, in the order of their paths."""

    schema: pa.Schema
    files: tuple[DataFile, ...]
    footers: tuple[pq.FileMetaData, ...]


def list_files(url: str) -> Listing:
    """Find the Parquet files and read their footers.

    Files and folders whose names begin with ``.`` or ``_`` are passed over, as Spark does.

    Raises:
        StorageError: there is no such path, or it cannot be read.
        DataError: there is no Parquet file under it, or files differ in their columns.
    """
    files, path = open_files(url)
    with storage_errors(url):
        found = ds.dataset(path, filesystem=files, format="parquet", partitioning="hive")
        fragments = sorted(found.get_fragments(), key=lambda fragment: str(fragment.path))
    if not fragments:
        raise DataError(f"there is no Parquet file under {url}")
    with storage_errors(url), ThreadPoolExecutor(_FOOTERS_AT_ONCE) as pool:
        footers = list(pool.map(lambda fragment: _footer(files, fragment.path), fragments))
    own = footers[0].schema.to_arrow_schema()
    for fragment, footer in zip(fragments, footers, strict=True):
        _require_same(own, footer.schema.to_arrow_schema(), fragments[0].path, fragment.path)
    keys = [name for name in found.schema.names if name not in own.names]
    instants = _instants(footers[0])
    fields = [field.with_type(_INSTANT) if field.name in instants else field for field in own]
    schema = pa.schema(fields, metadata=own.metadata)
    for name in keys:
        schema = schema.append(found.schema.field(name))
    return Listing(
        schema=schema,
        files=tuple(
            _describe(fragment, footer) for fragment, footer in zip(fragments, footers, strict=True)
        ),
        footers=tuple(footers),
    )


def _footer(files: fs.FileSystem, path: str) -> pq.FileMetaData:
    with files.open_input_file(path) as file:
        return pq.read_metadata(file)


def digest_of(footer: pq.FileMetaData) -> str:
    """Hash of a footer: of schema, sizes, places and statistics of all columns."""
    sink = pa.BufferOutputStream()
    footer.write_metadata_file(sink)
    return hashlib.blake2b(sink.getvalue(), digest_size=16).hexdigest()


def _describe(fragment: Any, footer: pq.FileMetaData) -> DataFile:
    return DataFile(
        path=fragment.path,
        digest=digest_of(footer),
        row_groups=tuple(
            RowGroup(number=number, num_rows=footer.row_group(number).num_rows)
            for number in range(footer.num_row_groups)
        ),
        constants=tuple(sorted(ds.get_partition_keys(fragment.partition_expression).items())),
    )


def _require_same(first: pa.Schema, other: pa.Schema, first_path: str, path: str) -> None:
    """Refuse files that differ in their columns; the metadata beside them may."""
    if first.equals(other):
        return
    before, now = set(map(str, first)), set(map(str, other))
    raise DataError(
        f"the files have different columns: {first_path} has {sorted(before - now)}, {path} has "
        f"{sorted(now - before)} in their place; write them anew with one schema"
    )


class Reader:
    """Reads row groups. For one thread."""

    def __init__(self, url: str) -> None:
        self._files, _ = open_files(url)
        self._footers: OrderedDict[str, pq.FileMetaData] = OrderedDict()

    def read(self, file: DataFile, row_group: int, columns: list[str]) -> pa.Table:
        """Columns of one row group, the constant ones among them.

        Raises:
            StorageError: it cannot be read.
            DataError: the file has changed since it was listed.
        """
        with self._opened(file) as opened:
            own = _stored(file, columns)
            table = opened.read_row_group(row_group, columns=own, use_threads=False)
            table = _with_instants(table, opened.metadata)
        return _with_constants(table, file, columns)

    def first_rows(
        self, file: DataFile, row_group: int, columns: list[str], count: int
    ) -> pa.Table:
        """The first rows of a row group; see `read`."""
        with self._opened(file) as opened:
            batches = opened.iter_batches(
                count, row_groups=[row_group], columns=_stored(file, columns), use_threads=False
            )
            table = _with_instants(pa.Table.from_batches([next(batches)]), opened.metadata)
        return _with_constants(table, file, columns)

    @contextlib.contextmanager
    def _opened(self, file: DataFile) -> Iterator[pq.ParquetFile]:
        """The file, closed afterwards: an open one may keep what was read of it in memory."""
        with storage_errors(file.path), self._files.open_input_file(file.path) as source:
            footer = self._footers.pop(file.path, None)
            opened = pq.ParquetFile(source, metadata=footer, pre_buffer=True)
            if footer is None and digest_of(opened.metadata) != file.digest:
                raise DataError(
                    f"{file.path} has changed since fit has listed it; train from files that stay "
                    "as they are"
                )
            self._footers[file.path] = opened.metadata
            if len(self._footers) > _FOOTERS_KEPT:
                self._footers.popitem(last=False)
            yield opened


def _stored(file: DataFile, columns: list[str]) -> list[str]:
    constants = dict(file.constants)
    return [name for name in columns if name not in constants]


def _instants(footer: pq.FileMetaData) -> set[str]:
    """Columns of the old type INT96, as Spark writes points in time: Arrow does not tell."""
    columns = [footer.schema.column(number) for number in range(len(footer.schema))]
    return {column.path for column in columns if column.physical_type == "INT96"}


def _with_instants(table: pa.Table, footer: pq.FileMetaData) -> pa.Table:
    for name in _instants(footer) & set(table.column_names):
        place = table.schema.get_field_index(name)
        table = table.set_column(place, name, table.column(name).cast(_INSTANT))
    return table


def _with_constants(table: pa.Table, file: DataFile, columns: list[str]) -> pa.Table:
    for name, value in file.constants:
        if name in columns:
            table = table.append_column(name, pa.array([value] * table.num_rows))
    return table


@contextlib.contextmanager
def storage_errors(place: str) -> Iterator[None]:
    """Failures of file system and format as ours."""
    try:
        yield
    except FileNotFoundError as error:
        raise StorageError(
            f"{place} is not there; check the path, and that driver and executors see the same "
            "storage"
        ) from error
    except (OSError, pa.ArrowInvalid) as error:
        raise StorageError(f"cannot read {place}: {error}") from error
