"""The storage of checkpoints and models: a folder on local disk, or behind a URL.

A `Storage` is a folder: relative posix paths in, bytes out. Nothing here knows what the files
mean; that a checkpoint is complete follows from its manifest, which is written last, so a storage
need not be able to rename or lock.
"""

from __future__ import annotations

import builtins
import contextlib
import errno
import mmap
import os
import re
import shutil
import stat
import uuid
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, Protocol

from sparkdl.errors import StorageError
from sparkdl.storage import s3

Data = bytes | bytearray | memoryview | Iterable[bytes | bytearray | memoryview]
"""Data for `Storage.write`: one buffer, or its pieces in order (large files are streamed)."""

Buffer = bytes | memoryview
_ASIDE = ".aside-"
_COPIED_BYTES = 16 << 20
_INNER_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_ABSENT = (FileNotFoundError, NotADirectoryError)
_LEADS_NOWHERE = (errno.ELOOP, errno.ENAMETOOLONG)
"""Numbers of errors of a name, or a link, that no file can be behind."""
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
        """Return True if a file or folder is there."""


class Folder(Storage, Protocol):
    """A storage of its own: all but those that pass files on to others."""

    @property
    def url(self) -> str:
        """The folder as other processes know it: a path, or a URL that may hold a password."""

    def move(self, source: str, target: str) -> None:
        """Give a file another path, replacing what was there; makes the folders."""

    def size(self, path: str) -> int:
        """The bytes that a file has, before any is read; StorageError if there is none."""

    def part(self, path: str, begin: int, end: int) -> Buffer:
        """The bytes of a file from ``begin`` to ``end``; StorageError if it ends before.

        Those of a local file are its pages, which processes share; who writes to them has a copy.
        """


def open_storage(path_or_url: str | os.PathLike[str]) -> Folder:
    """The storage for a local path, a ``file://`` URL, or any URL that fsspec knows.

    As in Hadoop, ``scheme:/path`` is a URL too: ``hdfs:/models`` lies on the default name node.
    StorageError if the scheme is unknown, its package is missing, or the place refuses.
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
            f"{without_password(text)} is no place that Python can write to; use /dbfs/..., where "
            "Databricks mounts it, or a volume, /Volumes/..."
        )
    return FsspecStorage(text if "://" in text else f"{scheme}://{rest}")


def at_home(path_or_url: str | os.PathLike[str]) -> str:
    """A path that begins with ``~`` as one in the user's home, anything else as it is.

    So are the stages of a pipeline, which pyspark puts into a folder that is called ``~``.
    """
    text = os.fspath(path_or_url)
    return text if _STAGE.search(text) else os.path.expanduser(text)  # noqa: PTH111


_STAGE = re.compile(r"/stages/\d+_[^/]+/?$")


def absolute(path_or_url: str | os.PathLike[str]) -> str:
    """A local path as seen from the root, for other processes; a URL as it is."""
    text = os.fspath(path_or_url)
    return str(open_storage(text)) if scheme_of(text) in (None, "file") else text


def scheme_of(path_or_url: str) -> str | None:
    """The scheme of a URL in small letters, or None for a path."""
    url = _URL.fullmatch(path_or_url)
    return url["scheme"].lower() if url is not None else None


_USER = re.compile(r"//(?:[^/\s:@\"']*:[^\s\"']*|[^/\s\"']*)@")
"""User and password of a URL. The password may have slashes, which a URL should not have."""
_PASSWORD = re.compile(r"(//[^/\s:@]*):(?:[^/\s]*|(?!\d+/)[^\s@]*)@")
_ORACLE = re.compile(r"(?<=:thin:)[^\s@]+@")
"""User and password for Oracle's JDBC driver."""
_WORD, _UNQUOTED = re.compile(r"\S+"), re.compile(r"[^\s\"']+")
_SECRET = re.compile(
    r"([?&;#](?:sig|signature|x-(?:amz|goog)-(?:signature|credential|security-token)"
    r"|awsaccesskeyid|googleaccessid|delegation|sas|jwt|hmac|bearer|pwd|passphrase"
    r"|credential|key|auth(?:_?key)?"
    r"|[\w-]*(?:token|secret|password|passwd|account_?key|(?:access|secret|api|private)[_-]?key))=)"
    r"[^&;#\s\"']+",
    re.IGNORECASE,
)
"""A value in a URL that lets in whoever has it: of a signed URL of Amazon, Azure (SAS) or Google,
of WebHDFS (``delegation``), a token, a password or a key."""


