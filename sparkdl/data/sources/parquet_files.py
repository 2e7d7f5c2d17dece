"""Parquet files under a path, their footers, and the reader of their row groups."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
from pyarrow import fs

from sparkdl.data.sources.column_conversion import as_spark
from sparkdl.errors import DataError, StorageError
from sparkdl.storage.storage import LocalStorage, open_storage, open_url, scheme_of


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


_FOOTERS_AT_ONCE = 16
_INSTANT = pa.timestamp("us", tz="UTC")
_FOOTERS_KEPT = 256
"""Files whose footers a reader does not read again."""


@dataclass(frozen=True, kw_only=True)
class Constant:
    """A column whose value a folder's name gives (``year=2024``)."""

    name: str
    value: Any
    """None in the folder that Spark calls ``__HIVE_DEFAULT_PARTITION__``."""
    type: pa.DataType
    """The same in all files: int32 if all values are such numbers, else string."""


@dataclass(frozen=True, kw_only=True)
class DataFile:
    """A Parquet file."""

    path: str
    """In its file system."""
    digest: str
    """Hash of the footer, which changes with the content."""
    row_groups: tuple[int, ...]
    """Rows of each."""
    constants: tuple[Constant, ...] = ()

    @property
    def name(self) -> str:
        """As errors show it."""
        return self.path.rsplit("/", 1)[-1]

    def constant(self, name: str) -> Constant | None:
        """The column of that name, if the folders' names have it."""
        return next((constant for constant in self.constants if constant.name == name), None)


@dataclass(frozen=True, kw_only=True)
class Listing:
    """All files under a path, in the order of their paths."""

    schema: pa.Schema
    """Of the first file that has rows, and the folders' names; see `require_alike`."""
    files: tuple[DataFile, ...]
    footers: tuple[pq.FileMetaData, ...]

    def require_alike(self, paths: Iterable[tuple[str, ...]]) -> None:
        """Refuse files in which a column has another type than in `schema`, or is missing.

        As Spark reads them: in any order, among any others, nullable or not. Files without rows
        may have any columns.

        Args:
            paths: where each of the columns lies.

        Raises:
            DataError: names file and column.
        """
        wanted = {path: _type_at(self.schema, path) for path in paths}
        for file, footer in zip(self.files, self.footers, strict=True):
            schema = _schema(footer)
            for path, kind in wanted.items():
                found = _type_at(schema, path)
                if footer.num_rows and found != kind and file.constant(path[0]) is None:
                    has = "no such column" if found is None else f"type {found}"
                    raise DataError(
                        f'the files differ in column "{".".join(path)}": it has type {kind}, but '
                        f"{file.path} has {has}; write them anew with one schema"
                    )


def _type_at(schema: pa.Schema, path: tuple[str, ...]) -> pa.DataType | None:
    """The type of a column, or of a field of a struct column, as which Spark reads it."""
    fields: Any = schema
    for name in path:
        index = fields.get_field_index(name) if fields is not None else -1
        if index < 0:
            return None
        kind = fields.field(index).type
        fields = kind if pa.types.is_struct(kind) else None
    return as_spark(kind)


def list_files(url: str) -> Listing:
    """Find the Parquet files and read their footers.

    Files and folders whose names begin with ``.`` or ``_`` are passed over, as Spark does, and
    files without a byte.

    Raises:
        StorageError: there is no such path, or it cannot be read.
        DataError: there is no Parquet file under it.
    """
    files, path = open_files(url)
    with storage_errors(url):
        paths = _paths(files, path)
    if not paths:
        raise DataError(f"there is no Parquet file under {url}")
    with storage_errors(url), ThreadPoolExecutor(_FOOTERS_AT_ONCE) as pool:
        footers = tuple(pool.map(lambda path: _footer(files, path), paths))
        constants = _folder_values(files, path, paths)
    full = next((footer for footer in footers if footer.num_rows), footers[0])
    schema = _schema(full)
    for constant in constants[0]:  # also of a column of the files: Spark takes the folder's value
        index, own = schema.get_field_index(constant.name), pa.field(constant.name, constant.type)
        schema = schema.append(own) if index < 0 else schema.set(index, own)
    return Listing(
        schema=schema,
        files=tuple(map(_describe, paths, footers, constants)),
        footers=footers,
    )


