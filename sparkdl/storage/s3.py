"""Access to S3, and to what speaks its protocol, with the client inside pyarrow.

It needs no package more, waits for a bounded time, and looks for credentials and region where
every AWS tool does: environment variables, ``~/.aws``, the machine's role.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from sparkdl.errors import StorageError

SCHEMES = ("s3", "s3a", "s3n")
"""Hadoop's two names for S3 are the same place."""
CONNECT_SECONDS = 10.0
REQUEST_SECONDS = 60.0
"""Longest waits, for WebHDFS too."""


def open_s3(url: str) -> tuple[Any, str]:
    """The file system of fsspec's form for an S3 URL, and bucket and folder in it.

    ``AWS_ENDPOINT_URL_S3`` or ``AWS_ENDPOINT_URL`` names another server than Amazon's. Without
    these and without ``AWS_REGION`` or ``AWS_DEFAULT_REGION`` Amazon is asked for the bucket's
    region. StorageError if the URL names no bucket, or carries a password; OSError if Amazon does
    not know the bucket.
    """
    from fsspec.implementations.arrow import ArrowFSWrapper
    from pyarrow.fs import S3FileSystem

    bucket, _, key = url.partition("://")[2].partition("/")  # a key may hold # and ?
    if "@" in bucket:
        raise StorageError(
            "a URL of S3 cannot carry a password; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        )
    if not bucket:
        raise StorageError("a URL of S3 names no bucket; write s3://bucket/folder")
    files = S3FileSystem(
        connect_timeout=CONNECT_SECONDS,
        request_timeout=REQUEST_SECONDS,
        **_server(bucket, os.environ),
    )
    # Not kept by fsspec: it would tell no two file systems of pyarrow apart.
    return ArrowFSWrapper(files, skip_instance_cache=True), f"{bucket}/{key}".rstrip("/")


def _server(bucket: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the server to turn to: one by its address, or that of Amazon's region."""
    endpoint = environment.get("AWS_ENDPOINT_URL_S3") or environment.get("AWS_ENDPOINT_URL")
    region = environment.get("AWS_REGION") or environment.get("AWS_DEFAULT_REGION")
    if endpoint:
        address = urlsplit(endpoint)
        server = {"scheme": address.scheme, "endpoint_override": address.netloc}
        return {**server, "region": region or "us-east-1"}
    if region:
        return {"region": region}
    from pyarrow.fs import resolve_s3_region

    return {"region": resolve_s3_region(bucket)}
