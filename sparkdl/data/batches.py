"""The batches of an epoch, made of the rows of a rank's shards.

Rows are gathered for several steps at once into buffers that are used again and again: one
large gather costs less than many small ones, and fresh memory costs page faults.
"""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import KW_ONLY, dataclass

import numpy as np
import torch

from sparkdl.data import collate
from sparkdl.data.collate import Arguments, Rows
from sparkdl.data.gather import Buffer
from sparkdl.data.plan import TrainPlan
from sparkdl.data.ragged import Array, Ragged, gather
from sparkdl.data.source import ShardRows

logger = logging.getLogger(__name__)

Inputs = tuple[torch.Tensor, ...]
Target = torch.Tensor | Inputs | dict[str, torch.Tensor]

GATHER_BYTES = 4 << 20
"""Steps are gathered together up to this size; it fits the cache of most machines."""
_CLOSE_SECONDS = 60.0
"""Longest wait for a read that goes on when nobody needs it any more."""


@dataclass(frozen=True)
class Batch:
    """Samples that are used together.

    Their memory is used again for later ones only once nobody has a tensor of it any more.
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
    has_label: bool = True
    """True if there is a label column."""

    @property
    def arguments(self) -> Arguments:
        """The arguments with which ``forward`` is called."""
        return Arguments(self.inputs, self.names)

    def rows(self, start: int, stop: int) -> Batch:
        """The samples from ``start`` to ``stop``, as views unless they are sparse."""
        return self._map(lambda value: collate.narrow(value, start, stop), stop - start)

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
            has_label=self.has_label,
        )


@dataclass(frozen=True)
class Batches:
    """The batches of one rank in one epoch, from ``start_step`` on; iterate once.

    Step ``s`` holds of each shard the rows in `plan.batch_bounds` of its order (`data.shuffle`),
    whatever ``start_step`` was, one shard after the other; it may be empty.
    """

    shards: Sequence[ShardRows]
    """The rank's training rows, as their source has opened them, in the order of the shards."""
    plan: TrainPlan
    rank: int
    _: KW_ONLY
    seed: int
    """The run's."""
    epoch: int
    """Number of the epoch, from 0."""
    start_step: int = 0
    """First step, counted from the beginning of the epoch."""
    num_together: int | None = None
    """Steps whose rows are grouped by length, see `LengthGroups`; None: none."""
    prefetch: bool = True
    """True if a thread gathers the next batches while the current ones are used."""
    pin_memory: bool = False
    """Give page-locked memory, which a CUDA device can read by itself."""
    by_shard: bool = False
    """True if a step has a batch of each shard that has rows, in place of one of them all."""

    def __iter__(self) -> Generator[Batch, None, None]:
        """Yield the batches of each step. Close the iterator to end its thread early."""
        runs = _in_background(self._runs()) if self.prefetch else self._runs()
        with contextlib.closing(runs):
            for run in runs:
                yield from run

    def _runs(self) -> Generator[list[Batch], None, None]:
        plan, num_steps = self.plan, self.plan.steps_per_epoch
        pairs = zip(self.shards, plan.shards_of(self.rank), strict=True)
        turns = [(rows, plan.turn(shard)) for rows, shard in pairs if rows.num_rows]
        shards = [rows for rows, _ in turns]
        num_rows = sum(rows.num_rows for rows in shards)
        assert num_rows == plan.rows_of(self.rank), "shards do not fit the plan"
        with contextlib.ExitStack() as stack:
            epochs = [
                stack.enter_context(
                    contextlib.closing(
                        rows.epoch(self.seed, self.epoch, num_together=self.num_together)
                    )
                )
                for rows in shards
            ]
            in_step = [-(-rows.num_rows // num_steps) for rows in shards]
            pairs_of = zip(epochs, in_step, strict=True)
            step_bytes = sum(epoch.row_bytes * size for epoch, size in pairs_of)
            steps_at_once = min(num_steps, max(1, GATHER_BYTES // max(1, step_bytes)))
            most = [steps_at_once * size for size in in_step]
            # The consumer holds one buffer and the last batch of another, the next is ready, and
            # the thread fills the fourth. Pinned memory is taken afresh instead: torch's allocator
            # knows when the device has read it.
            num_buffers = 4 if self.prefetch else 2
            buffers = [Buffer(sum(most)) for _ in range(num_buffers)]
            parts = [Buffer(capacity) for capacity in most] if len(shards) > 1 else []
            # A run that is resumed gathers the same steps together: where a batch lies in memory,
            # to 16 bytes, decides about bits of matrix products.
            begin = self.start_step - self.start_step % steps_at_once
            for number, first in enumerate(range(begin, num_steps, steps_at_once)):
                steps = range(first, min(first + steps_at_once, num_steps))
                buffer = buffers[number % num_buffers]
                if self.pin_memory:
                    buffer = Buffer(sum(most), pin_memory=True)
                upto = np.arange(steps.start, steps.stop + 1)  # as `plan.batch_bounds` has it
                bounds = [(rows.num_rows * upto + turn) // num_steps for rows, turn in turns]
                found = [
                    epoch.read(int(own[0]), int(own[-1]), part)
                    for epoch, own, part in zip(epochs, bounds, parts or [buffer], strict=False)
                ]
                sizes = np.diff(np.array(bounds, np.int64).reshape(len(shards), len(upto)))
                columns = found[0] if len(found) == 1 else _by_step(plan, found, sizes, buffer)
                del found  # the memory of parts is free for the next ones
                counts = sizes.T.ravel() if self.by_shard else sizes.sum(0)
                used = max(0, self.start_step - first) * (len(shards) if self.by_shard else 1)
                yield cut(plan, columns, counts.tolist())[used:]


def _by_step(
    plan: TrainPlan, shards: Sequence[Mapping[str, Rows]], sizes: Array, buffer: Buffer
) -> dict[str, Rows]:
    """The rows of several shards for some steps, step by step instead of shard by shard.

    Args:
        plan: names the columns.
        shards: each shard's rows of all these steps.
        sizes: rows of each shard in each step, ``(shards, steps)``.
        buffer: memory for the result.
    """
    if not shards:
        return {column.key: collate.no_rows(column) for column in plan.columns}
    joined: dict[str, Rows] = {}
    for column in plan.columns:
        parts = [rows[column.key] for rows in shards]
        dense = [rows for rows in parts if isinstance(rows, torch.Tensor)]
        if dense:
            rows = buffer.rows(column.key, dense[0], int(sizes.sum()))
            # A step's rows of a shard lie together, so that they are copied as one block.
            joined[column.key] = torch.cat(_in_turn(dense, sizes), out=rows)
        else:
            numbers = torch.split_with_sizes(torch.arange(int(sizes.sum())), sizes.sum(1).tolist())
            order = torch.cat(_in_turn(numbers, sizes)).numpy()
            joined[column.key] = gather([rows for rows in parts if isinstance(rows, Ragged)], order)
    return joined


def _in_turn(shards: Sequence[torch.Tensor], sizes: Array) -> list[torch.Tensor]:
    """Rows of ``shards`` cut into pieces of ``sizes``: for each step one of every shard."""
    pairs = zip(shards, sizes.tolist(), strict=True)
    steps = zip(*(torch.split_with_sizes(rows, own) for rows, own in pairs), strict=True)
    return [piece for step in steps for piece in step]


def sequential_batches(shards: Sequence[ShardRows], plan: TrainPlan) -> Iterator[Batch]:
    """All rows in their order, shard by shard, at most ``plan.batch_size`` at once.

    For evaluation.
    """
    for rows in shards:
        for columns in rows.in_order(plan.batch_size):
            num_rows = len(next(iter(columns.values())))
            yield from cut(plan, columns, [num_rows])


def cut(plan: TrainPlan, columns: Mapping[str, Rows], sizes: Sequence[int]) -> list[Batch]:
    """Cut rows into batches of ``sizes``, each column in the role that the plan names.

    All batches of a column are cut at once: one after the other takes longer than gathering them.
    """
    sizes = list(sizes)
    if not sizes:
        return []
    Pieces = list[tuple[str | None, Sequence[torch.Tensor]]]
    by_role: dict[str, Pieces] = {"feature": [], "label": [], "weight": []}
    for column in plan.columns:
        by_role[column.role] += collate.split(column, columns[column.key], sizes)
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
    has_label = [bool(labels)] * len(sizes)
    parts = zip(inputs, targets, weights, sizes, named, has_label, strict=True)
    return [Batch(*values) for values in parts]


def copied_ahead(
    batches: Generator[Batch, None, None], device: torch.device
) -> Generator[Batch, None, None]:
    """Copy batches to a CUDA device, each while the one before is used, on a stream of its own.

    Sparse tensors stay where they are. Closes ``batches`` at the end.
    """
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def copied(value: torch.Tensor) -> torch.Tensor:
        return value.to(device, non_blocking=True) if value.layout == torch.strided else value

    def used(value: torch.Tensor) -> torch.Tensor:
        if value.is_cuda and value.layout == torch.strided:
            value.record_stream(torch.cuda.current_stream(device))
        return value

    def following() -> tuple[Batch, torch.cuda.Event] | None:
        batch = next(batches, None)
        if batch is None:
            return None
        with torch.cuda.stream(stream):
            return batch.map(copied), stream.record_event()

    with contextlib.closing(batches):
        ahead = following()
        while ahead is not None:
            batch, is_copied = ahead
            torch.cuda.current_stream(device).wait_event(is_copied)
            batch = batch.map(used)  # its memory is free once the step is done that uses it
            ahead = following()
            yield batch


def _in_background(runs: Generator[list[Batch], None, None]) -> Generator[list[Batch], None, None]:
    """Draw from ``runs`` in a thread, two items ahead; its exception is raised here.

    The thread closes them too, so a read that hangs does not keep the caller for ever.
    """
    pool = ThreadPoolExecutor(1, thread_name_prefix="sparkdl-batches")
    begun = deque(pool.submit(next, runs, None) for _ in range(2))
    try:
        while (run := begun.popleft().result()) is not None:
            begun.append(pool.submit(next, runs, None))
            yield run
    finally:
        for each in begun:
            each.cancel()
        closing = pool.submit(runs.close)
        is_closed = bool(wait([closing], _CLOSE_SECONDS).done)
        pool.shutdown(wait=is_closed)
        if is_closed:
            closing.result()
        else:
            logger.warning(
                "a read of rows that nobody needs any more has not ended within %g s, and is "
                "left alone: it waits for a disk, a network mount or the dataset's own code",
                _CLOSE_SECONDS,
            )