def without_password(url: str) -> str:
    """A URL, or a text with URLs in it, as errors and logs may show it: ``***`` for each secret."""
    for pattern, shown in ((_ORACLE, "***@"), (_USER, "//***@")):
        url = _UNQUOTED.sub(partial(_until_last_at, pattern, shown), url)
    return _SECRET.sub(r"\1***", url)


def drop_password(text: str) -> str:
    """A text whose URLs keep the user, but neither the password nor other secrets."""
    for pattern, shown in ((_ORACLE, "@"), (_PASSWORD, r"\1@")):
        text = _WORD.sub(partial(_until_last_at, pattern, shown), text)
    return _SECRET.sub(r"\1", text)


def _until_last_at(pattern: re.Pattern[str], shown: str, word: re.Match[str]) -> str:
    """Replace a pattern that ends with ``@`` in a word; behind the last one it is not looked for.

    That would take a time that grows with the square of the length.
    """
    begin, at, rest = word[0].rpartition("@")
    return pattern.sub(shown, begin + at) + rest


def check_writable(storage: Storage) -> None:
    """Write, read and remove a small file, so that a wrong directory fails before training.

    StorageError names the place, the cause and the remedy.
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

    @property
    def url(self) -> str:
        return str(self._root)

    def path(self, path: str) -> Path:
        """Return the path of a file, for one that is read in parts."""
        return self._at(path)

    def write(self, path: str, data: Data) -> None:
        """Write it aside, force it to disk, then rename it."""
        aside = f"{_ASIDE}{uuid.uuid4().hex}"
        with (
            failures("write", str(self._at(path)), OSError),
            self._folder_of(path, makes=True) as (folder, name),
        ):
            try:
                with open(  # by a descriptor
                    aside, "xb", opener=lambda name, flags: os.open(name, flags, dir_fd=folder)
                ) as file:
                    for chunk in pieces(data):
                        file.write(chunk)
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(aside, name, src_dir_fd=folder, dst_dir_fd=folder)
            except BaseException:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(aside, dir_fd=folder)
                raise
            os.fsync(folder)  # forces the rename itself to disk

    def read(self, path: str) -> bytes:
        with failures("read", str(self._at(path)), OSError), _opened(self._at(path)) as file:
            return file.read(os.fstat(file.fileno()).st_size)

    def size(self, path: str) -> int:
        with failures("read", str(self._at(path)), OSError), _opened(self._at(path)) as file:
            return os.fstat(file.fileno()).st_size

    def list(self, path: str) -> builtins.list[str]:
        names: list[str] = []
        with failures("list", str(self._at(path)), OSError), contextlib.suppress(*_ABSENT):
            try:
                names = [entry.name for entry in self._at(path).iterdir()]
            except OSError as error:
                if error.errno not in _LEADS_NOWHERE:
                    raise
        return sorted(name for name in names if not name.startswith(_ASIDE))

    def remove(self, path: str) -> None:
        with (
            failures("remove", str(self._at(path)), OSError),
            contextlib.suppress(FileNotFoundError),  # someone else may remove it at the same time
            self._folder_of(path) as (folder, name),
        ):
            if stat.S_ISDIR(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
                shutil.rmtree(name, dir_fd=folder)
            else:
                os.unlink(name, dir_fd=folder)

    def move(self, source: str, target: str) -> None:
        with (
            failures("move", f"{self._at(source)} to {self._at(target)}", OSError),
            self._folder_of(source) as (origin, old),
            self._folder_of(target, makes=True) as (folder, name),
        ):
            os.replace(old, name, src_dir_fd=origin, dst_dir_fd=folder)
            os.fsync(folder)

    def part(self, path: str, begin: int, end: int) -> Buffer:
        place = self._at(path)
        with failures("read", str(place), OSError), _opened(place) as file:
            size = os.fstat(file.fileno()).st_size
            require_size(min(size, end) - begin, end - begin, str(place))
            if begin == end:  # there is no map of nothing
                return b""
            before = begin % mmap.ALLOCATIONGRANULARITY
            pages = mmap.mmap(
                file.fileno(), end - begin + before, access=mmap.ACCESS_COPY, offset=begin - before
            )
            return memoryview(pages)[before:]

    def exists(self, path: str) -> bool:
        with failures("look for", str(self._at(path)), OSError):
            return self._at(path).exists()

    def _at(self, path: str) -> Path:
        return self._root / checked(path)

    @contextlib.contextmanager
    def _folder_of(self, path: str, *, makes: bool = False) -> Iterator[tuple[int, str]]:
        """A descriptor of the folder that has a file, and the file's name there.

        Links that lead to the storage are followed, but none inside: others may have put them
        there, and what they lead to is not ours to change.
        """
        root, parts = self._root, checked(path).split("/")
        if parts == [""]:
            root, parts = root.parent, [root.name]
        if makes:
            root.mkdir(parents=True, exist_ok=True)
        folder = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            for part in parts[:-1]:
                if makes:
                    with contextlib.suppress(FileExistsError):
                        os.mkdir(part, dir_fd=folder)
                inner = os.open(part, _INNER_FOLDER, dir_fd=folder)
                os.close(folder)
                folder = inner
            yield folder, parts[-1]
        finally:
            os.close(folder)


@contextlib.contextmanager
def _opened(place: Path) -> Iterator[BinaryIO]:
    """A file to read; StorageError if it is a pipe, a socket or a device.

    Others may have put it there. To open a pipe waits for its writer, and a device may never end.
    """

    def at_once(name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NONBLOCK)

    _require_file(place.stat(), place)
    with open(place, "rb", opener=at_once) as file:  # it may be another one by now
        _require_file(os.fstat(file.fileno()), place)
        yield file


def _require_file(found: os.stat_result, place: Path) -> None:
    if not stat.S_ISREG(found.st_mode) and not stat.S_ISDIR(found.st_mode):
        raise StorageError(f"cannot read {place}: it is a pipe, a socket or a device; remove it")


def open_url(url: str) -> tuple[Any, str]:
    """The file system of fsspec's form behind a URL ``scheme://...``, and the path in it.

    The one place where Python opens URLs, for all who read and write in other ways than `Storage`
    too: with our time-outs, S3's server, and errors that name the remedy. StorageError if the
    scheme is unknown, its package is missing, or the place refuses.
    """
    import fsspec

    scheme, name = scheme_of(url), without_password(url)
    try:
        if scheme in s3.SCHEMES:
            return s3.open_s3(url)
        files, path = fsspec.core.url_to_fs(url)
        if scheme == "webhdfs":
            _bound_webhdfs(files)
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


def _bound_webhdfs(files: Any) -> None:
    """Give fsspec's WebHDFS time-outs, and have it raise what data nodes refuse.

    It sets none, and takes what a data node answers for the file's content even where that is an
    error message.
    """
    from requests.adapters import HTTPAdapter

    class Bounded(HTTPAdapter):
        def send(self, request: Any, *args: Any, **options: Any) -> Any:
            options["timeout"] = (s3.CONNECT_SECONDS, s3.REQUEST_SECONDS)
            answer: Any = super().send(request, *args, **options)
            if "op=OPEN" in request.url and answer.status_code >= 400:
                raise OSError(f"WebHDFS refused with status {answer.status_code}")
            return answer

    for scheme in ("http://", "https://"):
        files.session.mount(scheme, Bounded())


class FsspecStorage:
    """A folder behind any URL that fsspec knows: ``gs://``, ``abfs://``, ``hdfs://``, or S3.

    Files are written in place: object stores show an object only when it is whole, and on the
    others the manifest that is written last tells a whole checkpoint from a part of one.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self._name = without_password(url)
        self._has_folders = scheme_of(url) not in s3.SCHEMES
        self._fs, self._root = open_url(url)

    def __str__(self) -> str:
        return self._name

    def write(self, path: str, data: Data) -> None:
        target = self._at(path)
        with failures("write", self._show(path)):
            if self._has_folders:
                self._fs.makedirs(str(PurePosixPath(target).parent), exist_ok=True)
            opened = self._fs.open(target, "wb")
            try:
                with opened as file:
                    for chunk in pieces(data):
                        file.write(chunk)
            except BaseException:
                with contextlib.suppress(Exception):  # what broke the writing off is raised
                    self._fs.rm(target)  # once closed, half a file counts as one
                raise

    def read(self, path: str) -> bytes:
        place = self._at(path)
        with failures("read", self._show(path)):
            return bytes(self._fs.cat_file(place))

    def size(self, path: str) -> int:
        place = self._at(path)
        with failures("read", self._show(path)):
            self._fs.invalidate_cache()
            return int(self._fs.info(place)["size"])

    def list(self, path: str) -> builtins.list[str]:
        place, names = self._at(path), []
        with failures("list", self._show(path)), contextlib.suppress(*_ABSENT):
            self._fs.invalidate_cache()  # other hosts write here too
            names = self._fs.ls(place, detail=False)
        return sorted(str(name).rstrip("/").rsplit("/", 1)[-1] for name in names)

    def remove(self, path: str) -> None:
        place = self._at(path)
        with failures("remove", self._show(path)), contextlib.suppress(FileNotFoundError):
            self._fs.invalidate_cache()
            self._fs.rm(place, recursive=True)

    def move(self, source: str, target: str) -> None:
        if not self.exists(source):
            raise failure("move", self._show(source), FileNotFoundError(errno.ENOENT, "not there"))
        self.remove(target)  # not every file system replaces
        origin, place = self._at(source), self._at(target)
        with failures("move", f"{self._show(source)} to {target}"):
            self._fs.makedirs(str(PurePosixPath(place).parent), exist_ok=True)
            try:
                self._fs.mv(origin, place)
                return
            except NotImplementedError:  # it can neither rename nor copy, only read and write
                pass
        with failures("move", f"{self._show(source)} to {target}"):
            with self._fs.open(origin, "rb") as old, self._fs.open(place, "wb") as new:
                shutil.copyfileobj(old, new, _COPIED_BYTES)
            self._fs.rm_file(origin)

    def part(self, path: str, begin: int, end: int) -> Buffer:
        place = self._at(path)
        with failures("read", self._show(path)), self._fs.open(place, "rb") as file:
            file.seek(begin)
            data = bytes(file.read(end - begin))
        require_size(len(data), end - begin, self._show(path))
        return data

    def exists(self, path: str) -> bool:
        place = self._at(path)
        with failures("look for", self._show(path)), contextlib.suppress(*_ABSENT):
            self._fs.invalidate_cache()
            self._fs.info(place)  # fsspec's own exists takes every failure for a no
            return True
        return False

    def _at(self, path: str) -> str:
        relative = checked(path)
        return f"{self._root.rstrip('/')}/{relative}" if relative else self._root

    def _show(self, path: str) -> str:
        return f"{self._name.rstrip('/')}/{path}"


