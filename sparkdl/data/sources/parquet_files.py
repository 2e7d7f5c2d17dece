"""Parquet files under a path, their footers, and the reader of their row groups."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import math
import os
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
from pyarrow import fs

from sparkdl.data.source import Spread, in_threads
from sparkdl.data.sources.column_conversion import as_spark, column_at
from sparkdl.errors import DataError
from sparkdl.storage.storage import (
    LocalStorage,
    failures,
    open_storage,
    open_url,
    scheme_of,
    without_password,
)

logger = logging.getLogger(__name__)


def open_files(path_or_url: str | os.PathLike[str]) -> tuple[fs.FileSystem, str]:
    """The file system, and the path in it; URLs are those of `open_storage`.

    Raises:
        StorageError: the URL's scheme is unknown, its package is missing, or the place refuses.
    """
    text = os.fspath(path_or_url)
    if scheme_of(text) in (None, "file"):
        local = open_storage(text)
        assert isinstance(local, LocalStorage)
        return fs.LocalFileSystem(), str(Path(str(local)).absolute())
    files, path = open_url(text)
    # That of pyarrow's own is used as it is.
    return getattr(files, "fs", None) or fs.PyFileSystem(fs.FSSpecHandler(files)), path


_INSTANT = pa.timestamp("us", tz="UTC")
_FOOTERS_KEPT = 256
"""Files whose footers a reader does not read again."""


ColumnPath = tuple[str, ...]
"""Path of a column: its name, and behind it the names of fields of struct columns."""


@dataclass(frozen=True, kw_only=True)
class DataFile:
    """A Parquet file."""

    path: str
    """In its file system."""
    digest: str
    """Hash of the footer, which changes with the content."""
    constants: Mapping[str, pa.Scalar]
    """Columns whose value a folder's name gives (``year=2024``). Their types are the same in all
    files: int32 if all values are such numbers, else string. The value is null in the folder that
    Spark calls ``__HIVE_DEFAULT_PARTITION__``."""

    @property
    def name(self) -> str:
        """As errors show it."""
        return self.path.rsplit("/", 1)[-1]


@dataclass(frozen=True)
class RowGroup:
    """A row group of a file, or those of its rows that belong to a split."""

    file: DataFile
    number: int
    """In the file."""
    num_rows: int

    def __str__(self) -> str:
        return f"row group {self.number} of {self.file.name}"


class Chunk(NamedTuple):
    """A leaf of a column in a row group, without reading it."""

    num_values: int
    num_nulls: int
    """0 if it is not known."""
    minimum: float
    """Infinite if it is not known, or no number."""
    maximum: float
    """Likewise, below all numbers."""
    stored_units: int
    """Size of what is stored: bytes of strings and binary, else values."""


@dataclass(frozen=True, kw_only=True)
class Footer:
    """The part of a file's footer that is kept: 24 bytes a row group, 40 for each of its leaves."""

    digest: str
    """See `DataFile.digest`."""
    schema: pa.Schema
    """The columns of the file as they are read."""
    leaves: tuple[str, ...]
    """Paths of the leaves of columns that were asked for."""
    groups: npt.NDArray[np.int64]
    """``(row groups, 3)``: rows, the first byte, and one past the last."""
    chunks: npt.NDArray[np.float64]
    """``(row groups, leaves, 5)``: see `Chunk`."""

    @property
    def num_rows(self) -> int:
        """The number of rows of all row groups."""
        return int(self.groups[:, 0].sum())


