"""A DataFrame becomes shards: the same every time, checked, and gone afterwards."""

from __future__ import annotations

import math
import shutil
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import MagicMock

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
import torch
from pyspark.errors import PySparkException
from pyspark.sql import functions as F

from sparkdl.data.column_stats import SpooledShard
from sparkdl.data.ragged import Ragged
from sparkdl.data.spool.spool_source import open_spool
from sparkdl.errors import DataError, StorageError
from sparkdl.inputs import Named, Tensor
from sparkdl.inputs import Sequence as SequenceInput
from sparkdl.spark.frames import shard_table
from sparkdl.spark.frames import shard_table as module
from sparkdl.spark.frames.columns import validation_indicator
from sparkdl.spark.frames.prepare_columns import prepare
from sparkdl.spark.frames.row_table import TableSpec, content_of
from sparkdl.spark.frames.shard_table import ShardTable, SpoolTable
from sparkdl.spark.frames.spool_task import CleanTask

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.spark

SCHEMA = "x array<double>, y double, w double, v boolean"
GOOD = [([float(i), -float(i)], float(i % 3), 1.0, i % 4 == 0) for i in range(20)]


class Tables:
    """Makes shard tables of columns x, y, w and closes them."""

    def __init__(self) -> None:
        self.open: list[ShardTable] = []

    def __call__(
        self, df: DataFrame, *, num_shards: int = 2, validation: bool = False,
        as_classes: bool = True, num_places: int | None = None,
    ) -> ShardTable:  # fmt: skip
        columns = (
            prepare(df.schema, "x", "feature", float_dtype="float32"),
            prepare(df.schema, "y", "label", float_dtype="float32", as_classes=as_classes),
            prepare(df.schema, "w", "weight", float_dtype="float32"),
        )
        fits = (num_places or num_shards) <= 2  # slots of this session
        spec = TableSpec(
            columns=columns, num_shards=num_shards, num_places=num_places, at_once=fits
        )
        if validation:
            indicator = validation_indicator(df.schema, "v")
            spec = replace(spec, validation=indicator, validation_col="v")
        table = ShardTable(df, spec, run_id=uuid.uuid4().hex[:12])
        self.open.append(table)
        return table


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> Iterator[Tables]:
    tables = Tables()
    yield tables
    monkeypatch.setattr(module, "_KILL_SECONDS", 0.0)  # no task has been cancelled just now
    for table in tables.open:
        table.close()


@pytest.fixture(scope="module")
def good(spark: SparkSession) -> DataFrame:
    return spark.createDataFrame(GOOD, SCHEMA)


def frame(spark: SparkSession, rows: Sequence[tuple[Any, ...]]) -> DataFrame:
    return spark.createDataFrame(list(rows), SCHEMA)


def read(table: ShardTable, spooled: Sequence[SpooledShard], split: str = "train") -> list[Any]:
    """The rows of all shards in their order: (x, y, w)."""
    columns = table.columns(spooled)
    rows = []
    for part in spooled:
        shard = part.shard
        count = shard.num_rows if split == "train" else shard.num_validation_rows
        spool = open_spool(Path(shard.path), columns, num_rows=count, split=split)  # type: ignore[arg-type]
        opened = spool.columns
        rows.append(list(zip(*(opened[c.key].tolist() for c in columns), strict=True)))
    return rows


def persisted(spark: SparkSession) -> int:
    context: Any = spark.sparkContext
    return int(context._jsc.getPersistentRDDs().size())


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_shards_are_the_same_however_few_partitions_hold_them(
    good: DataFrame, tables: Tables
) -> None:
    each = tables(good, num_shards=5, validation=True)
    known = each.collect()
    expected = [(part.shard.shard_id, part.shard.fingerprint, part.content) for part in known]
    table = tables(good, num_shards=5, num_places=2, validation=True)
    found = table.collect()
    assert [(p.shard.shard_id, p.shard.fingerprint, p.content) for p in found] == expected
    assert len({Path(part.shard.path).parent for part in found}) == 2
    for split in ("train", "validation"):
        assert read(table, found, split) == read(each, known, split)
    one = tables(frame(good.sparkSession, GOOD[:1]), num_shards=5, num_places=2)
    assert sorted(part.shard.num_rows for part in one.collect()) == [0] * 4 + [1]


