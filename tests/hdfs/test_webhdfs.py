"""``webhdfs://``, the way of Spark Connect clients, behaves as every storage does."""

from __future__ import annotations

import uuid

import pytest

from sparkdl.errors import StorageError
from sparkdl.storage.storage import FsspecStorage, Storage, open_storage
from tests.hdfs.daemons import Hdfs
from tests.storage.contract import FolderContract


@pytest.fixture
def storage(hdfs: Hdfs) -> Storage:
    opened = open_storage(f"{hdfs.webhdfs_url}/{uuid.uuid4().hex}")
    assert isinstance(opened, FsspecStorage)
    return opened


class TestContract(FolderContract):
    """fsspec's client."""


def test_what_a_data_node_refuses_is_no_content(
    storage: FsspecStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage.write("a", b"content")
    info = storage._fs.info(storage._at("a"))
    monkeypatch.setattr(type(storage._fs), "info", lambda self, path: info)
    storage._fs.rm(storage._at("a"))
    with pytest.raises(StorageError, match="cannot read"):
        storage.read("a")


def test_nobody_waits_for_ever(storage: FsspecStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    from sparkdl.storage import s3

    seen = []

    def send(self: object, request: object, **options: object) -> object:
        seen.append(options["timeout"])
        raise TimeoutError("nobody answers")

    monkeypatch.setattr("requests.adapters.HTTPAdapter.send", send)
    with pytest.raises(StorageError, match="nobody answers"):
        storage.exists("a")
    assert seen == [(s3.CONNECT_SECONDS, s3.REQUEST_SECONDS)]
