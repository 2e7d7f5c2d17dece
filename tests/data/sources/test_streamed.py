from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from sparkdl.data.batches import Batches, sequential_batches
from sparkdl.data.collate import Rows
from sparkdl.data.plan import TrainPlan
from sparkdl.data.sources.streamed import StreamedRows
from sparkdl.errors import ConfigError, DataError
from tests.data.test_batches import COLUMNS, columns_of, copied, make_test_plan


def streamed(
    plan: TrainPlan, sizes: Sequence[int], *, together: int = 2, row_bytes: int = 28
) -> StreamedRows[tuple[int, int]]:
    starts = np.cumsum([0, *sizes]).tolist()
    pieces = [((start, size), size) for start, size in zip(starts, sizes, strict=False)]
    return StreamedRows(
        plan,
        pieces,
        lambda piece: columns_of(*piece),
        fingerprint="a",
        pieces_together=together,
        row_bytes=row_bytes,
    )


@pytest.mark.parametrize("sizes", [[10], [7, 1, 5, 9, 3], [1], [40, 40, 40]])
@pytest.mark.parametrize("together", [1, 2, 100])
@pytest.mark.parametrize("prefetch", [True, False])
@pytest.mark.parametrize("row_bytes", [1, 1 << 19, 1 << 23])
def test_an_epoch_holds_every_row_once(
    sizes: list[int], together: int, prefetch: bool, row_bytes: int
) -> None:
    plan = make_test_plan([sum(sizes)], 4)
    rows = streamed(plan, sizes, together=together, row_bytes=row_bytes)
    seen = copied(Batches([rows], plan, 0, seed=5, epoch=1, prefetch=prefetch))
    assert len(seen) == plan.steps_per_epoch
    assert sorted(torch.cat([batch.target for batch in seen]).tolist()) == list(range(sum(sizes)))
    for batch in seen:
        x, k = batch.inputs
        assert torch.equal(x[:, 1], -batch.target.float())
        assert k.tolist() == batch.target.tolist()


def test_the_order_follows_from_seed_and_epoch() -> None:
    plan = make_test_plan([50], 4)

    def order(seed: int, epoch: int, row_bytes: int = 28) -> list[int]:
        rows = streamed(plan, [10] * 5, row_bytes=row_bytes)
        found = copied(Batches([rows], plan, 0, seed=seed, epoch=epoch))
        return torch.cat([batch.target for batch in found]).tolist()

    assert order(1, 0) == order(1, 0, 1 << 23)
    assert len({tuple(order(s, e)) for s, e in [(1, 0), (1, 1), (2, 0)]}) == 3


@pytest.mark.parametrize("row_bytes", [1, 1 << 23])
def test_a_resumed_epoch_goes_on_where_it_was(row_bytes: int) -> None:
    plan = make_test_plan([44], 3)
    rows = streamed(plan, [10, 4, 10, 10, 10], row_bytes=row_bytes)
    whole = copied(Batches([rows], plan, 0, seed=0, epoch=3))
    for start in range(plan.steps_per_epoch + 1):
        rest = copied(Batches([rows], plan, 0, seed=0, epoch=3, start_step=start))
        assert [b.target.tolist() for b in rest] == [b.target.tolist() for b in whole[start:]]


def test_evaluation_sees_the_rows_as_they_are_stored() -> None:
    plan = make_test_plan([17], 4)
    batches = list(sequential_batches([streamed(plan, [6, 1, 10])], plan))
    assert torch.cat([batch.target for batch in batches]).tolist() == list(range(17))
    assert max(batch.num_rows for batch in batches) == 4


def test_memory_holds_two_windows_at_most() -> None:
    sizes = [8] * 12
    plan = make_test_plan([sum(sizes)], 4)
    alive: weakref.WeakSet[Held] = weakref.WeakSet()
    most = 0

    class Held(dict[str, torch.Tensor]):
        __hash__ = object.__hash__

    def read(piece: tuple[int, int]) -> dict[str, Rows]:
        nonlocal most
        held = Held(columns_of(*piece))
        alive.add(held)
        most = max(most, len(alive))
        return held

    pieces = [((start, 8), 8) for start in range(0, 96, 8)]
    rows = StreamedRows(plan, pieces, read, fingerprint="a", pieces_together=3, row_bytes=1 << 20)
    for batch in Batches([rows], plan, 0, seed=0, epoch=0):
        assert batch.num_rows
    assert 3 <= most <= 6  # as many as the thread that reads ahead comes to
    for _ in sequential_batches([rows], plan):
        pass
    assert most <= 6


def test_an_epoch_that_ends_early_leaves_no_thread() -> None:
    plan = make_test_plan([60], 4)
    before = threading.active_count()
    batches = iter(Batches([streamed(plan, [20] * 3)], plan, 0, seed=0, epoch=0))
    next(batches)
    assert threading.active_count() > before
    batches.close()
    assert threading.active_count() == before


def test_rows_that_are_gone_are_an_error() -> None:
    plan = make_test_plan([8], 4)
    rows: StreamedRows[int] = StreamedRows(
        plan,
        [(0, 8)],
        lambda _: columns_of(0, 7),
        fingerprint="a",
        pieces_together=1,
        row_bytes=28,
    )
    with pytest.raises(DataError, match="has 7 rows, not 8"):
        list(Batches([rows], plan, 0, seed=0, epoch=0))


def test_lengths_are_not_known() -> None:
    plan = make_test_plan([8], 4)
    with pytest.raises(ConfigError, match="groupByLength"):
        list(Batches([streamed(plan, [8])], plan, 0, seed=0, epoch=0, num_together=2))


def test_a_rank_without_rows_takes_all_steps() -> None:
    plan = make_test_plan([0, 9], 4, world_size=2)
    seen = list(Batches([streamed(plan, [])], plan, 0, seed=0, epoch=0))
    assert [batch.num_rows for batch in seen] == [0, 0, 0]
    assert [column.name for column in COLUMNS if column.role == "feature"] == ["x", "k"]
    assert seen[0].inputs[0].shape == (0, 2)
