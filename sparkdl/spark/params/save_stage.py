"""Estimators and models are saved and loaded here, alone and inside pipelines, without pickle.

A model's files lie in ``<path>/model``, the module that an estimator holds in ``<path>/module``.
"""

from __future__ import annotations

import copy
import json
import logging
import os
from collections.abc import Iterable, Mapping
from typing import Any, Self, TypeVar

from pyspark.ml.param import Params
from pyspark.ml.util import DefaultParamsWriter, MLReadable, MLReader, MLWriter
from torch import Tensor, nn

from sparkdl import __version__
from sparkdl.errors import ConfigError, SparkDLError, StorageError
from sparkdl.report.summary import TrainingSummary
from sparkdl.runtime.public_names import importing_by
from sparkdl.runtime.tracebacks import plainly
from sparkdl.serialization import initial_state
from sparkdl.serialization.example_inputs import example_of
from sparkdl.serialization.initial_weights import InitialWeights
from sparkdl.serialization.json_objects import DescribeError, describe, restore
from sparkdl.serialization.load import column_as_json, column_from_json
from sparkdl.serialization.program.imported_values import changed_names, values_of_main
from sparkdl.serialization.saved_module import (
    PreparedModule,
    open_module,
    prepare_module,
    prepare_stored,
    prepare_weights,
)
from sparkdl.serialization.stored_module import StoredModule
from sparkdl.serialization.travel.pickling import sent_code
from sparkdl.serialization.trust import Trust, trusting
from sparkdl.spark.params import stage_metadata
from sparkdl.spark.params.param_table import UNKNOWN_LOSS
from sparkdl.spark.params.params import CheckedParams
from sparkdl.spark.session.settings import session_settings
from sparkdl.storage.storage import Folder, at_home, drop_password, without_password

logger = logging.getLogger(__name__)
P = TypeVar("P", bound=MLReadable[Any])
M = TypeVar("M", bound=MLReadable[Any])

_MODEL, _MODULE, _SUMMARY = "model", "module", "summary.json"
_WEIGHTS, _INITIAL = "initialWeights", "initialState"


class ParamsWriter(MLWriter):
    """Saves Params. What is there already is deleted when the new is written as a whole."""

    def __init__(self, instance: CheckedParams) -> None:
        super().__init__()
        self.instance = instance

    @plainly
    def save(self, path: str | os.PathLike[str]) -> None:
        """Save to ``path``, which must not exist unless ``overwrite()`` was called.

        Raises:
            DescribeError: a Param holds an object that cannot be written as JSON.
            ConfigError: the module cannot be written without pickle.
            StorageError: the place cannot be written.
        """
        path, folders = at_home(path), dict[str, PreparedModule]()
        stage_metadata.require_plain_name(path)
        described = self._describe(folders)
        self._warn_of_changed_values(folders)
        replaces = self.shouldOverwrite and stage_metadata.is_there(path, self.sparkSession)
        if not replaces:
            stage_metadata.make_way(path, self.shouldOverwrite, self.sparkSession)
        stage_metadata.check_folder(path, self.sparkSession)
        if replaces:
            aside = stage_metadata.beside(path)
            self._write(described, folders, aside)
            stage_metadata.take_place(aside, self.sparkSession)
        else:
            self._write(described, folders, path)

    def _warn_of_changed_values(self, folders: Mapping[str, PreparedModule]) -> None:
        """Name what the program has changed in files of code, which who loads does not have."""
        values = [
            value
            for param, value in self.instance.extractParamMap().items()
            if not self.instance._options[param.name].is_plain
        ]
        code = sent_code((values, *self._made_by_code(folders)))
        names = changed_names(one for one, _ in code)
        if names:
            logger.warning(
                "%s: the program has other values of %s than its files give a new process; the "
                "saved code is that of the files, so what is loaded does not have these values and "
                "may predict something else: write them into the files, or keep them in an "
                "attribute or a buffer of the module",
                *(self.instance.uid, ", ".join(names)),
            )

    def _made_by_code(self, folders: Mapping[str, PreparedModule]) -> Iterable[Any]:
        """What is saved besides Params and is made by code when it is loaded."""
        return ()

    def _write(self, described: Params, folders: Mapping[str, PreparedModule], path: str) -> None:
        """Write to where there is nothing; what was begun is removed if it cannot be ended."""
        metadata = json.loads(
            DefaultParamsWriter._get_metadata_to_save(described, self.sparkSession)
        )
        about = {
            "format": stage_metadata.FORMAT,
            "version": __version__,
            "sha256": stage_metadata.sum_of(metadata),
        }
        try:
            storage = stage_metadata.write_metadata(
                described, path, self.sparkSession, {"sparkdl": about}
            )
            for folder, prepared in folders.items():
                prepared.write(storage, folder)
        except BaseException:
            stage_metadata.make_way(path, True, self.sparkSession)
            raise

    def _describe(self, folders: dict[str, PreparedModule]) -> Params:
        """A twin of the instance whose values are JSON; its modules go to ``folders``."""
        twin = copy.copy(self.instance)
        for name in ("_paramMap", "_defaultParamMap"):
            values = getattr(self.instance, name).items()
            described = {p: self._as_json(p.name, value, folders) for p, value in values}
            setattr(twin, name, described)
        return twin

    def _as_json(self, name: str, value: Any, folders: dict[str, PreparedModule]) -> Any:
        if self.instance._options[name].is_plain:
            return self._without_passwords(name, value)
        try:
            if name == "module" and isinstance(value, nn.Module):
                folders[_MODULE] = prepare_module(value, None, example_inputs=None, extra={})
                return {"folder": _MODULE}
            if name == "initialWeights" and value is not None and value.is_in_memory:
                folders[_WEIGHTS] = prepare_weights(value.source)
                return {"folder": _WEIGHTS, "skip": list(value.skip), "names": value.names}
            if name == "initialState" and value is not None:
                if value.source is not None:
                    return self._without_passwords(name, value.source)
                folders[_INITIAL] = prepare_weights(value.weights)
                folders[initial_state.STATE] = prepare_weights(value.training.tree())
                return {"folder": _INITIAL}
            return self._without_passwords(name, describe(value))
        except ConfigError as error:
            raise DescribeError(
                f"cannot save Param {name!r} of {self.instance.uid}: {error}"
            ) from error

    def _without_passwords(self, name: str, value: Any) -> Any:
        """A value of JSON as others may read it: its URLs have neither passwords nor signatures."""
        kept = _kept_by_others(value)
        if kept != value:
            logger.warning(
                "%s: the password in %s is not saved; set it again on what is loaded",
                self.instance.uid,
                name,
            )
        return kept


