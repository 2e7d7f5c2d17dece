"""How full the fullest shard will be, by a sample."""

from __future__ import annotations

import random

import pytest

from sparkdl.explain.calibrate import shard_rows, shared_rows


def test_rows_that_are_all_known_are_counted() -> None:
    assert shard_rows([0, 1, 2, 3, 4], 5, 2) == [3, 2]
    assert shard_rows([-1, -2], 2, 2) == [1, 1]


@pytest.mark.parametrize("num_shards", [2, 8, 100])
def test_different_rows_are_spread_as_balls_over_bins(num_shards: int) -> None:
    generator = random.Random(1)
    num_rows = 20_000
    rows = [0] * num_shards
    for _ in range(num_rows):
        rows[generator.randrange(num_shards)] += 1
    sample = [generator.randrange(1 << 31) for _ in range(1000)]
    found = shard_rows(sample, num_rows, num_shards)
    assert sum(found) == num_rows
    assert max(found) == pytest.approx(max(rows), rel=0.05)


def test_equal_rows_stay_together() -> None:
    generator = random.Random(2)
    sample = [7] * 300 + [generator.randrange(1 << 31) for _ in range(700)]
    found = shard_rows(sample, 1_000_000, 4)
    assert sum(found) == 1_000_000
    assert found.index(max(found)) == 7 % 4
    assert max(found) == pytest.approx(300_000 + 175_000, rel=0.02)


def test_one_value_fills_one_shard() -> None:
    assert shard_rows([5] * 100, 1000, 4) == [0, 1000, 0, 0]


def test_one_shard_has_all_rows() -> None:
    assert shard_rows([1, 2, 3, 4], 999, 1) == [999]


def test_shares() -> None:
    assert shared_rows(90, (2 / 3, 1 / 3)) == [60, 30]
    assert shared_rows(7, (0.5, 0.5)) in ([4, 3], [3, 4])
