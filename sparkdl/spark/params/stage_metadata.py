"""The place of a saved instance, and its metadata, which Spark writes where it can.

Where Spark has no file system for a path's scheme (plain pyspark knows no S3), `Storage` writes
and reads the same file with the same name.
"""

from __future__ import annotations

import functools
import uuid
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from typing import Any
from urllib.parse import unquote

from pyspark.errors import AnalysisException
from pyspark.ml.param import Params
from pyspark.ml.util import DefaultParamsReader, DefaultParamsWriter, MLReadable
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from sparkdl import __version__
from sparkdl.errors import SparkDLError, StorageError
from sparkdl.runtime.name_patterns import some_of
from sparkdl.runtime.public_names import MODULE_OF, import_object
from sparkdl.serialization.trust import Trust, trusting
from sparkdl.spark.session.compat import is_connect
from sparkdl.spark.session.failures import is_spark_error
from sparkdl.spark.session.settings import session_settings
from sparkdl.storage.atomic_folder import digest
from sparkdl.storage.hadoop_storage import HadoopStorage, knows_scheme, open_on_driver
from sparkdl.storage.storage import (
    Folder,
    absolute,
    at_home,
    check_writable,
    open_storage,
    scheme_of,
    without_password,
)

FORMAT = 2
"""Version of the layout; raised when an older sparkdl could not read it. All before are read."""
_METADATA = "metadata/part-00000"
_OF_PATTERNS = frozenset("*?[]{}^,\\")
"""Characters that have a meaning in Hadoop's patterns of paths, and the comma between paths."""
_SEALED = ("class", "uid", "paramMap", "defaultParamMap")
"""Entries of the metadata whose sum is kept in it from format 2 on."""


def require_plain_name(path: str) -> None:
    """Refuse a name that Spark reads as a pattern, so that it means other folders too.

    Raises:
        StorageError: it has such a character.
    """
    found = sorted(set(path) & _OF_PATTERNS)
    if found:
        raise StorageError(
            f"cannot save to {without_password(path)}: Spark reads {' '.join(found)} in a name as "
            "a pattern, which may mean other folders; choose a name without"
        )


def make_way(path: str, overwrite: bool, spark: SparkSession) -> None:
    """Delete what is at ``path``, or raise StorageError if ``overwrite`` is not wanted."""
    if is_connect(spark):
        from pyspark.ml.connect.readwrite import RemoteMLWriter

        RemoteMLWriter.handleOverwrite(path, overwrite)
    elif _is_ours(path, spark):
        storage = open_storage(path)
        if (names := storage.list("")) and not overwrite:
            raise StorageError(_taken(str(storage), names))
        for name in names:
            storage.remove(name)
    else:
        from pyspark.ml.wrapper import JavaWrapper

        if not overwrite and is_there(path, spark):
            names = HadoopStorage(spark, path).list("")
            raise StorageError(_taken(without_password(path), names))
        java = JavaWrapper._new_java_obj("org.apache.spark.ml.util.FileSystemOverwrite")
        helper: Any = JavaWrapper(java)
        helper._call_java("handleOverwrite", path, overwrite, spark._jsparkSession)


def _taken(place: str, names: Sequence[str]) -> str:
    """Say what is at a place, and what would replace it: all that is there would be deleted."""
    if _METADATA.partition("/")[0] in names:
        return f"{place} already exists; use write().overwrite().save(...)"
    return (
        f"{place} holds {some_of(names) or 'nothing'}, and no saved model; choose another path, or "
        "let write().overwrite().save(...) delete it"
    )


def check_place(path: str, spark: SparkSession) -> None:
    """See, before there is a model to lose, that it can be saved; raises StorageError."""
    require_plain_name(path)
    path = at_home(path)
    # What is not there must not be there afterwards either.
    folder = path if is_there(path, spark) else _parent(path)
    is_python = is_connect(spark) or _is_ours(path, spark)
    check_writable(open_storage(folder) if is_python else HadoopStorage(spark, folder))


def check_folder(path: str, spark: SparkSession) -> None:
    """See that Spark can write where a folder needs one that it lies in; raises StorageError.

    Spark would end in the stacks of a job. Object stores have no such folder.
    """
    if not is_connect(spark) and scheme_of(path) in (None, "file", "hdfs", "viewfs"):
        check_place(path, spark)


