"""The batches that a training function gets: every row once, in an order that repeats."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from sparkdl.data.plan import Column, Shard, SpoolColumn
from sparkdl.data.spool.spool_source import SpoolSource
from sparkdl.data.spool.writer import SpoolWriter
from sparkdl.errors import ConfigError, DataError, ShardLost
from sparkdl.worker.context import Context
from sparkdl.worker.function_loader import DataSet, Loader

COLUMNS = (
    Column(name="x", role="feature", dtype="float32", shape=(2,), argument="x"),
    Column(name="y", role="feature", dtype="int64", shape=(), argument="y"),
)
ROWS = (11, 9)


def spooled(directory: Path, shard_id: int, rows: Sequence[int]) -> Shard:
    """A shard whose row ``n`` holds ``[n, -n]`` and ``n``."""
    batch = pa.record_batch(
        [
            pa.array([[float(n), -float(n)] for n in rows], pa.list_(pa.float32())),
            pa.array(rows, pa.int64()),
            pa.array(rows, pa.int64()),
        ],
        names=["x", "y", "hash"],
    )
    columns = [SpoolColumn(name=c.name, role=c.role, dtype=c.dtype) for c in COLUMNS]
    with SpoolWriter(directory, columns, has_validation=False) as out:
        out.write(batch)
    return replace(out.summary().shard, shard_id=shard_id)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> DataSet:
    """Rows 0 to 10 in the first shard, 11 to 19 in the second."""
    folder = tmp_path_factory.mktemp("spools")
    shards = (
        spooled(folder / "0", 0, range(ROWS[0])),
        spooled(folder / "1", 1, range(ROWS[0], sum(ROWS))),
    )
    return DataSet(columns=COLUMNS, shards=shards, source=SpoolSource())


def loader(data: DataSet, rank: int = 0, world_size: int = 2, **changes: Any) -> Loader:
    options: dict[str, Any] = {
        "device": torch.device("cpu"), "batch_size": 4, "columns": None, "shuffle": True, "seed": 0,
    }  # fmt: skip
    return Loader(data, name="train", rank=rank, world_size=world_size, **{**options, **changes})


def labels(batches: Loader) -> list[list[int]]:
    return [batch["y"].tolist() for batch in batches]


def test_every_row_is_in_one_batch_of_one_rank(data: DataSet) -> None:
    both = [loader(data, rank) for rank in (0, 1)]
    assert [len(one) for one in both] == [3, 3]
    assert [one.num_rows for one in both] == [20, 20]
    found = [labels(one) for one in both]
    assert sorted(n for rank in found for batch in rank for n in batch) == list(range(20))
    assert all(1 <= len(batch) <= 4 for rank in found for batch in rank)


def test_epochs_differ_and_repeat(data: DataSet) -> None:
    one = loader(data)
    first, second = labels(one), labels(one)
    assert first != second
    one.set_epoch(0)
    assert labels(one) == first
    assert labels(one) == second
    assert labels(loader(data, seed=1)) != first


def test_an_epoch_goes_on_in_its_middle(data: DataSet) -> None:
    whole = labels(loader(data))
    for shuffle in (True, False):
        whole = labels(loader(data, shuffle=shuffle))
        rest = loader(data, shuffle=shuffle)
        rest.set_epoch(0, start=2)
        assert labels(rest) == whole[2:]


def test_without_shuffling_rows_come_in_their_order(data: DataSet) -> None:
    stored = loader(data, rank=1, shuffle=False)
    assert labels(stored) == [[11, 12, 13, 14], [15, 16, 17, 18], [19]]
    assert labels(stored) == labels(stored)
    assert len(stored) == 3
    assert labels(loader(data, rank=0, world_size=1, shuffle=False))[-1] == [19]


@pytest.fixture(scope="module")
def five(tmp_path_factory: pytest.TempPathFactory) -> DataSet:
    """Five shards of 7 to 11 rows."""
    folder, shards, first = tmp_path_factory.mktemp("five"), [], 0
    for number in range(5):
        rows = range(first, first := first + 7 + number)
        shards.append(spooled(folder / str(number), number, rows))
    return DataSet(columns=COLUMNS, shards=tuple(shards), source=SpoolSource())


def united(data: DataSet, world_size: int, start: int = 0) -> list[list[int]]:
    """The rows of all ranks' batches of each step of epoch 1, sorted."""
    loaders = [loader(data, rank, world_size) for rank in range(world_size)]
    for one in loaders:
        one.set_epoch(1, start)
    steps = zip(*map(labels, loaders), strict=True)
    return [sorted(n for batch in step for n in batch) for step in steps]


def test_the_batches_of_all_ranks_together_are_the_same_however_many_there_are(
    five: DataSet,
) -> None:
    once = united(five, 1)
    assert sorted(n for step in once for n in step) == list(range(45))
    assert [loader(five, 0, size).rows_of_all(1) for size in (1, 3)] == [len(once[1])] * 2
    elsewhere = replace(five, shards_by_rank=((4,), (0, 3), (1, 2)))
    for size, data in [(2, five), (3, elsewhere), (4, five)]:
        assert {len(loader(data, rank, size)) for rank in range(size)} == {len(once)}
        assert united(data, size) == once
        assert united(data, size, start=1) == once[1:]  # it goes on with another number


