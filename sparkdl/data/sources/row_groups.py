"""Row groups dealt to shards, and read on the worker to whose rank they belong."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from sparkdl.data.plan import Column, Shard, Split, SpoolColumn, TrainPlan
from sparkdl.data.ragged import Array, Ragged
from sparkdl.data.sources.column_conversion import checked_rows, column_at, owned
from sparkdl.data.sources.parquet_files import DataFile, Listing, Reader
from sparkdl.errors import ConfigError, DataError

if TYPE_CHECKING:
    from sparkdl.data.collate import Rows
    from sparkdl.data.source import ShardRows, Wanted


logger = logging.getLogger(__name__)

_FAR_MORE = 1.5
"""Times the rows that were asked for, from which on the user is told."""

Group = tuple[int, int, int]
"""Number of the file in the listing, of the row group in it, and its rows."""


@dataclass(frozen=True)
class Piece:
    """Some rows of a row group, all in one shard."""

    file: int
    """Number of the file in the listing."""
    row_group: int
    first: int
    """Of those rows of the row group that belong to the split, counted from 0."""
    stop: int

    @property
    def num_rows(self) -> int:
        """Rows."""
        return self.stop - self.first


@dataclass(frozen=True)
class ShardPieces:
    """A shard's rows."""

    train: tuple[Piece, ...]
    validation: tuple[Piece, ...]

    def of(self, split: Split) -> tuple[Piece, ...]:
        """Those of a split."""
        return self.train if split == "train" else self.validation


def check_options(buffer_bytes: int, validation_fraction: float) -> None:
    """Refuse what no source of row groups can have.

    Raises:
        ConfigError: names the option.
    """
    if buffer_bytes < 1:
        raise ConfigError(f"buffer_bytes must be at least 1; received {buffer_bytes}")
    if not 0 <= validation_fraction < 1:
        raise ConfigError(f"validation_fraction must be in [0, 1); received {validation_fraction}")


def groups_of(listing: Listing, path: str) -> list[Group]:
    """The row groups that have rows.

    Raises:
        DataError: there are none.
    """
    groups = [
        (number, group, num_rows)
        for number, file in enumerate(listing.files)
        for group, num_rows in enumerate(file.row_groups)
        if num_rows
    ]
    if not groups:
        raise DataError(f"the files under {path} have no rows")
    return groups


def deal(
    groups: Sequence[Group], shares: Sequence[float], names: Sequence[str]
) -> list[tuple[Piece, ...]]:
    """Deal row groups to shards, so that each has its share of the rows, to the row.

    The row groups are put into an order that is random but follows from their content, then cut: a
    row group on a border is read by two shards, each of which uses its part.

    Args:
        groups: file, number in it and rows of each row group.
        shares: each shard's part, adding up to 1.
        names: digest of each file, by which they are put into order.
    """
    ordered = sorted(groups, key=lambda group: (_lot(group, names), *group))
    total = sum(rows for _, _, rows in ordered)
    bounds = [0, *(round(upto * total) for upto in accumulate(shares[:-1])), total]
    dealt: list[list[Piece]] = [[] for _ in shares]
    start, shard = 0, 0
    for file, number, rows in ordered:
        taken = 0
        while taken < rows:
            while bounds[shard + 1] <= start + taken:
                shard += 1
            stop = min(rows, bounds[shard + 1] - start)
            dealt[shard].append(Piece(file, number, taken, stop))
            taken = stop
        start += rows
    return [tuple(pieces) for pieces in dealt]


def hold_out(
    groups: Sequence[Group], fraction: float, names: Sequence[str]
) -> tuple[list[Group], list[Group]]:
    """Row groups for training, and so many for validation that they have ``fraction`` of the rows.

    Which ones these are is random but follows from their content.
    """
    total = sum(rows for _, _, rows in groups)
    wanted = fraction * total
    train: list[Group] = []
    validation: list[Group] = []
    taken = 0
    for group in sorted(groups, key=lambda group: _lot(group, names, "validation:")):
        if taken < wanted:
            validation.append(group)
            taken += group[2]
        else:
            train.append(group)
    if train and taken > _FAR_MORE * wanted > 0:
        logger.warning(
            "validation_fraction=%g takes %d of the %d rows, since whole row groups are held out; "
            "write smaller row groups, or mark rows by a column",
            fraction,
            taken,
            total,
        )
    return train, validation


def _lot(group: Group, names: Sequence[str], purpose: str = "") -> str:
    return hashlib.sha256(f"{purpose}{names[group[0]]}:{group[1]}".encode()).hexdigest()


def deal_both(
    train: Sequence[Group], validation: Sequence[Group], wanted: Wanted, names: Sequence[str]
) -> tuple[ShardPieces, ...]:
    """Deal the rows of both splits, those for validation equally.

    Raises:
        DataError: no rows are left for training.
    """
    if not sum(rows for _, _, rows in train):
        raise DataError(
            "no rows are left for training; lower validation_fraction, or write more row groups"
        )
    equal = (1 / wanted.num_shards,) * wanted.num_shards
    shares = wanted.shares or equal
    dealt = zip(deal(train, shares, names), deal(validation, equal, names), strict=True)
    return tuple(ShardPieces(*both) for both in dealt)


