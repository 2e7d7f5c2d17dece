"""Rows that fit into memory are mixed as a whole, others in windows of bounded size."""

from __future__ import annotations

import pytest

from sparkdl.data.shuffle_windows import (
    GROUP_BYTES,
    HostLoad,
    Windows,
    as_text,
    choose_windows,
    from_text,
    make_windows,
)
from sparkdl.errors import CheckpointError

MIB, GIB = 1 << 20, 1 << 30


def chosen(
    *hosts: tuple[int, int, int], window_bytes: int | None = None, row_bytes: int = 1000
) -> Windows | None:
    loads = [
        HostLoad(num_shards=shards, num_bytes=size, memory_bytes=memory)
        for shards, size, memory in hosts
    ]
    by_rank = [size // shards for shards, size, _ in hosts]
    return choose_windows(
        loads, bytes_by_shard=by_rank, row_bytes=row_bytes, window_bytes=window_bytes
    )


def test_rows_of_half_the_memory_are_mixed_as_a_whole() -> None:
    assert chosen((2, 4 * GIB, 8 * GIB), (2, 3 * GIB, 8 * GIB)) is None
    assert chosen((2, 4 * GIB + 1, 8 * GIB)) is not None
    assert chosen((2, GIB, 8 * GIB), (2, GIB, GIB)) is not None


@pytest.mark.parametrize(
    ("memory", "shards", "window"),
    [(64 * GIB, 2, 256 * MIB), (2 * GIB, 2, 128 * MIB), (512 * MIB, 4, 16 * MIB), (0, 1, 16 * MIB)],
)
def test_a_window_is_an_eighth_of_the_workers_memory(memory: int, shards: int, window: int) -> None:
    windows = chosen((shards, 100 * GIB, memory))
    assert windows is not None
    assert 0.95 * window <= windows.num_rows * 1000 <= window
    assert windows.groups_together >= 32
    assert windows.group_rows * 1000 <= GROUP_BYTES


def test_the_user_chooses() -> None:
    assert chosen((1, GIB, 8 * GIB), window_bytes=GIB) is None
    windows = chosen((1, GIB, 8 * GIB), window_bytes=32 * MIB)
    assert windows == make_windows(32 * MIB, 1000)
    # Also windows larger than those that are chosen without a word.
    assert chosen((1, 9 * GIB, GIB), window_bytes=GIB) == make_windows(GIB, 1000)


@pytest.mark.parametrize(
    ("window_bytes", "row_bytes", "expected"),
    [
        (GIB, 1 << 10, Windows(group_rows=8192, groups_together=128)),
        (MIB, 1 << 10, Windows(group_rows=32, groups_together=32)),
        (MIB, 256 << 10, Windows(group_rows=1, groups_together=4)),
        (MIB, 2 * MIB, Windows(group_rows=1, groups_together=1)),
        (1, 8, Windows(group_rows=1, groups_together=1)),
    ],
)
def test_row_groups_of_a_window(window_bytes: int, row_bytes: int, expected: Windows) -> None:
    assert make_windows(window_bytes, row_bytes) == expected


@pytest.mark.parametrize("windows", [None, Windows(group_rows=12, groups_together=3)])
def test_windows_as_text(windows: Windows | None) -> None:
    assert from_text(as_text(windows)) == windows


@pytest.mark.parametrize("text", ["", "3", "0x4", "3x", "whole?", "9" * 5000 + "x1"])
def test_text_that_is_none(text: str) -> None:
    with pytest.raises(CheckpointError, match="order of rows"):
        from_text(text)
