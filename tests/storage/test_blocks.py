"""What is known of the places of files without an HDFS; `tests/hdfs` asks a real one."""

from __future__ import annotations

import json
import socket
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from sparkdl.storage import blocks
from sparkdl.storage.blocks import FileBlock, locate_blocks


def test_where_nobody_knows_hosts_training_does_without(caplog: pytest.LogCaptureFixture) -> None:
    no_jvm: Any = object()  # as a client of Spark Connect
    for url in ("/data", "file:///data", "hdfs://host/data", "s3://bucket/data"):
        assert locate_blocks(no_jvm, url, ("/data/a.parquet",)) == {}
    assert caplog.text == ""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]  # of nobody, once it is closed
    url = f"webhdfs://me:secret@127.0.0.1:{port}/data"
    assert locate_blocks(no_jvm, url, ("/data/a.parquet",)) == {}
    assert "workers read from any host" in caplog.text and "secret" not in caplog.text


NODE = {"hostName": "far.net", "ipAddr": "10.0.0.7"}
HERE = {"hostName": "localhost", "ipAddr": "127.0.0.1"}
FAR = ("far.net", "10.0.0.7")


def test_webhdfs_names_the_hosts_of_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    class Files:
        def _call(self, operation: str, path: str) -> Any:
            assert operation == "GET_BLOCK_LOCATIONS"
            located = [
                {"startOffset": 100 * n, "block": {"numBytes": 30}, "locations": nodes}
                for n, nodes in enumerate([[HERE], [HERE, NODE]] if path == "/a" else [[HERE]])
            ]
            return SimpleNamespace(json=lambda: {"LocatedBlocks": {"locatedBlocks": located}})

    monkeypatch.setattr(blocks, "open_url", lambda url: (Files(), "/"))
    spark: Any = None
    found = locate_blocks(spark, "webhdfs://host/", ("/a", "/b"))
    assert found == {"/a": [FileBlock(0, 30, ()), FileBlock(100, 130, (FAR,))]}


def jvm_of(files: dict[str, list[dict[str, Any]]]) -> Any:
    """A session whose name node knows these files."""
    spark, listed = MagicMock(), []
    for path, located in files.items():
        status = MagicMock()
        status.getPath.return_value.toUri.return_value.getPath.return_value = path
        status.getBlockLocations.return_value = located
        listed.append(status)
    rest = iter([*listed, None])
    ahead = [next(rest)]
    listing = SimpleNamespace(hasNext=lambda: ahead[0] is not None)

    def following() -> Any:
        status, ahead[0] = ahead[0], next(rest)
        return status

    listing.next = following
    root = spark._jvm.org.apache.hadoop.fs.Path.return_value
    root.getFileSystem.return_value.listFiles.return_value = listing
    mapper = spark._jvm.com.fasterxml.jackson.databind.ObjectMapper.return_value
    mapper.writeValueAsString = json.dumps
    return spark


def test_hadoop_names_the_hosts_of_the_files_that_are_wanted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(blocks, "knows_scheme", lambda *_: True)
    six = {"offset": 64, "length": 10, "hosts": ["six.net"], "names": ["[fe80::7]:9866"]}
    four = {"offset": 0, "length": 64, "hosts": ["far.net"], "names": ["10.0.0.7:9866"]}
    spark = jvm_of({"/other": [four], "/a": [four, six]})
    assert locate_blocks(spark, "hdfs://host/", ("/a",)) == {
        "/a": [FileBlock(0, 64, (FAR,)), FileBlock(64, 74, (("six.net", "fe80::7"),))]
    }
    store = {"offset": 0, "length": 64, "hosts": ["localhost"], "names": ["localhost:9866"]}
    spark = jvm_of({"/a": [store], "/b": [four]})
    assert locate_blocks(spark, "s3a://bucket/", ("/a", "/b")) == {}
