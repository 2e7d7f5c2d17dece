"""The numbers of a run that follow from its data and configuration, before anything is launched.

Everything here is pure: rows per shard in, steps and batch boundaries out. The driver makes the
plan, logs it and sends it to the workers, so all ranks agree on it without talking.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

from sparkdl.data.shuffle_windows import WINDOWS, Windows, as_text
from sparkdl.errors import ConfigError, DataError
from sparkdl.inputs import Specification, Tensor

Role = Literal["feature", "label", "weight"]
Split = Literal["train", "validation"]
Holding = Literal["here", "planned", "near"]
"""How a rank comes to its shards: those that the plan gives it lie where it runs; it has those all
the same, wherever they lie; or shards are dealt to the ranks that are near them, by their speeds.
Nobody checks "here": a rank that Spark runs elsewhere raises `ShardLost`, so all are written anew.
"""
HOMES = "homes"
"""Key in a checkpoint's manifest of the plan's ``homes``."""


@dataclass(frozen=True, kw_only=True)
class Column:
    """One column of the spool, and what a batch makes of it."""

    name: str
    """Name of the DataFrame column; of several, all, with commas between."""
    role: Role
    """Use that the model makes of it."""
    dtype: str
    """numpy name of the stored dtype: ``float32``, ``int64``, ``uint8``, ``bool`` ..."""
    shape: tuple[int, ...]
    """Shape of one sample, ``()`` for a scalar, after ``inputShape`` was applied; of a sequence
    that of one of its values."""
    argument: str | None = None
    """Argument of ``forward``, or name of the label; None: by position, or the only label."""
    specification: Specification | None = None
    """Specification that the user gave; None: a tensor, named in the simple way."""
    longest: int = 0
    """Length of the longest sequence of all shards."""
    cast: str | None = None
    """dtype in which ``forward`` gets the values, if that is one of torch's alone: ``bfloat16``."""

    @property
    def key(self) -> str:
        """Tells the column apart from the plan's others, of which one may be of the same name."""
        return f"{self.role} {self.name if self.argument is None else self.argument}"

    @property
    def kind(self) -> Specification:
        """The specification, also where the user gave none."""
        return self.specification or Tensor(self.name)

    @property
    def stored_parts(self) -> list[tuple[str, tuple[int, ...]]]:
        """Dtype and inner shape of each array of values, where rows may differ in length."""
        if self.kind.num_parts == 2:
            return [("int32", ()), (self.dtype, ())]
        return [(self.dtype, () if self.kind.keeps_dtype else self.shape)]

    def reshaped(self, shape: tuple[int, ...]) -> Column:
        """The column with samples of another shape.

        Raises:
            DataError: a sample has another number of values.
        """
        if math.prod(self.shape) != math.prod(shape):
            remedy = ""
            if math.prod(self.shape) == math.prod(shape[1:]):
                remedy = f"; a shape is that of one row: leave out the batch, {list(shape[1:])}"
            raise DataError(
                f'column "{self.name}" has {math.prod(self.shape)} values per row (shape '
                f"{self.shape}), which shape {shape} cannot hold{remedy}"
            )
        return replace(self, shape=shape)


@dataclass(frozen=True, kw_only=True)
class SpoolColumn:
    """A column as it is prepared for a spool or an evaluation; its rows are not known yet."""

    name: str
    role: Role
    dtype: str
    """dtype of the values; for the result of a transform that of floating ones."""
    as_classes: bool = False
    """Values must be whole, non-negative numbers."""
    ignored: int | None = None
    """The class number that the loss leaves out, which may be any whole number; None: none."""
    argument: str | None = None
    """See `Column`."""
    specification: Specification | None = None
    """None: a tensor, named in the simple way."""
    shape: tuple[int, ...] | None = None
    """Shape of a row as stored, which the plan's column may change; None: not known yet."""
    cast: str | None = None
    """See `Column`; of floating values."""
    expression: Any = None
    """On the driver the Spark column that makes it of a DataFrame, casts included."""

    @property
    def kind(self) -> Specification:
        """The specification, also where the user gave none."""
        return self.specification or Tensor(self.name)

    def found(self, shape: tuple[int, ...], dtype: str | None = None, longest: int = 0) -> Column:
        """The column with what its rows have shown; ``dtype`` is None if there are none."""
        return Column(
            name=self.name,
            role=self.role,
            dtype=dtype or self.dtype,
            shape=shape,
            argument=self.argument,
            specification=self.specification,
            longest=longest,
            cast=self.cast if (dtype or self.dtype).startswith("float") else None,
        )


