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
from sparkdl.data.sources.column_conversion import checked_rows, owned
from sparkdl.data.sources.locality import Places
from sparkdl.data.sources.parquet_files import ColumnPath, Reader, RowGroup
from sparkdl.errors import CheckpointError, ConfigError, DataError

if TYPE_CHECKING:
    from sparkdl.data.collate import Rows
    from sparkdl.data.source import ShardRows, Wanted


logger = logging.getLogger(__name__)

_FAR_MORE = 1.5
"""Times the rows that were asked for, from which on the user is told."""


@dataclass(frozen=True)
class Piece:
    """Some rows of a row group, all in one shard."""

    group: RowGroup
    first: int
    """Number of the first row, from 0, among those of the row group that belong to the split."""
    stop: int

    @property
    def num_rows(self) -> int:
        """Rows."""
        return self.stop - self.first

    def __str__(self) -> str:
        return f"rows {self.first} to {self.stop - 1} of {self.group}"


ShardPieces = Mapping[Split, tuple[Piece, ...]]
"""A shard's rows."""


def check_options(buffer_bytes: int, validation_fraction: float) -> None:
    """Refuse what no source of row groups can have.

    Raises:
        ConfigError: names the option.
    """
    if buffer_bytes < 1:
        raise ConfigError(f"buffer_bytes must be at least 1; received {buffer_bytes}")
    if not 0 <= validation_fraction < 1:
        raise ConfigError(f"validation_fraction must be in [0, 1); received {validation_fraction}")


def deal(
    groups: Sequence[RowGroup], num_shards: int, homes: Sequence[int]
) -> list[tuple[Piece, ...]]:
    """Deal row groups to shards, so that all have equally many rows, but for one.

    The row groups of one home come after those of another, so that a shard has mostly those of one.
    Then they are cut: a row group on a border is read by two shards, each of which uses its part.

    Args:
        groups: those with rows of the split, in random order.
        num_shards: how many shards.
        homes: the host of each row group, see `Places.homes`; empty: they keep their order.
    """
    if homes:
        groups = [groups[n] for n in sorted(range(len(groups)), key=homes.__getitem__)]
    total = sum(group.num_rows for group in groups)
    parts = accumulate([1 / num_shards] * (num_shards - 1))
    bounds = [0, *(round(upto * total) for upto in parts), total]
    dealt: list[list[Piece]] = [[] for _ in range(num_shards)]
    start, shard = 0, 0
    for group in groups:
        taken = 0
        while taken < group.num_rows:
            while bounds[shard + 1] <= start + taken:
                shard += 1
            stop = min(group.num_rows, bounds[shard + 1] - start)
            dealt[shard].append(Piece(group, taken, stop))
            taken = stop
        start += group.num_rows
    return [tuple(pieces) for pieces in dealt]


def hold_out(groups: Sequence[RowGroup], fraction: float) -> tuple[list[RowGroup], list[RowGroup]]:
    """Row groups for training, and so many for validation that they have ``fraction`` of the rows.

    Which ones these are is random but follows from their content.
    """
    total = sum(group.num_rows for group in groups)
    wanted = fraction * total
    train: list[RowGroup] = []
    validation: list[RowGroup] = []
    taken = 0
    for group in _by_lot(groups, "validation:"):
        if taken < wanted:
            validation.append(group)
            taken += group.num_rows
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


def _by_lot(groups: Sequence[RowGroup], purpose: str = "") -> list[RowGroup]:
    def lot(group: RowGroup) -> tuple[str, str, int]:
        text = f"{purpose}{group.file.digest}:{group.number}"
        return hashlib.sha256(text.encode()).hexdigest(), group.file.path, group.number

    return sorted(groups, key=lot)


def deal_both(
    train: Sequence[RowGroup], validation: Sequence[RowGroup], wanted: Wanted, places: Places
) -> tuple[tuple[ShardPieces, ...], str]:
    """Deal the rows of both splits.

    Returns:
        The shards, and the homes of the row groups of both splits, which are ``wanted.homes`` if
        these are given: with equal ones the shards are equal, wherever the row groups lie now.

    Raises:
        DataError: no rows are left for training.
        CheckpointError: ``wanted.homes`` are not those of these row groups.
    """
    if not train:
        raise DataError(
            "no rows are left for training; lower validation_fraction, or write more row groups"
        )
    train, validation = _by_lot(train), _by_lot(validation)
    text = wanted.homes
    if text is None:
        text = json.dumps([places.homes(train), places.homes(validation)], separators=(",", ":"))
    homes, held_homes = _homes(text, len(train), len(validation))
    own = deal(train, wanted.num_shards, homes)
    held = deal(validation, wanted.num_shards, held_homes)
    return tuple({"train": t, "validation": v} for t, v in zip(own, held, strict=True)), text


