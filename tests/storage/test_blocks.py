"""What is known of the places of files without an HDFS; `tests/hdfs` asks a real one."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from sparkdl.storage.blocks import locate_blocks


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