def _parent(path: str) -> str:
    """The folder that ``path`` lies in; a bucket or host itself."""
    parent, slash, _ = path.rstrip("/").rpartition("/")
    if not slash:
        return "."
    if parent.endswith(":/"):
        return path
    return f"{parent}/" if parent in ("", f"{scheme_of(path)}:") else parent


def beside(path: str) -> str:
    """A folder in ``path`` for what will take its place; see `take_place`."""
    return f"{path.rstrip('/')}/new-{uuid.uuid4().hex}"


def take_place(aside: str, spark: SparkSession) -> None:
    """Delete all but ``aside`` in the folder that it lies in, and move what it holds there.

    Stopped in the middle, it leaves the new instance; the metadata are the last to move.
    """
    is_ours = _is_ours(aside, spark)
    root, _, name = (aside if is_ours else qualified(aside, spark)).rpartition("/")
    storage = open_storage(root) if is_ours else open_on_driver(spark, root)
    for old in storage.list(""):
        if old != name:
            storage.remove(old)
    for folder in sorted(storage.list(name), key=lambda folder: folder == "metadata"):
        for file in storage.list(f"{name}/{folder}"):
            storage.move(f"{name}/{folder}/{file}", f"{folder}/{file}")
    storage.remove(name)


def write_metadata(
    instance: Params, path: str, spark: SparkSession, extra: dict[str, Any]
) -> Folder:
    """Write ``<path>/metadata``; returns the folder ``path``. Raises StorageError."""
    if _is_ours(path, spark):
        text = DefaultParamsWriter._get_metadata_to_save(instance, spark, extra)
        ours = open_storage(path)
        ours.write(_METADATA, f"{text}\n".encode())
        ours.write("metadata/_SUCCESS", b"")
        return ours
    DefaultParamsWriter.saveMetadata(instance, path, spark, extraMetadata=extra)
    storage = place_of(path, spark)
    if is_connect(spark) and not storage.exists("metadata"):
        raise StorageError(
            f"{storage} lies on the host of the Spark Connect server, where this client cannot "
            "write; save to a storage that both see, such as hdfs://, s3:// or a network mount"
        )
    return storage


def read_metadata(path: str, spark: SparkSession) -> dict[str, Any]:
    """Read ``<path>/metadata``; raises StorageError if it is not what was written."""
    try:
        if not is_connect(spark):
            _require_saved(path, spark)
        if _is_ours(path, spark):
            text = open_storage(path).read(_METADATA).decode()
            metadata = DefaultParamsReader._parseMetaData(text)
        else:
            metadata = DefaultParamsReader.loadMetadata(path, spark)
        if not isinstance(metadata["class"], str):
            raise TypeError(f"class {metadata['class']!r}")
        if not isinstance(metadata.get("sparkdl", {}), dict):
            raise TypeError(f"sparkdl {metadata['sparkdl']!r}")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise damaged(path, repr(error)) from error
    except Exception as error:  # Spark's own have no common base class
        if not is_spark_error(error):
            raise
        raise StorageError(
            f"Spark cannot read {without_password(path)}/metadata: {without_password(str(error))}; "
            "check the path, and that the model is whole"
        ) from error
    if "sparkdl" not in metadata:
        return metadata
    written = metadata["sparkdl"]
    if written.get("format") not in range(1, FORMAT + 1):
        raise StorageError(
            f"{without_password(path)} was written by sparkdl {written.get('version', '(unknown)')}"
            f" in format {written.get('format')}; this sparkdl {__version__} reads formats up to "
            f"{FORMAT}"
        )
    if written["format"] > 1 and written.get("sha256") != sum_of(metadata):
        raise damaged(path, "it is not what was written")
    return metadata


def _require_saved(path: str, spark: SparkSession) -> None:
    if not is_there(path, spark):
        raise StorageError(f"nothing is saved at {without_password(path)}; check the path")
    if not is_there(f"{path}/metadata", spark):
        raise StorageError(
            f"{without_password(path)} holds no saved model, estimator or pipeline: it has no "
            "folder metadata; name the folder that save() has written"
        )


def sum_of(metadata: Mapping[str, Any]) -> str:
    """SHA-256 of what counts in the metadata."""
    return digest({name: metadata.get(name) for name in _SEALED})