def describe_shards(
    shards: Sequence[ShardPieces],
    names: Sequence[str],
    *,
    together: int,
    about: object,
    num_bytes: int,
) -> tuple[Shard, ...]:
    """The shards for the plan; fingerprints follow from all that decides which rows come when.

    Args:
        shards: their rows.
        names: digest of each file.
        together: pieces that are mixed.
        about: what else decides.
        num_bytes: memory for the rows of a worker.
    """

    def lines(several: Sequence[Piece]) -> list[list[object]]:
        return [[names[p.file], p.row_group, p.first, p.stop] for p in several]

    def fingerprint(pieces: ShardPieces) -> str:
        text = json.dumps([lines(pieces.train), lines(pieces.validation), together, about])
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    return tuple(
        Shard(
            shard_id=number,
            num_rows=sum(piece.num_rows for piece in pieces.train),
            num_validation_rows=sum(piece.num_rows for piece in pieces.validation),
            fingerprint=fingerprint(pieces),
            num_bytes=num_bytes,
        )
        for number, pieces in enumerate(shards)
    )


def content_of(names: Sequence[str], about: object) -> int:
    """Fingerprint of all files, 64 bits."""
    text = json.dumps([sorted(names), about])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


@dataclass(frozen=True, kw_only=True)
class PieceShards:
    """Opens shards of pieces of row groups on a worker; see `source.ShardSource`."""

    files: tuple[DataFile, ...]
    pieces: tuple[ShardPieces, ...]
    """Of each shard."""
    wanted: tuple[SpoolColumn, ...]
    together: int
    """Pieces that are mixed."""
    row_bytes: int

    def open(self, plan: TrainPlan, shards: Sequence[Shard], split: Split) -> ShardRows:
        from sparkdl.data.sources.streamed import StreamedRows

        pieces = [piece for shard in shards for piece in self.pieces[shard.shard_id].of(split)]
        return StreamedRows(
            plan,
            [(piece, piece.num_rows) for piece in pieces],
            self.reader(plan, split),
            fingerprints=[shard.fingerprint for shard in shards],
            pieces_together=self.together,
            row_bytes=self.row_bytes,
        )

    def is_here(self, shard: Shard) -> bool:
        """See `source.ShardSource.is_here`: storage is everywhere."""
        return True

    def reader(self, plan: TrainPlan, split: Split) -> Callable[[Piece], Mapping[str, Rows]]:
        """The function that reads the plan's columns of a piece."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class RowGroupShards(PieceShards):
    """Opens shards of Parquet files."""

    url: str
    paths: tuple[tuple[tuple[str, ...], ...], ...]
    """Of each wanted column: where its specification's columns lie in the files."""
    validation: tuple[str, ...] | None
    """Where the column lies that marks validation rows."""

    def reader(self, plan: TrainPlan, split: Split) -> Callable[[Piece], Mapping[str, Rows]]:
        return partial(self._rows, Reader(self.url), plan.columns, split)

    def _rows(
        self, reader: Reader, columns: Sequence[Column], split: Split, piece: Piece
    ) -> Mapping[str, Rows]:
        file = self.files[piece.file]
        paths = [path for several in self.paths for path in several]
        if self.validation is not None:
            paths.append(self.validation)
        names = sorted({".".join(path) for path in paths})
        table = reader.read(file, piece.row_group, names)
        mask: Array | None = None
        first, stop = piece.first, piece.stop
        if self.validation is not None:
            marked = marks(table, self.validation, place(file, piece.row_group))
            chosen = np.flatnonzero(marked if split == "validation" else ~marked)[first:stop]
            first, stop = int(chosen[0]), int(chosen[-1]) + 1
            mask = np.zeros(stop - first, dtype=bool)
            mask[chosen - first] = True
        table = table.slice(first, stop - first)
        where = f" of {place(file, piece.row_group)}"
        found: dict[str, Any] = {}
        for wanted, several, column in zip(self.wanted, self.paths, columns, strict=True):
            arrays = [column_at(table, path) for path in several]
            rows = checked_rows(arrays, wanted, column, where=where, first_row=first)
            if mask is not None and not mask.all():
                rows = rows.where(mask) if isinstance(rows, Ragged) else rows[mask]
            found[column.key] = owned(rows)
        return found


def place(file: DataFile, row_group: int) -> str:
    """A row group, as errors name it."""
    return f"row group {row_group} of {file.name}"


def marks(table: pa.Table, path: tuple[str, ...], where: str) -> Array:
    """Bool ``(rows,)``: which rows are for validation.

    Raises:
        DataError: some rows do not say.
    """
    array = column_at(table, path)
    if array.null_count:
        raise DataError(
            f'column "{".".join(path)}" has {array.null_count} null row(s) in {where}; drop or '
            "fill them before fit"
        )
    return np.asarray(array.to_numpy(zero_copy_only=False))


def pieces_together(sizes: Sequence[int], buffer_bytes: int, shards: Sequence[ShardPieces]) -> int:
    """Pieces that are mixed: half of the memory is for them, half for those that are read ahead.

    Args:
        sizes: memory of each piece; the largest so many of them fit into that half.
        buffer_bytes: memory for both.
        shards: all rows; more pieces than a shard has for training need not be mixed.

    Returns:
        At least 1, also where the largest piece alone does not fit.
    """
    upto = accumulate(sorted(sizes, reverse=True))
    fitting = max(1, sum(size <= buffer_bytes // 2 for size in upto))
    return min(fitting, max(len(shard.train) for shard in shards))
