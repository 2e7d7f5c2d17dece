"""Fits that share slots: as many at a time as there is room for, each in its turn."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from sparkdl.errors import TrainingFailed
from sparkdl.spark.frames.row_table import TableSpec
from sparkdl.spark.frames.shared_spools import SlotQueue, Spools


def most_at_a_time(num_slots: int, total: int | None) -> int:
    """How many of four fits were in their block together."""
    queue, counted = SlotQueue(), threading.Lock()
    inside, most = 0, 0

    def fit(_: int) -> None:
        nonlocal inside, most
        with queue.slots(num_slots, total):
            with counted:
                inside += 1
                most = max(most, inside)
            threading.Event().wait(0.2)
            with counted:
                inside -= 1

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(fit, range(4)))
    return most


@pytest.mark.parametrize(
    ("num_slots", "total", "expected"),
    [(1, 4, 4), (2, 4, 2), (3, 4, 1), (4, 4, 1), (5, 4, 1), (2, None, 4)],
)
def test_as_many_fits_at_a_time_as_there_is_room_for(
    num_slots: int, total: int | None, expected: int
) -> None:
    assert most_at_a_time(num_slots, total) == expected


def test_those_that_wait_can_be_told_that_it_is_over() -> None:
    queue, begun = SlotQueue(), threading.Event()

    def wait() -> None:
        begun.set()
        with queue.slots(2, 2):
            pass

    with ThreadPoolExecutor(1) as pool, queue.slots(1, 2):
        waiting = pool.submit(wait)
        assert begun.wait(10)
        queue.end()
        with pytest.raises(TrainingFailed, match="was ended"):
            waiting.result(10)


def test_a_fit_that_fails_gives_its_slots_back() -> None:
    queue = SlotQueue()
    with pytest.raises(ArithmeticError), queue.slots(2, 2):
        raise ArithmeticError
    with queue.slots(2, 2):
        pass


def test_a_table_is_there_once_its_shards_are_known() -> None:
    spools, spec = Spools(), TableSpec(columns=(), num_shards=2)
    slots: Any = SimpleNamespace(
        num_workers=2, is_gang=True, cpus_per_worker=None, gpus_per_worker=None
    )
    table: Any = SimpleNamespace(known=())
    assert not spools.has(spec, slots)
    assert spools.take(spec, slots, lambda: table) is table
    assert not spools.has(spec, slots)
    table.known = ("shard",)
    assert spools.has(spec, slots)
    for other in ({"num_shards": 3}, {"num_places": 1}, {"at_once": False}):
        assert not spools.has(replace(spec, **other), slots)
