"""Shards that are mapped into memory, and their rows in an epoch's order.

Rows that do not fit into memory together are read window by window (see `StreamedEpoch`), without
touching the mapping: so a worker takes no more memory than two windows need, even where nobody else
asks for it.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from sparkdl.data import collate
from sparkdl.data.collate import Rows
from sparkdl.data.gather import Buffer, empty, gather_column, sum_of_lengths
from sparkdl.data.plan import Column, TrainPlan
from sparkdl.data.ragged import Array, Ragged, offsets_of
from sparkdl.data.shuffle import (
    DealtByLength,
    LengthGroups,
    Order,
    cut_rows,
    epoch_order,
    windowed_order,
)
from sparkdl.data.source import EpochRows
from sparkdl.data.sources.streamed import StreamedEpoch
from sparkdl.data.spool.local_disk import disk_error, lock

_READ_BYTES = 128 << 10
"""Read ahead at once; the kernel cuts off what exceeds its own largest request."""


class MappedFile:
    """A file mapped into memory. What is written to the mapping stays in this process.

    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(self, path: Path, num_bytes: int) -> None:
        self._path = path
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._descriptor)
        lock(self._descriptor)
        self._map = mmap.mmap(
            self._descriptor,
            num_bytes,
            flags=mmap.MAP_PRIVATE,
            prot=mmap.PROT_READ | mmap.PROT_WRITE,
        )

    def values(self, dtype: str) -> Array:
        """The file's content; keeps the mapping alive."""
        return np.frombuffer(self._map, dtype=dtype)

    def prefetch(self, part: Array) -> None:
        """Have the kernel read some of the values in the background, in large pieces."""
        start = self._start(part)
        for first in range(start, start + part.nbytes, _READ_BYTES):
            if hasattr(os, "posix_fadvise"):  # not on macOS
                os.posix_fadvise(self._descriptor, first, _READ_BYTES, os.POSIX_FADV_WILLNEED)

    def read(self, part: Array, out: Array) -> None:
        """Read some of the values; neither this process nor the page cache keeps them.

        Args:
            part: a view of `values`, whose pages are not touched.
            out: contiguous memory of the same size.

        Raises:
            StorageError: the disk has failed.
        """
        rest = out.reshape(-1).view(np.uint8).data
        start = first = self._start(part)
        try:
            while len(rest):
                count = os.preadv(self._descriptor, [rest], start)
                if not count:
                    raise OSError("the file has become shorter")
                start, rest = start + count, rest[count:]
        except OSError as error:
            raise disk_error(error, "read", self._path) from error
        if start > first and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._descriptor, first, start - first, os.POSIX_FADV_DONTNEED)

    def _start(self, part: Array) -> int:
        """Return the byte where a view of the values begins in the file."""
        begin: int = self.values("uint8").__array_interface__["data"][0]
        return int(part.__array_interface__["data"][0]) - begin


@dataclass(frozen=True)
class ShardData:
    """One shard as memory-mapped tensors."""

    fingerprint: str
    columns: Mapping[str, Rows]
    """Key of the plan's column -> ``(rows, *shape)``, or ragged rows."""
    files: Mapping[str, Sequence[MappedFile]] = field(default_factory=dict)
    """The files of each column's values, by its key; none of one that is in memory anyhow."""

    @property
    def num_rows(self) -> int:
        """Rows of the shard."""
        return len(next(iter(self.columns.values())))