def _homes(text: str, *counts: int) -> list[list[int]]:
    """The homes of so many row groups of each split, from their text."""
    try:
        homes = [[int(home) for home in several] for several in json.loads(text)]
        if all(len(h) in (0, n) for h, n in zip(homes, counts, strict=True)):
            return homes
    except (ValueError, TypeError):
        pass
    raise CheckpointError(f"a checkpoint's manifest says {text[:80]!r} of the homes of row groups")


def describe_shards(
    shards: Sequence[ShardPieces],
    places: Places,
    *,
    together: int,
    about: object,
    num_bytes: int,
) -> tuple[Shard, ...]:
    """The shards for the plan; fingerprints follow from all that decides which rows come when.

    Args:
        shards: their rows.
        places: where these lie, which the fingerprints do not tell.
        together: pieces that are mixed.
        about: what else decides.
        num_bytes: memory for the rows of a worker.
    """

    def lines(several: Sequence[Piece]) -> list[list[object]]:
        return [[p.group.file.digest, p.group.number, p.first, p.stop] for p in several]

    def fingerprint(shard: ShardPieces) -> str:
        text = json.dumps([lines(shard["train"]), lines(shard["validation"]), together, about])
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    return tuple(
        Shard(
            shard_id=number,
            num_rows=sum(piece.num_rows for piece in shard["train"]),
            num_validation_rows=sum(piece.num_rows for piece in shard["validation"]),
            fingerprint=fingerprint(shard),
            num_bytes=num_bytes,
            hosts=places.hosts_of(
                [(p.group, p.num_rows / p.group.num_rows) for own in shard.values() for p in own]
            ),
        )
        for number, shard in enumerate(shards)
    )


@dataclass(frozen=True, kw_only=True)
class PieceShards:
    """Opens shards of pieces of row groups on a worker; see `source.ShardSource`."""

    pieces: tuple[ShardPieces, ...]
    """Pieces of each shard."""
    wanted: tuple[SpoolColumn, ...]
    together: int
    """Pieces that are mixed."""
    row_bytes: int

    def open(self, plan: TrainPlan, shard: Shard, split: Split) -> ShardRows:
        from sparkdl.data.sources.streamed import StreamedRows

        return StreamedRows(
            plan,
            [(piece, piece.num_rows) for piece in self.pieces[shard.shard_id][split]],
            self.reader(plan, split),
            fingerprint=shard.fingerprint,
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
    paths: tuple[tuple[ColumnPath, ...], ...]
    """Paths in the files, for each wanted column, of its specification's columns."""
    validation: ColumnPath | None
    """Path of the column that marks validation rows."""

    def reader(self, plan: TrainPlan, split: Split) -> Callable[[Piece], Mapping[str, Rows]]:
        return partial(self._rows, Reader(self.url), plan.columns, split)

    def _rows(
        self, reader: Reader, columns: Sequence[Column], split: Split, piece: Piece
    ) -> Mapping[str, Rows]:
        paths = [path for several in self.paths for path in several]
        if self.validation is not None:
            paths.append(self.validation)
        arrays = reader.read(piece.group, paths)
        mask: Array | None = None
        first, stop = piece.first, piece.stop
        if self.validation is not None:
            marked = marks(arrays[self.validation], self.validation, piece.group)
            chosen = np.flatnonzero(marked if split == "validation" else ~marked)[first:stop]
            first, stop = int(chosen[0]), int(chosen[-1]) + 1
            mask = np.zeros(stop - first, dtype=bool)
            mask[chosen - first] = True
        found: dict[str, Any] = {}
        for wanted, several, column in zip(self.wanted, self.paths, columns, strict=True):
            own = [arrays[path].slice(first, stop - first) for path in several]
            rows = checked_rows(own, wanted, column, where=f" of {piece.group}", first_row=first)
            if mask is not None and not mask.all():
                rows = rows.where(mask) if isinstance(rows, Ragged) else rows[mask]
            found[column.key] = owned(rows)
        return found


def marks(array: pa.Array, path: ColumnPath, group: RowGroup) -> Array:
    """Bool ``(rows,)``: which rows are for validation.

    Raises:
        DataError: some rows do not say.
    """
    if array.null_count:
        raise DataError(
            f'column "{".".join(path)}" has {array.null_count} null row(s) in {group}; drop or '
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
    return min(fitting, max(len(shard["train"]) for shard in shards))
