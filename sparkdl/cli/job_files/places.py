"""The places that a job names: what it reads must be there, and nothing where it writes.

What lies on this machine's disks is looked at before Spark starts, which takes seconds, and the
rest by a session, in the same words.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from sparkdl.cli.job_files.job_file import (
    DataSection,
    EvaluateJob,
    PredictJob,
    SparkSection,
    TrainJob,
    ValidationSection,
    spark_defaults,
)
from sparkdl.cli.job_files.prepare_file import FolderSection
from sparkdl.errors import ConfigError, DataError, StorageError
from sparkdl.storage.storage import absolute, scheme_of, without_password

IsThere = Callable[[str], bool | None]
"""Tells whether there is something at a path or URL; None: that cannot be known yet."""

_OTHERS = ("PYSPARK_GATEWAY_PORT", "SPARK_REMOTE")
"""Variables of a Spark that has started already, here or on another host."""
_HADOOP = ("HADOOP_CONF_DIR", "YARN_CONF_DIR")
_DEFAULTS = ("fs.default", "--properties-file", *_HADOOP, "SPARK_DIST_CLASSPATH")
"""Words of a configuration that may say where a path without a scheme lies."""
_PATTERN = frozenset("*?[]{}\\")
"""Characters by which a path stands for several."""


def here(section: SparkSection) -> IsThere:
    """Return a function that knows of this machine's disks, if Spark will look there."""
    masters = (section.master, section.conf.get("spark.master"), section.conf.get("spark.remote"))
    is_elsewhere = any(str(master).startswith("sc://") for master in masters) or any(
        name in os.environ for name in _OTHERS
    )
    names_default = (
        "yarn" in masters  # whose file system is that of a configuration, wherever that is
        or any(name in os.environ for name in _HADOOP)
        or any(word in text for text in (*section.conf, spark_defaults()) for word in _DEFAULTS)
    )

    def is_there(path: str) -> bool | None:
        scheme = scheme_of(path)
        is_ours = scheme == "file" or (scheme is None and not names_default)
        if is_elsewhere or not is_ours or _PATTERN & set(path):
            return None
        try:
            return Path(absolute(path)).exists()
        except OSError:
            return None

    return is_there


def require_rows(job: Any, is_there: IsThere) -> None:
    """See that there are files where a job has its rows; raises DataError."""
    for key, path in _read_by(job):
        if is_there(path) is False:
            raise DataError(f"cannot read {path!r}: there is no such file or folder; check {key}")


def _read_by(part: Any, place: str = "") -> Iterator[tuple[str, str]]:
    """The keys of the files that a job reads, and their paths."""
    for item in fields(part):
        value, key = getattr(part, item.name), f"{place}{item.name}"
        if isinstance(value, DataSection | ValidationSection | FolderSection):
            paths = value.path if isinstance(value.path, tuple) else (value.path,)
            yield from ((f"{key}.path", path) for path in paths if path is not None)
        elif is_dataclass(value):
            yield from _read_by(value, f"{key}.")


def require_model(job: EvaluateJob | PredictJob, is_there: IsThere) -> None:
    """See that a model was saved where the job says; raises StorageError."""
    require_saved(job.model.path, is_there)


def require_saved(path: str, is_there: IsThere) -> None:
    """See that there is a saved model; raises StorageError."""
    if is_there(f"{path.rstrip('/')}/metadata") is False:
        name = without_password(path)
        raise StorageError(f"there is no saved model at {name}; check model.path, or train first")


def refuse_model(job: TrainJob, is_there: IsThere) -> None:
    """See that there is nothing where the model goes, unless it is to be replaced."""
    if not job.output.overwrite:
        _refuse(job.output.path, is_there, "replace it with --set output.overwrite=true")


def refuse_rows(job: PredictJob, is_there: IsThere) -> None:
    """See that there is nothing where predictions go, unless the job says what then."""
    if job.output.mode == "error":
        _refuse(job.output.path, is_there, "output.mode 'overwrite' or 'append'")


def _refuse(path: str, is_there: IsThere, remedy: str) -> None:
    if is_there(path):
        raise ConfigError(
            f"there is something at {without_password(path)} already; choose another output.path, "
            f"or {remedy}"
        )
