"""Kept spools of DataFrames: equal rows have one key, others another, and fits find them again."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from pyspark import SparkContext
from pyspark.sql import functions as F
from torch import nn

from sparkdl import ParameterAveraging, Tensor, TorchRegressor
from sparkdl.data.column_stats import SpooledShard
from sparkdl.data.plan import Shard, SpoolColumn
from sparkdl.data.spool.kept_spools import Keep
from sparkdl.errors import ConfigError
from sparkdl.inputs import Named
from sparkdl.model import TorchModel
from sparkdl.spark.frames import kept_frames
from sparkdl.spark.frames.kept_frames import KeepChoice, check_cache_dir, choose_keep
from sparkdl.spark.frames.prepare_columns import prepare
from sparkdl.spark.frames.row_table import TableSpec
from sparkdl.spark.frames.shard_table import parse_shards, placed_near

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.spark

NUM_ROWS = 200


def write(folder: Path, factor: float = 1.0) -> None:
    """Two files of rows."""
    folder.mkdir(exist_ok=True)
    for number in range(2):
        y = [factor * row / NUM_ROWS for row in range(number, NUM_ROWS, 2)]
        rows = pa.table({"x": pa.array([[v, 1 - v] for v in y]), "y": pa.array(y)})
        pq.write_table(rows, folder / f"{number}.parquet")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path / "rows")
    return tmp_path / "rows"


def choice(df: DataFrame, wanted: Any = "x", **changes: Any) -> KeepChoice:
    columns = tuple(
        prepare(df.schema, column, role, float_dtype="float32")
        for column, role in ((wanted, "feature"), ("y", "label"))  # type: ignore[arg-type]
    )
    spec = replace(TableSpec(columns=columns, num_shards=2), **changes)
    return choose_keep(df, spec, "/cache", None)


def key(df: DataFrame, **changes: Any) -> str:
    found = choice(df, **changes)
    assert found.keep is not None, found
    return found.keep.key


def derived(df: DataFrame, least: float = 0.25) -> DataFrame:
    """What an application may do, with names and numbers that count up in every process."""
    twice = df.withColumn("x", F.transform("x", lambda value: value * 2)).where(F.col("y") > least)
    return twice.join(df.select("y", F.col("y").alias("z")), "y").orderBy("z")


@pytest.mark.slow
def test_keys(spark: SparkSession, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read() -> DataFrame:
        return spark.read.parquet(str(folder))

    first = key(derived(read()))
    assert key(derived(read())) == first
    assert key(derived(spark.newSession().read.parquet(str(folder)))) == first
    assert key(derived(read()), num_places=1) == first  # who holds a shard is no matter
    frames = {
        "literal": derived(read(), 0.5),
        "type": read().withColumn("n", F.lit(1)),
        "other type": read().withColumn("n", F.lit(1).cast("long")),
        "order of sums": read().withColumn("y", (F.col("y") + 0.1) + 0.2),
        "other order": read().withColumn("y", F.col("y") + (F.lit(0.1) + 0.2)),
        "cast": read().withColumn("n", F.expr("cast(y as int)")),
        "try_cast": read().withColumn("n", F.expr("try_cast(y as int)")),
    }
    keys = {name: key(df) for name, df in frames.items()}
    named = [Named(argument="x", specification=Tensor("x", shape=s)) for s in ((2, 1), None)]
    changes: list[dict[str, Any]] = [
        {"num_shards": 3}, {"validation": F.col("y") > 0.5},
        {"validation": F.col("y") > 0.6}, *({"wanted": one} for one in named),
    ]  # fmt: skip
    keys.update({str(change): key(derived(read()), **change) for change in changes})
    for name, value in (
        ("spark.sql.session.timeZone", "Asia/Tokyo"),
        ("spark.sql.files.ignoreCorruptFiles", "true"),
        ("spark.sql.shuffle.partitions", "77"),
    ):
        session = spark.newSession()
        session.conf.set(name, value)
        keys[name] = key(derived(session.read.parquet(str(folder))))
    assert keys.pop("spark.sql.shuffle.partitions") == first
    with monkeypatch.context() as patch:
        patch.setattr(kept_frames, "versions", lambda: {"pyarrow": "of tomorrow"})
        keys["versions"] = key(derived(read()))
    known = read()
    before = key(known)
    os.utime(folder / "0.parquet", (1, 1))
    keys["time"] = key(known)  # although Spark has listed the files before
    assert keys["time"] != before
    write(folder, factor=2.0)
    keys["content"] = key(known)
    keys["before"] = before
    assert len({*keys.values(), first}) == len(keys) + 1


def rows_of(spark: SparkSession) -> DataFrame:
    return spark.createDataFrame([([0.5], 1.0)], "x array<double>, y double")


UNKEYED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "memory": (lambda df: rows_of(df.sparkSession), "have no key"),
    "python": (lambda df: df.withColumn("y", F.udf(abs, "double")("y")), "(PythonUDF)"),
    "random": (lambda df: df.withColumn("z", F.rand(1)), "such as rand"),
    "now": (lambda df: df.where(F.current_timestamp() > "2020-01-01"), "CurrentTimestamp may be"),
    "and now": (lambda df: df.where(F.expr("now() > '2020-01-01'")), "Now may be"),
    "local": (lambda df: df.where(F.localtimestamp() > "2020-01-01"), "LocalTimestamp may be"),
    "user": (lambda df: df.where(F.current_user() != ""), "CurrentUser may be"),
    "subquery": (lambda df: df.where("y > (select 0)"), "have no key|Subquery"),
    "word": (lambda df: df.where(F.lit(" Today UTC").cast("date") > "2020-01-01"), "another time"),
    "cache": (lambda df: df.cache(), "Spark has cached rows"),
    "sum": (lambda df: df.groupBy("x").agg(F.sum("y").alias("y")), "a Aggregate may give"),
    "limit": (lambda df: df.limit(5), "a GlobalLimit may give"),
}


@pytest.mark.parametrize("name", UNKEYED)
def test_what_cannot_be_told_apart_has_no_key(spark: SparkSession, folder: Path, name: str) -> None:
    make, reason = UNKEYED[name]
    found = choice(make(spark.read.parquet(str(folder))))
    assert found.keep is None and any(part in str(found) for part in reason.split("|"))


def test_rows_that_were_cached_since_the_plan_was_made_have_no_key(
    spark: SparkSession, folder: Path
) -> None:
    df, same = (spark.read.parquet(str(folder)) for _ in range(2))
    assert df.count() == NUM_ROWS and choice(df).keep is not None
    same.cache()
    try:
        assert "Spark has cached rows" in str(choice(df))
    finally:
        same.unpersist()


def test_a_file_that_has_grown_since_it_was_listed_has_another_key(
    spark: SparkSession, tmp_path: Path
) -> None:
    file = tmp_path / "rows.csv"
    file.write_text("1,1\n")

    def read() -> DataFrame:
        return spark.read.schema("x double, y double").csv(str(file))

    before = read()
    file.write_text("1,1\n" + 9 * "2,2\n")
    assert before.count() < 10  # Spark goes by the length that it knows
    assert key(before) != key(read())


@pytest.mark.slow
def test_code_and_partitions_that_may_be_others(
    spark: SparkSession, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    df = spark.read.parquet(str(folder))
    made = Named(argument="x", specification=Tensor("x", transform=lambda values: values))
    assert 'the code for "x"' in str(choice(df, made))
    assert "a Sort may give" in str(choice(df.orderBy("y"), pieces=1))
    cut = [key(df, pieces=pieces, num_places=places) for pieces, places in ((1, 1), (2, 1), (1, 2))]
    with monkeypatch.context() as patch:  # partitions may have other borders
        patch.setattr(SparkContext, "defaultParallelism", 99)
        cut.append(key(df, pieces=1, num_places=1))
        assert key(df) not in cut
    assert len({*cut, key(df)}) == 5


def test_folders_and_sessions_that_cannot_keep(monkeypatch: pytest.MonkeyPatch) -> None:
    for directory, remedy in (("hdfs:///a", "executors' disks"), ("a/b", "whole path")):
        with pytest.raises(ConfigError, match=remedy):
            check_cache_dir(directory)
    check_cache_dir("/a/b")
    monkeypatch.setattr(kept_frames, "is_connect", lambda _: True)
    frame: Any = type("Frame", (), {"sparkSession": None})
    with pytest.raises(ConfigError, match="needs classic Spark"):
        choose_keep(frame, TableSpec(columns=(), num_shards=1), "/a", None)


def java(**answers: Any) -> Any:
    """A Java object whose methods answer so."""
    return SimpleNamespace(**{name: lambda *_, a=answer: a for name, answer in answers.items()})


def of_class(name: str) -> Any:
    return java(getName=name, getSimpleName=name.rpartition(".")[2])


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"leaf": "a.b.LocalRelation"}, "come from memory or a table (LocalRelation)"),
        ({"kind": "a.b.JDBCRelation"}, "the rows of a JDBCRelation may change unseen"),
        ({"index": "a.b.TahoeFileIndex"}, "are those of a TahoeFileIndex"),
        ({"node": "objects.Invoke"}, "whose code Spark does not show (Invoke)"),
        ({"text": "nowhere"}, None),
        ({"text": "now "}, "'now ' may be another time"),
        ({"deterministic": False}, "such as rand()"),
    ],
)
def test_what_a_plan_may_have(changes: dict[str, Any], reason: str | None) -> None:
    given = {
        "leaf": kept_frames._FILES, "kind": "a.HadoopFsRelation", "index": "a.InMemoryFileIndex",
        "node": "Add", "text": "", "deterministic": True, **changes,
    }  # fmt: skip
    location = java(getClass=of_class(given["index"]))
    relation = java(getClass=of_class(given["kind"]), location=location)
    leaf = java(getClass=of_class(given["leaf"]), relation=relation)
    nodes: list[Any] = [
        {"class": f"{kept_frames._EXPRESSIONS}{given['node']}", "num-children": 2},
        {"class": kept_frames._LITERAL, "dataType": "string", "value": given["text"]},
    ]
    found = kept_frames._unclear(java(deterministic=given["deterministic"]), nodes, [leaf], ())
    assert found is None if reason is None else reason in str(found)


def test_columns_are_told_apart_by_all_that_they_have() -> None:
    column = SpoolColumn(name="x", role="feature", dtype="float32", expression="a")
    changes: list[dict[str, Any]] = [
        {}, {"name": "z"}, {"role": "label"}, {"dtype": "int64"}, {"as_classes": True},
        {"argument": "x"}, {"expression": "b"}, {"specification": Tensor("x", shape=(2,))},
    ]  # fmt: skip
    found = [json.dumps([*kept_frames._identity(replace(column, **one))]) for one in changes]
    assert len({*found}) == len(changes)


def test_numbers_of_columns_count_as_they_come() -> None:
    def plan(*numbers: int) -> Any:
        nodes = [{"exprId": {"id": number, "jvmId": "a"}} for number in numbers]
        return kept_frames._renumbered(nodes)

    assert plan(7, 9, 7) == plan(3, 4, 3) != plan(3, 4, 4)


def test_files_are_told_apart_by_how_they_are_read_and_what_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kept_frames, "scala_context", lambda _: java(hadoopConfiguration=None))
    default = {
        "format": "parquet", "schema": "{}", "partitions": "{}", "options": "a", "length": 5,
        "time": 6, "length_now": 5, "time_now": 6, "path": "/a/b",
    }  # fmt: skip

    def found(**changes: Any) -> str:
        given = {**default, **changes}
        path: Any = SimpleNamespace(toString=lambda: given["path"])
        now = java(getPath=path, getLen=given["length_now"], getModificationTime=given["time_now"])
        path.getParent = lambda: java(toString="/a", getFileSystem=java(listStatus=[now]))
        file = java(getPath=path, getLen=given["length"], getModificationTime=given["time"])
        relation = java(
            location=java(allFiles=java(size=1, apply=file)),
            fileFormat=java(getClass=of_class(given["format"])),
            schema=java(json=given["schema"]), partitionSchema=java(json=given["partitions"]),
            options=java(toString=given["options"]),
        )  # fmt: skip
        return json.dumps(kept_frames._files_of(relation, None))

    others = {name: value * 2 for name, value in default.items()}
    assert len({found(), *(found(**{name: value}) for name, value in others.items())}) == 10


def test_files_that_cannot_be_listed_have_no_key(spark: SparkSession, folder: Path) -> None:
    df = spark.read.parquet(str(folder))
    shutil.rmtree(folder)
    assert "its files cannot be listed: " in str(choice(df))


def test_columns_of_a_kind_of_its_own_have_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_frames, "is_connect", lambda _: False)
    monkeypatch.setattr(Tensor, "own_kind", object())
    frame: Any = SimpleNamespace(sparkSession=None)
    spec = TableSpec(
        columns=(SpoolColumn(name="x", role="feature", dtype="float32"),), num_shards=1
    )
    assert 'the code for "x"' in str(choose_keep(frame, spec, "/a", None))


def test_tasks_run_near_the_shards_if_they_can(spark: SparkSession) -> None:
    shards = [
        SpooledShard(
            shard=Shard(
                shard_id=number, host=f"host-{number // 2}", path="", num_rows=1,
                num_validation_rows=0, fingerprint="",
            ),
            content=0,
            columns=(),
        )
        for number in range(4)
    ]  # fmt: skip
    table: Any = placed_near(spark, shards, TableSpec(columns=(), num_shards=4, num_places=2))
    rows = table.mapInArrow(lambda batches: batches, table.schema)._jdf.queryExecution().toRdd()
    scala = table.sparkSession.sparkContext._jsc.sc()
    places = [scala.getPreferredLocs(rows, number).mkString(" ") for number in range(2)]
    assert ["host-0" in places[0], "host-1" in places[1]] == [True, True]
    found = [parse_shards(json.loads(row["payload"])) for row in sorted(table.collect())]
    assert found == [shards[:2], shards[2:]]


def without_content(folder: Path) -> None:
    """Overwrite the files, of which neither length nor time tells; to read them would fail."""
    for path in folder.iterdir():
        status = path.stat()
        path.write_bytes(bytes(status.st_size))
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def fitted(df: DataFrame, cache: Path, **params: Any) -> TorchModel:
    torch.manual_seed(1)
    estimator = TorchRegressor(
        module=nn.Linear(2, 1), loss="mse", featuresCol="x", labelCol="y", learningRate=0.1,
        batchSize=16, numWorkers=2, validationFraction=0.2, cacheDir=str(cache), verbose=0,
        **params,
    )  # fmt: skip
    return estimator.fit(df)


def trained(df: DataFrame, cache: Path, **params: Any) -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = fitted(df, cache, **params).module.state_dict()
    return state


def equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_second_fit_reads_nothing_and_gives_the_same_bits(
    spark: SparkSession, folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "sparkdl")
    cache = tmp_path / "new" / "cache"
    df = spark.read.parquet(str(folder))
    first = trained(df, cache)
    (own,) = cache.iterdir()
    assert "the 2 shards are kept in" in caplog.text
    kept = Keep(directory=str(cache), key=own.name.removeprefix("sparkdl-kept-"))
    shards = kept.find()
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    without_content(folder)
    again = fitted(df, cache)
    assert equal(first, again.module.state_dict())
    assert again.summary.shards == "2 shards (with those of an earlier fit)"
    assert "2 of 2 shards are kept from an earlier fit" in caplog.text
    trained(df, cache, syncStrategy=ParameterAveraging(), executionMode="rounds")
    for name, content in before.items():  # at another time, hence under another key
        (folder / name).write_bytes(content)
    assert equal(first, trained(df, cache))
    assert len(list(cache.iterdir())) == 2
    # A shard that is not whole is written anew, from the files that had this key.
    (other,) = set(cache.iterdir()) - {own}
    os.truncate(other / "00000" / "train-000.bin", 4)
    assert equal(first, trained(df, cache))
    assert "1 of 2 shards are kept from an earlier fit" in caplog.text
    anew = Keep(directory=str(cache), key=other.name.removeprefix("sparkdl-kept-")).find()
    assert [s.shard.fingerprint for s in anew] == [s.shard.fingerprint for s in shards]
    assert {path.name for path in cache.iterdir()} == {own.name, other.name}
