from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from sparkdl.data import batches
from sparkdl.data.batches import Batch, Batches, sequential_batches
from sparkdl.data.collate import Rows
from sparkdl.data.gather import gather_rows
from sparkdl.data.plan import Column, Shard, TrainPlan, batch_bounds, make_plan
from sparkdl.data.ragged import Ragged, offsets_of
from sparkdl.data.shuffle import cut_rows, epoch_order, windowed_order
from sparkdl.data.shuffle_windows import Windows
from sparkdl.data.spool.mapped import MappedRows, ShardData
from sparkdl.inputs import Sequence as Tokens
from tests.data.row_windows import whole as order_of_windows

COLUMNS = (
    Column(name="y", role="label", dtype="int64", shape=()),
    Column(name="x", role="feature", dtype="float32", shape=(2,)),
    Column(name="w", role="weight", dtype="float32", shape=()),
    Column(name="k", role="feature", dtype="int32", shape=()),
)


def columns_of(first: int, count: int) -> dict[str, Rows]:
    y = torch.arange(first, first + count)
    values = (y, torch.stack([y, -y], 1).float(), y / 2, y.int())
    return {column.key: rows for column, rows in zip(COLUMNS, values, strict=True)}


def make_shards(rows: Sequence[int]) -> list[ShardData]:
    shards, first = [], 0
    for number, count in enumerate(rows):
        shards.append(ShardData(str(number), columns_of(first, count)))
        first += count
    return shards


def make_test_plan(
    rows: Sequence[int],
    batch_size: int,
    columns: tuple[Column, ...] = COLUMNS,
    world_size: int = 1,
) -> TrainPlan:
    table = [
        Shard(
            shard_id=i,
            host="",
            path="",
            num_rows=count,
            num_validation_rows=0,
            fingerprint=str(i),
            num_bytes=0,
        )
        for i, count in enumerate(rows)
    ]
    return make_plan(
        columns=columns, shards=table, world_size=world_size, batch_size=batch_size, epochs=1
    )


def copied(source: Batches) -> list[Batch]:
    return [batch.map(torch.clone) for batch in source]


def places_of(source: Batches) -> list[int]:
    """Where batches lie in memory, as far as it decides about bits of matrix products."""
    return [batch.inputs[0].data_ptr() % 16 for batch in source]


def batches_of(shards: Sequence[ShardData], plan: TrainPlan, rank: int, **options: Any) -> Batches:
    return Batches([MappedRows(shard, plan) for shard in shards], plan, rank, **options)


def in_order(shards: Sequence[ShardData], plan: TrainPlan) -> Iterator[Batch]:
    return sequential_batches([MappedRows(shard, plan) for shard in shards], plan)


def by_step(orders: Sequence[Sequence[int]], num_steps: int) -> list[list[int]]:
    """The rows of each step, where those of the shards follow each other in the data."""
    steps: list[list[int]] = [[] for _ in range(num_steps)]
    first = 0
    for order in orders:
        for step, rows in enumerate(steps):
            low, high = batch_bounds(len(order), num_steps, step)
            rows += [first + place for place in order[low:high]]
        first += len(order)
    return steps


@pytest.mark.parametrize("rows", [[10], [7, 0, 5], [1], [1, 1]])
@pytest.mark.parametrize("prefetch", [True, False])
@pytest.mark.parametrize("gather_bytes", [1, 80, 1 << 20])
def test_epoch_holds_every_row_once_in_order(
    monkeypatch: pytest.MonkeyPatch, rows: list[int], prefetch: bool, gather_bytes: int
) -> None:
    monkeypatch.setattr(batches, "GATHER_BYTES", gather_bytes)
    plan = make_test_plan(rows, 4)
    source = batches_of(make_shards(rows), plan, 0, seed=5, epoch=1, prefetch=prefetch)
    seen = copied(source)
    orders = [epoch_order(5, 1, str(n), count).tolist() for n, count in enumerate(rows)]

    assert [batch.target.tolist() for batch in seen] == by_step(orders, plan.steps_per_epoch)
    for batch in seen:
        x, k = batch.inputs
        assert batch.num_rows == len(batch.target) <= 4 * len(rows)
        assert x.dtype == torch.float32
        assert k.dtype == torch.int32
        assert torch.equal(x[:, 1], -batch.target.float())
        assert k.tolist() == batch.target.tolist()
        assert torch.equal(batch.weight, batch.target / 2)


