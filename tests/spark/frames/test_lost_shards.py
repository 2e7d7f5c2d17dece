"""What a shard table writes anew after a loss, with jobs made up for the test."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from pyspark.sql import Row

from sparkdl.data.column_stats import SpooledShard
from sparkdl.data.plan import Shard
from sparkdl.data.spool.kept_spools import Keep
from sparkdl.errors import DataError
from sparkdl.spark.frames import shard_table
from sparkdl.spark.frames.row_table import TableSpec
from sparkdl.spark.frames.shard_table import ShardTable, SpooledRows
from sparkdl.spark.frames.spool_task import SpoolTask


def part(number: int, path: str, rows: str = "") -> SpooledShard:
    shard = Shard(
        shard_id=number, path=f"{path}{number}", num_rows=4, num_validation_rows=0,
        fingerprint=rows or f"rows {number}",
    )  # fmt: skip
    return SpooledShard(shard=shard, content=number, columns=())


class Table(ShardTable):
    """Four shards, which are at ``old``; a job that writes some anew gives ``made``."""

    def __init__(self, pieces: int | None = None) -> None:
        SpooledRows.__init__(self, TableSpec(columns=(), num_shards=4, pieces=pieces))
        self._spooling, self.num_places = threading.RLock(), 2
        self._task = SpoolTask(run_id="r", sets=((),), pieces=pieces)
        self.df = "the first table"  # type: ignore[assignment]
        self._unreachable, self._moved = set(), {}
        self._keep, self._is_kept, self._is_followed, self._for_others = None, False, False, {}
        self._spark, self._profile, self._run_id = MagicMock(), None, "r"
        self._seen, self._stragglers, self._begun = set(), False, None
        self._queue_timeout_seconds, self._first_shards = 1.0, MagicMock()
        self.rows, self.dealt = MagicMock(), list[Any]()
        self._dealt = lambda ids: (self.dealt.append(ids), self.rows)[1]
        self.old = [part(number, "old") for number in range(4)]
        self.made: list[SpooledShard] = []

    def _spooled(self, num_sets: int = 1, table: Any = None) -> list[tuple[SpooledShard, ...]]:
        return [tuple(self.old if table is None else self.made)]

    def unstable(self) -> str | None:
        return None

    def paths(self) -> list[str]:
        return [found.shard.path for found in self.known]

    def task(self) -> Any:
        """That of the last job."""
        if self._spec.pieces is None:
            return self.rows.mapInArrow.call_args.args[0]
        shuffled = self.rows.withColumn().where().repartitionById()
        return shuffled.sortWithinPartitions().select().mapInArrow.call_args.args[0]


@pytest.fixture(autouse=True)
def no_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_table, "F", MagicMock())
    monkeypatch.setattr(shard_table, "num_slots", lambda _: 2)
    monkeypatch.setattr(shard_table, "is_connect", lambda _: False)
    monkeypatch.setattr(shard_table, "registered_executors", lambda _: 3)
    monkeypatch.setattr(shard_table, "slots_for", lambda _, count: f"{count} slots")


def test_of_own_partitions_what_is_out_of_reach_is_written_anew() -> None:
    table = Table(pieces=2)
    table.collect()
    table.made = [part(2, "new"), part(3, "new")]
    table.remake([3])
    assert table.task().is_numbered
    assert table.paths() == ["old0", "old1", "old2", "new3"]
    table.old[3] = part(3, "again")  # which Spark has written, as it lost what it had
    table.remake([3])
    assert table.paths() == ["old0", "old1", "old2", "again3"]
    table.old[0] = part(0, "again")
    assert len(table.dealt) == 1
    table.remake([0])
    assert table.paths() == ["again0", "old1", "old2", "again3"]
    assert len(table.dealt) == 1


@pytest.mark.parametrize("made", [[part(1, "new"), part(3, "new", "others")], [part(1, "new")]])
def test_of_own_partitions_other_rows_are_refused(made: list[SpooledShard]) -> None:
    table = Table(pieces=2)
    table.collect()
    table.made = made
    with pytest.raises(DataError, match=r"the shards \[1, 3\] had to be written anew"):
        table.remake([1, 3])


def test_shards_of_rows_are_written_by_as_many_tasks_as_there_are_slots() -> None:
    table = Table()
    table.collect()
    table.made = [part(number, "new") for number in (0, 1, 3)]
    table.remake([3, 0, 1])
    assert table.dealt == [((0,), (1, 3))]
    assert table.task().shards_by_place == ((0,), (1, 3))
    assert table.paths() == ["new0", "new1", "old2", "new3"]
    table.made = [part(2, "new", "others")]
    with pytest.raises(DataError, match=r"shard\(s\) \[2\] hold other rows"):
        table.remake([2])


def test_what_no_executor_has_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    here = [{"place": 0}, {"place": 2}]
    monkeypatch.setattr(
        shard_table,
        "BackgroundJob",
        lambda *_, **__: SimpleNamespace(watched=lambda *_, **__: here),
    )
    table = Table()
    table.old = table.old[1:]
    table.collect()
    table.made = [part(2, "new")]
    found, rows = table.restore(3)
    assert [one.shard.path for one in found] == ["old1", "new2", "old3"]
    assert str(rows) == "3 slots"
    assert table.dealt == [((2,),)]


@pytest.mark.parametrize("executors", [2, 3])
def test_own_partitions_go_where_workers_will_be(
    monkeypatch: pytest.MonkeyPatch, executors: int
) -> None:
    """With more executors than workers, Spark would run these where no shard is."""
    monkeypatch.setattr(shard_table, "registered_executors", lambda _: executors)
    table = Table(pieces=2)
    table.collect()
    assert table.is_scattered(2) is (executors > 2)
    if executors > 2:
        table.made = [part(number, "new") for number in (0, 2, 3)]  # one has no rows
        table.known[1].shard.__dict__["num_rows"] = 0
        found, rows = table.restore(2)
        assert [one.shard.path for one in found] == ["new0", "old1", "new2", "new3"]
        assert rows is table._for_others[2]  # a barrier stage of the first one may be refused
        table.made[0] = part(0, "new", "others")
        with pytest.raises(DataError, match="cut otherwise"):
            table.restore(2)


@pytest.mark.parametrize(("hosts", "is_scattered"), [("abc", True), ("aab", False)])
def test_kept_shards_of_more_hosts_than_workers_are_scattered(
    monkeypatch: pytest.MonkeyPatch, hosts: str, is_scattered: bool
) -> None:
    table = Table()
    table.old = [
        replace(found, shard=replace(found.shard, host=host))
        for found, host in zip(table.old, hosts, strict=False)
    ]
    table.collect()
    table._is_kept = True
    assert table.is_scattered(2) is is_scattered
    forgotten = list[bool]()
    monkeypatch.setattr(Table, "forget", lambda table: forgotten.append(True))
    table.made = table.old
    table.restore(2)
    assert forgotten == [True]  # three executors: what is kept is written where workers will be


@pytest.mark.parametrize("pieces", [None, 2])
def test_what_was_kept_and_lost_is_not_kept_again(pieces: int | None) -> None:
    """Else whoever removes what is kept, again and again, would end the fit."""
    table = Table(pieces)
    table._keep = Keep(directory="/kept", key="k")
    table._task = replace(table._task, keep=table._keep)
    table.known, table._is_kept = tuple(table.old), True
    table.made = [part(number, "new") for number in (2, 3)]
    table.remake([2, 3])
    assert table.task().keep is None
    assert table.paths() == ["old0", "old1", "new2", "new3"]
    described = list[Any]()
    table._task = replace(table._task, keep=table._keep)
    table._describe_by = lambda task: described.append(task.keep)  # type: ignore[assignment]
    table.df, table._for_others = MagicMock(), {3: MagicMock()}
    table.forget()
    assert (described, table._is_kept, table._for_others) == ([None], False, {})


def test_each_data_set_has_its_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        Row(shard_id=n, payload=json.dumps({"shards": [part(n, s).to_dict() for s in "ab"]}))
        for n in range(3)
    ]
    monkeypatch.setattr(
        shard_table, "BackgroundJob",
        lambda *_, **__: SimpleNamespace(watched=lambda *_, **__: reversed(rows)),
    )  # fmt: skip
    table = Table()
    found = ShardTable._spooled(table, 2)
    paths = [[one.shard.path for one in own] for own in found]
    assert paths == [["a0", "a1", "a2"], ["b0", "b1", "b2"]]


def test_copies_that_spark_has_written_since_are_waited_for() -> None:
    table = Table()
    table._seen = {"old0", "old1"}
    table.note({"old1"})
    assert not table._stragglers
    table.note({"new1"})
    assert table._stragglers and table._seen == {"old0", "old1", "new1"}
