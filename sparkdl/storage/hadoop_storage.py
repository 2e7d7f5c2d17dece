"""Hadoop's file systems as the driver reads and writes them: through the JVM of its Spark session.

Checkpoints and models can lie wherever Spark can read: its FileSystem brings high availability,
Kerberos, encryption zones and the cluster's own settings, and needs no native library in Python.
Executors have no such JVM at hand; `spark.cluster.link` sends their files to the driver. This
file needs a session that exists already, and imports pyspark only for its types.
"""

from __future__ import annotations

import builtins
import contextlib
import errno
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparkdl.storage.storage import (
    Buffer,
    Data,
    Folder,
    checked,
    failure,
    failures,
    open_storage,
    pieces,
    require_size,
    scheme_of,
    without_password,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_ERRORS = {
    "FileNotFoundException": errno.ENOENT,
    "AccessControlException": errno.EACCES,
    "DSQuotaExceededException": errno.EDQUOT,
    "NSQuotaExceededException": errno.EDQUOT,
    "ParentNotDirectoryException": errno.ENOTDIR,
}
"""Hadoop's exceptions for which there is a remedy, by their class's own name."""


def open_on_driver(spark: SparkSession, path_or_url: str) -> Folder:
    """The storage for a path or URL, as the driver reaches it.

    A URL is opened by Hadoop if Spark has a file system for its scheme, so that it is the place
    which Spark itself reads and writes, with the same credentials; otherwise, and always from a
    Spark Connect client, which has no JVM, by Python. Errors are those of `open_storage`.
    """
    scheme = scheme_of(path_or_url)
    has_jvm = hasattr(spark, "_jsparkSession")  # a Spark Connect client has none
    if scheme in (None, "file") or not has_jvm or not knows_scheme(spark, str(scheme)):
        return open_storage(path_or_url)
    return HadoopStorage(spark, path_or_url)


def open_place(path_or_url: str | os.PathLike[str]) -> Folder:
    """The storage for a path or URL, as this process reaches it, for functions without a session.

    On the driver of classic Spark a URL is the place that Spark itself reads and writes, with the
    same credentials; elsewhere, also where Spark is not installed, `open_storage` opens it.
    """
    text = os.fspath(path_or_url)
    spark = _session() if scheme_of(text) is not None else None
    return open_storage(text) if spark is None else open_on_driver(spark, text)


def open_parent(path_or_url: str | os.PathLike[str]) -> tuple[Folder, str]:
    """The folder that a file lies in, see `open_place`, and the file's name; empty if none."""
    text = os.fspath(path_or_url)
    name = text.rpartition("/")[2]
    return open_place(text.removesuffix(name) or "."), name


def _session() -> Any:
    """The Spark session that this process has, or None; none is ever started."""
    if sys.modules.get("pyspark.sql") is None:
        return None
    from pyspark.errors import PySparkRuntimeError
    from pyspark.sql import SparkSession

    try:
        return SparkSession.active()
    except PySparkRuntimeError:  # also in Spark's workers
        return None


def knows_scheme(spark: SparkSession, scheme: str) -> bool:
    """True if Hadoop has a file system for a scheme; classic Spark only."""
    from py4j.protocol import Py4JJavaError

    session: Any = spark
    try:
        conf = session._jsparkSession.sessionState().newHadoopConf()
        session._jvm.org.apache.hadoop.fs.FileSystem.getFileSystemClass(scheme, conf)
    except Py4JJavaError as error:
        # The scheme is in no configuration, or in one, but its jar is not on the class path.
        thrown = error.java_exception
        causes = [thrown, thrown.getCause()] if thrown.getCause() is not None else [thrown]
        names = {cause.getClass().getSimpleName() for cause in causes}
        if names & {"UnsupportedFileSystemException", "ClassNotFoundException"}:
            return False
        raise
    return True


class HadoopStorage:
    """A folder of a file system of Hadoop's, through the JVM of a classic Spark session.

    Bytes pass through a temporary file of the driver: the JVM's socket would take them encoded as
    text, which is several times slower. A write that breaks off before the file is whole leaves
    what was there.
    """

    def __init__(self, spark: SparkSession, url: str) -> None:
        session: Any = spark
        self._name = without_password(url)
        self._jvm = session._jvm
        self._path = session._jvm.org.apache.hadoop.fs.Path
        conf = session._jsparkSession.sessionState().newHadoopConf()
        with self._failures("open", ""):
            root = self._path(url)
            self._fs = root.getFileSystem(conf)
            self._root = self._fs.makeQualified(root)

    def __str__(self) -> str:
        return self._name

    @property
    def url(self) -> str:
        """The folder with scheme and host, as other processes know it."""
        return str(self._root.toString())

    def write(self, path: str, data: Data) -> None:
        target = self._at(path)
        try:
            with tempfile.NamedTemporaryFile(prefix="sparkdl-") as file:
                for piece in pieces(data):
                    file.write(piece)
                file.flush()
                with self._failures("write", path):
                    self._fs.copyFromLocalFile(False, True, self._local(file.name), target)
        except OSError as error:  # of the driver's own disk
            place = f"{tempfile.gettempdir()}, on the way to {self._name.rstrip('/')}/{path}"
            raise failure("write", place, error) from error

    def read(self, path: str) -> bytes:
        source = self._at(path)
        with tempfile.TemporaryDirectory(prefix="sparkdl-") as folder:
            copy = Path(folder) / "copy"
            with self._failures("read", path):
                # The raw local file system writes no checksums beside the file.
                self._fs.copyToLocalFile(False, source, self._local(str(copy)), True)
                return copy.read_bytes()

    def size(self, path: str) -> int:
        source = self._at(path)
        with self._failures("read", path):
            return int(self._fs.getFileStatus(source).getLen())

    def list(self, path: str) -> builtins.list[str]:
        folder = self._at(path)
        # Others may remove it at any moment, so it is not asked for beforehand.
        absent = contextlib.suppress(FileNotFoundError, NotADirectoryError)
        with self._failures("list", path), absent, java_errors():
            if self._fs.getFileStatus(folder).isDirectory():
                return sorted(entry.getPath().getName() for entry in self._fs.listStatus(folder))
        return []

    def remove(self, path: str) -> None:
        gone = self._at(path)
        with self._failures("remove", path):
            if not self._fs.delete(gone, True) and self._fs.exists(gone):
                raise OSError("the file system has kept it")

    def move(self, source: str, target: str) -> None:
        origin, place = self._at(source), self._at(target)
        with self._failures("move", source):
            if not self._fs.exists(origin):
                raise FileNotFoundError(errno.ENOENT, "not there")
            self._fs.mkdirs(place.getParent())
            self._fs.delete(place, False)  # rename replaces nothing
            if not self._fs.rename(origin, place):
                raise OSError("the file system has refused to rename")

    def part(self, path: str, begin: int, end: int) -> Buffer:
        source, jvm = self._at(path), self._jvm
        with tempfile.TemporaryDirectory(prefix="sparkdl-") as folder:
            copy = Path(folder) / "part"
            with self._failures("read", path):
                stream = self._fs.open(source)
                target = jvm.java.io.FileOutputStream(str(copy))
                try:
                    stream.seek(begin)
                    channel = jvm.java.nio.channels.Channels.newChannel(stream)
                    target.getChannel().transferFrom(channel, 0, end - begin)
                finally:
                    target.close()
                    stream.close()
                data = copy.read_bytes()
        require_size(len(data), end - begin, f"{self._name.rstrip('/')}/{path}")
        return data

    def exists(self, path: str) -> bool:
        place = self._at(path)
        with self._failures("look for", path):
            return bool(self._fs.exists(place))

    def _at(self, path: str) -> Any:
        relative = checked(path)
        return self._path(self._root, relative) if relative else self._root

    def _local(self, path: str) -> Any:
        return self._path(Path(path).as_uri())

    @contextlib.contextmanager
    def _failures(self, action: str, path: str) -> Iterator[None]:
        place = f"{self._name.rstrip('/')}/{path}" if path else self._name
        with failures(action, place), java_errors():
            yield


@contextlib.contextmanager
def java_errors() -> Iterator[None]:
    """Raise exceptions of the JVM as Python's own, with the first line of their messages."""
    from py4j.protocol import Py4JJavaError

    try:
        yield
    except Py4JJavaError as error:
        java = error.java_exception
        name, message = java.getClass().getSimpleName(), java.getMessage()
        text = f"{name}: {message.strip().splitlines()[0]}" if message else name
        raise (OSError(_ERRORS[name], text) if name in _ERRORS else OSError(text)) from error