@pytest.mark.parametrize("start_step", [0, 1, 3, 4])
def test_start_step_continues_the_same_epoch(start_step: int) -> None:
    plan = make_test_plan([15], 4)
    shards = make_shards([15])
    whole = copied(batches_of(shards, plan, 0, seed=0, epoch=0))
    rest = copied(batches_of(shards, plan, 0, seed=0, epoch=0, start_step=start_step))
    assert [b.target.tolist() for b in rest] == [b.target.tolist() for b in whole[start_step:]]
    assert (
        places_of(batches_of(shards, plan, 0, seed=0, epoch=0, start_step=start_step))
        == (places_of(batches_of(shards, plan, 0, seed=0, epoch=0))[start_step:])
    )


def test_batches_have_the_rows_that_the_plan_counts() -> None:
    plan = replace(make_test_plan([10, 7, 5], 2), takes_turns=True)
    found = batches_of(make_shards([10, 7, 5]), plan, 0, seed=5, epoch=1)
    sizes = [plan.rows_by_rank(step)[0] for step in range(plan.steps_per_epoch)]
    assert [batch.num_rows for batch in found] == sizes
    in_step = [len(rows) for rows in by_step([range(10), range(7), range(5)], len(sizes))]
    assert sizes != in_step


@pytest.mark.parametrize("gather_bytes", [1, 80, 1 << 20])
def test_each_shard_may_have_batches_of_its_own(
    monkeypatch: pytest.MonkeyPatch, gather_bytes: int
) -> None:
    monkeypatch.setattr(batches, "GATHER_BYTES", gather_bytes)
    rows = [10, 0, 7, 1]
    plan, shards = make_test_plan(rows, 4), make_shards(rows)
    apart = copied(batches_of(shards, plan, 0, seed=5, epoch=1, by_shard=True))
    found = [[b.target.tolist() for b in apart[n : n + 3]] for n in range(0, len(apart), 3)]
    orders = [epoch_order(5, 1, str(n), count).tolist() for n, count in enumerate(rows)]
    assert [list(chain(*step)) for step in found] == by_step(orders, plan.steps_per_epoch)
    assert [list(map(len, step)) for step in found] == [[3, 2, 0], [3, 2, 0], [4, 3, 1]]
    rest = batches_of(shards, plan, 0, seed=5, epoch=1, by_shard=True, start_step=2)
    assert [b.target.tolist() for b in copied(rest)] == found[2]
    sequences = Column(name="s", role="feature", dtype="int64", shape=(), specification=Tokens("s"))
    empty = make_test_plan([0, 3], 4, (*COLUMNS, sequences), world_size=2)
    assert copied(batches_of(make_shards([0]), empty, 0, seed=5, epoch=1, by_shard=True)) == []


@pytest.mark.parametrize("rows", [[40], [17, 0, 5, 30]])
@pytest.mark.parametrize("gather_bytes", [1, 80, 1 << 20])
def test_windows_change_the_order_alone(
    monkeypatch: pytest.MonkeyPatch, rows: list[int], gather_bytes: int
) -> None:
    monkeypatch.setattr(batches, "GATHER_BYTES", gather_bytes)
    windows = Windows(group_rows=3, groups_together=4)
    plan = replace(make_test_plan(rows, 4), windows=windows)
    shards = make_shards(rows)
    seen = [b.target.tolist() for b in copied(batches_of(shards, plan, 0, seed=5, epoch=1))]
    orders = [
        order_of_windows(windowed_order(5, 1, str(number), cut_rows(count, 3), 4))
        for number, count in enumerate(rows)
    ]
    assert seen == by_step(orders, plan.steps_per_epoch)
    assert sorted(chain(*seen)) == list(range(sum(rows)))
    whole = batches_of(shards, replace(plan, windows=None), 0, seed=5, epoch=1)
    assert [len(step) for step in seen] == [batch.num_rows for batch in whole]
    for start in (1, plan.steps_per_epoch - 1, plan.steps_per_epoch):
        rest = copied(batches_of(shards, plan, 0, seed=5, epoch=1, start_step=start))
        assert [b.target.tolist() for b in rest] == seen[start:]


