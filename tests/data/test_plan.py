"""The plan's numbers: every row once an epoch, equal steps on all ranks."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest

from sparkdl.data.plan import (
    Column,
    Shard,
    TrainPlan,
    assign_near,
    assign_shards,
    batch_bounds,
    make_plan,
    steps_per_epoch,
)
from sparkdl.errors import ConfigError, DataError

FEATURE = Column(name="x", role="feature", dtype="float32", shape=(2,))


def shard(shard_id: int, num_rows: int, num_validation_rows: int = 0) -> Shard:
    return Shard(
        shard_id=shard_id,
        host="h",
        path=f"/spool/{shard_id}",
        num_rows=num_rows,
        num_validation_rows=num_validation_rows,
        fingerprint=str(shard_id),
        num_bytes=8 * num_rows,
    )


def plan(rows: list[int], *, world_size: int, batch_size: int = 4, epochs: int = 2,
         max_steps: int = -1) -> TrainPlan:  # fmt: skip
    return make_plan(
        columns=[FEATURE],
        shards=[shard(i, n, n // 2) for i, n in enumerate(rows)],
        world_size=world_size,
        batch_size=batch_size,
        epochs=epochs,
        max_steps=max_steps,
    )


@pytest.mark.parametrize(
    ("rows", "world_size"),
    [([10, 10], 2), ([13, 1], 2), ([7, 0], 2), ([1], 1), ([3, 5, 0, 9, 2], 2), ([1, 1, 1], 3)],
)
def test_every_row_once_and_no_batch_too_large(rows: list[int], world_size: int) -> None:
    made = plan(rows, world_size=world_size)
    global_rows = [0] * made.steps_per_epoch
    for rank in range(world_size):
        sizes = [made.rows_by_rank(step)[rank] for step in range(made.steps_per_epoch)]
        global_rows = [n + size for n, size in zip(global_rows, sizes, strict=True)]
        assert sum(sizes) == made.rows_of(rank)
        largest = made.batch_size * len(made.shards_by_rank[rank])
        assert all(0 <= size <= largest for size in sizes)
    assert sum(global_rows) == made.num_rows == sum(rows)
    assert min(global_rows) >= 1


def test_rows_set_aside_stay_so_where_shards_are_written_anew() -> None:
    made = plan([10, 8], world_size=2)
    held_out = replace(made, shards=(made.shards[0], shard(1, 6, 2)))
    moved = [replace(shard(number, rows), path="/new") for number, rows in ((0, 10), (1, 8))]
    found = held_out.for_shards(moved)
    assert [one.path for one in found.shards] == ["/new", "/new"]
    assert [(s.num_rows, s.num_validation_rows) for s in found.shards] == [(10, 5), (6, 2)]


def test_batches_differ_by_at_most_one_row() -> None:
    sizes = [stop - start for start, stop in (batch_bounds(23, 5, step) for step in range(5))]
    assert sum(sizes) == 23
    assert max(sizes) - min(sizes) == 1


@pytest.mark.parametrize(
    ("rows", "batch_size", "steps"), [([8, 3], 4, 2), ([9, 3], 4, 3), ([0], 4, 1), ([1], 100, 1)]
)
def test_steps_follow_the_largest_rank(rows: list[int], batch_size: int, steps: int) -> None:
    assert steps_per_epoch(rows, batch_size) == steps


def test_rows_may_be_more_than_32_bits_count() -> None:
    rows = [2**31 + 5, 3 * 2**31, 1, 2**33 - 7]
    made = plan(rows, world_size=4, batch_size=1000, epochs=3)
    assert made.num_rows == sum(rows) > 10**10
    assert made.num_validation_rows == sum(n // 2 for n in rows)
    assert made.steps_per_epoch == -(-(2**33 - 7) // 1000) and made.total_steps > 2 * 10**7
    last = made.steps_per_epoch - 1
    for number, num_rows in enumerate(rows):
        steps = made.steps_per_epoch
        assert batch_bounds(num_rows, steps, last)[1] == num_rows
        for step in (0, last // 3, last - 1):
            stop = batch_bounds(num_rows, steps, step)[1]
            start, end = batch_bounds(num_rows, steps, step + 1)
            assert start == stop and 0 <= end - start <= 1000
        assert made.rows_of(number) == num_rows
    assert made.largest_spool_bytes == 8 * (2**33 - 7)
    whole = assign_near(rows, [range(4)] * 2)
    assert sorted(sum(rows[n] for n in own) for own in whole) == [2**33 - 6, 2**33 + 5]
    turns = make_plan(
        columns=[FEATURE], shards=[shard(i, n) for i, n in enumerate(rows)], world_size=4,
        batch_size=1000, epochs=1, num_parts=4,
    )  # fmt: skip
    assert turns.steps_per_epoch == math.ceil(math.ceil(sum(rows) / 4) / 1000)
    assert sum(turns.rows_by_rank(0)) <= 4 * 1000 + 4


def test_steps_in_all() -> None:
    assert plan([8, 8], world_size=2).total_steps == 4
    assert plan([8, 8], world_size=2, max_steps=3).total_steps == 3
    assert plan([8, 8], world_size=2, max_steps=30).total_steps == 4
    later = replace(plan([8, 8], world_size=2, max_steps=3), first_epoch=5, first_step=10)
    assert (later.end_epoch, later.end_step) == (7, 13)
    assert replace(later, max_steps=-1).end_step == -1


def test_shards_go_to_ranks_in_contiguous_runs() -> None:
    assert assign_shards(5, 2) == ((0, 1), (2, 3, 4))
    assert assign_shards(2, 2) == ((0,), (1,))
    made = plan([1, 2, 3, 4, 5], world_size=2)
    assert [s.shard_id for s in made.shards_of(1)] == [2, 3, 4]
    assert made.rows_of(1) == 12
    assert made.num_validation_rows == 6
    assert made.largest_spool_bytes == 8 * 12
    assert plan([4, 4, 9, 9], world_size=2).fewest_in_a_step == 2  # one of each shard of rank 0
    held = made.held_by([[4], [0, 3], [1, 2]])
    assert [held.rows_of(rank) for rank in range(3)] == [5, 5, 5]
    assert [sum(rows) for rows in zip(*map(held.rows_by_rank, range(2)), strict=True)] == [5, 5, 5]


@pytest.mark.parametrize(
    ("rows", "near", "expected"),
    [
        ([5, 5, 5, 5], [{0, 1, 2, 3}] * 2, ((0, 1), (2, 3))),  # where all are near: as planned
        ([5, 5, 5, 5], [{2, 3}, {0, 1}], ((2, 3), (0, 1))),
        ([5, 5, 5, 5, 5], [{0, 1, 2, 3, 4}, set()], ((2, 3, 4), (0, 1))),  # some must move
        ([9, 1, 1, 1], [{0, 1}, {2, 3}, {2, 3}], ((0, 1), (3,), (2,))),  # not worth the way
        ([10, 9], [{0, 1}, set()], ((1,), (0,))),
        ([0, 0, 0], [{0, 1, 2}, set(), set()], ((2,), (0,), (1,))),  # nobody is without a shard
        ([10, 9, 8], [{0, 1, 2}, {2}], ((0,), (1, 2))),
        ([10] * 4, [set(), set()], ((0, 3), (1, 2))),  # nobody has them
    ],
)
def test_shards_go_where_they_are_near(
    rows: list[int], near: list[set[int]], expected: tuple[tuple[int, ...], ...]
) -> None:
    assert assign_near(rows, near) == expected


def test_faster_ranks_get_more_rows() -> None:
    everywhere = [set(range(8))] * 2
    found = assign_near([10] * 8, everywhere, speeds=[3.0, 1.0])
    assert [len(own) for own in found] == [6, 2]
    assert assign_near([10, 20], [{0, 1}] * 2, speeds=[3.0, 2.0]) == ((1,), (0,))


def test_a_thousand_shards_are_assigned_at_once() -> None:
    near = [{n for n in range(2000) if n % 500 == rank % 500} for rank in range(999)]
    found = assign_near([100 + n % 7 for n in range(2000)], near)
    assert max(map(len, found)) <= 4 and sum(map(len, found)) == 2000


def test_the_order_of_the_shard_table_does_not_matter() -> None:
    backwards = make_plan(
        columns=[FEATURE], shards=[shard(1, 5), shard(0, 3)], world_size=2, batch_size=4, epochs=1
    )
    assert [s.shard_id for s in backwards.shards] == [0, 1]
    assert (backwards.rows_of(0), backwards.rows_of(1)) == (3, 5)


@pytest.mark.parametrize("world_size", [0, 3])
def test_the_world_must_fit_the_shards(world_size: int) -> None:
    with pytest.raises(
        ConfigError, match=rf"world_size must be in \[1, 2\]; received {world_size}"
    ):
        plan([1, 1], world_size=world_size)


@pytest.mark.parametrize("counts", [{"batch_size": 0}, {"epochs": 0}])
def test_counts_are_positive(counts: dict[str, int]) -> None:
    (name,) = counts
    with pytest.raises(ConfigError, match=f"{name} must be at least 1; received 0"):
        plan([1, 1], world_size=1, **counts)


def test_without_training_rows_there_is_nothing_to_plan() -> None:
    with pytest.raises(DataError, match="no training rows"):
        plan([0, 0], world_size=2)


@pytest.mark.parametrize(
    ("rows", "world_size"),
    [([37] * 12, 2), ([3] * 100, 4), ([900, 41, 40, 7, 0, 3, 300, 58], 2), ([20, 13], 2)],
)
def test_shards_of_any_size_take_turns(rows: list[int], world_size: int) -> None:
    made = make_plan(
        columns=[FEATURE], shards=[shard(i, n) for i, n in enumerate(rows)],
        world_size=world_size, batch_size=8, epochs=1, num_parts=world_size,
    )  # fmt: skip
    num_steps = made.steps_per_epoch
    assert num_steps == -(-sum(rows) // (8 * world_size))
    for each in made.shards:
        bounds = [
            batch_bounds(each.num_rows, num_steps, t, made.turn(each)) for t in range(num_steps)
        ]
        assert bounds[0][0] == 0 and bounds[-1][1] == each.num_rows
        assert all(before[1] == after[0] for before, after in itertools.pairwise(bounds))
    for rank in range(world_size):
        sizes = [made.rows_by_rank(step)[rank] for step in range(num_steps)]
        assert sum(sizes) == made.rows_of(rank)
        assert max(sizes) - min(sizes) <= (3 if len(set(rows)) == 1 else 4)
    if len(set(rows)) == 1:  # without turns all would give a row more in the same steps
        plain = replace(made, takes_turns=False)
        sizes = [sum(plain.rows_by_rank(step)) for step in range(num_steps)]
        assert max(sizes) - min(sizes) == len(rows)


def test_ranks_that_read_everything_get_equally_many_rows() -> None:
    everything = [range(4)] * 2
    assert assign_near([10, 11, 10, 9], everything) == ((0, 1), (2, 3))
    assert assign_near([40, 30, 10, 20], everything) == ((0, 2), (1, 3))
    assert assign_near([100, 1, 1, 1], everything) == ((0, 1), (2, 3))  # it saves too little
