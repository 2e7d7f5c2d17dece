"""Where the workers of a gang are, and how lost shards come back."""

from __future__ import annotations

from collections.abc import Collection
from types import SimpleNamespace
from typing import Any

import pytest

from sparkdl.spark.cluster.cluster_info import ClusterInfo
from sparkdl.spark.cluster.slots import Slots
from sparkdl.spark.frames.row_table import Origin
from sparkdl.spark.run.placement import Anywhere, OnTable, choose_placement, is_fixed


class Table:
    """Remembers what was asked of it."""

    known = "as known"

    def __init__(self, origin: Origin = "dealt") -> None:
        self.origin, self.asked, self.is_spread = origin, list[Any](), False
        session = SimpleNamespace(range=lambda *rows: rows)
        self.df: Any = SimpleNamespace(sparkSession=session)

    def collect(self) -> str:
        self.asked.append("collect")
        return "made anew"

    def is_scattered(self, num_workers: int) -> bool:
        return self.is_spread

    def restore(self, num_workers: int) -> tuple[str, Any]:
        self.asked.append(num_workers)
        return "restored", "restored table"

    def forget(self) -> None:
        self.asked.append("forget")

    def remake(self, missing: Collection[int]) -> None:
        self.asked.append(list(missing))


def slots(most: int | None = None, *, is_dynamic: bool = False) -> Slots:
    cluster = ClusterInfo(
        master="spark://h:7077", num_executors=1, cores_per_executor=2,
        dynamic_allocation=is_dynamic,
    )  # fmt: skip
    return Slots(num_workers=2, threads=1, cluster=cluster, max_workers=most)


ELASTIC, DYNAMIC = slots(3), slots(is_dynamic=True)


def test_whether_workers_keep_their_places() -> None:
    found = [is_fixed(*case) for case in ((slots(), 2), (slots(), 1), (ELASTIC, 2), (DYNAMIC, 2))]
    assert found == [True, False, False, False]


@pytest.mark.parametrize(("origin", "holding"), [("dealt", "here"), ("source", "near")])
def test_a_gang_of_fixed_workers_follows_its_table(origin: Origin, holding: str) -> None:
    table = Table(origin)
    placement = choose_placement(table, slots(), 2)
    assert isinstance(placement, OnTable)
    assert placement.holding == holding
    assert placement.start(0, 2) == ("as known", table.df)
    assert table.asked == []
    placement.after_loss({1})
    assert placement.start(1, 2) == ("made anew", table.df)
    assert table.asked == ["forget", "collect"]


@pytest.mark.parametrize(
    ("origin", "offered", "readers", "holding", "on_table"),
    [
        ("kept", slots(), 2, "planned", True),  # the same bits as of shards written now
        ("kept", ELASTIC, 2, "near", True),
        ("partitions", slots(), 2, "near", False),
        ("dealt", slots(), 1, "near", False),  # several read the same rows
        ("source", slots(), 1, "near", False),
        ("dealt", ELASTIC, 2, "near", True),
        ("source", DYNAMIC, 2, "near", True),
    ],
)
def test_other_gangs_find_their_shards(
    origin: Origin, offered: Slots, readers: int, holding: str, on_table: bool
) -> None:
    table = Table(origin)
    placement = choose_placement(table, offered, readers)
    assert isinstance(placement, Anywhere)
    assert placement.holding == holding
    assert placement.start(0, 2) == ("as known", table.df if on_table else (0, 2, 1, 2))
    for missing in ({1}, set[int]()):
        placement.after_loss(missing)
    assert placement.start(1, 3) == ("restored", "restored table")
    assert table.asked == [[1], [], 3]


def test_scattered_shards_are_restored_before_the_first_submission() -> None:
    """As own partitions are that more executors have spooled than there are workers."""
    table = Table("partitions")
    table.is_spread = True
    assert choose_placement(table, slots(), 2).start(0, 2) == ("restored", "restored table")
