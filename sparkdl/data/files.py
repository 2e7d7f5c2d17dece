"""Through which file system does pyarrow read the files behind a path or a URL?"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import fs

from sparkdl.errors import StorageError

_OWN = {"s3": "s3", "s3a": "s3", "s3n": "s3", "gs": "gs", "gcs": "gs"}
"""Schemes that pyarrow has a client for; the others go through fsspec."""


def open_files(path_or_url: str | os.PathLike[str]) -> tuple[fs.FileSystem, str]:
    """The file system, and the path in it.

    Raises:
        StorageError: the URL's scheme is unknown, or its package is not installed.
    """
    text = os.fspath(path_or_url)
    scheme, separator, rest = text.partition("://")
    if not separator or scheme == "file":
        return fs.LocalFileSystem(), str(Path(rest if separator else text).expanduser().absolute())
    shown = f"{scheme}://{rest.rpartition('@')[2]}"  # without a password
    try:
        if scheme.lower() in _OWN:
            files, path = fs.FileSystem.from_uri(f"{_OWN[scheme.lower()]}://{rest}")
            return files, str(path)
        return _by_fsspec(text)
    except ImportError as error:
        raise StorageError(
            f"cannot open {shown}: {error}; install that package on driver and executors"
        ) from error
    except (OSError, ValueError, pa.ArrowInvalid) as error:
        raise StorageError(f"cannot open {shown}: {error}; check the URL") from error


def _by_fsspec(url: str) -> tuple[fs.FileSystem, str]:
    import fsspec
    from fsspec.implementations.arrow import ArrowFSWrapper

    files: Any
    files, path = fsspec.core.url_to_fs(url)
    own = isinstance(files, ArrowFSWrapper)
    return (files.fs if own else fs.PyFileSystem(fs.FSSpecHandler(files))), str(path)