@pytest.mark.slow
def test_every_row_lands_once_with_its_dtype(good: DataFrame, tables: Tables) -> None:
    table = tables(good)
    spooled = table.collect()
    assert [part.shard.shard_id for part in spooled] == [0, 1]
    assert sum(part.shard.num_rows for part in spooled) == 20
    assert all(part.shard.host for part in spooled)
    columns = table.columns(spooled)
    assert [(c.name, c.role, c.dtype, c.shape) for c in columns] == [
        ("x", "feature", "float32", (2,)),
        ("y", "label", "int64", ()),
        ("w", "weight", "float32", ()),
    ]
    rows = [row for shard in read(table, spooled) for row in shard]
    assert sorted(rows) == sorted((x, int(y), w) for x, y, w, _ in GOOD)
    size = 20 * (2 * 4 + 8 + 4)
    assert sum(part.shard.num_bytes for part in spooled) == size


@pytest.mark.slow
def test_equal_data_gives_equal_shards_in_equal_order(good: DataFrame, tables: Tables) -> None:
    first, again = tables(good), tables(good.orderBy("y", "w").repartition(5))
    one, two = first.collect(), again.collect()
    assert [s.shard.fingerprint for s in one] == [s.shard.fingerprint for s in two]
    assert len({s.shard.fingerprint for s in one}) == 2
    assert read(first, one) == read(again, two)
    assert content_of(one) == content_of(two)


@pytest.mark.slow
def test_rows_of_equal_hashes_have_an_order_too(spark: SparkSession) -> None:
    """Spark's hash passes over nulls, and joins arrays."""

    def fill(batch: pa.RecordBatch) -> Any:
        return np.stack([pc.fill_null(column, -1).to_numpy() for column in batch.columns], 1)

    rows = [(None, 1.0, [1], [2, 3]), (1.0, None, [1, 2], [3]), (None, 1.0, [1, 2], [3])] * 5
    schema = "a double, b double, s array<int>, t array<int>"
    entries = [
        Named(argument="ab", specification=Tensor(("a", "b"), transform=fill)),
        Named(argument="s", specification=SequenceInput("s")),
        Named(argument="t", specification=SequenceInput("t")),
    ]
    found = []
    for these in (rows, rows[::-1]):
        df = spark.createDataFrame(these, schema).coalesce(1)
        columns = tuple(
            prepare(df.schema, entry, "feature", float_dtype="float32") for entry in entries
        )
        spec = TableSpec(columns=columns, num_shards=1)
        table = ShardTable(df, spec, run_id=uuid.uuid4().hex[:12])
        try:
            spooled = table.collect()
            columns = table.columns(spooled)
            path = Path(spooled[0].shard.path)
            opened = open_spool(path, columns, num_rows=len(rows), split="train").columns
            pairs, lengths = opened["feature ab"], opened["feature s"]
            assert isinstance(pairs, torch.Tensor) and isinstance(lengths, Ragged)
            fingerprint = spooled[0].shard.fingerprint
            found.append((pairs.tolist(), lengths.lengths.tolist(), fingerprint))
        finally:
            table.close()
    assert found[0] == found[1]


@pytest.mark.slow
def test_the_content_does_not_depend_on_the_number_of_shards(
    spark: SparkSession, good: DataFrame, tables: Tables
) -> None:
    three = tables(good, num_shards=1).collect()
    assert content_of(three) == content_of(tables(good).collect())
    changed = [*GOOD[:-1], ([19.0, -19.0], 2.0, 1.0, False)]
    assert content_of(three) != content_of(tables(frame(spark, changed)).collect())


