"""Do all storages behave alike, and do their errors name place, cause and remedy?"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sparkdl.errors import StorageError
from sparkdl.storage.storage import (
    Folder,
    FsspecStorage,
    LocalStorage,
    absolute,
    check_writable,
    drop_password,
    failures,
    open_storage,
    without_password,
)
from tests.storage.contract import FolderContract
from tests.storage.memory import MemoryStorage


def refuse(*_: object, **options: object) -> None:
    raise NotImplementedError


@pytest.fixture(params=["local", "memory", "fsspec-memory", "fsspec-local", "fsspec-no-rename"])
def storage(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Folder:
    if request.param == "fsspec-no-rename":
        monkeypatch.setattr("fsspec.implementations.local.LocalFileSystem.mv", refuse)
    makers = {
        "local": lambda: LocalStorage(tmp_path / "deep" / "root"),
        "memory": MemoryStorage,
        "fsspec-memory": lambda: FsspecStorage(f"memory://{tmp_path.name}"),
        "fsspec-local": lambda: FsspecStorage(f"local://{tmp_path}/root"),
        "fsspec-no-rename": lambda: FsspecStorage(f"local://{tmp_path}/root"),
    }
    return makers[request.param]()


class TestContract(FolderContract):
    """The storages that need no server."""


def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path: Path) -> None:
    def broken() -> Iterator[bytes]:
        yield b"half"
        raise RuntimeError("stop")

    storage = LocalStorage(tmp_path)
    storage.write("a", b"old")
    with pytest.raises(RuntimeError, match="stop"):
        storage.write("a", broken())
    assert storage.read("a") == b"old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["a"]


def test_a_file_in_the_way_is_reported_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(
        StorageError, match=r"cannot write .*file/.*; choose a path that is no file"
    ):
        check_writable(LocalStorage(tmp_path / "file"))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        with open("/dev/full", "wb", buffering=0) as file:  # noqa: PTH123
            file.write(b"x")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageError, match=r"No space left on device; free some space"):
        check_writable(LocalStorage(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_open_storage_chooses_by_the_form_of_the_address(tmp_path: Path) -> None:
    for address in (tmp_path, str(tmp_path), f"file://{tmp_path}", f"file:{tmp_path}"):
        storage = open_storage(address)
        assert isinstance(storage, LocalStorage) and str(storage) == str(tmp_path)
    assert isinstance(open_storage("memory://here"), FsspecStorage)


@pytest.mark.parametrize("url", ["nowhere://x", "nowhere:x"])
def test_an_unknown_scheme_is_a_storage_error(url: str) -> None:
    with pytest.raises(StorageError, match=r"cannot open nowhere://x: Protocol not known"):
        open_storage(url)


def test_one_slash_is_a_url_too() -> None:
    assert str(open_storage("memory:/here")) == "memory:///here"
    with pytest.raises(StorageError, match=r"dbfs:/models/x is no .*; use /dbfs/\.\.\., where"):
        open_storage("dbfs:/models/x")
    assert isinstance(open_storage("./run:1"), LocalStorage)


def test_local_paths_are_the_same_for_other_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")
    assert absolute("runs/x") == absolute("file:runs/x") == str(tmp_path / "runs" / "x")
    assert absolute(Path("~/runs")) == "/home/me/runs"
    assert absolute("memory://runs") == "memory://runs"


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from fsspec.registry import known_implementations

    entry = {"class": "package_that_is_absent.Files", "err": "install package_that_is_absent"}
    monkeypatch.setitem(known_implementations, "absent", entry)
    with pytest.raises(StorageError, match=r"install package_that_is_absent; install that package"):
        open_storage("absent://bucket")


def test_passwords_in_urls_are_not_shown() -> None:
    with pytest.raises(StorageError) as caught:
        open_storage("nowhere://user:secret@host/x")
    assert "secret" not in str(caught.value) and "***@host" in str(caught.value)
    assert drop_password("webhdfs://user:secret@host:9870/x") == "webhdfs://user@host:9870/x"
    for other in ("s3://bucket/a:b@c", "/a:b@c", "hdfs://host:9000/x", "gs://user@host/x"):
        assert drop_password(other) == other


SECRETS = [
    "webhdfs://user:s3cret@host:9870/x",
    "webhdfs://user:pa/s3cret@host/x",
    "https://user:s3cret/@host/x",
    "abfs://c@account.dfs.core.windows.net/x?sv=2024&sig=s3cret%2Bs3cret%3D&se=1",
    "https://bucket.s3.amazonaws.com/k?X-Amz-Credential=s3cret%2F2024&X-Amz-Signature=s3cret",
    "https://b/k?X-Amz-Security-Token=s3cret",
    "https://b/k?AWSAccessKeyId=s3cret&Signature=s3cret&Expires=1",
    "https://storage.googleapis.com/b/k?X-Goog-Signature=s3cret&GoogleAccessId=s3cret",
    "webhdfs://host:9870/x?delegation=s3cret",
    "https://host/x?a=1&access_token=s3cret",
    "https://host/x?auth_token=s3cret#part",
    "https://host/x?api_key=s3cret;password=s3cret",
    "https://host/x?api-key=s3cret&secret_key=s3cret&pwd=s3cret",
    "https://host/x?private-token=s3cret&jwt=s3cret",
    "https://host/x#access_token=s3cret&state=1",
    "https://host/x?key=s3cret",
    "jdbc:oracle:thin:user/s3cret@//host:1521/x",
    "jdbc:oracle:thin:user/s3cret@host:1521:x?a=/x",
]


@pytest.mark.parametrize("url", SECRETS)
def test_no_secret_of_a_url_is_shown_or_saved(url: str) -> None:
    for text in (url, f"cannot read {url}: not there", repr([url, "more"]), f'{{"a": "{url}"}}'):
        for kept in (without_password(text), drop_password(text)):
            assert "s3cret" not in kept, kept
            assert "/x" in kept or "/k" in kept
    with pytest.raises(StorageError) as caught, failures("read", without_password(url)):
        raise OSError(f"403 Forbidden: {url}")
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize("text", ["//a:", "//", "//a", "//a:b@", "?token", ";sig", "?a", ":thin:"])
def test_long_texts_are_looked_at_in_little_time(text: str) -> None:
    """The message of an error may be one, such as that of a rank."""
    began = time.monotonic()
    for shown in (text * 100_000, "@" + text * 100_000, text * 100_000 + "'@"):
        without_password(shown)
        drop_password(shown)
    assert time.monotonic() - began < 10


def test_nothing_is_changed_through_links_in_a_storage(tmp_path: Path) -> None:
    """Others may write into a folder of checkpoints that many use, and may put links there."""
    home, storage = tmp_path / "home", LocalStorage(tmp_path / "shared")
    (home / "backup-1").mkdir(parents=True)
    (home / "backup-1" / "manifest.json").write_text("mine")
    storage.write("own/file", b"x")
    (tmp_path / "shared" / "key").symlink_to(home)
    actions: list[Callable[[], None]] = [
        lambda: storage.write("key/backup-1/manifest.json", b"{}"),
        lambda: storage.write("key/new", b"{}"),
        lambda: storage.move("own/file", "key/backup-1/manifest.json"),
        lambda: storage.move("key/backup-1/manifest.json", "own/other"),
        lambda: storage.remove("key/backup-1"),
        lambda: storage.remove("key/backup-1/manifest.json"),
    ]
    for action in actions:
        with pytest.raises(StorageError, match="choose a path that is no file, and below none"):
            action()
    assert [path.name for path in home.iterdir()] == ["backup-1"]
    assert storage.read("key/backup-1/manifest.json") == b"mine"
    storage.remove("key")  # the link
    assert storage.list("") == ["own"] and (home / "backup-1" / "manifest.json").exists()
    (tmp_path / "link").symlink_to(tmp_path / "shared")
    LocalStorage(tmp_path / "link").write("own/file", b"y")  # links that lead there are the user's
    assert storage.read("own/file") == b"y"


def test_other_texts_stay_as_they_are() -> None:
    for text in (
        "s3://bucket/a:b@c", "hdfs://host:9000/x", "dbfs:/x?y", "/data/sig=1/token=2",
        "hdfs://host/date=1&x=2", "loss=1; token=3", "a user@host", "https://host/x?page=2&size=3",
    ):  # fmt: skip
        assert without_password(text) == text
        assert drop_password(text) == text
    assert drop_password("hdfs://host:9000/x@y") == "hdfs://host:9000/x@y"


def test_a_name_that_no_file_can_have_is_a_storage_error(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"cannot look for .*; choose a shorter path"):
        LocalStorage(tmp_path).exists("a" * 5000)


def test_what_broke_the_writing_off_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    storage = open_storage("memory://broken-off")

    def refuse(*_: object, **__: object) -> None:
        raise OSError("the server is gone")

    def pieces() -> Iterator[bytes]:
        yield b"1"
        raise KeyboardInterrupt

    monkeypatch.setattr(storage._fs, "rm", refuse)  # type: ignore[attr-defined]
    with pytest.raises(KeyboardInterrupt):
        storage.write("a", pieces())
