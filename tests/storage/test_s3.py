"""Does S3 behave as every storage does, and does it find server, region and credentials?"""

from __future__ import annotations

import os
from typing import Any

import pytest

from sparkdl.errors import StorageError
from sparkdl.storage import s3
from sparkdl.storage.storage import Storage, open_storage
from tests.storage.contract import FolderContract


@pytest.fixture
def storage(s3_url: str) -> Storage:
    return open_storage(s3_url)


class TestContract(FolderContract):
    """The client inside pyarrow."""


def test_large_files_go_in_parts(storage: Storage) -> None:
    content = os.urandom(24 << 20)
    storage.write("large", (content[at : at + 1000000] for at in range(0, len(content), 1000000)))
    assert storage.read("large") == content


def test_hadoops_name_for_s3_is_the_same_place(storage: Storage, s3_url: str) -> None:
    open_storage(s3_url.replace("s3:", "s3a:")).write("a", b"x")
    assert storage.read("a") == b"x" and storage.list("") == ["a"]


@pytest.mark.parametrize("name", ["models#2", "lr=0.1?", "a b%20c"])
def test_a_key_may_hold_what_ends_the_path_of_a_web_page(s3_url: str, name: str) -> None:
    open_storage(f"{s3_url}/{name}/net").write("a", b"x")
    assert open_storage(s3_url).list("") == [name]


def test_a_wrong_bucket_is_told(s3_url: str) -> None:
    with pytest.raises(
        StorageError, match=r"cannot write s3://absent/x/a: .*; check the path, and"
    ):
        open_storage("s3://absent/x").write("a", b"")
    with pytest.raises(StorageError, match=r"names no bucket; write s3://bucket/folder"):
        open_storage("s3:///x")


def test_a_password_in_the_url_is_refused_and_not_shown() -> None:
    with pytest.raises(StorageError, match="AWS_SECRET_ACCESS_KEY") as caught:
        open_storage("s3://key:confidential@bucket/x")
    assert "confidential" not in str(caught.value)


def test_an_absent_server_is_told_in_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(StorageError, match=r"cannot write s3://bucket/x/a: .*"):
        open_storage("s3://bucket/x").write("a", b"")


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        (
            {"AWS_ENDPOINT_URL": "http://host:9000"},
            {"scheme": "http", "endpoint_override": "host:9000", "region": "us-east-1"},
        ),
        (
            {
                "AWS_ENDPOINT_URL_S3": "https://s3.example/",
                "AWS_ENDPOINT_URL": "http://other",
                "AWS_REGION": "eu",
            },
            {"scheme": "https", "endpoint_override": "s3.example", "region": "eu"},
        ),
        ({"AWS_DEFAULT_REGION": "eu-central-1"}, {"region": "eu-central-1"}),
    ],
)
def test_the_environment_names_the_server(
    environment: dict[str, str], expected: dict[str, str]
) -> None:
    assert s3._server("bucket", environment) == expected


def test_without_a_region_amazon_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    import pyarrow.fs

    asked: list[Any] = []
    monkeypatch.setattr(pyarrow.fs, "resolve_s3_region", lambda b: asked.append(b) or "found")
    assert s3._server("bucket", {}) == {"region": "found"} and asked == ["bucket"]