def damaged(path: str, why: str) -> StorageError:
    """Return the error to raise where ``<path>/metadata`` is not what was written."""
    place = f"{without_password(path)}/metadata"
    return StorageError(f"{place} is damaged: {why}; save it again, or take an intact copy")


def is_there(path: str, spark: SparkSession) -> bool:
    """Return True if ``path`` has something, on whatever file system Spark or Python reaches."""
    path = at_home(path)
    if _is_ours(path, spark):
        return bool(open_storage(path).list(""))
    if not is_connect(spark):
        return HadoopStorage(spark, path).exists("")
    try:
        spark.read.format("binaryFile").load(path).schema  # noqa: B018
    except AnalysisException as error:
        if error.getCondition() == "PATH_NOT_FOUND":
            return False
        raise
    return True


def load_instance(path: str, spark: SparkSession) -> Any:
    """A saved instance of whatever class, and its parts, such as the stages of a pipeline.

    Raises:
        StorageError: the files are missing or damaged, or name what cannot be loaded.
        ConfigError: the class of the instance, or of one of its parts, is not trusted.
    """
    path = at_home(path)
    trust = trusting(session_settings(spark).trusted_packages).reading(absolute(path))
    _watch_parts()
    token = _trust.set(trust)
    try:
        return _load(path, spark, trust)
    finally:
        _trust.reset(token)


_trust: ContextVar[Trust | None] = ContextVar("trust", default=None)
"""Code that the parts of an instance may name while `load_instance` reads it."""


@functools.cache
def _watch_parts() -> None:
    """Have pyspark's readers load parts by `_load`, inside `load_instance` only.

    They import and call whatever class the metadata of a part names.
    """
    plain = DefaultParamsReader.loadParamsInstance

    def load(path: str, spark: Any) -> Any:
        trust = _trust.get()
        return plain(path, spark) if trust is None else _load(path, spark, trust)

    reader: Any = DefaultParamsReader
    reader.loadParamsInstance = staticmethod(load)


def _load(path: str, spark: SparkSession, trust: Trust) -> Any:
    name = read_metadata(path, spark)["class"]  # imported only if it is what was written
    found = _class_of(name, trust)
    kinds = (MLReadable, Params)
    if not (isinstance(found, type) and all(issubclass(found, kind) for kind in kinds)):
        raise damaged(path, f"{name} is no class of what is saved and loaded")
    loaded: Any = found
    if not found.__module__.startswith("pyspark."):
        return loaded.load(path)
    if _is_ours(path, spark):
        raise StorageError(
            f"{without_password(path)} holds a {name}, whose files only Spark can read, and this "
            f"one has no file system for {scheme_of(path)}://; add one, such as hadoop-aws"
        )
    try:
        return loaded.load(path)
    except SparkDLError:  # of a part
        raise
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise damaged(path, repr(error)) from error


def _class_of(name: str, trust: Trust) -> Any:
    """Import what an instance's metadata name: of sparkdl and Spark only what users may use."""
    module, _, cls = name.replace("org.apache.spark.", "pyspark.").rpartition(".")
    if f"{module}.".startswith("pyspark.ml.") or (
        module.startswith("sparkdl.") and cls in MODULE_OF
    ):
        return import_object(f"{module}:{cls}")
    return trust.import_object(f"{module}:{cls}")


def place_of(path: str, spark: SparkSession) -> Folder:
    """The folder ``path``, as this process reaches it."""
    return (
        open_storage(path)
        if _is_ours(path, spark)
        else open_on_driver(spark, qualified(path, spark))
    )


def _is_ours(path: str, spark: SparkSession) -> bool:
    """Return True if Spark has no file system for the path's scheme."""
    scheme = scheme_of(path)
    return scheme is not None and not is_connect(spark) and not knows_scheme(spark, scheme)


def qualified(path: str, spark: SparkSession) -> str:
    """Return ``path`` with scheme and host, as Spark tells of the metadata, also on Connect."""
    row = spark.read.text(f"{path}/metadata").select(F.input_file_name()).first()
    if row is None:
        raise StorageError(f"{without_password(path)}/metadata is empty; save the instance again")
    return unquote(str(row[0])).rsplit("/metadata/", 1)[0]
