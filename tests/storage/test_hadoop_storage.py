"""Does the driver open what Hadoop knows through the JVM, and do workers get there through it?

viewfs, which leads to a local folder here, is known to Hadoop and not to Python; tests/hdfs does
the same with a real HDFS.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from sparkdl.data.plan import Column
from sparkdl.errors import StorageError
from sparkdl.storage.hadoop_storage import HadoopStorage, knows_scheme, open_on_driver, open_place
from sparkdl.storage.storage import FsspecStorage, LocalStorage, Storage, open_storage
from tests.storage.contract import FolderContract

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.classic]


@pytest.fixture
def url(spark: SparkSession, tmp_path: Path) -> Iterator[str]:
    entry = f"fs.viewfs.mounttable.{tmp_path.name}.link./here"
    spark.conf.set(entry, f"file://{tmp_path}/root")
    (tmp_path / "root").mkdir()
    yield f"viewfs://{tmp_path.name}/here"
    spark.conf.unset(entry)


@pytest.fixture
def storage(spark: SparkSession, url: str) -> Storage:
    return open_on_driver(spark, url)


class TestContract(FolderContract):
    """The JVM's file systems."""


def test_hadoop_opens_what_it_knows_and_python_the_rest(
    spark: SparkSession, url: str, tmp_path: Path
) -> None:
    opened = open_on_driver(spark, url)
    assert isinstance(opened, HadoopStorage) and opened.url == url == str(opened)
    assert isinstance(open_on_driver(spark, str(tmp_path)), LocalStorage)
    assert isinstance(open_on_driver(spark, f"file://{tmp_path}"), LocalStorage)
    assert isinstance(open_on_driver(spark, "memory://x"), FsspecStorage)
    known = {scheme: knows_scheme(spark, scheme) for scheme in ("hdfs", "s3", "s3a", "memory")}
    assert known == {"hdfs": True, "s3": False, "s3a": False, "memory": False}


def test_what_has_no_session_at_hand_takes_that_of_the_process(
    spark: SparkSession, url: str
) -> None:
    from concurrent.futures import ThreadPoolExecutor

    assert isinstance(open_place(url), HadoopStorage)
    with ThreadPoolExecutor(1) as pool:
        assert isinstance(pool.submit(open_place, url).result(60), HadoopStorage)
    (told,) = spark.range(0, 1, 1, 1).mapInArrow(in_a_worker(url), "told string").collect()
    assert told.told == f"cannot open {url}: Protocol not known: viewfs"


def in_a_worker(url: str) -> Any:
    def open_there(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        list(batches)
        with pytest.raises(StorageError) as caught:
            open_place(url)
        yield pa.RecordBatch.from_pydict({"told": [str(caught.value).partition(";")[0]]})

    return open_there


def test_modules_and_weights_are_found_there(spark: SparkSession, url: str) -> None:
    from sparkdl import InitialWeights, TorchModel, load_module, load_signature
    from sparkdl.serialization.initial_weights import load_initial_weights

    column = Column(name="x", role="feature", dtype="float32", shape=(1,))
    model = TorchModel(make_net(), [column])
    model.save(f"{url}/model")
    expected = model.module.state_dict()
    module = make_net()
    load_initial_weights(module, InitialWeights(source=f"{url}/model"))
    for found in (module, load_module(f"{url}/model"), TorchModel.load(f"{url}/model").module):
        state = found.state_dict()
        assert all(state[name].equal(value) for name, value in expected.items())
    assert load_signature(f"{url}/model").inputs == (column,)
    storage = open_on_driver(spark, f"{url}/model/model")
    storage.write("module.json", storage.read("module.json").replace(b"float32", b"float64"))
    for load in (load_module, load_signature, TorchModel.load):
        with pytest.raises(StorageError, match=r"module\.json is damaged"):
            load(f"{url}/model")


def test_a_name_node_that_is_not_there_is_told(spark: SparkSession) -> None:
    spark.conf.set("ipc.client.connect.max.retries", "0")
    try:
        with pytest.raises(StorageError, match=r"cannot look for hdfs://127.0.0.1:9/x/a: Connect"):
            open_on_driver(spark, "hdfs://127.0.0.1:9/x").exists("a")
    finally:
        spark.conf.unset("ipc.client.connect.max.retries")


def test_nothing_stays_in_the_drivers_temporary_folder(
    storage: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    storage.write("a", b"x")
    assert storage.read("a") == b"x"
    with pytest.raises(StorageError):
        storage.read("absent")
    assert list((tmp_path / "tmp").iterdir()) == []
    assert [path.name for path in (tmp_path / "root").iterdir() if path.name[0] != "."] == ["a"]


def test_a_temporary_folder_that_fails_is_told_as_any_other_place(
    storage: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "none"))
    with pytest.raises(StorageError, match=r"cannot write .*/none, on the way to .*/a: "):
        storage.write("a", b"x")


def test_passwords_in_urls_are_not_shown(spark: SparkSession) -> None:
    with pytest.raises(StorageError) as caught:
        open_on_driver(spark, "hdfs://user:secret@127.0.0.1:port/x").exists("a")
    assert "secret" not in str(caught.value)


@pytest.mark.gang
@pytest.mark.slow
def test_a_fit_keeps_checkpoints_where_only_the_driver_can(
    spark: SparkSession, url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from pyspark.sql import functions as F

    from sparkdl import TorchClassifier

    with pytest.raises(StorageError, match="Protocol not known"):
        open_storage(url)
    df = spark.range(0, 60, 1, 2).select(
        F.array(F.col("id").cast("float")).alias("features"), (F.col("id") % 2).alias("label")
    )
    entries: dict[str, Any] = {"checkpointDir": url, "checkpointInterval": 2}
    classifier = TorchClassifier(
        module=make_net, batchSize=10, epochs=2, numWorkers=2, verbose=0, **entries
    )
    classifier.fit(df)
    steps = sorted(path.name for path in (tmp_path / "root").glob("*/*/step-*"))
    assert steps[-1].endswith("-final")
    with caplog.at_level(logging.INFO, "sparkdl"):
        model = classifier.fit(df)
    assert "going on from the checkpoint of step 8" in caplog.text
    assert "by way of the driver, since executors cannot open it: " in caplog.text
    assert [record["epoch"] for record in model.summary.history] == [1, 2]


@pytest.mark.gang
def test_without_a_channel_nothing_can_be_passed_on(spark: SparkSession, url: str) -> None:
    from pyspark.sql import functions as F

    from sparkdl import TorchClassifier

    features = F.array(F.col("id").cast("float")).alias("features")
    df = spark.range(4).select(features, F.lit(0).alias("label"))
    classifier = TorchClassifier(module=make_net, numWorkers=2, verbose=0, checkpointDir=url)
    spark.conf.set("spark.sparkdl.channel", "workers")
    try:
        with pytest.raises(StorageError, match=r"Protocol not known.*Nor can the driver pass fil"):
            classifier.fit(df)
    finally:
        spark.conf.unset("spark.sparkdl.channel")


def make_net() -> Any:
    from torch import nn

    return nn.Linear(1, 2)