@dataclass(frozen=True, kw_only=True)
class Shard:
    """The place and the contents of one shard's spool; one row of the shard table."""

    shard_id: int
    host: str = ""
    """Empty: workers read the rows by themselves, wherever they are."""
    path: str = ""
    """Directory of the spool on that host."""
    num_rows: int
    """Training rows."""
    num_validation_rows: int
    fingerprint: str
    """Hash of the rows in their order: equal fingerprints mean the same rows in the same order."""
    num_bytes: int = 0
    hosts: tuple[str, ...] = ()
    """Hosts that can read it without the network, best first; empty: any."""

    @property
    def num_all_rows(self) -> int:
        """Rows for training and for validation."""
        return self.num_rows + self.num_validation_rows


@dataclass(frozen=True, kw_only=True)
class TrainPlan:
    """The derived numbers of a run. Make it with `make_plan`."""

    columns: tuple[Column, ...]
    shards: tuple[Shard, ...]
    world_size: int
    batch_size: int
    """Largest number of samples of a shard in one step; see ``takes_turns``."""
    epochs: int
    """Epochs of this run."""
    max_steps: int
    """Steps of this run after which it ends whatever the epoch; -1 for no limit."""
    steps_per_epoch: int
    shards_by_rank: tuple[tuple[int, ...], ...] = field(default=())
    """Shard ids of each rank; who holds a shard changes nothing of what is computed."""
    windows: Windows | None = None
    """Windows for rows that do not fit into memory; None: each shard's are mixed as a whole."""
    homes: str | None = None
    """Facts, besides the content, that the shards follow from; see `source.Contents.homes`."""
    first_epoch: int = 0
    """Number of the first epoch: those of the fits that this one goes on from count too."""
    first_step: int = 0
    """Steps of the fits that this one goes on from."""
    takes_turns: bool = False
    """True if shards are many and of any size: then ``batch_size`` is of shards that were all
    equal and fewer (see `make_plan`), and shards give the rows that a step has more than another
    at steps of their own, so that all batches are nearly equal."""

    @property
    def num_rows(self) -> int:
        """Training rows over all shards."""
        return sum(shard.num_rows for shard in self.shards)

    @property
    def num_validation_rows(self) -> int:
        """Validation rows over all shards."""
        return sum(shard.num_validation_rows for shard in self.shards)

    @property
    def total_steps(self) -> int:
        """Steps of the whole run, which are counted from ``first_step``."""
        steps = self.epochs * self.steps_per_epoch
        return min(steps, self.max_steps) if self.max_steps >= 0 else steps

    @property
    def end_epoch(self) -> int:
        """Number of the first epoch that is not trained any more."""
        return self.first_epoch + self.epochs

    @property
    def end_step(self) -> int:
        """Number of the first step that is too many, whatever the epoch; -1 for no limit."""
        return self.first_step + self.max_steps if self.max_steps >= 0 else -1

    def notes(self) -> dict[str, str]:
        """Return the notes of checkpoints on the order of rows, for runs that go on from them."""
        homes = {} if self.homes is None else {HOMES: self.homes}
        return {WINDOWS: as_text(self.windows), **homes}

    def shards_of(self, rank: int) -> tuple[Shard, ...]:
        """The shards of ``rank``, in shard-id order."""
        return tuple(self._by_id[shard_id] for shard_id in self.shards_by_rank[rank])

    def rows_of(self, rank: int) -> int:
        """Training rows of ``rank``."""
        return sum(shard.num_rows for shard in self.shards_of(rank))

    def rows_by_rank(self, step_in_epoch: int) -> list[int]:
        """Each rank's samples in a step: of each of its shards those in `batch_bounds`."""
        found = [0] * self.world_size
        for rank, rows, turn in self._rows_and_ranks:
            start, stop = batch_bounds(rows, self.steps_per_epoch, step_in_epoch, turn)
            found[rank] += stop - start
        return found

    def usual_rows(self, rank: int) -> int:
        """The number of samples that most steps of ``rank`` have, as its first thousand show."""
        rows = [(shard.num_rows, self.turn(shard)) for shard in self.shards_of(rank)]
        counts: Counter[int] = Counter()
        for step in range(min(self.steps_per_epoch, 1000)):
            bounds = (batch_bounds(n, self.steps_per_epoch, step, turn) for n, turn in rows)
            counts[sum(stop - start for start, stop in bounds)] += 1
        return counts.most_common(1)[0][0]

    def turn(self, shard: Shard) -> int:
        """Return where the shard begins to count in `batch_bounds`: neighbours far from each other.

        The number's bits in reverse (van der Corput's sequence) spread any run of neighbours.
        """
        place = int(f"{shard.shard_id:032b}"[::-1], 2) * self.steps_per_epoch >> 32
        return place if self.takes_turns else 0

    def for_shards(self, shards: Sequence[Shard]) -> TrainPlan:
        """The plan of the same shards, which lie elsewhere now; rows set aside stay so."""
        return replace(
            self,
            shards=tuple(
                replace(new, num_rows=old.num_rows, num_validation_rows=old.num_validation_rows)
                for old, new in zip(self.shards, shards, strict=True)
            ),
        )

    def held_by(self, shards_by_rank: Sequence[Sequence[int]]) -> TrainPlan:
        """The plan of a gang whose ranks hold these shards, in order."""
        held = tuple(map(tuple, shards_by_rank))
        return replace(self, world_size=len(held), shards_by_rank=held)

    @property
    def largest_spool_bytes(self) -> int:
        """The most bytes that the shards of one rank take."""
        return max(
            sum(shard.num_bytes for shard in self.shards_of(rank))
            for rank in range(self.world_size)
        )

    @property
    def fewest_in_a_step(self) -> int:
        """So many samples at least each rank has in every step."""
        return min(
            sum(shard.num_rows // self.steps_per_epoch for shard in self.shards_of(rank))
            for rank in range(self.world_size)
        )

    @cached_property
    def _by_id(self) -> dict[int, Shard]:
        return {shard.shard_id: shard for shard in self.shards}

    @cached_property
    def _rows_and_ranks(self) -> list[tuple[int, int, int]]:
        """The rank of each shard, its training rows, and its `turn`."""
        return [
            (rank, shard.num_rows, self.turn(shard))
            for rank in range(self.world_size)
            for shard in self.shards_of(rank)
        ]


@dataclass(frozen=True, kw_only=True)
class RoundPart:
    """The steps of the run that make a round on plain Spark stages; all within one epoch."""

    epoch: int
    """Number of the epoch, from 0."""
    step_in_epoch: int
    """First step, counted in the epoch."""
    step: int
    """First step, counted in the run."""
    num_steps: int


def batch_bounds(num_rows: int, num_steps: int, step: int, turn: int = 0) -> tuple[int, int]:
    """Cut ``num_rows`` into ``num_steps`` runs whose sizes differ by at most one.

    The runs of all steps are a partition of ``range(num_rows)``: every row exactly once. Which runs
    have one row more depends on ``turn``, which is less than ``num_steps``.
    """
    start, stop = num_rows * step + turn, num_rows * (step + 1) + turn
    return start // num_steps, stop // num_steps


def steps_per_epoch(rows_by_shard: Sequence[int], batch_size: int) -> int:
    """Smallest number of steps in which no shard gives more than ``batch_size`` samples a step."""
    return max(1, -(-max(rows_by_shard) // batch_size))


def assign_shards(num_shards: int, world_size: int) -> tuple[tuple[int, ...], ...]:
    """Give shards to ranks in contiguous, nearly equal runs, in shard-id order."""
    return tuple(
        tuple(range(num_shards * r // world_size, num_shards * (r + 1) // world_size))
        for r in range(world_size)
    )


_WORTH = 0.9
"""A shard goes to a rank that must fetch it if the longest epoch takes so much less, or shorter."""


def assign_near(
    rows: Sequence[int], near: Sequence[Collection[int]], speeds: Sequence[float] | None = None
) -> tuple[tuple[int, ...], ...]:
    """Give shards to ranks: where they are near, then so that all ranks are ready together.

    After MXNet's static balancing by the speed of devices. If all are near the ranks that
    `assign_shards` gives them to, and no speeds are known, it stays at that, unless ranks would
    have to wait for one that has much more rows.

    Args:
        rows: of each shard.
        near: by rank the numbers of the shards that it reads without the network.
        speeds: rows per second of each rank, in proportion; None: all alike.
    """
    ranks, default = range(len(near)), assign_shards(len(rows), len(near))
    is_near = all(set(own) <= set(near[rank]) for rank, own in enumerate(default))
    most = max(sum(rows[number] for number in own) for own in default)
    if is_near and speeds is None and _WORTH * most * len(near) <= sum(rows):
        return default
    even, speeds = speeds is None, speeds or [1.0] * len(near)
    held: list[set[int]] = [set() for _ in ranks]
    loads = [0.0] * len(near)

    def take(shard: int, rank: int, sign: int = 1) -> None:
        loads[rank] += sign * max(rows[shard], 0.5) / speeds[rank]  # also an empty one counts
        (held[rank].add if sign > 0 else held[rank].remove)(shard)

    for shard in sorted(range(len(rows)), key=lambda number: (-rows[number], number)):
        choice = [rank for rank in ranks if shard in near[rank]] or list(ranks)
        ready = [loads[rank] + rows[shard] / speeds[rank] for rank in choice]
        soonest = min(ready)
        first = [rank for rank, when in zip(choice, ready, strict=True) if when == soonest]
        take(shard, next((rank for rank in first if shard in default[rank]), first[0]))
    while True:
        slowest, idlest = max(ranks, key=loads.__getitem__), min(ranks, key=loads.__getitem__)
        best, moved = _WORTH * loads[slowest], None
        for shard in sorted(held[slowest]):
            take(shard, slowest, -1)
            take(shard, idlest)
            if (after := max(loads[slowest], loads[idlest])) < best:
                best, moved = after, shard
            take(shard, idlest, -1)
            take(shard, slowest)
        if moved is None:
            break
        take(moved, slowest, -1)
        take(moved, idlest)
    if is_near and even and max(loads) > _WORTH * most:
        return default
    return tuple(tuple(sorted(own)) for own in held)


def make_plan(
    *,
    columns: Sequence[Column],
    shards: Sequence[Shard],
    world_size: int,
    batch_size: int,
    epochs: int,
    max_steps: int = -1,
    windows: Windows | None = None,
    first_epoch: int = 0,
    first_step: int = 0,
    num_parts: int | None = None,
) -> TrainPlan:
    """Derive the numbers of a run; see `TrainPlan`.

    ``num_parts`` is for shards of any size: an epoch has the steps of so many equal ones. None:
    shards are nearly equal, and none gives more than ``batch_size`` rows in a step.

    Raises:
        ConfigError: there are more ranks than shards, or a count is not positive.
        DataError: there is no training row at all.
    """
    if world_size < 1 or world_size > len(shards):
        raise ConfigError(f"world_size must be in [1, {len(shards)}]; received {world_size}")
    for name, count in (("batch_size", batch_size), ("epochs", epochs)):
        if count < 1:
            raise ConfigError(f"{name} must be at least 1; received {count}")
    ordered = tuple(sorted(shards, key=lambda shard: shard.shard_id))
    rows = [shard.num_rows for shard in ordered]
    if not any(rows):
        if held_out := sum(shard.num_validation_rows for shard in ordered):
            raise DataError(
                f"all {held_out} rows are for validation, and none for training; check the column "
                "of validationIndicatorCol, or validationFraction"
            )
        raise DataError("the DataFrame has no training rows; check its filter")
    if num_parts is not None:
        rows = [-(-sum(rows) // num_parts)]
    return TrainPlan(
        columns=tuple(columns),
        shards=ordered,
        world_size=world_size,
        batch_size=batch_size,
        epochs=epochs,
        max_steps=max_steps,
        steps_per_epoch=steps_per_epoch(rows, batch_size),
        shards_by_rank=assign_shards(len(ordered), world_size),
        windows=windows,
        first_epoch=first_epoch,
        first_step=first_step,
        takes_turns=num_parts is not None,
    )
