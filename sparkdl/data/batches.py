"""How do a rank's memory-mapped columns become the batches of an epoch?

Rows are gathered for several steps at once into buffers that are used again and again: one
large gather costs less than many small ones, and fresh memory costs page faults.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from sparkdl.data import assemble
from sparkdl.data.assemble import Arguments, Rows
from sparkdl.data.pages import Pages
from sparkdl.data.places import Places, PlacesByLength, WholePlaces, WindowedPlaces
from sparkdl.data.ragged import Ragged, gather, lengths_at
from sparkdl.data.shuffle import LengthGroups, Order, cut_rows, epoch_order, windowed_order
from sparkdl.inputs import Sequence as SequenceInput
from sparkdl.plan import Column, TrainPlan, batch_bounds

Inputs = tuple[torch.Tensor, ...]
Target = torch.Tensor | Inputs | dict[str, torch.Tensor]

GATHER_BYTES = 4 << 20
"""Steps are gathered together up to this size; it fits the cache of most machines."""


@dataclass(frozen=True)
class ShardData:
    """One shard as memory-mapped tensors."""

    fingerprint: str
    columns: Mapping[str, Rows]
    """Key of the plan's column -> ``(rows, *shape)``, or ragged rows."""
    pages: Pages | None = None
    """Which of it is in memory; None: all of it is, whatever the plan says."""

    @property
    def num_rows(self) -> int:
        """Rows of the shard."""
        return len(next(iter(self.columns.values())))