def require_size(found: int, wanted: int, place: str) -> None:
    """Raise StorageError if a file has less than what was to be read of it."""
    if found < wanted:
        raise StorageError(
            f"{place} ends too early: it is damaged, or was not written to its end; write it "
            "again, or take an intact copy"
        )


def pieces(data: Data) -> Iterator[bytes | bytearray | memoryview]:
    """The buffers of ``data`` in order, none copied."""
    if isinstance(data, bytes | bytearray | memoryview):
        yield data
    else:
        yield from data


def checked(path: str) -> str:
    """Normalize a relative posix path; StorageError if it leads out of the storage."""
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
    errno.ENOTDIR: "choose a path that is no file, and below none",
    errno.EEXIST: "choose a path that is no file, and below none",
    errno.ELOOP: "remove the link, which leads back to itself",
    errno.ENAMETOOLONG: "choose a shorter path",
    errno.ENOENT: "check the path, and that all hosts see the same storage",
}
_DEFINITE = (
    FileNotFoundError,
    NotADirectoryError,
    IsADirectoryError,
    FileExistsError,
    PermissionError,
)
_WITHOUT_LIBHDFS = (
    "without libhdfs (HADOOP_HOME, CLASSPATH) Python reaches HDFS by webhdfs:// only; the driver "
    "of classic Spark needs neither"
)