@dataclass(frozen=True, kw_only=True)
class Listing:
    """All files under a path, in the order of their paths."""

    url: str
    schema: pa.Schema
    """Schema of the first file that has rows, and the folders' names; see `require_alike`."""
    files: tuple[DataFile, ...]
    footers: Mapping[str, Footer]
    """Path of the file -> its footer."""

    def row_groups(self) -> list[RowGroup]:
        """The row groups that have rows.

        Raises:
            DataError: there are none.
        """
        groups = [
            RowGroup(file, number, num_rows)
            for file in self.files
            for number, num_rows in enumerate(self.footers[file.path].groups[:, 0].tolist())
        ]
        groups = [group for group in groups if group.num_rows]
        if not groups:
            raise DataError(f"the files under {without_password(self.url)} have no rows")
        return groups

    def chunk(self, group: RowGroup, leaf: int) -> Chunk:
        """Return what the footer says of a leaf (its number in `Footer.leaves`) in a row group."""
        values, nulls, minimum, maximum, stored = (
            self.footers[group.file.path].chunks[group.number, leaf].tolist()
        )
        return Chunk(int(values), int(nulls), minimum, maximum, int(stored))

    def byte_range(self, group: RowGroup) -> tuple[int, int]:
        """Return where a row group lies in its file: the first byte, and one past the last."""
        _, start, stop = self.footers[group.file.path].groups[group.number].tolist()
        return start, stop

    def content(self, about: object) -> int:
        """Fingerprint of all files, and of what else decides, 64 bits."""
        text = json.dumps([sorted(file.digest for file in self.files), about])
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")

    def require_alike(self, paths: Iterable[ColumnPath]) -> None:
        """Refuse files in which a column has another type than in `schema`, or is missing.

        As Spark reads them: in any order, among any others, nullable or not. Files without rows
        may have any columns.

        Args:
            paths: where each of the columns lies.

        Raises:
            DataError: names file and column.
        """
        wanted = {path: _type_at(self.schema, path) for path in paths}
        for file in self.files:
            footer = self.footers[file.path]
            for path, kind in wanted.items():
                found = _type_at(footer.schema, path)
                if footer.num_rows and found != kind and path[0] not in file.constants:
                    has = "no such column" if found is None else f"type {found}"
                    raise DataError(
                        f'the files differ in column "{".".join(path)}": it has type {kind}, but '
                        f"{file.path} has {has}; write them anew with one schema"
                    )


def _start_of(column: pq.ColumnChunkMetaData) -> int:
    """The first byte of a column of a row group; its dictionary, if it has one, comes first."""
    return int(column.dictionary_page_offset or column.data_page_offset)


def _type_at(schema: pa.Schema, path: ColumnPath) -> pa.DataType | None:
    """The type of a column, or of a field of a struct column, as which Spark reads it."""
    fields: Any = schema
    for name in path:
        index = fields.get_field_index(name) if fields is not None else -1
        if index < 0:
            return None
        kind = fields.field(index).type
        fields = kind if pa.types.is_struct(kind) else None
    return as_spark(kind)


def schema_under(url: str) -> pa.Schema:
    """The columns that the files under a path have, by the first file that has rows.

    Raises:
        StorageError: there is no such path, or it cannot be read.
        DataError: there is no Parquet file under it.
    """
    paths, constants = _found(url)
    footers = map(Footers(url, ()), paths)
    first = next(footers)
    full = first if first.num_rows else next((f for f in footers if f.num_rows), first)
    return _whole_schema(full.schema, constants[0])


def list_files(url: str, names: Iterable[str], spread: Spread = in_threads) -> Listing:
    """Find the Parquet files and read their footers, by ``spread`` on executors if they are many.

    Files and folders whose names begin with ``.`` or ``_`` are passed over, as Spark does, and
    files without a byte. Statistics are kept of columns ``names``, also of fields of structs.

    Raises:
        StorageError: there is no such path, or it cannot be read.
        DataError: there is no Parquet file under it.
    """
    paths, constants = _found(url)
    read = Footers(url, tuple(sorted(set(names))))
    schemas: dict[tuple[bytes, tuple[str, ...]], Footer] = {}
    footers = []
    for footer in spread(read, paths):
        like = schemas.setdefault((footer.schema.serialize().to_pybytes(), footer.leaves), footer)
        footers.append(replace(footer, schema=like.schema, leaves=like.leaves))
    full = next((footer for footer in footers if footer.num_rows), footers[0])
    return Listing(
        url=url,
        schema=_whole_schema(full.schema, constants[0]),
        files=tuple(
            DataFile(path=path, digest=footer.digest, constants=told)
            for path, footer, told in zip(paths, footers, constants, strict=True)
        ),
        footers=dict(zip(paths, footers, strict=True)),
    )


_MOST_SHOWN = 5
_MAGIC = (b"PAR1", b"PARE")
"""First bytes of a Parquet file: of a plain one, and of one whose footer is encrypted."""


