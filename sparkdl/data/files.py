"""Through which file system does pyarrow read the files behind a path or a URL?"""

from __future__ import annotations

import os
from pathlib import Path

from pyarrow import fs

from sparkdl.storage.storage import LocalStorage, open_storage, open_url, scheme_of


def open_files(path_or_url: str | os.PathLike[str]) -> tuple[fs.FileSystem, str]:
    """The file system, and the path in it; URLs are those of `open_storage`.

    Raises:
        StorageError: the URL's scheme is unknown, its package is missing, or the place refuses.
    """
    text = os.fspath(path_or_url)
    if scheme_of(text) in (None, "file"):
        local = open_storage(text)
        assert isinstance(local, LocalStorage)
        return fs.LocalFileSystem(), str(Path(str(local)).absolute())
    files, path = open_url(text)
    # That of pyarrow's own is used as it is.
    return getattr(files, "fs", None) or fs.PyFileSystem(fs.FSSpecHandler(files)), path
