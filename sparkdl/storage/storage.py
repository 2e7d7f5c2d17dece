"""Where do checkpoints and models lie, and how are their files written and read?

A `Storage` is a folder: relative posix paths in, bytes out. Nothing here knows what the files
mean; that a checkpoint is complete follows from its manifest, which is written last, so a storage
need not be able to rename or lock.
"""

from __future__ import annotations

import builtins
import contextlib
import errno
import os
import re
import shutil
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

from sparkdl.errors import StorageError
from sparkdl.storage import s3, webhdfs

Data = bytes | bytearray | memoryview | Iterable[bytes | bytearray | memoryview]
"""What `Storage.write` takes: one buffer, or its pieces in order (large files are streamed)."""

_ASIDE = ".aside-"
_URL = re.compile("(?P<scheme>[A-Za-z][A-Za-z0-9+.-]+):(?P<rest>.*)", re.DOTALL)


class Storage(Protocol):
    """A folder somewhere. Thread-safe. Every method raises StorageError if the place fails."""

    def write(self, path: str, data: Data) -> None:
        """Store ``data`` under a relative path, replacing what was there; makes the folders."""

    def read(self, path: str) -> bytes:
        """The bytes stored under a path; StorageError if there are none."""

    def list(self, path: str) -> list[str]:
        """Names directly under a folder, sorted; empty if there is no such folder."""

    def remove(self, path: str) -> None:
        """Delete a file, or a folder with all it holds; nothing if absent."""

    def exists(self, path: str) -> bool:
        """Whether a file or folder is there."""


class Folder(Storage, Protocol):
    """A storage that can move its files: all but those that pass files on to others."""

    def move(self, source: str, target: str) -> None:
        """Give a file another path, replacing what was there; makes the folders."""


def open_storage(path_or_url: str | os.PathLike[str]) -> Folder:
    """The storage for a local path, a ``file://`` URL, or any URL that fsspec knows.

    As in Hadoop, ``scheme:/path`` is a URL too: ``hdfs:/models`` lies on the default name node.

    Raises:
        StorageError: the URL's scheme is unknown, or its package is not installed.
    """
    text = os.fspath(path_or_url)
    url = _URL.fullmatch(text)
    if url is None:
        return LocalStorage(text)
    scheme, rest = url["scheme"].lower(), url["rest"]
    if scheme == "file":
        return LocalStorage(re.sub("^//(localhost)?(?=/)", "", rest))
    if scheme == "dbfs":
        raise StorageError(
            f"{text} is no place that Python can write to; use /dbfs/..., where Databricks mounts "
            "it, or a volume, /Volumes/..."
        )
    return FsspecStorage(text if "://" in text else f"{scheme}://{rest}")


def absolute(path_or_url: str | os.PathLike[str]) -> str:
    """A local path as seen from the root, for other processes; a URL as it is."""
    storage = open_storage(path_or_url)
    return str(storage) if isinstance(storage, LocalStorage) else os.fspath(path_or_url)


def scheme_of(path_or_url: str) -> str | None:
    """The scheme of a URL in small letters, or None for a path."""
    url = _URL.fullmatch(path_or_url)
    return url["scheme"].lower() if url is not None else None


def without_password(url: str) -> str:
    """A URL, or a text with URLs in it, as errors and logs may show it."""
    return re.sub(r"//[^/\s]*@", "//***@", url)


def drop_password(text: str) -> str:
    """A text whose URLs keep the user, but not the password."""
    return re.sub(r"(//[^/\s:@]*):[^/\s]*@", r"\1@", text)


def check_writable(storage: Storage) -> None:
    """Write, read and remove a small file, so that a wrong directory fails before training.

    Raises:
        StorageError: names the place, the cause and the remedy.
    """
    name = f"sparkdl-probe-{uuid.uuid4().hex}"
    storage.write(name, name.encode())
    try:
        intact = storage.read(name) == name.encode()
    finally:
        storage.remove(name)
    if not intact:
        raise StorageError(
            f"{storage} gave back other bytes than were written; choose another directory"
        )