@dataclass(frozen=True)
class Footers:
    """Reads footers of files under a URL, on the driver or on executors."""

    url: str
    names: tuple[str, ...]
    """Columns of which statistics are kept; upper and lower case are the same."""

    @cached_property
    def _files(self) -> fs.FileSystem:
        return open_files(self.url)[0]

    def __call__(self, path: str) -> Footer:
        """Read a footer, and return what is kept of it.

        Raises:
            StorageError: the file cannot be read.
            DataError: it is a file of another kind.
        """
        with _read_failures(path), self._files.open_input_file(path) as file:
            _require_parquet(file, path)
            return self._kept(pq.read_metadata(file))

    def _kept(self, footer: pq.FileMetaData) -> Footer:
        leaves = [footer.schema.column(number).path for number in range(len(footer.schema))]
        own = tuple(name.lower() for name in self.names)
        below = tuple(f"{name}." for name in own)
        kept = [n for n, p in enumerate(map(str.lower, leaves)) if p in own or p.startswith(below)]
        groups = np.zeros((footer.num_row_groups, 3), dtype=np.int64)
        chunks = np.zeros((footer.num_row_groups, len(kept), 5))
        for number in range(footer.num_row_groups):
            group = footer.row_group(number)
            first, last = group.column(0), group.column(group.num_columns - 1)
            stop = _start_of(last) + int(last.total_compressed_size)
            groups[number] = group.num_rows, _start_of(first), stop
            for place, leaf in enumerate(kept):
                chunks[number, place] = _chunk(group.column(leaf))
        return Footer(
            digest=digest_of(footer),
            schema=_schema(footer),
            leaves=tuple(leaves[leaf] for leaf in kept),
            groups=groups,
            chunks=chunks,
        )


def _chunk(column: pq.ColumnChunkMetaData) -> Chunk:
    found, count = column.statistics, column.num_values
    stored = column.total_uncompressed_size if column.physical_type == "BYTE_ARRAY" else count
    if found is None:
        return Chunk(count, 0, math.inf, -math.inf, stored)
    is_known = found.has_min_max and isinstance(found.min, (int, float))
    low, high = (found.min, found.max) if is_known else (math.inf, -math.inf)
    return Chunk(count, found.null_count or 0, low, high, stored)


def _require_parquet(file: pa.NativeFile, path: str) -> None:
    """Raise DataError for a file of another kind."""
    if file.read(4) not in _MAGIC:
        raise DataError(
            f"{without_password(path)} is no Parquet file; have Spark read it, as spark.read.csv "
            "does, and give the DataFrame to fit"
        )


def _found(url: str) -> tuple[list[str], list[dict[str, pa.Scalar]]]:
    """The paths of the files, and the columns that the folders' names give each of them."""
    files, path = open_files(url)
    with _read_failures(url):
        paths = _paths(files, path)
        if not paths:
            raise DataError(f"there is no Parquet file under {without_password(url)}")
        with files.open_input_file(paths[0]) as first:
            _require_parquet(first, paths[0])
        _tell_folders(url, path, paths)
        return paths, _folder_values(files, path, paths)


def _tell_folders(url: str, base: str, paths: Iterable[str]) -> None:
    """Say so if files of several folders are read that no column tells apart."""
    start = len(base.strip("/")) + 1
    inside = (path.strip("/")[start:].split("/") for path in paths)
    names = {parts[0] if len(parts) > 1 else "" for parts in inside}
    if len(names) > 1 and not all("=" in name for name in names):
        shown = ", ".join(sorted(names - {""})[:_MOST_SHOWN])
        logger.warning(
            "%s is read with the folders below it, %s, whose names give no column: all their rows "
            "are one data set; name one of them if they are not, as 'train' and 'test' are not",
            *(without_password(url), shown),
        )


def _whole_schema(schema: pa.Schema, constants: Mapping[str, pa.Scalar]) -> pa.Schema:
    """The columns of a file, and those that the folders' names give it."""
    for name, value in constants.items():  # also of a column of the files: Spark takes this one
        index, own = schema.get_field_index(name), pa.field(name, value.type)
        schema = schema.append(own) if index < 0 else schema.set(index, own)
    return schema


def _read_failures(place: str) -> AbstractContextManager[None]:
    # Names and texts in a footer need not be UTF-8.
    kinds = (OSError, pa.ArrowException, UnicodeDecodeError)
    return failures("read", without_password(place), kinds)


def _paths(files: fs.FileSystem, path: str) -> list[str]:
    """The files to read, in order."""
    found = files.get_file_info(path)
    if found.type == fs.FileType.NotFound:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
    if found.is_file:
        return [path]
    if isinstance(files, fs.LocalFileSystem):
        return sorted(_local_paths(path, frozenset()))
    below = len(path.strip("/")) + 1
    return sorted(
        info.path
        for info in files.get_file_info(fs.FileSelector(path, recursive=True))
        if info.is_file and info.size != 0 and not _is_hidden(info.path.strip("/")[below:])
    )


def _local_paths(folder: str, above: frozenset[str]) -> Iterator[str]:
    """Yield the files below a folder; not once more those below a link that leads back to it.

    ``above`` has the folders in which it was found, as they really are.
    """
    above |= {os.path.realpath(folder)}
    with os.scandir(folder) as entries:
        for entry in entries:
            if _is_hidden(entry.name):
                continue
            if entry.is_dir():
                if os.path.realpath(entry.path) not in above:
                    yield from _local_paths(entry.path, above)
            elif entry.is_file() and entry.stat().st_size:
                yield entry.path