def _paths(files: fs.FileSystem, path: str) -> list[str]:
    """The files to read, in order."""
    found = files.get_file_info(path)
    if found.type == fs.FileType.NotFound:
        raise FileNotFoundError(path)
    if found.is_file:
        return [path]
    below = len(path.strip("/")) + 1
    return sorted(
        info.path
        for info in files.get_file_info(fs.FileSelector(path, recursive=True))
        if info.is_file and info.size != 0 and not _is_hidden(info.path.strip("/")[below:])
    )


def _is_hidden(path: str) -> bool:
    return any(part.startswith((".", "_")) for part in path.split("/"))


def _folder_values(
    files: fs.FileSystem, base: str, paths: Sequence[str]
) -> list[tuple[Constant, ...]]:
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
        tuple(
            Constant(name=field.name, value=values[path].get(field.name), type=field.type)
            for field in types
        )
        for path in paths
    ]


def _footer(files: fs.FileSystem, path: str) -> pq.FileMetaData:
    with files.open_input_file(path) as file:
        return pq.read_metadata(file)


def digest_of(footer: pq.FileMetaData) -> str:
    """Hash of a footer: of schema, sizes, places and statistics of all columns."""
    sink = pa.BufferOutputStream()
    footer.write_metadata_file(sink)
    return hashlib.blake2b(sink.getvalue(), digest_size=16).hexdigest()


def _describe(path: str, footer: pq.FileMetaData, constants: tuple[Constant, ...]) -> DataFile:
    return DataFile(
        path=path,
        digest=digest_of(footer),
        row_groups=tuple(footer.row_group(n).num_rows for n in range(footer.num_row_groups)),
        constants=constants,
    )


class Reader:
    """Reads row groups. For one thread."""

    def __init__(self, url: str) -> None:
        self._files, _ = open_files(url)
        self._footers: OrderedDict[str, pq.FileMetaData] = OrderedDict()
        self._states: dict[str, tuple[int | None, int | None]] = {}
        """Size and time of change of each file, when it was opened first."""

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


def _stored(file: DataFile, columns: list[str]) -> list[str]:
    return [name for name in columns if file.constant(name) is None]


def _instants(footer: pq.FileMetaData) -> set[str]:
    """Columns of the old type INT96, as Spark writes points in time: Arrow does not tell."""
    columns = [footer.schema.column(number) for number in range(len(footer.schema))]
    return {column.path for column in columns if column.physical_type == "INT96"}


def _schema(footer: pq.FileMetaData) -> pa.Schema:
    """The columns of a file as they are read."""
    schema, instants = footer.schema.to_arrow_schema(), _instants(footer)
    fields = [field.with_type(_INSTANT) if field.name in instants else field for field in schema]
    return pa.schema(fields, metadata=schema.metadata)


def _with_instants(table: pa.Table, footer: pq.FileMetaData) -> pa.Table:
    for name in _instants(footer) & set(table.column_names):
        place = table.schema.get_field_index(name)
        table = table.set_column(place, name, table.column(name).cast(_INSTANT))
    return table


def _with_constants(table: pa.Table, file: DataFile, columns: list[str]) -> pa.Table:
    for constant in file.constants:
        if constant.name in columns:
            value = pa.scalar(constant.value, constant.type)
            table = table.append_column(constant.name, pa.repeat(value, table.num_rows))
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
    except (OSError, pa.ArrowException) as error:
        raise StorageError(f"cannot read {place}: {error}") from error