def is_definite(error: Exception) -> bool:
    """True if the same request would fail again: absent, forbidden, full, read-only, damaged.

    What a busy server or a broken connection has caused may pass.
    """
    if not isinstance(error, StorageError):
        return False
    cause = error.__cause__
    known = getattr(cause, "errno", None) in _REMEDIES
    return cause is None or isinstance(cause, _DEFINITE) or known


def is_full(error: Exception) -> bool:
    """True if there was no space, or no quota, left."""
    return getattr(error.__cause__, "errno", None) in (errno.ENOSPC, errno.EDQUOT)


def failure(action: str, place: str, error: Exception, remedy: str | None = None) -> StorageError:
    """Make the error for a file system that has failed: the place, the cause and the remedy."""
    code: Any = getattr(error, "errno", None)
    cause = getattr(error, "strerror", None) or str(error).strip() or type(error).__name__
    if "is not a directory" in cause:  # as Hadoop says it, without a number
        code = errno.ENOTDIR
    remedy = remedy or _REMEDIES.get(code, "check the path and the credentials")
    shown = without_password(cause.splitlines()[0])  # libhdfs lists all places that it looks at
    return StorageError(f"cannot {action} {place}: {shown}; {remedy}")


@contextlib.contextmanager
def failures(
    action: str, place: str, kind: type[Exception] | tuple[type[Exception], ...] = Exception
) -> Iterator[None]:
    """Raise errors of a file system, of ``kind``, as StorageErrors; see `failure`.

    Each file system of fsspec has exception types of its own. ``action`` is what the block does,
    such as ``read``, and ``place`` where.
    """
    try:
        yield
    except kind as error:
        raise failure(action, place, error) from error