def why_not_saved(stage: CheckedParams) -> str | None:
    """Say which Param of an estimator `ParamsWriter` cannot write; None: it can write all."""
    for param, value in stage.extractParamMap().items():
        name = param.name
        is_module = name == "module" and isinstance(value, nn.Module)
        if stage._options[name].is_plain or name in ("initialWeights", "initialState"):
            continue
        try:
            if is_module:
                prepare_module(value, None, example_inputs=None, extra={})
            else:
                describe(value)
        except ConfigError as error:
            return f"{name}: {error}"
    return None


def _kept_by_others(value: Any) -> Any:
    """A value of JSON whose texts have lost the secrets of their URLs."""
    if isinstance(value, str):
        return drop_password(value)
    if isinstance(value, dict):
        return {key: _kept_by_others(item) for key, item in value.items()}
    return list(map(_kept_by_others, value)) if isinstance(value, list) else value


class ModelWriter(ParamsWriter):
    """Saves a model: Params, module, summary."""

    def _as_json(self, name: str, value: Any, folders: dict[str, PreparedModule]) -> Any:
        """A loss that JSON cannot hold stays behind: the model predicts without."""
        if name == "loss" and _describable(value) is None:
            logger.warning(
                "%s: the loss %r cannot be saved; evaluate and scores of the loaded model need "
                "loss=",
                self.instance.uid,
                value,
            )
            value = UNKNOWN_LOSS
        return super()._as_json(name, value, folders)

    def _describe(self, folders: dict[str, PreparedModule]) -> Params:
        model: Any = self.instance  # a TorchModel, which imports this file
        extra = {
            "columns": [column_as_json(column) for column in model.columns],
            "num_classes": model._num_classes,
            "factory": _describable(model.module_factory),
        }
        others = {}
        if model.hasSummary:
            others[_SUMMARY] = json.dumps(model.summary.to_dict(), allow_nan=False).encode()
        if model.trainingState is not None:
            folders[initial_state.STATE] = prepare_weights(model.trainingState.tree())
        module, example = model._module, example_of(model.columns)
        if isinstance(module, StoredModule):
            folders[_MODEL] = prepare_stored(
                module,
                model.module_factory,
                example_inputs=example,
                extra={**extra, "mesh": module.mesh},
                others=others,
            )
        else:
            folders[_MODEL] = prepare_module(
                module, model.module_factory, example_inputs=example, extra=extra, others=others
            )
        if "program" in folders[_MODEL].index["recipe"]:
            layers = [item.output.layer for item in model._wanted() if item.output.layer]
            if layers:
                raise ConfigError(
                    f"{model.uid} has an output of the layer {layers[0]!r}, and its module can "
                    "only be saved as an exported program, which has no layers; move the "
                    "module's class, or the function that makes it, into a file that can be "
                    "imported, or save without that output (setOutputs, setPredictionOutput)"
                )
        return super()._describe(folders)

    def _warn_of_changed_values(self, folders: Mapping[str, PreparedModule]) -> None:
        super()._warn_of_changed_values(folders)
        model: Any = self.instance
        before = model._read_when_fitted
        now = values_of_main(model._blank) if before else {}
        changed = sorted(name for name, digest in before.items() if now.get(name, digest) != digest)
        if changed:
            logger.warning(
                "%s: the program has changed %s since the fit, and what is saved computes with "
                "what it is now, as the model here does: set it back and save again, or keep it in "
                "an attribute or a buffer of the module",
                *(model.uid, ", ".join(changed)),
            )

    def _made_by_code(self, folders: Mapping[str, PreparedModule]) -> Iterable[Any]:
        model: Any = self.instance
        specifications = [column.specification for column in model.columns]
        recipe = folders[_MODEL].index["recipe"]
        if "program" in recipe:  # has the values in it
            return (specifications,)
        factory = model.module_factory if "factory" in recipe else None
        return (specifications, model._blank, factory)