def _is_hidden(path: str) -> bool:
    return any(part.startswith((".", "_")) for part in path.split("/"))


def _folder_values(
    files: fs.FileSystem, base: str, paths: Sequence[str]
) -> list[dict[str, pa.Scalar]]:
    """The columns that the folders' names give each file."""
    options = ds.FileSystemFactoryOptions(
        partition_base_dir=base, partitioning=ds.HivePartitioning.discover()
    )
    factory = ds.FileSystemDatasetFactory(files, list(paths), ds.ParquetFileFormat(), options)
    types = factory.inspect_schemas()[-1]
    values = {
        fragment.path: ds.get_partition_keys(fragment.partition_expression)
        for fragment in factory.finish(types).get_fragments()
    }
    return [
        {field.name: pa.scalar(values[path].get(field.name), field.type) for field in types}
        for path in paths
    ]


def digest_of(footer: pq.FileMetaData) -> str:
    """Hash of a footer: of schema, sizes, places and statistics of all columns."""
    sink = pa.BufferOutputStream()
    footer.write_metadata_file(sink)
    return hashlib.blake2b(sink.getvalue(), digest_size=16).hexdigest()


class Reader:
    """Reads row groups. For one thread."""

    def __init__(self, url: str) -> None:
        self._files, _ = open_files(url)
        self._footers: OrderedDict[str, pq.FileMetaData] = OrderedDict()
        self._states: dict[str, tuple[int | None, int | None]] = {}
        """Size and time of change of each file, when it was opened first."""

    def read(
        self, group: RowGroup, paths: Iterable[ColumnPath], count: int | None = None
    ) -> dict[ColumnPath, pa.Array]:
        """Columns of a row group, the constant ones among them.

        Args:
            group: the row group, all rows of which are read.
            paths: where the columns lie.
            count: read the first rows only, up to so many.

        Raises:
            StorageError: it cannot be read.
            DataError: the file has changed since it was listed.
        """
        paths, file = set(paths), group.file
        names = sorted({".".join(path) for path in paths if path[0] not in file.constants})
        with self._opened(file) as opened:
            if count is None:
                table = opened.read_row_group(group.number, columns=names, use_threads=False)
            else:
                batches = opened.iter_batches(
                    count, row_groups=[group.number], columns=names, use_threads=False
                )
                first = next(batches, None)
                if first is None:
                    raise DataError(f"{group} has none of the {group.num_rows} rows of its footer")
                table = pa.Table.from_batches([first])
            instants = _instants(opened.metadata)
        for name in instants & set(table.column_names):
            place = table.schema.get_field_index(name)
            table = table.set_column(place, name, table.column(name).cast(_INSTANT))
        for name, value in file.constants.items():
            if (name,) in paths:
                table = table.append_column(name, pa.repeat(value, table.num_rows))
        return {path: column_at(table, path) for path in paths}

    @contextlib.contextmanager
    def _opened(self, file: DataFile) -> Iterator[pq.ParquetFile]:
        """The file, closed afterwards: an open one may keep what was read of it in memory."""
        with _read_failures(file.path), self._files.open_input_file(file.path) as source:
            info = self._files.get_file_info(file.path)
            state = (info.size, info.mtime_ns)
            footer = self._footers.pop(file.path, None)
            opened = pq.ParquetFile(source, metadata=footer, pre_buffer=True)
            is_other = footer is None and digest_of(opened.metadata) != file.digest
            # Not compared with the listing's: each host may have a copy of its own.
            if is_other or self._states.setdefault(file.path, state) != state:
                raise DataError(
                    f"{file.path} has changed since fit has listed it; train from files that stay "
                    "as they are"
                )
            self._footers[file.path] = opened.metadata
            if len(self._footers) > _FOOTERS_KEPT:
                self._footers.popitem(last=False)
            yield opened


def _instants(footer: pq.FileMetaData) -> set[str]:
    """Columns of the old type INT96, as Spark writes points in time: Arrow does not tell."""
    columns = [footer.schema.column(number) for number in range(len(footer.schema))]
    return {column.path for column in columns if column.physical_type == "INT96"}


def _schema(footer: pq.FileMetaData) -> pa.Schema:
    """The columns of a file as they are read."""
    schema, instants = footer.schema.to_arrow_schema(), _instants(footer)
    fields = [field.with_type(_INSTANT) if field.name in instants else field for field in schema]
    return pa.schema(fields, metadata=schema.metadata)