@pytest.mark.slow
def test_a_second_look_spools_nothing(good: DataFrame, tables: Tables) -> None:
    table = tables(good)
    before = table.collect()
    assert table.collect() == before
    table.df.unpersist()  # as if the executor had died
    rebuilt = table.collect()
    assert [s.shard.path for s in rebuilt] != [s.shard.path for s in before]
    assert [s.shard.fingerprint for s in rebuilt] == [s.shard.fingerprint for s in before]


def test_few_and_no_rows(spark: SparkSession, tables: Tables) -> None:
    one = tables(frame(spark, GOOD[:1]))
    spooled = one.collect()
    assert sorted(part.shard.num_rows for part in spooled) == [0, 1]
    assert one.columns(spooled)[0].shape == (2,)  # the empty shard has none, and needs none
    assert sum(map(len, read(one, spooled))) == 1


def none(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        yield batch.slice(0, 0)


@pytest.mark.parametrize("emptied", ["where false", "at run time", "from the start"])
def test_no_row_at_all(spark: SparkSession, good: DataFrame, tables: Tables, emptied: str) -> None:
    # Spark may find out, and then runs no task at all.
    frames = {
        "where false": good.where("false"),
        "at run time": good.mapInArrow(none, SCHEMA),
        "from the start": frame(spark, []),
    }
    with pytest.raises(DataError, match="the DataFrame has no rows; check its source and filters"):
        tables(frames[emptied]).collect()


def test_uneven_shards(spark: SparkSession, tables: Tables) -> None:
    # Equal rows have equal hashes, so all of them go to one shard.
    table = tables(frame(spark, [GOOD[0]] * 30 + GOOD[1:3]))
    spooled = table.collect()
    counts = [part.shard.num_rows for part in spooled]
    assert sum(counts) == 32
    assert max(counts) >= 30
    assert sum(map(len, read(table, spooled))) == 32


def test_validation_rows_go_apart(good: DataFrame, tables: Tables) -> None:
    table = tables(good, validation=True)
    spooled = table.collect()
    assert sum(part.shard.num_rows for part in spooled) == 15
    assert sum(part.shard.num_validation_rows for part in spooled) == 5
    rows = [row[0][0] for shard in read(table, spooled, "validation") for row in shard]
    assert sorted(rows) == [0, 4, 8, 12, 16]


def test_bad_rows_are_counted_with_an_example(spark: SparkSession, tables: Tables) -> None:
    table = tables(frame(spark, [*GOOD, ([1.0, None], math.inf, 1.0, True)]))
    told = r"\(such as the row with y=inf, w=1.0, v=True\); drop or fill them"
    with pytest.raises(
        DataError, match=f'"x" has 1 row with a null, .* {told}, as .*; column "y" must hold'
    ) as caught:
        table.columns(table.collect())
    assert "(such as inf in the row with y=inf, w=1.0, v=True); drop or mend" in str(caught.value)


@pytest.mark.slow
def test_bad_rows_of_files_are_named_by_them(
    spark: SparkSession, tables: Tables, tmp_path: Path
) -> None:
    path = str(tmp_path / "rows")
    rows = [*GOOD, ([1.0, None], 1.0, 1.0, True)]
    frame(spark, rows).drop("v").coalesce(1).write.parquet(path)
    read_back = spark.read.parquet(path).where("w > 0")
    told = r"\(such as the row with y=1.0, w=1.0, which is row 20 of file:.*\.parquet\); drop"
    table = tables(read_back)
    with pytest.raises(DataError, match=f'column "x" has 1 row with a null, .* {told}'):
        table.columns(table.collect())


def test_ragged_rows_in_different_shards_are_seen_too(spark: SparkSession, tables: Tables) -> None:
    rows = [([1.0] * (1 + i % 2), 0.0, float(i), True) for i in range(2)]
    table = tables(frame(spark, rows), num_shards=2)
    told = r"\(such as the row with y=0.0, w=[01].0, v=True, of shape"
    with pytest.raises(DataError, match=f'"x" is ragged: .* {told}'):
        table.columns(table.collect())


def test_a_null_indicator(spark: SparkSession, tables: Tables) -> None:
    table = tables(frame(spark, [*GOOD, ([1.0, 2.0], 1.0, 1.0, None)]), validation=True)
    told = r"\(such as the row with y=1.0, w=1.0\); drop or fill them"
    with pytest.raises(DataError, match=f'column "v" has 1 null row {told}'):
        table.columns(table.collect())


def unsteady(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        weights = pa.array(np.random.default_rng().random(batch.num_rows))
        yield batch.set_column(2, "w", weights)


@pytest.mark.slow
def test_a_source_that_changes_is_refused(good: DataFrame, tables: Tables) -> None:
    table = tables(good.mapInArrow(unsteady, SCHEMA))
    table.collect()
    table.df.unpersist()
    with pytest.raises(DataError, match=r"has changed during training: shard\(s\) \[0, 1\] hold"):
        table.collect()


@pytest.mark.slow
def test_closing_leaves_no_file_and_no_persisted_table(
    spark: SparkSession, good: DataFrame, tables: Tables
) -> None:
    before = persisted(spark)
    table = tables(good)
    paths = [Path(part.shard.path) for part in table.collect()]
    assert persisted(spark) == before + 1
    table.df.unpersist()
    paths += [Path(part.shard.path) for part in table.collect()]  # after a loss: two of each
    assert all(path.is_dir() for path in paths)
    assert len({path.parent for path in paths}) == 1
    local = paths[0].parent.parent
    table.close()
    assert persisted(spark) == before
    assert not paths[0].parent.exists()
    assert local.is_dir()  # it is Spark's
    assert not list(local.glob("sparkdl-*"))


def test_closing_after_nothing_was_spooled(spark: SparkSession, good: DataFrame) -> None:
    before = persisted(spark)
    columns = (prepare(good.schema, "x", "feature", float_dtype="float32"),)
    ShardTable(good, TableSpec(columns=columns, num_shards=2), run_id="never").close()
    assert persisted(spark) == before


def test_closing_never_raises_and_forgets_the_table_even_if_it_cannot_clean(
    spark: SparkSession,
    good: DataFrame,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    before = persisted(spark)
    columns = (prepare(good.schema, "x", "feature", float_dtype="float32"),)
    table = ShardTable(good, TableSpec(columns=columns, num_shards=1), run_id="gone")
    (spooled,) = table.collect()

    def broken(*_: Any) -> None:
        raise OSError("no executors")

    with monkeypatch.context() as patch:
        patch.setattr(table, "_clean", broken)
        patch.setattr(shard_table, "remove_spool", lambda _: False)  # as if on another host
        table.close()
    assert "could not clean up after run gone: no executors" in caplog.text
    assert "spools remain where no executor could be asked to remove them" in caplog.text
    assert spooled.shard.path in caplog.text
    assert persisted(spark) == before
    table.close()
    assert not Path(spooled.shard.path).exists()


def looks(table: ShardTable, monkeypatch: pytest.MonkeyPatch) -> list[int | float]:
    """What closing does: how many tasks look for spools, and how long it waits between."""
    done: list[int | float] = []
    with monkeypatch.context() as patch:
        patch.setattr(shard_table, "num_slots", lambda _: 0)
        # Not the function of `time` itself: threads of other libraries sleep, too.
        patch.setattr(shard_table, "time", SimpleNamespace(sleep=done.append))
        patch.setattr(table, "_clean", done.append)
        table.close()
    return done


@pytest.mark.slow
def test_spools_that_were_not_met_are_looked_for_again(
    good: DataFrame, tables: Tables, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = tables(good)
    table.collect()
    table._seen.clear()  # as if all had been removed
    assert looks(table, monkeypatch) == [2]
    table._seen.add("/elsewhere")
    assert looks(table, monkeypatch) == [2, module._KILL_SECONDS, 8]


@pytest.mark.slow
def test_after_a_shard_was_written_anew_its_other_copies_are_waited_for(
    good: DataFrame, tables: Tables, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = tables(good)
    paths = {part.shard.path for part in table.collect()}
    table.note(paths)
    table._seen.clear()
    assert looks(table, monkeypatch) == [2]
    table.note({"/elsewhere"})
    table._seen.clear()
    assert looks(table, monkeypatch) == [2, module._KILL_SECONDS, 8]


@pytest.mark.slow
def test_after_a_spooling_that_failed_its_last_tasks_are_waited_for(
    good: DataFrame, tables: Tables, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = tables(good.where(F.raise_error(F.lit("broken")).isNull()))
    with pytest.raises(Exception, match="broken"):
        table.collect()
    assert looks(table, monkeypatch) == [2, module._KILL_SECONDS, 8]


@pytest.mark.slow
def test_shards_whose_files_are_gone_can_be_written_anew(good: DataFrame, tables: Tables) -> None:
    table = tables(good)
    before = table.collect()
    for part in before:
        shutil.rmtree(part.shard.path)
    assert table.collect() == before  # Spark has kept the rows
    table.forget()
    assert read(table, table.collect())


@pytest.mark.slow
def test_where_there_are_more_executors_than_workers_these_follow_the_rows(
    spark: SparkSession, good: DataFrame, tables: Tables, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else Spark would run a gang that begins again where nobody has the shards."""
    table = tables(good, num_shards=3, num_places=2)
    before, tables_before = table.collect(), persisted(spark)
    found, slots = table.restore(2)
    assert found == before
    assert slots.columns == ["id"]
    monkeypatch.setattr(module, "registered_executors", lambda _: 3)
    assert table.restore(2) == (before, table.df)
    found, to_follow = table.restore(1)
    assert to_follow.select(F.spark_partition_id()).distinct().count() == 1
    assert read(table, found) == read(table, before)
    assert persisted(spark) == tables_before + 1
    shutil.rmtree(found[1].shard.path)
    table.remake([1])
    found, again = table.restore(1)
    assert again is to_follow
    assert read(table, found) == read(table, before)
    table.close()
    assert persisted(spark) == tables_before - 1


def test_cleaning_keeps_the_directories_of_spark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    roots = [tmp_path / "a", tmp_path / "b"]
    monkeypatch.setenv("SPARK_LOCAL_DIRS", ",".join(map(str, roots)))
    seen, unseen = roots[0] / "sparkdl-r" / "shard-0", roots[1] / "sparkdl-r" / "shard-1"
    other = roots[1] / "sparkdl-other" / "shard-1"
    late = roots[0] / "sparkdl-late" / "shard-0"
    for folder in (seen, unseen, other, late):
        folder.mkdir(parents=True)
        (folder / "train-000.bin").write_bytes(b"x")
    task = CleanTask(run_ids=("r", "late"), paths=(str(seen), "/nowhere/sparkdl-r/shard-9"))
    (batch,) = task(iter([]))
    assert batch.column(0).to_pylist() == [str(seen)]
    assert list(roots[0].iterdir()) == []
    assert list(roots[1].iterdir()) == [other.parent]


def test_a_failure_of_ours_on_an_executor_keeps_its_type() -> None:
    with pytest.raises(StorageError, match="the disk of /d is full"):
        module.parse_shards({"error": "StorageError", "message": "the disk of /d is full"})


class Blocked(SpoolTable):
    """A table of a cluster whose slots others hold: its job waits until it is cancelled."""

    def __init__(self, *seen: Path) -> None:
        self.context, self.ended = MagicMock(), threading.Event()
        self.context.cancelJobsWithTag.side_effect = lambda _: self.ended.set()
        super().__init__(MagicMock(sparkContext=self.context), run_id="r", num_places=2)
        self.df = MagicMock()
        self._seen = {str(path) for path in seen}

    def _clean(self, num_tasks: int) -> None:
        assert self.ended.wait(20)
        raise PySparkException("cancelled")


@pytest.mark.slow
def test_a_result_does_not_wait_for_slots_to_clean_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setattr(module, "_WAIT_SECONDS", 0.3)
    monkeypatch.setattr(module, "_LIMIT_SECONDS", 0.5)
    here = tmp_path / "sparkdl-r" / "shard-0"
    here.mkdir(parents=True)
    table = Blocked(here, Path("/elsewhere/sparkdl-r/shard-1"))
    began = time.monotonic()
    table.close()
    assert time.monotonic() - began < 5
    assert not here.parent.exists()  # what is on the driver's host needs no job
    assert "has not ended yet, mostly because other jobs hold the slots" in caplog.text
    assert "at most 0 s: /elsewhere/sparkdl-r/shard-1" in caplog.text.replace("1 s:", "0 s:")
    assert table.ended.wait(10)  # in the background it is given up in the end
    deadline = time.monotonic() + 10
    while "r" not in module._left:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert module._left.pop("r") == {"/elsewhere/sparkdl-r/shard-1"}


def test_where_the_session_has_ended_nothing_is_asked_of_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    spark = MagicMock()
    spark.sparkContext._jsc = None
    table = SpoolTable(spark, run_id="r", num_places=2)
    table.df = MagicMock()
    table.close()
    assert table.df.mock_calls == spark.range.mock_calls == [] and caplog.text == ""

    def stop(*_: Any) -> None:  # while the spools are removed in the background
        spark.sparkContext._jsc = None
        raise AttributeError("'NoneType' object has no attribute 'setCallSite'")

    spark.sparkContext._jsc = MagicMock()
    spark.range.side_effect = stop
    table.note({"/away/sparkdl-r/shard-1"})
    table.close()
    assert spark.range.called and caplog.text == ""


def test_a_later_run_removes_what_an_earlier_one_has_left_where_it_meets_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    here, away = "/elsewhere/sparkdl-earlier/shard-0", "/away/sparkdl-earlier/shard-1"
    monkeypatch.setattr(module, "_left", {"earlier": {here, away}})
    asked: list[tuple[tuple[str, ...], tuple[str, ...]]] = []

    def task(run_ids: tuple[str, ...], paths: tuple[str, ...], keep: None) -> None:
        asked.append((run_ids, paths))

    monkeypatch.setattr(module, "CleanTask", task)
    spark = MagicMock()
    table = SpoolTable(spark, run_id="r", num_places=2)
    table.df = MagicMock()
    collect = spark.range.return_value.mapInArrow.return_value.collect
    collect.return_value = [{"path": here}]
    table.close()
    assert asked == [(("earlier", "r"), (away, here))]
    assert module._left == {"earlier": {away}} and caplog.text == ""
    collect.return_value = [{"path": away}]
    table.close()
    assert asked[1:] == [(("earlier", "r"), (away,))]
    assert module._left == {}


def test_what_a_lost_host_has_is_noted_for_later_runs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "_KILL_SECONDS", 0.0)
    monkeypatch.setattr(module, "_left", {})
    spark = MagicMock()
    spark.range.return_value.mapInArrow.return_value.collect.return_value = []
    table = SpoolTable(spark, run_id="r", num_places=2)
    table.df = MagicMock()
    table.note({"/away/sparkdl-r/shard-1"})
    monkeypatch.setattr(module, "num_slots", lambda _: 2)
    table.close()
    assert "until a later fit of this session meets one" in caplog.text
    assert module._left == {"r": {"/away/sparkdl-r/shard-1"}}
