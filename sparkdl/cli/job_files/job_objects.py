"""The names in a job file become an estimator with the user's objects."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, get_args, get_origin

from sparkdl.cli.job_files.job_file import PARAMS, ObjectRef, TrainJob
from sparkdl.cli.job_files.toml_values import build
from sparkdl.errors import ConfigError
from sparkdl.runtime.public_names import import_object
from sparkdl.spark.params.param_table import Option

if TYPE_CHECKING:
    from pyspark.ml import Estimator

VALIDATION_COLUMN = "sparkdl_validation"
"""Marks the rows of ``validation.path``."""
_REMEDY = "a module of your own travels to driver and workers with spark-submit --py-files"


def make_estimator(job: TrainJob) -> Estimator[Any]:
    """The estimator that a job describes, with the user's objects imported."""
    from sparkdl import estimator as faces

    kinds: dict[str, Callable[..., Estimator[Any]]] = {
        "classifier": faces.TorchClassifier,
        "regressor": faces.TorchRegressor,
        "estimator": faces.TorchEstimator,
    }
    params = {
        PARAMS[key].name: _resolve(value, PARAMS[key], f"estimator.{key}")
        for key, value in job.estimator.given.items()
    }
    if job.validation is not None and job.validation.fraction is not None:
        params["validationFraction"] = job.validation.fraction
    elif job.validation is not None:
        params["validationIndicatorCol"] = VALIDATION_COLUMN
    return kinds[job.estimator.kind](module=_partial(job.model), **params)


def _resolve(value: Any, option: Option, where: str) -> Any:
    """A value of ``[estimator]``, or a part of one, as its Param takes it."""
    if isinstance(value, str) and _mentions(option.type, Callable):
        if ":" in value:
            value = ObjectRef(factory=value)
        elif not _mentions(option.type, str):
            raise ConfigError(f"{where} must be 'package.module:name'; received {value!r}")
    if isinstance(value, ObjectRef):
        return _partial(value) if option.is_called_later else _made(value)
    if isinstance(value, Mapping):
        return {key: _resolve(item, option, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, tuple):
        return [_resolve(item, option, where) for item in value]
    return value


def _mentions(hint: Any, kind: Any) -> bool:
    """True if a type is ``kind``, or has it within a union or as the type of its items."""
    if kind in (hint, get_origin(hint)):
        return True
    return get_origin(hint) is not Callable and any(_mentions(p, kind) for p in get_args(hint))


def _partial(reference: ObjectRef) -> Any:
    """The named object, to be called later with its arguments."""
    named = import_object(reference.factory, _REMEDY)
    if not callable(named):
        raise ConfigError(f"'{reference.factory}' cannot be called: it is {named!r}")
    arguments = dict(reference.args)
    for name, value in arguments.items():
        if isinstance(value, Mapping) and "factory" in value:
            arguments[name] = _partial(build(ObjectRef, value, "args"))
    return functools.partial(named, **arguments) if arguments else named


def _made(reference: ObjectRef) -> Any:
    """The named object; a class, or whatever has arguments, is called."""
    named = _partial(reference) if reference.args else import_object(reference.factory, _REMEDY)
    if not isinstance(named, type | functools.partial):
        return named
    try:
        return named()
    except Exception as error:  # whatever the user's classes raise when they are made
        raise ConfigError(
            f"cannot make '{reference.factory}' with args {dict(reference.args)}: "
            f"{type(error).__name__}: {error}; correct them in the job file"
        ) from error