@dataclass(frozen=True)
class Batch:
    """Samples that are used together.

    The tensors of a training batch are valid until the next batch is asked for: their memory is
    then used again. Those of `sequential_batches` stay.
    """

    inputs: Inputs
    """One tensor ``(batch, *shape)`` per feature column, in the plan's order, and masks."""
    target: Target
    """The label column, a dict of several by name, or, where there is none, the inputs."""
    weight: torch.Tensor | None
    """``(batch,)``."""
    num_rows: int
    names: tuple[str | None, ...] = ()
    """Names of the inputs; see `Arguments`."""

    @property
    def arguments(self) -> Arguments:
        """What ``forward`` is called with."""
        return Arguments(self.inputs, self.names)

    def rows(self, start: int, stop: int) -> Batch:
        """The samples from ``start`` to ``stop``, as views unless they are sparse."""
        return self._map(lambda value: assemble.narrow(value, start, stop), stop - start)

    def map(self, convert: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
        """The batch with ``convert`` applied to each of its tensors, once to each."""
        return self._map(convert, self.num_rows)

    def _map(self, convert: Callable[[torch.Tensor], torch.Tensor], num_rows: int) -> Batch:
        done: dict[int, torch.Tensor] = {}

        def once(value: torch.Tensor) -> torch.Tensor:
            if id(value) not in done:
                done[id(value)] = convert(value)
            return done[id(value)]

        target: Target
        if isinstance(self.target, torch.Tensor):
            target = once(self.target)
        elif isinstance(self.target, dict):
            target = {name: once(value) for name, value in self.target.items()}
        else:
            target = tuple(once(value) for value in self.target)
        return Batch(
            inputs=tuple(once(value) for value in self.inputs),
            target=target,
            weight=None if self.weight is None else once(self.weight),
            num_rows=num_rows,
            names=self.names,
        )


class Batches:
    """The batches of one rank in one epoch, from ``start_step`` on; iterate once.

    Step ``s`` holds the rows ``plan.bounds(rank, s)`` of `shuffle.epoch_order`, or, if the plan
    has windows, of `shuffle.windowed_order`, whatever ``start_step`` was; it may be empty.

    Args:
        shards: the rank's training shards, in the plan's order.
        plan: the run's plan.
        rank: whose batches.
        seed: the run's seed.
        epoch: number of the epoch, from 0.
        start_step: first step, counted from the beginning of the epoch.
        num_together: steps whose rows are grouped by length, see `LengthGroups`; None: none.
        prefetch: whether a thread gathers the next batches while the current ones are used.
        pin_memory: give page-locked memory, which a CUDA device can read by itself.
    """

    def __init__(
        self,
        shards: Sequence[ShardData],
        plan: TrainPlan,
        rank: int,
        *,
        seed: int,
        epoch: int,
        start_step: int = 0,
        num_together: int | None = None,
        prefetch: bool = True,
        pin_memory: bool = False,
    ) -> None:
        self._shards = [shard for shard in shards if shard.num_rows]
        self._plan = plan
        self._rank = rank
        self._seed = seed
        self._epoch = epoch
        self._start_step = start_step
        self._num_together = num_together
        self._prefetch = prefetch
        self._pin_memory = pin_memory

    def __iter__(self) -> Generator[Batch, None, None]:
        """Yield the batch of each step. Close the iterator to end its thread early."""
        runs = self._runs()
        return _chain(_in_background(runs) if self._prefetch else runs)

    def _runs(self) -> Generator[list[Batch], None, None]:
        num_rows = sum(shard.num_rows for shard in self._shards)
        assert num_rows == self._plan.rows_of(self._rank), "shards do not fit the plan"
        num_steps = self._plan.steps_per_epoch
        num_together = self._steps_together()
        capacity = num_together * -(-num_rows // num_steps)
        # The consumer holds one buffer, the queue another, and the thread fills the third. Pinned
        # memory is taken afresh instead: torch's allocator knows when the device has read it.
        num_buffers = 3 if self._prefetch else 1
        buffers: list[dict[str, torch.Tensor]] = [{} for _ in range(num_buffers)]
        with contextlib.closing(self._places(num_rows)) as places:
            for number, first in enumerate(range(self._start_step, num_steps, num_together)):
                steps = range(first, min(first + num_together, num_steps))
                together = [batch_bounds(num_rows, num_steps, step) for step in steps]
                start, stop = together[0][0], together[-1][1]
                buffer = {} if self._pin_memory else buffers[number % num_buffers]
                positions = places.positions(start, stop)
                columns = {
                    column.key: self._gather(column, positions, buffer, capacity)
                    for column in self._plan.columns
                }
                places.used(stop)
                yield cut(self._plan, columns, [high - low for low, high in together])

    def _places(self, num_rows: int) -> Places:
        """The rows of the epoch, step by step."""
        rows = [shard.num_rows for shard in self._shards]
        known = (self._seed, self._epoch, [shard.fingerprint for shard in self._shards])
        windows = self._plan.windows
        places: Places
        if windows is None:
            places = WholePlaces(epoch_order(*known, rows))
        else:
            sizes = cut_rows(rows, windows.group_rows)
            order = windowed_order(*known, sizes, windows.groups_together)
            pages = [shard.pages for shard in self._shards]
            places = WindowedPlaces(order, list(zip(pages, rows, strict=True)))
        if self._num_together is None:
            return places
        groups = LengthGroups(
            num_rows,
            self._plan.steps_per_epoch,
            self._num_together,
            seed=self._seed,
            epoch=self._epoch,
        )
        return PlacesByLength(places, groups, self._lengths)

    def _lengths(self, positions: Order) -> Order:
        """Length of the row at each position: the sum over its sequences."""
        total = np.zeros(len(positions), dtype=np.int64)
        for column in self._plan.columns:
            sources = [shard.columns[column.key] for shard in self._shards]
            if isinstance(column.kind, SequenceInput):
                total += lengths_at(
                    [rows for rows in sources if isinstance(rows, Ragged)], positions
                )
        return total

    def _steps_together(self) -> int:
        if not self._shards:
            return max(1, self._plan.steps_per_epoch)
        shard = self._shards[0]
        row_bytes = sum(_row_bytes(rows) for rows in shard.columns.values())
        return max(1, GATHER_BYTES // max(1, row_bytes * self._plan.batch_size))

    def _gather(
        self, column: Column, positions: Order, buffer: dict[str, torch.Tensor], capacity: int
    ) -> Rows:
        sources = [shard.columns[column.key] for shard in self._shards]
        if not sources:
            return assemble.no_rows(column)
        if column.kind.num_parts:
            return gather([rows for rows in sources if isinstance(rows, Ragged)], positions)
        tensors = [rows for rows in sources if isinstance(rows, torch.Tensor)]
        if column.key not in buffer:
            shape = (capacity, *tensors[0].shape[1:])
            buffer[column.key] = torch.empty(
                shape, dtype=tensors[0].dtype, pin_memory=self._pin_memory
            )
        rows = buffer[column.key][: len(positions)]
        gather_rows(tensors, positions, rows)
        return rows


def _row_bytes(rows: Rows) -> int:
    if isinstance(rows, Ragged):
        return rows.num_bytes // max(1, len(rows))
    return rows[:1].numel() * rows.element_size()


def sequential_batches(shards: Sequence[ShardData], plan: TrainPlan) -> Iterator[Batch]:
    """All rows in their order, at most ``plan.batch_size`` at once; for evaluation."""
    for shard in shards:
        behind = 0
        for start in range(0, shard.num_rows, plan.batch_size):
            stop = min(start + plan.batch_size, shard.num_rows)
            behind = _move_on(shard, plan, behind, start, stop)
            # Copies: a model that changes its input in place must not reach the spool's pages.
            columns = {
                column.key: assemble.copied(shard.columns[column.key][start:stop])
                for column in plan.columns
            }
            yield from cut(plan, columns, [stop - start])
        if plan.windows is not None and shard.pages is not None:
            shard.pages.leave()
            shard.pages.drop(behind, shard.num_rows)


def _move_on(shard: ShardData, plan: TrainPlan, behind: int, start: int, stop: int) -> int:
    """Read a row group ahead of rows ``start`` to ``stop``, forget those from ``behind`` on.

    Returns:
        First row that was not forgotten.
    """
    windows, pages = plan.windows, shard.pages
    if windows is None or pages is None:
        return behind
    group = windows.group_rows
    if start == 0:
        pages.expect(0, min(2 * group, shard.num_rows))
    reached, before = stop // group, start // group
    if reached > before:
        first = min((before + 2) * group, shard.num_rows)
        pages.expect(first, min((reached + 2) * group, shard.num_rows))
        pages.leave()
        pages.drop(behind, start)
        return start
    return behind


def cut(plan: TrainPlan, columns: Mapping[str, Rows], sizes: Sequence[int]) -> list[Batch]:
    """Cut rows into batches of ``sizes``, each column in the role that the plan names.

    All batches of a column are cut at once: one after the other takes longer than gathering them.
    """
    sizes = list(sizes)
    Pieces = list[tuple[str | None, Sequence[torch.Tensor]]]
    by_role: dict[str, Pieces] = {"feature": [], "label": [], "weight": []}
    for column in plan.columns:
        by_role[column.role] += assemble.split(column, columns[column.key], sizes)
    names = tuple(name for name, _ in by_role["feature"])
    inputs = list(zip(*(pieces for _, pieces in by_role["feature"]), strict=True))
    targets: Sequence[Target]
    labels = by_role["label"]
    if not labels:
        targets = [Arguments(values, names).packed() for values in inputs]
    elif labels[0][0] is None:
        targets = labels[0][1]
    else:
        label_names = [str(name) for name, _ in labels]
        rows = zip(*(pieces for _, pieces in labels), strict=True)
        targets = [dict(zip(label_names, values, strict=True)) for values in rows]
    weights = by_role["weight"][0][1] if by_role["weight"] else [None] * len(sizes)
    named = [names if any(names) else ()] * len(sizes)
    return [Batch(*parts) for parts in zip(inputs, targets, weights, sizes, named, strict=True)]


def gather_rows(sources: Sequence[torch.Tensor], positions: Order, out: torch.Tensor) -> None:
    """Write the rows at ``positions`` of the concatenation of ``sources`` to ``out``, in order."""
    if len(sources) == 1:
        torch.index_select(sources[0], 0, torch.from_numpy(positions), out=out)
        return
    ends = np.cumsum([len(source) for source in sources])
    # Small integers of one type: numpy then sorts by radix and converts nothing.
    owners = np.searchsorted(ends.astype(positions.dtype), positions, side="right")
    by_owner = np.argsort(owners.astype(np.min_scalar_type(len(sources))), kind="stable")
    rows = positions[by_owner]
    # One source after the other, then into order: twice `index_select`, which takes whole rows,
    # costs a fourth of one `index_copy_`, which does not.
    staged, start = torch.empty_like(out), 0
    for source, end, count in zip(sources, ends, np.bincount(owners).tolist(), strict=False):
        stop = start + count
        local = torch.from_numpy(rows[start:stop] - rows.dtype.type(end - len(source)))
        torch.index_select(source, 0, local, out=staged[start:stop])
        start = stop
    places = np.empty_like(by_owner)
    places[by_owner] = np.arange(len(by_owner))
    torch.index_select(staged, 0, torch.from_numpy(places), out=out)


def _chain(runs: Generator[list[Batch], None, None]) -> Generator[Batch, None, None]:
    with contextlib.closing(runs):
        for run in runs:
            yield from run


def _in_background(runs: Generator[list[Batch], None, None]) -> Generator[list[Batch], None, None]:
    """Draw from ``runs`` in a thread, one item ahead; its exception is raised here."""
    ready: queue.Queue[list[Batch] | BaseException | None] = queue.Queue(maxsize=1)
    stopped = threading.Event()

    def produce() -> None:
        try:
            with contextlib.closing(runs):
                for run in runs:
                    ready.put(run)
                    if stopped.is_set():
                        return
            ready.put(None)
        except BaseException as error:  # handed to the consumer, which raises it
            ready.put(error)

    thread = threading.Thread(target=produce, name="sparkdl-batches", daemon=True)
    thread.start()
    try:
        while (item := ready.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        stopped.set()
        while thread.is_alive():  # a put that waits for room must be let through
            with contextlib.suppress(queue.Empty):
                ready.get_nowait()
            thread.join(timeout=0.01)