def test_several_shards_come_one_after_the_other_in_their_order(five: DataSet) -> None:
    one = loader(five, 1, 2, shuffle=False)  # shards 2, 3 and 4
    assert [n for batch in labels(one) for n in batch] == list(range(15, 45))
    assert len(labels(one)) == len(one) == 3 + 3 + 3
    with pytest.raises(ConfigError, match="shuffle=False, 0"):
        one.rows_of_all(0)
    with pytest.raises(ConfigError, match=r"in \[0, 2\].* 3"):
        loader(five, 1, 2).rows_of_all(3)


def test_columns_are_chosen_in_their_order(data: DataSet) -> None:
    one = loader(data, columns=["y", "x"], shuffle=False)
    y, x = next(iter(one))
    assert y.tolist() == [0, 1, 2, 3]
    assert x.tolist() == [[0, 0], [1, -1], [2, -2], [3, -3]]
    assert x.dtype == torch.float32
    with pytest.raises(ConfigError, match="no column 'z'; it has 'x', 'y'"):
        loader(data, columns=["z"])


def test_batches_belong_to_the_caller(data: DataSet) -> None:
    for shuffle in (True, False):
        kept = list(loader(data, columns=["x"], shuffle=shuffle))
        copies = [x.clone() for (x,) in kept]
        for (x,) in loader(data, columns=["x"], shuffle=shuffle):
            x.zero_()
        assert all(torch.equal(x, copy) for (x,), copy in zip(kept, copies, strict=True))
        again = list(loader(data, columns=["x"], shuffle=shuffle))
        assert all(torch.equal(x, copy) for (x,), copy in zip(again, copies, strict=True))


def test_too_few_rows_for_a_rank_are_an_error_with_shuffling(tmp_path: Path) -> None:
    shards = (spooled(tmp_path / "0", 0, range(10)), spooled(tmp_path / "1", 1, range(2)))
    small = DataSet(columns=COLUMNS, shards=shards, source=SpoolSource())
    with pytest.raises(DataError, match="2 rows for rank 1, but an epoch has 5 batches"):
        loader(small, batch_size=2)
    assert [len(labels(loader(small, r, batch_size=2, shuffle=False))) for r in (0, 1)] == [5, 1]


def test_where_ranks_come_and_go_each_shard_must_do_for_one(tmp_path: Path) -> None:
    shards = (spooled(tmp_path / "0", 0, range(10)), spooled(tmp_path / "1", 1, range(2)))
    uneven = DataSet(columns=COLUMNS, shards=shards, source=SpoolSource())
    assert len(labels(loader(uneven, world_size=1, batch_size=2))) == 5
    with pytest.raises(DataError, match="2 rows for shard 1, but an epoch has 5 batches"):
        loader(replace(uneven, shards_by_rank=((0, 1),)), world_size=1, batch_size=2)


def test_a_rank_without_rows_is_told_what_helps(tmp_path: Path) -> None:
    shards = (spooled(tmp_path / "0", 0, [1]), spooled(tmp_path / "1", 1, []))
    one_row = DataSet(columns=COLUMNS, shards=shards, source=SpoolSource())
    with pytest.raises(DataError, match="none of them for rank 1; use fewer workers or shards"):
        loader(one_row, batch_size=64)


def test_a_shard_that_is_not_here_is_lost(data: DataSet, tmp_path: Path) -> None:
    shards = tuple(
        Shard(**{**{n: getattr(s, n) for n in s.__dataclass_fields__}, "path": str(tmp_path)})
        for s in data.shards
    )
    elsewhere = loader(DataSet(columns=COLUMNS, shards=shards, source=SpoolSource()))
    with pytest.raises(ShardLost):
        next(iter(elsewhere))


@pytest.mark.parametrize(("epoch", "start"), [(-1, 0), (0, 4), (0, -1)])
def test_there_is_no_such_batch(data: DataSet, epoch: int, start: int) -> None:
    with pytest.raises(ConfigError, match="start in"):
        loader(data).set_epoch(epoch, start)


def test_an_epoch_may_be_left_early(data: DataSet) -> None:
    one = loader(data)
    for _ in one:
        break
    assert len(np.concatenate(labels(one))) == ROWS[0]


def test_ranks_of_one_reader_get_the_same_batches(data: DataSet) -> None:
    """As those along the axis tensor of a mesh."""
    found = []
    for rank in range(4):
        place = Context(
            rank=rank, nodes=(0, 0, 1, 1), device=torch.device("cpu"), num_restarts=0,
            sets={"train": data}, resumed=None, save=None, show=lambda record: None,
            reader=(rank // 2, 2),
        )  # fmt: skip
        own = place.loader(batch_size=4, columns=["y"], seed=3)
        assert (own.num_readers, len(own), own.num_rows) == (2, 3, sum(ROWS))
        found.append([y.tolist() for (y,) in own])
    assert found[0] == found[1] and found[2] == found[3]
    assert sorted(y for batch in found[0] + found[2] for y in batch) == list(range(sum(ROWS)))