class LocalStorage:
    """A folder of this host's file system; files appear whole or not at all."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self._root = Path(root).expanduser().absolute()

    def __str__(self) -> str:
        return str(self._root)

    def write(self, path: str, data: Data) -> None:
        """See `Storage.write`. Written aside, forced to disk, then renamed."""
        target = self._at(path)
        aside = target.with_name(f"{_ASIDE}{uuid.uuid4().hex}")
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                with aside.open("xb") as file:
                    for chunk in pieces(data):
                        file.write(chunk)
                    file.flush()
                    os.fsync(file.fileno())
                aside.replace(target)
            except BaseException:
                aside.unlink(missing_ok=True)
                raise
            _sync_folder(target.parent)
        except OSError as error:
            raise failure("write", str(target), error) from error

    def read(self, path: str) -> bytes:
        try:
            return self._at(path).read_bytes()
        except OSError as error:
            raise failure("read", str(self._at(path)), error) from error

    def list(self, path: str) -> builtins.list[str]:
        try:
            names = [entry.name for entry in self._at(path).iterdir()]
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise failure("list", str(self._at(path)), error) from error
        return sorted(name for name in names if not name.startswith(_ASIDE))

    def remove(self, path: str) -> None:
        target = self._at(path)
        try:
            if target.is_dir() and not target.is_symlink():
                shutil.rmtree(target)
            else:
                target.unlink(missing_ok=True)
        except FileNotFoundError:
            return  # someone else removed it at the same time
        except OSError as error:
            raise failure("remove", str(target), error) from error

    def move(self, source: str, target: str) -> None:
        place = self._at(target)
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            self._at(source).replace(place)
            _sync_folder(place.parent)
        except OSError as error:
            raise failure("move", f"{self._at(source)} to {place}", error) from error

    def exists(self, path: str) -> bool:
        try:
            return self._at(path).exists()
        except OSError as error:
            raise failure("look for", str(self._at(path)), error) from error

    def _at(self, path: str) -> Path:
        return self._root / checked(path)


def open_url(url: str) -> tuple[Any, str]:
    """The file system of fsspec's form behind a URL ``scheme://...``, and the path in it.

    The one place where Python opens URLs, for all who read and write in other ways than `Storage`
    too: with our time-outs, S3's server, and errors that name the remedy.

    Raises:
        StorageError: the URL's scheme is unknown, its package is missing, or the place refuses.
    """
    import fsspec

    scheme, name = scheme_of(url), without_password(url)
    try:
        if scheme in s3.SCHEMES:
            return s3.open_s3(url)
        files, path = fsspec.core.url_to_fs(url)
        if scheme == "webhdfs":
            webhdfs.bound(files)
    except StorageError:
        raise
    except ImportError as error:
        raise StorageError(
            f"cannot open {name}: {error}; install that package on driver and executors"
        ) from error
    except Exception as error:  # each file system of fsspec has its own exception types
        remedy = _WITHOUT_LIBHDFS if scheme == "hdfs" else None
        raise failure("open", name, error, remedy) from error
    return files, path


class FsspecStorage:
    """A folder behind any URL that fsspec knows: ``gs://``, ``abfs://``, ``hdfs://``, or S3.

    Files are written in place: object stores show an object only when it is whole, and on the
    others the manifest that is written last tells a whole checkpoint from a part of one.
    """

    def __init__(self, url: str) -> None:
        self._name = without_password(url)
        self._has_folders = scheme_of(url) not in s3.SCHEMES
        self._fs, self._root = open_url(url)

    def __str__(self) -> str:
        return self._name

    def write(self, path: str, data: Data) -> None:
        target = self._at(path)
        try:
            if self._has_folders:
                self._fs.makedirs(str(PurePosixPath(target).parent), exist_ok=True)
            self._write(target, data)
        except Exception as error:
            raise failure("write", self._show(path), error) from error

    def _write(self, target: str, data: Data) -> None:
        opened = self._fs.open(target, "wb")
        try:
            with opened as file:
                for chunk in pieces(data):
                    file.write(chunk)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                self._fs.rm(target)  # once closed, half a file counts as one
            raise

    def read(self, path: str) -> bytes:
        try:
            return bytes(self._fs.cat_file(self._at(path)))
        except Exception as error:
            raise failure("read", self._show(path), error) from error

    def list(self, path: str) -> builtins.list[str]:
        try:
            self._fs.invalidate_cache()  # other hosts write here too
            names = self._fs.ls(self._at(path), detail=False)
        except (FileNotFoundError, NotADirectoryError):
            return []
        except Exception as error:
            raise failure("list", self._show(path), error) from error
        return sorted(str(name).rstrip("/").rsplit("/", 1)[-1] for name in names)

    def remove(self, path: str) -> None:
        try:
            self._fs.invalidate_cache()
            self._fs.rm(self._at(path), recursive=True)
        except FileNotFoundError:
            return
        except Exception as error:
            raise failure("remove", self._show(path), error) from error

    def move(self, source: str, target: str) -> None:
        if not self.exists(source):
            raise failure("move", self._show(source), FileNotFoundError(errno.ENOENT, "not there"))
        self.remove(target)  # not every file system replaces
        try:
            place = self._at(target)
            self._fs.makedirs(str(PurePosixPath(place).parent), exist_ok=True)
            self._fs.mv(self._at(source), place)
        except Exception as error:
            raise failure("move", f"{self._show(source)} to {target}", error) from error

    def exists(self, path: str) -> bool:
        try:
            self._fs.invalidate_cache()
            self._fs.info(self._at(path))  # fsspec's own exists takes every failure for a no
        except (FileNotFoundError, NotADirectoryError):
            return False
        except Exception as error:
            raise failure("look for", self._show(path), error) from error
        return True

    def _at(self, path: str) -> str:
        relative = checked(path)
        return f"{self._root.rstrip('/')}/{relative}" if relative else self._root

    def _show(self, path: str) -> str:
        return f"{self._name.rstrip('/')}/{path}"


def pieces(data: Data) -> Iterator[bytes | bytearray | memoryview]:
    """The buffers of ``data`` in order, none copied."""
    if isinstance(data, bytes | bytearray | memoryview):
        yield data
    else:
        yield from data


def checked(path: str) -> str:
    """Normalize a relative posix path.

    Raises:
        StorageError: the path is absolute or leads out of the storage.
    """
    parts = PurePosixPath(path).parts
    if path.startswith("/") or ".." in parts:
        raise StorageError(f"{path!r} leads out of its storage; use a relative path without '..'")
    return "/".join(parts)


_REMEDIES = {
    errno.ENOSPC: "free some space or choose another directory",
    errno.EDQUOT: "free some of the quota or choose another directory",
    errno.EACCES: "give the user that runs Spark the right to it, or choose another directory",
    errno.EPERM: "give the user that runs Spark the right to it, or choose another directory",
    errno.EROFS: "choose a directory that is not on a read-only file system",
    errno.ENOTDIR: "choose a path whose parents are folders",
    errno.EEXIST: "choose a path whose parents are folders",
    errno.ENOENT: "check the path, and that all hosts see the same storage",
}
_WITHOUT_LIBHDFS = (
    "without libhdfs (HADOOP_HOME, CLASSPATH) Python reaches HDFS by webhdfs:// only; the driver "
    "of classic Spark needs neither"
)


def failure(action: str, place: str, error: Exception, remedy: str | None = None) -> StorageError:
    """What to raise when a file system has failed: the place, the cause and the remedy."""
    code: Any = getattr(error, "errno", None)
    cause = getattr(error, "strerror", None) or str(error).strip() or type(error).__name__
    remedy = remedy or _REMEDIES.get(code, "check the path and the credentials")
    shown = without_password(cause.splitlines()[0])  # libhdfs lists all places that it looks at
    return StorageError(f"cannot {action} {place}: {shown}; {remedy}")


def _sync_folder(folder: Path) -> None:
    """Force the rename itself to disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