class ParamsReader(MLReader[P]):
    """Loads what `ParamsWriter` saved."""

    def __init__(self, cls: type[P]) -> None:
        super().__init__()
        self.cls = cls
        self._trusted: tuple[str, ...] = ()

    def trusting(self, *packages: str) -> Self:
        """Trust code of these packages too, besides those of ``spark.sparkdl.trustedPackages``.

        Example::

            model = TorchClassifierModel.read().trusting("timm").load("models/digits")
        """
        self._trusted = packages
        return self

    @property
    def _trust(self) -> Trust:
        settings = session_settings(self.sparkSession)
        return trusting((*settings.trusted_packages, *self._trusted))

    @plainly
    def load(self, path: str | os.PathLike[str]) -> P:
        """Load from ``path``.

        Raises:
            StorageError: the files are missing, damaged, of another class or a later format.
            ConfigError: the code that a description names cannot be imported here, or is not
                trusted.
        """
        path = at_home(path)
        metadata = stage_metadata.read_metadata(path, self.sparkSession)
        expected = f"{self.cls.__module__}.{self.cls.__qualname__}"
        if metadata["class"] != expected:
            raise StorageError(
                f"{without_password(path)} holds a {metadata['class']}, not a {expected}; load it "
                f"with {metadata['class'].rpartition('.')[2]}.load"
            )
        if "sparkdl" not in metadata:
            raise stage_metadata.damaged(path, "it does not say which sparkdl has written it")
        storage = stage_metadata.place_of(path, self.sparkSession)
        trust = self._trust.reading(storage.url)
        try:
            instance: Any = self._make(storage)
            instance._resetUid(metadata["uid"])
            instance._paramMap = {}
            with importing_by(trust.import_object):
                default = self._values(metadata["defaultParamMap"], instance, storage)
                for name, value in default.items():
                    if value is None and instance._defaultParamMap.get(instance.getParam(name)):
                        raise ValueError(f"the default of {name!r} is null")
                instance._setDefault(**default)
                instance._set(**self._values(metadata["paramMap"], instance, storage))
        except SparkDLError:
            raise
        except (AttributeError, LookupError, TypeError, ValueError, RecursionError) as error:
            raise stage_metadata.damaged(path, repr(error)) from error
        loaded: P = instance
        return loaded

    def _make(self, storage: Folder) -> P:
        return self.cls()

    def _values(
        self, saved: Mapping[str, Any], instance: CheckedParams, storage: Folder
    ) -> dict[str, Any]:
        values = {}
        for name, value in saved.items():
            if not instance.hasParam(name):
                raise StorageError(
                    f"{storage} has a Param {name!r} that this version does not know"
                )
            is_plain = instance._options[name].is_plain
            values[name] = value if is_plain else self._from_json(name, value, storage)
        return values

    def _from_json(self, name: str, value: Any, storage: Folder) -> Any:
        if isinstance(value, dict) and "folder" in value:
            if name == "module":
                return open_module(storage, _MODULE, self._trust).make()
            state = open_module(storage, value["folder"]).weights()
            own = {key: v.clone() if isinstance(v, Tensor) else v for key, v in state.items()}
            if name == "initialState":
                training = initial_state.read_training_state(storage, _INITIAL)
                return initial_state.InitialState(weights=own, training=training)
            names = value.get("names", {})  # not there in what earlier versions have written
            return InitialWeights(source=own, skip=tuple(value["skip"]), names=names)
        return restore(value, self._trust.reading(storage.url))


class ModelReader(ParamsReader[M]):
    """Loads what `ModelWriter` saved; nothing is unpickled."""

    def _make(self, storage: Folder) -> M:
        trust = self._trust.reading(storage.url)
        saved = open_module(storage, _MODEL, trust, is_lazy=True)
        data = saved.files.get(_SUMMARY)
        if saved.index["version"] == 1 and storage.exists(f"{_MODEL}/{_SUMMARY}"):
            data = storage.read(f"{_MODEL}/{_SUMMARY}")  # not in the list of files then
        summary = None if data is None else TrainingSummary.from_dict(json.loads(data))
        extra = saved.extra()
        module: nn.Module | StoredModule
        if saved.sharded is None:
            module = saved.make()
        else:
            module = StoredModule.of(saved.make_blank(), storage, _MODEL, mesh=extra["mesh"])
        columns = [column_from_json(column, trust) for column in extra["columns"]]
        make: Any = self.cls
        model = make(module, columns, num_classes=extra["num_classes"], summary=summary)
        model.module_factory = extra["factory"]
        model._training_state = initial_state.read_training_state(storage, _MODEL)
        made: M = model
        return made


def _describable(factory: Any) -> Any:
    """The factory if JSON can hold it, for a loaded model to be saved again; otherwise None."""
    try:
        describe(factory)
    except DescribeError:
        return None
    return factory