class MappedRows:
    """A shard of which any row can be read at any time. See `source.ShardRows`."""

    def __init__(self, shard: ShardData, plan: TrainPlan) -> None:
        self._shard = shard
        self._plan = plan

    @property
    def num_rows(self) -> int:
        return self._shard.num_rows

    def part(self, start: int, stop: int) -> MappedRows:
        """Some of the rows, from the shard's begin or up to its end."""
        shard = self._shard
        columns = {name: rows[start:stop] for name, rows in shard.columns.items()}
        return MappedRows(ShardData(shard.fingerprint, columns, shard.files), self._plan)

    def epoch(self, seed: int, epoch: int, *, num_together: int | None = None) -> EpochRows:
        plan, shard, groups = self._plan, self._shard, None
        if num_together is not None:
            steps = plan.steps_per_epoch
            groups = LengthGroups(shard.num_rows, steps, num_together, seed=seed, epoch=epoch)
        known = (seed, epoch, shard.fingerprint)
        if plan.windows is None:
            return MappedEpoch(shard, plan, epoch_order(*known, shard.num_rows), groups)
        sizes = cut_rows(shard.num_rows, plan.windows.group_rows)
        order = windowed_order(*known, sizes, plan.windows.groups_together)

        def load(numbers: Sequence[int]) -> list[dict[str, Rows]]:
            pieces = [slice(*order.starts[n : n + 2].tolist()) for n in numbers]
            return [{column.key: _joined(shard, column, pieces) for column in plan.columns}]

        return StreamedEpoch(plan, order, load, _row_bytes(shard), groups)

    def in_order(self, batch_size: int) -> Iterator[Mapping[str, Rows]]:
        shard = self._shard
        for start in range(0, shard.num_rows, batch_size):
            rows = slice(start, min(start + batch_size, shard.num_rows))
            # Copies: a model that changes its input in place must not reach the spool's pages.
            yield {
                column.key: collate.copied(shard.columns[column.key][rows])
                if self._plan.windows is None
                else _joined(shard, column, [rows])
                for column in self._plan.columns
            }


class MappedEpoch:
    """An epoch of rows that fit into memory; see `source.EpochRows`."""

    def __init__(
        self, shard: ShardData, plan: TrainPlan, order: Order, groups: LengthGroups | None
    ) -> None:
        self._shard = shard
        self._plan = plan
        self._order = order
        self._by_length: DealtByLength | None = None
        if groups is not None:
            self._by_length = DealtByLength(
                groups,
                lambda start, stop: order[start:stop],
                lambda rows: sum_of_lengths(plan.columns, [shard.columns], rows),
            )
        self.row_bytes = _row_bytes(shard)

    def read(self, start: int, stop: int, buffer: Buffer) -> dict[str, Rows]:
        """Gather the rows at these places of the order."""
        dealt = self._by_length
        positions = self._order[start:stop] if dealt is None else dealt.rows(start, stop)
        return {
            column.key: gather_column(column, [self._shard.columns[column.key]], positions, buffer)
            for column in self._plan.columns
        }

    def close(self) -> None:
        """Nothing is held."""


def _row_bytes(shard: ShardData) -> int:
    """About the memory of a row."""
    total = 0
    for rows in shard.columns.values():
        if isinstance(rows, Ragged):
            total += rows.num_bytes // max(1, len(rows))
        else:
            total += rows[:1].nbytes
    return total


def _joined(shard: ShardData, column: Column, pieces: Sequence[slice]) -> Rows:
    """A column of some row groups, read one after the other into memory of its own."""
    found = [shard.columns[column.key][rows] for rows in pieces]
    values = [rows.own() if isinstance(rows, Ragged) else (rows.numpy(),) for rows in found]
    files = shard.files.get(column.key)
    outs: list[Array] = []
    for number, parts in enumerate(zip(*values, strict=True)):
        out = empty((sum(map(len, parts)), *parts[0].shape[1:]), parts[0].dtype)
        if files and len(pieces) > 1:  # of neighbours the kernel reads the next by itself
            for part in parts:
                files[number].prefetch(part)
        end = 0
        for part in parts:
            start, end = end, end + len(part)
            if files:
                files[number].read(part, out[start:end])
            else:
                out[start:end] = part
        outs.append(out)
    if not isinstance(found[0], Ragged):
        return torch.from_numpy(outs[0])
    lengths = [rows.lengths for rows in found if isinstance(rows, Ragged)]
    return Ragged(tuple(outs), offsets_of(np.concatenate(lengths)), found[0].shape)
