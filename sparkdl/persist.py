"""How are estimators and models saved and loaded, alone and inside pipelines?

``<path>/metadata`` is written by Spark as for any ML instance, so pipelines can read it; values
that are objects are described, never pickled. A model's files lie in ``<path>/model``, the module
that an estimator holds (with its weights) in ``<path>/module``.
"""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Mapping
from typing import Any, TypeVar

from pyspark.ml.param import Params
from pyspark.ml.util import MLReadable, MLReader, MLWriter
from torch import nn

from sparkdl import __version__
from sparkdl.checkpoint.storage import MemoryStorage, Storage
from sparkdl.describe import DescribeError, describe, restore
from sparkdl.errors import ConfigError, StorageError
from sparkdl.model import TorchModel, example_inputs
from sparkdl.modulefile import load_module_from, save_module
from sparkdl.params import OBJECT_PARAMS
from sparkdl.plan import Column
from sparkdl.spark.saving import make_way, place_of, read_metadata, write_metadata
from sparkdl.spark.session import is_connect
from sparkdl.summary import TrainingSummary

P = TypeVar("P", bound=MLReadable[Any])
M = TypeVar("M", bound=TorchModel)

FORMAT = 1
"""Version of the layout; raised when an older sparkdl could not read it."""
_MODEL, _MODULE, _SUMMARY = "model", "module", "model/summary.json"


class ParamsWriter(MLWriter):
    """Saves Params. All that can fail on the driver does so before old files are deleted."""

    def __init__(self, instance: Params) -> None:
        super().__init__()
        self.instance = instance

    def save(self, path: str) -> None:
        """Save to ``path``, which must not exist unless ``overwrite()`` was called.

        Raises:
            DescribeError: a Param holds an object that cannot be written as JSON.
            ConfigError: the module cannot be written without pickle.
            StorageError: the place cannot be written.
        """
        files = MemoryStorage()
        described = self._describe(files)
        make_way(path, self.shouldOverwrite, self.sparkSession)
        extra = {"sparkdl": {"format": FORMAT, "version": __version__}}
        storage = write_metadata(described, path, self.sparkSession, extra)
        self._check_place(storage, path)
        for folder in files.list(""):
            for name in files.list(folder):
                storage.write(f"{folder}/{name}", files.read(f"{folder}/{name}"))

    def _check_place(self, storage: Storage, path: str) -> None:
        """See that this is the folder in which Spark has written the metadata."""
        if is_connect(self.sparkSession) and not storage.exists("metadata"):
            make_way(path, True, self.sparkSession)
            raise StorageError(
                f"{storage} lies on the host of the Spark Connect server, where this client cannot "
                "write; save to a storage that both see, such as hdfs://, s3:// or a network mount"
            )

    def _describe(self, files: MemoryStorage) -> Params:
        """A twin of the instance whose values are JSON; its files go to ``files``."""
        twin = copy.copy(self.instance)
        twin._paramMap = {
            param: self._as_json(param.name, value, files)
            for param, value in self.instance._paramMap.items()
        }
        twin._defaultParamMap = {
            param: self._as_json(param.name, value, files)
            for param, value in self.instance._defaultParamMap.items()
        }
        return twin

    def _as_json(self, name: str, value: Any, files: MemoryStorage) -> Any:
        if name not in OBJECT_PARAMS:
            return value
        try:
            if name == "module" and isinstance(value, nn.Module):
                save_module(value, None, files, _MODULE, example_inputs=None, extra={})
                return {"folder": _MODULE}
            return describe(value)
        except ConfigError as error:
            raise DescribeError(
                f"cannot save Param {name!r} of {self.instance.uid}: {error}"
            ) from error


class ModelWriter(ParamsWriter):
    """Saves a model: Params, module, summary."""

    instance: TorchModel

    def _describe(self, files: MemoryStorage) -> Params:
        model = self.instance
        extra = {
            "columns": [dataclasses.asdict(column) for column in model.columns],
            "num_classes": model._num_classes,
            "factory": _describable(model.module_factory),
        }
        save_module(
            model.module,
            model.module_factory,
            files,
            _MODEL,
            example_inputs=example_inputs(model.columns),
            extra=extra,
        )
        if model.hasSummary:
            files.write(_SUMMARY, json.dumps(model.summary.to_dict(), allow_nan=False).encode())
        return super()._describe(files)


class ParamsReader(MLReader[P]):
    """Loads what `ParamsWriter` saved."""

    def __init__(self, cls: type[P]) -> None:
        super().__init__()
        self.cls = cls

    def load(self, path: str) -> P:
        """Load from ``path``.

        Raises:
            StorageError: the files are missing, damaged, of another class or a later format.
            ConfigError: the code that a description names cannot be imported here.
        """
        metadata = read_metadata(path, self.sparkSession)
        self._check(metadata, path)
        instance: Any = self._make(path)
        instance._resetUid(metadata["uid"])
        instance._paramMap = {}
        instance._setDefault(**self._values(metadata["defaultParamMap"], instance, path))
        instance._set(**self._values(metadata["paramMap"], instance, path))
        loaded: P = instance
        return loaded

    def _make(self, path: str) -> P:
        return self.cls()

    def _check(self, metadata: Mapping[str, Any], path: str) -> None:
        expected = f"{self.cls.__module__}.{self.cls.__qualname__}"
        if metadata["class"] != expected:
            raise StorageError(f"{path} holds a {metadata['class']}, not a {expected}")
        written = metadata.get("sparkdl", {})
        if written.get("format") != FORMAT:
            raise StorageError(
                f"{path} was written by sparkdl {written.get('version', '(unknown)')} in format "
                f"{written.get('format')}; this sparkdl {__version__} reads format {FORMAT}"
            )

    def _values(self, saved: Mapping[str, Any], instance: Params, path: str) -> dict[str, Any]:
        values = {}
        for name, value in saved.items():
            if not instance.hasParam(name):
                raise StorageError(f"{path} has a Param {name!r} that this version does not know")
            values[name] = self._from_json(name, value, path)
        return values

    def _from_json(self, name: str, value: Any, path: str) -> Any:
        if name not in OBJECT_PARAMS:
            return value
        if name == "module" and value == {"folder": _MODULE}:
            return load_module_from(place_of(path, self.sparkSession), _MODULE)[0]
        return restore(value)


class ModelReader(ParamsReader[M]):
    """Loads what `ModelWriter` saved; nothing is unpickled."""

    def _make(self, path: str) -> M:
        storage = place_of(path, self.sparkSession)
        module, extra = load_module_from(storage, _MODEL)
        summary = None
        if storage.exists(_SUMMARY):
            summary = TrainingSummary.from_dict(json.loads(storage.read(_SUMMARY)))
        columns = [Column(**column) for column in extra["columns"]]
        model = self.cls(module, columns, num_classes=extra["num_classes"], summary=summary)
        model.module_factory = extra["factory"]
        return model


def _describable(factory: Any) -> Any:
    """The factory if JSON can hold it, for a loaded model to be saved again; otherwise None."""
    try:
        describe(factory)
    except DescribeError:
        return None
    return factory
