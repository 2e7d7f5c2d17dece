"""The protocols of a source, which is where a fit's rows come from.

On the driver a `Source` says what it holds and cuts it into shards; on a worker a
`ShardSource` opens a shard, and `ShardRows` give its rows of an epoch in their order. The
spool, which `fit` makes of a DataFrame, is one implementation; others are given to ``fit`` in place
of a DataFrame.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

from sparkdl.data.plan import Column, Shard, Split, SpoolColumn, TrainPlan
from sparkdl.storage.blocks import Locate, nowhere

if TYPE_CHECKING:
    from sparkdl.data.collate import Rows
    from sparkdl.data.gather import Buffer


class EpochRows(Protocol):
    """The rows of one shard in the order of one epoch."""

    @property
    def row_bytes(self) -> int:
        """About the memory of a row, by which steps are read together."""

    def read(self, start: int, stop: int, buffer: Buffer) -> Mapping[str, Rows]:
        """The rows from ``start`` to ``stop`` of the epoch's order.

        Called with one range after the other, each beginning where the last one ended; the first
        may begin anywhere, and must give what an undisturbed epoch gives there.

        Args:
            start: first row, counted in the epoch.
            stop: one past the last.
            buffer: memory that may be used for the result.

        Returns:
            Key of the plan's column -> ``(rows, *shape)``, or ragged rows.

        Raises:
            DataError: rows cannot be used.
        """

    def close(self) -> None:
        """Release threads and files."""


@runtime_checkable
class ShardRows(Protocol):
    """The rows of one shard in one split, opened on a worker."""

    @property
    def num_rows(self) -> int:
        """The number of rows that the plan says."""

    def epoch(self, seed: int, epoch: int, *, num_together: int | None = None) -> EpochRows:
        """An order that is a pure function of seed, epoch and the shard's fingerprint.

        Not called where there are no rows.

        Args:
            seed: the run's seed.
            epoch: number of the epoch, from 0.
            num_together: steps whose rows are sorted by length together; None: none.

        Raises:
            ConfigError: ``num_together`` is asked for, and lengths are not known beforehand.
        """

    def in_order(self, batch_size: int) -> Iterator[Mapping[str, Rows]]:
        """The rows as they are stored, up to ``batch_size`` at once; for evaluation.

        What is yielded stays: it is in memory of its own.
        """


class ShardSource(Protocol):
    """Opens shards on a worker. Travels there by cloudpickle, and imports torch only when used."""

    def open(self, plan: TrainPlan, shard: Shard, split: Split) -> ShardRows:
        """The rows of ``split`` of one of the plan's shards.

        Raises:
            ShardLost: they are not there; they may be after a restart.
            DataError: they are not what the plan says.
        """

    def is_here(self, shard: Shard) -> bool:
        """Return True if this host can open the shard."""


@dataclass(frozen=True, kw_only=True)
class Contents:
    """The contents of a source, cut into shards."""

    columns: tuple[Column, ...]
    """One for each column that was asked for, in that order; arguments are not filled in."""
    shards: tuple[Shard, ...]
    content: int
    """Fingerprint of all rows, 64 bits, whatever the number of shards."""
    reader: ShardSource
    """Opens these shards."""
    labels_outside: Callable[[int, int], tuple[int, str] | None] = lambda index, num_classes: None
    """Given the number of a label's column and how many classes there are: how many labels are
    not below it, as far as that can be known before training, and where the first one is."""
    homes: str | None = None
    """Facts that the shards follow from besides the content, such as the hosts that have had the
    rows; see `Wanted`. None: from nothing else."""
    transform: Any = None
    """A function of the user's, or what holds some, that makes the rows of what ``content`` tells:
    checkpoints of another one are not continued."""


A = TypeVar("A")
B = TypeVar("B")


class Spread(Protocol):
    """Calls a function for each of several items, at once where it can."""

    def __call__(self, call: Callable[[A], B], items: Sequence[A]) -> list[B]:
        """Return what ``call`` gives for each item, in their order.

        Function, items and results must go by cloudpickle to executors and back.
        """


_THREADS = 16


def in_threads(call: Callable[[A], B], items: Sequence[A]) -> list[B]:
    """See `Spread`: in this process, in threads, since what is called waits for storage."""
    with ThreadPoolExecutor(_THREADS) as pool:
        return list(pool.map(call, items))


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """The request that a fit makes of a source."""

    columns: tuple[SpoolColumn, ...]
    validation: str | None
    """Boolean column that marks validation rows."""
    num_shards: int
    spread: Spread = in_threads
    """Function that makes many small reads, in threads or elsewhere."""
    locate: Locate = nowhere
    """Tells where the blocks of files lie."""
    homes: str | None = None
    """`Contents.homes` of an earlier call for equal content: then the shards are equal too. None:
    there is none, or it said nothing."""
    seed: int = 0
    """The estimator's."""


@runtime_checkable
class Source(Protocol):
    """Data that workers read by themselves. Given to ``fit`` in place of a DataFrame.

    Options only; the driver calls both methods, before anything is launched.
    """

    def schema(self) -> Any:
        """The columns it has, as a ``pyarrow.Schema``.

        Raises:
            StorageError: it cannot be opened.
        """

    def contents(self, wanted: Wanted) -> Contents:
        """Cut the rows into shards. Equal calls give equal shards.

        Raises:
            DataError: there are no rows, or they cannot be used.
        """


def with_shapes(wanted: Sequence[SpoolColumn], found: Sequence[Column]) -> tuple[SpoolColumn, ...]:
    """The columns with the shapes in which a source has found them, for its workers to compare."""
    pairs = zip(wanted, found, strict=True)
    return tuple(replace(column, shape=tuple(known.shape)) for column, known in pairs)


def open_shards(source: ShardSource, plan: TrainPlan, rank: int, split: Split) -> list[ShardRows]:
    """The rows of ``rank``'s shards, in their order; raises what `ShardSource.open` raises."""
    return [source.open(plan, shard, split) for shard in plan.shards_of(rank)]


def rows_of(shard: Shard, split: Split) -> int:
    """Rows of one split of a shard."""
    return shard.num_rows if split == "train" else shard.num_validation_rows
