"""HDFS behaves as every storage does, through the JVM and through the driver's channel."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from sparkdl.comm.channel import ChannelServer, ChannelStorage, Hub
from sparkdl.errors import StorageError
from sparkdl.storage.mounted import Mounted, Subfolder
from sparkdl.storage.storage import Storage, open_storage
from tests.hdfs.daemons import Hdfs
from tests.storage.contract import FolderContract, StorageContract
from tests.storage.memory import MemoryStorage

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from sparkdl.storage.hadoop_storage import HadoopStorage

pytestmark = pytest.mark.spark


@pytest.fixture
def driver(spark: SparkSession, url: str) -> HadoopStorage:
    """HDFS as the driver opens it."""
    from sparkdl.storage.hadoop_storage import HadoopStorage, open_on_driver

    opened = open_on_driver(spark, url)
    assert isinstance(opened, HadoopStorage)
    return opened


@contextlib.contextmanager
def relayed(driver: Storage) -> Iterator[Storage]:
    """HDFS as a worker sees it by way of the driver."""
    served = Mounted(MemoryStorage())
    served.mount("there", driver)
    with (
        ChannelServer(Hub(), bind="127.0.0.1", announce="127.0.0.1", files=served) as server,
        contextlib.closing(ChannelStorage(server.address.of_rank(0))) as client,
    ):
        yield Subfolder(client, "there", str(driver))


class TestDriver(FolderContract):
    """The driver's JVM."""

    @pytest.fixture
    def storage(self, driver: HadoopStorage) -> Storage:
        return driver


class TestWorkers(StorageContract):
    """The workers behind it."""

    @pytest.fixture
    def storage(self, driver: HadoopStorage) -> Iterator[Storage]:
        with relayed(driver) as worker:
            yield worker


def test_there_is_no_libhdfs_so_these_tests_show_what_they_say(url: str) -> None:
    with pytest.raises(StorageError, match="cannot open hdfs://"):
        open_storage(url)


def test_a_write_that_breaks_off_leaves_the_old_file(driver: HadoopStorage) -> None:
    def broken() -> Iterator[bytes]:
        yield b"half"
        raise ArithmeticError("stop")

    driver.write("a", b"old")
    with pytest.raises(ArithmeticError, match="stop"):
        driver.write("a", broken())
    assert driver.read("a") == b"old" and driver.list("") == ["a"]


def test_what_is_forbidden_is_told_with_the_remedy(
    spark: SparkSession, driver: HadoopStorage, url: str
) -> None:
    from sparkdl.storage.hadoop_storage import HadoopStorage

    driver.write("locked/file", b"x")
    session: Any = spark
    uri, conf = (
        session._jvm.java.net.URI(url),
        session._jsparkSession.sessionState().newHadoopConf(),
    )
    locked = HadoopStorage(spark, url)
    locked._fs = session._jvm.org.apache.hadoop.fs.FileSystem.newInstance(uri, conf, "somebody")
    for act in (lambda: locked.write("locked/other", b""), lambda: locked.remove("locked")):
        with pytest.raises(StorageError, match=r"Permission denied.*; give the user that runs"):
            act()


def test_large_files_pass_whole_both_ways(driver: HadoopStorage) -> None:
    content = os.urandom(40 << 20)  # several messages of the channel
    with relayed(driver) as worker:
        worker.write(
            "large", (content[at : at + (1 << 20)] for at in range(0, len(content), 1 << 20))
        )
        assert worker.read("large") == content


def test_many_threads_write_at_a_time(driver: HadoopStorage) -> None:
    with relayed(driver) as worker:
        threads = [
            threading.Thread(target=worker.write, args=(f"ranks/{number}", b"%d" % number))
            for number in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert [worker.read(f"ranks/{number}") for number in range(8)] == [
            b"%d" % number for number in range(8)
        ]


def test_files_stay_readable_and_writable_when_a_data_node_dies(
    hdfs: Hdfs, driver: HadoopStorage
) -> None:
    content = os.urandom(1 << 20)
    driver.write("before", content)
    hdfs.kill_data_node(0)
    try:
        assert driver.read("before") == content
        driver.write("after", content)
        assert driver.read("after") == content
    finally:
        hdfs.start_data_node(0)