def test_sequences_of_several_shards_stay_with_their_rows() -> None:
    tokens = Column(
        name="s", role="feature", dtype="int64", shape=(), specification=Tokens("s"), longest=3
    )
    shards = []
    for first, count in ((1, 7), (8, 5)):
        y = np.arange(first, first + count)
        lengths = y % 3 + 1
        sequences = Ragged((np.repeat(y, lengths),), offsets_of(lengths), ())
        columns: dict[str, Rows] = {COLUMNS[0].key: torch.from_numpy(y), tokens.key: sequences}
        shards.append(ShardData(str(first), columns))
    plan = make_test_plan([7, 5], 4, (COLUMNS[0], tokens))
    found = copied(batches_of(shards, plan, 0, seed=5, epoch=1))
    assert sorted(y for batch in found for y in batch.target.tolist()) == list(range(1, 13))
    for batch in found:
        assert torch.equal(batch.inputs[0].amax(1), batch.target)
        assert torch.equal((batch.inputs[0] > 0).sum(1), batch.target % 3 + 1)


def test_windows_do_not_change_validation() -> None:
    shards, plan = make_shards([5, 0, 13]), make_test_plan([5, 0, 13], 4)
    windowed = replace(plan, windows=Windows(group_rows=3, groups_together=2))
    whole = [batch.target.tolist() for batch in in_order(shards, plan)]
    assert [batch.target.tolist() for batch in in_order(shards, windowed)] == whole


def test_rank_without_rows_takes_all_steps() -> None:
    plan = make_test_plan([0, 9], 4, world_size=2)
    seen = list(batches_of(make_shards([0, 9])[:1], plan, 0, seed=0, epoch=0))
    assert [batch.num_rows for batch in seen] == [0, 0, 0]
    assert seen[0].inputs[0].shape == (0, 2)
    assert seen[0].inputs[1].dtype == torch.int32


def test_without_label_the_inputs_are_the_target() -> None:
    x, k = COLUMNS[1], COLUMNS[3]
    single = next(in_order(make_shards([3]), make_test_plan([3], 4, (x,))))
    assert single.target is single.inputs[0]
    assert single.weight is None
    both = next(in_order(make_shards([3]), make_test_plan([3], 4, (x, k))))
    assert both.target is both.inputs
    part = both.map(torch.clone).rows(1, 3)
    assert part.num_rows == 2
    assert torch.equal(part.target[1], both.inputs[1][1:3])


def test_a_column_may_be_input_and_label_each_in_its_own_shape() -> None:
    columns = (
        Column(name="x", role="feature", dtype="float32", shape=(1, 2)),
        Column(name="x", role="label", dtype="float32", shape=(2,)),
    )
    x = torch.arange(6.0).reshape(3, 2)
    rows = {columns[0].key: x.reshape(3, 1, 2), columns[1].key: x}
    plan = make_test_plan([3], 4, columns)
    (batch,) = batches_of([ShardData("0", rows)], plan, 0, seed=0, epoch=0)
    batch.inputs[0].zero_()  # as a module may do, which must not reach the label
    assert batch.inputs[0].shape == (3, 1, 2)
    assert sorted(batch.target.tolist()) == x.tolist()


def test_sequential_batches_are_copies_in_order() -> None:
    shards = make_shards([5, 0, 3])
    seen = list(in_order(shards, make_test_plan([5, 0, 3], 4)))
    assert [batch.target.tolist() for batch in seen] == [[0, 1, 2, 3], [4], [5, 6, 7]]
    seen[0].inputs[0].zero_()
    assert shards[0].columns["feature x"][1, 0] == 1


