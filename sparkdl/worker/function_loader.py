"""The batches that `Context.loader` gives a training function; those of a fit: `data.batches`."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sparkdl.data.batches import Batch, Batches, sequential_batches
from sparkdl.data.plan import Column, Shard, TrainPlan, make_plan
from sparkdl.data.shuffle_windows import Windows
from sparkdl.data.source import ShardRows, ShardSource, open_shards
from sparkdl.errors import ConfigError, DataError


@dataclass(frozen=True, kw_only=True)
class DataSet:
    """One of the run's data sets, in shards. Picklable and small."""

    columns: tuple[Column, ...]
    """All are features, and have the argument by which a batch names them."""
    shards: tuple[Shard, ...]
    source: ShardSource
    """Opens the shards."""
    windows: Windows | None = None
    """Windows in which rows are mixed that do not fit into memory."""
    shards_by_rank: tuple[tuple[int, ...], ...] | None = None
    """Shards of each rank, where ranks come and go; None: neighbouring ones, for good."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of what a batch holds."""
        names: list[str] = []
        for column in self.columns:
            names += [str(column.argument), *column.kind.masks]
        return tuple(names)

    def plan(self, world_size: int, batch_size: int) -> TrainPlan:
        """Plan which rows make which batch."""
        plan = make_plan(
            columns=self.columns,
            shards=self.shards,
            world_size=world_size,
            batch_size=batch_size,
            epochs=1,
            windows=self.windows,
        )
        return plan if self.shards_by_rank is None else plan.held_by(self.shards_by_rank)


class Loader:
    """Batches of one rank's rows; iterate once per epoch. Made by `Context.loader`.

    A batch is a dict, or a tuple where columns were chosen, of tensors ``(batch, *shape)`` on the
    rank's device. They are the caller's own: the loader does not use their memory again.

    Without a call of `set_epoch`, each iteration is the epoch after the last. With shuffling, batch
    ``n`` holds of each of the rank's shards the same part, so the batches ``n`` of all ranks have
    the same rows however many ranks there are. Without shuffling the rows come shard by shard in
    their order, and ranks may have different numbers of batches.
    """

    def __init__(
        self,
        data: DataSet,
        *,
        name: str,
        rank: int,
        world_size: int,
        device: torch.device,
        batch_size: int,
        columns: Sequence[str] | None,
        shuffle: bool,
        seed: int,
    ) -> None:
        """See `Context.loader`."""
        self._plan = data.plan(world_size, batch_size)
        self._data = data
        self._name = name
        self._rank = rank
        self._device = device
        self._columns = None if columns is None else tuple(columns)
        self._shuffle = shuffle
        self._seed = seed
        self._epoch, self._start = 0, 0
        self._check_columns()
        if shuffle:
            self._check_rows()
        self._rows: list[ShardRows] | None = None

    def __len__(self) -> int:
        """Batches of an epoch; with shuffling the same on all ranks, however many there are."""
        if self._shuffle:
            return self._plan.steps_per_epoch
        shards = self._plan.shards_of(self._rank)
        return sum(-(-shard.num_rows // self._plan.batch_size) for shard in shards)

    @property
    def num_rows(self) -> int:
        """Rows of an epoch, of all ranks."""
        return self._plan.num_rows

    @property
    def num_readers(self) -> int:
        """Ranks that read different rows: all, or along a mesh ``data`` times ``shard``."""
        return self._plan.world_size

    def rows_of_all(self, number: int) -> int:
        """Rows in the batches of that number of all readers, with shuffling.

        A sum of losses, times `num_readers`, divided by this, gives each row the same weight in
        the mean of all readers' gradients, also where they have different numbers of rows.

        Raises:
            ConfigError: there is no such batch, or rows come in their order.
        """
        if not self._shuffle or not 0 <= number < len(self):
            raise ConfigError(
                f"rows_of_all needs shuffle=True and the number of a batch in [0, {len(self) - 1}];"
                f" received shuffle={self._shuffle}, {number}"
            )
        return sum(self._plan.rows_by_rank(number))

    def set_epoch(self, epoch: int, start: int = 0) -> None:
        """Let the next iteration be the epoch of that number, from 0, from its batch ``start`` on.

        So a restart goes on where a checkpoint was written. Batches before are not read.

        Raises:
            ConfigError: there is no such batch.
        """
        if epoch < 0 or not 0 <= start <= len(self):
            raise ConfigError(
                f"epoch must be at least 0 and start in [0, {len(self)}]; received {epoch}, {start}"
            )
        self._epoch, self._start = epoch, start

    def __iter__(self) -> Iterator[Any]:
        """Yield an epoch's batches."""
        epoch, start = self._epoch, self._start
        self._epoch, self._start = epoch + 1, 0
        if self._rows is None:
            self._rows = open_shards(self._data.source, self._plan, self._rank, "train")
        batches = self._batches(self._rows, epoch, start)
        with contextlib.closing(batches):
            for batch in batches:
                yield self._given(batch)

    def _batches(
        self, rows: Sequence[ShardRows], epoch: int, start: int
    ) -> Generator[Batch, None, None]:
        if not self._shuffle:
            yield from itertools.islice(sequential_batches(rows, self._plan), start, None)
            return
        batches = Batches(
            rows,
            self._plan,
            self._rank,
            seed=self._seed,
            epoch=epoch,
            start_step=start,
            pin_memory=self._device.type == "cuda",
        )
        with contextlib.closing(iter(batches)) as steps:
            yield from steps

    def _given(self, batch: Batch) -> Any:
        """As the user gets it."""
        moved = batch.map(self._own)
        found = dict(zip(moved.names, moved.inputs, strict=True))
        if self._columns is None:
            return found
        return tuple(found[name] for name in self._columns)

    def _own(self, value: torch.Tensor) -> torch.Tensor:
        """On the rank's device, in memory that is not used again for the next batch."""
        if self._device.type == "cpu":
            return value.clone()
        return value.to(self._device, non_blocking=True)

    def _check_columns(self) -> None:
        known = self._data.names
        unknown = [name for name in self._columns or () if name not in known]
        if unknown:
            raise ConfigError(
                f"data set {self._name!r} has no column {unknown[0]!r}; it has "
                f"{', '.join(map(repr, known))}"
            )

    def _check_rows(self) -> None:
        """Raise `DataError` if a rank lacks a row in a batch, and so cannot take part in a step.

        Where ranks come and go, each of them must be able to have but one shard.
        """
        plan, steps = self._plan, self._plan.steps_per_epoch
        parts = [(f"rank {rank}", plan.shards_of(rank)) for rank in range(plan.world_size)]
        if self._data.shards_by_rank is not None:
            parts = [(f"shard {shard.shard_id}", (shard,)) for shard in plan.shards]
        for name, shards in parts:
            most = max(shard.num_rows for shard in shards)
            if most == 0:
                raise DataError(
                    f"data set {self._name!r} has {plan.num_rows} rows, and none of them for "
                    f"{name}; use fewer workers or shards, more rows, or shuffle=False"
                )
            if most < steps:
                of_several = " in its largest shard" if len(shards) > 1 else ""
                raise DataError(
                    f"data set {self._name!r} has {most} rows for {name}{of_several}, but an epoch "
                    f"has {steps} batches; use fewer workers or shards, or a larger batch_size"
                )
