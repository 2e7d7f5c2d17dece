"""The place of a gang's workers: where the table of its shards is, or anywhere.

Chosen once for a run, and asked at each submission. A gang on its table is a child of it: Spark
runs each rank where it has written the rank's shards, and makes lost ones anew in the ranks' own
tasks. Elsewhere Spark runs ranks wherever there are slots, and they look for shards, see
`worker.held_shards`; lost ones are written before the ranks begin.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Generic, Protocol, TypeVar

from pyspark.sql import DataFrame

from sparkdl.data.plan import Holding
from sparkdl.spark.cluster.slots import Slots
from sparkdl.spark.frames.row_table import Origin, slots_for

T = TypeVar("T", covariant=True)


class Placeable(Protocol[T]):
    """Shards of a run that a placement can be asked for; see `RowTable` for the methods."""

    @property
    def df(self) -> DataFrame: ...

    @property
    def known(self) -> T: ...

    @property
    def origin(self) -> Origin: ...

    def collect(self) -> T: ...

    def is_scattered(self, num_workers: int) -> bool: ...

    def restore(self, num_workers: int) -> tuple[T, DataFrame]: ...

    def forget(self) -> None: ...

    def remake(self, missing: Collection[int]) -> None: ...


class Placement(Protocol[T]):
    """The place of a gang's workers."""

    holding: Holding
    """How ranks of equal speed come to their shards."""

    def start(self, attempt: int, num_workers: int) -> tuple[T, DataFrame]:
        """The shards of a submission, and the rows on which it runs; raises what `collect` does."""

    def after_loss(self, missing: Collection[int]) -> None:
        """Have shards written anew that no rank could read; empty: it is not known which."""


class OnTable(Generic[T]):
    """A gang in the table's own tasks, by lineage."""

    def __init__(self, table: Placeable[T]) -> None:
        """Store the table, whose rows are in as many partitions as there are workers."""
        self._table = table
        self.holding: Holding = "near" if table.origin == "source" else "here"

    def start(self, attempt: int, num_workers: int) -> tuple[T, DataFrame]:
        """See `Placement.start`: what was lost since is made anew."""
        return (self._table.collect() if attempt else self._table.known), self._table.df

    def after_loss(self, missing: Collection[int]) -> None:
        """See `Placement.after_loss`: Spark holds the rows of files that are gone."""
        self._table.forget()


class Anywhere(Generic[T]):
    """A gang of any size, whose ranks find the shards where they lie."""

    def __init__(self, table: Placeable[T], holding: Holding, first: DataFrame) -> None:
        """Store the table, and the rows on which the first submission runs."""
        self._table = table
        self._first = first
        self.holding = holding

    def start(self, attempt: int, num_workers: int) -> tuple[T, DataFrame]:
        """See `Placement.start`: what no slot can open is written anew."""
        if attempt or self._table.is_scattered(num_workers):
            return self._table.restore(num_workers)
        return self._table.known, self._first

    def after_loss(self, missing: Collection[int]) -> None:
        """See `Placement.after_loss`."""
        self._table.remake(missing)


def is_fixed(slots: Slots, num_readers: int) -> bool:
    """Return True if each worker of a run has rows of its own, and all of them stay to the end."""
    return not slots.may_move and num_readers == slots.num_workers


def choose_placement(table: Placeable[T], slots: Slots, num_readers: int) -> Placement[T]:
    """The placement of a gang of which ``num_readers`` workers read different rows.

    The shards are there.
    """
    if not is_fixed(slots, num_readers) or table.origin == "partitions":
        has_rows = num_readers == slots.num_workers and table.origin != "partitions"
        first = table.df if has_rows else slots_for(table.df.sparkSession, slots.num_workers)
        return Anywhere(table, "near", first)
    if table.origin == "kept":  # which has the same bits as if they had been written now
        return Anywhere(table, "planned", table.df)
    return OnTable(table)