@pytest.mark.parametrize("rows", [[64], [40, 24]])
def test_memory_is_used_again(rows: list[int]) -> None:
    plan = make_test_plan(rows, 4)
    shards = make_shards(rows)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batches, "GATHER_BYTES", 1)
        source = batches_of(shards, plan, 0, seed=0, epoch=0)
        places = {batch.inputs[0].data_ptr() for batch in source}
    assert len(places) <= 4


def test_failure_in_the_thread_reaches_the_consumer() -> None:
    shards = make_shards([8])
    shards[0].columns["feature x"] = torch.zeros(2, 2)  # shorter than it says
    with pytest.raises(IndexError, match="out of range"):
        list(batches_of(shards, make_test_plan([8], 2), 0, seed=0, epoch=0))


def test_thread_ends_when_the_consumer_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "GATHER_BYTES", 1)
    before = threading.active_count()
    source = iter(batches_of(make_shards([100]), make_test_plan([100], 1), 0, seed=0, epoch=0))
    next(source)
    assert threading.active_count() == before + 1
    source.close()
    assert threading.active_count() == before


@pytest.mark.parametrize("prefetch", [True, False])
def test_who_stops_closes_the_rows_and_hears_if_they_cannot_be_closed(prefetch: bool) -> None:
    rows, closed = MappedRows(make_shards([8])[0], make_test_plan([8], 2)), []

    class Epoch:
        row_bytes = batches.GATHER_BYTES

        def __init__(self, *arguments: Any, **options: Any) -> None:
            self.read = rows.epoch(*arguments, **options).read

        def close(self) -> None:
            closed.append(self)
            raise OSError("the disk is gone")

    opened: Any = SimpleNamespace(num_rows=8, epoch=Epoch)
    source = iter(Batches([opened], make_test_plan([8], 2), 0, seed=0, epoch=0, prefetch=prefetch))
    next(source)
    with pytest.raises(OSError, match="the disk is gone"):
        source.close()
    assert len(closed) == 1


def test_a_read_that_hangs_does_not_keep_who_stops(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(batches, "GATHER_BYTES", 1)
    monkeypatch.setattr(batches, "_CLOSE_SECONDS", 0.1)
    released, calls = threading.Event(), 0

    def cut(*arguments: Any) -> list[Batch]:
        nonlocal calls
        calls += 1
        assert calls == 1 or released.wait(20)
        return original(*arguments)

    original = batches.cut
    monkeypatch.setattr(batches, "cut", cut)
    before = threading.active_count()
    source = iter(batches_of(make_shards([10]), make_test_plan([10], 1), 0, seed=0, epoch=0))
    next(source)
    while calls < 2:
        time.sleep(0.01)
    began = time.monotonic()
    source.close()
    assert time.monotonic() - began < 10
    assert "has not ended within 0.1 s, and is left alone" in caplog.text
    released.set()
    while threading.active_count() > before:
        assert time.monotonic() - began < 20
        time.sleep(0.01)
    assert calls == 2  # what had not begun was not begun any more


def test_batch_stays_while_the_next_ones_are_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "GATHER_BYTES", 1)
    for batch in batches_of(make_shards([20]), make_test_plan([20], 2), 0, seed=0, epoch=0):
        before = batch.inputs[0].clone()
        time.sleep(0.005)  # time enough for the thread to run ahead
        assert torch.equal(batch.inputs[0], before)


def test_batch_may_be_changed_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "GATHER_BYTES", 1)
    weight = torch.nn.Parameter(torch.ones(()))
    plan, shards = make_test_plan([20], 2), make_shards([20])
    for batch in batches_of(shards, plan, 0, seed=0, epoch=0, prefetch=False):
        batch.inputs[0].mul_(weight).sum().backward()
    assert weight.grad is not None


def test_gather_from_several_sources() -> None:
    sources = [torch.arange(3), torch.arange(3, 3), torch.arange(3, 10)]
    out = torch.empty(4, dtype=torch.int64)
    gather_rows(sources, np.array([9, 0, 3, 2], dtype=np.int32), out)
    assert out.tolist() == [9, 0, 3, 2]
