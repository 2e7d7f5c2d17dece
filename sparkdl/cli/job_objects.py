"""How do the names in a job file become an estimator with the user's objects?"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from sparkdl.cli.job_file import ObjectRef, TrainJob, check_reference
from sparkdl.cli.toml_values import build
from sparkdl.errors import ConfigError
from sparkdl.runtime import public_names

if TYPE_CHECKING:
    from pyspark.ml import Estimator

VALIDATION_COLUMN = "sparkdl_validation"
"""Marks the rows of the section ``[validation]``; `job` makes it."""


def make_estimator(job: TrainJob) -> Estimator[Any]:
    """The estimator that a job describes, with the user's objects imported."""
    from sparkdl import estimator as faces

    kinds: dict[str, Callable[..., Estimator[Any]]] = {
        "classifier": faces.TorchClassifier,
        "regressor": faces.TorchRegressor,
        "estimator": faces.TorchEstimator,
    }
    params = {
        camel_case(name): _resolve(name, value) for name, value in job.estimator.given.items()
    }
    if job.validation is not None:
        params["validationIndicatorCol"] = VALIDATION_COLUMN
    return kinds[job.estimator.kind](module=_partial(job.model), **params)


def camel_case(name: str) -> str:
    """The Param that a snake_case key of ``[estimator]`` stands for."""
    first, *others = name.split("_")
    return first + "".join(word.capitalize() for word in others)


def import_object(reference: str) -> Any:
    """The object that ``package.module:name`` names.

    Raises:
        ConfigError: the module is not importable or has no such name.
    """
    check_reference(reference, "an object")
    return public_names.import_object(
        reference, "a module of your own travels to driver and workers with spark-submit --py-files"
    )


_FUNCTIONS = ("scheduler", "augmentation", "training_step")
"""Keys of ``[estimator]`` that name functions."""


def _resolve(name: str, value: Any) -> Any:
    """A value of ``[estimator]`` as its Param takes it."""
    if name == "loss":
        return _loss(value, "estimator.loss")
    if name in ("optimizer", *_FUNCTIONS) and is_reference(value):
        value = ObjectRef(factory=value)
    if name in _FUNCTIONS and isinstance(value, str):
        raise ConfigError(f"estimator.{name} must be 'package.module:name'; received {value!r}")
    if name in ("optimizer", "scheduler", "training_step"):
        return _partial(value) if isinstance(value, ObjectRef) else value
    if isinstance(value, ObjectRef):
        return _made(value)
    if name in ("metrics", "inputs", "labels") and isinstance(value, Mapping):
        return {key: _made_or_name(item) for key, item in value.items()}
    return [_made_or_name(item) for item in value] if isinstance(value, tuple) else value


def is_reference(value: Any) -> bool:
    """Whether a value names an object, as ``package.module:name``."""
    return isinstance(value, str) and ":" in value


def _loss(value: Any, where: str) -> Any:
    """A name of a loss, an object, or these by label."""
    if is_reference(value):
        return _made(ObjectRef(factory=value))
    if not isinstance(value, Mapping):
        return value
    if "factory" in value:
        return _made(build(ObjectRef, value, where))
    return {label: _loss(item, f"{where}.{label}") for label, item in value.items()}


def _made_or_name(value: Any) -> Any:
    return _made(value) if isinstance(value, ObjectRef) else value


def _partial(reference: ObjectRef) -> Any:
    """The named object, to be called later with its arguments."""
    named = import_object(reference.factory)
    if not callable(named):
        raise ConfigError(f"'{reference.factory}' cannot be called: it is {named!r}")
    arguments = {name: _argument(value) for name, value in reference.args.items()}
    return functools.partial(named, **arguments) if arguments else named


def _argument(value: Any) -> Any:
    """An argument as the file gives it; a table with a factory is an object to be called later."""
    if isinstance(value, Mapping) and "factory" in value:
        return _partial(build(ObjectRef, value, "args"))
    return value


def _made(reference: ObjectRef) -> Any:
    """The named object; a class, or whatever has arguments, is called.

    Raises:
        ConfigError: the call failed.
    """
    named = _partial(reference) if reference.args else import_object(reference.factory)
    if not isinstance(named, type | functools.partial):
        return named
    try:
        return named()
    except Exception as error:  # whatever the user's classes raise when they are made
        raise ConfigError(
            f"cannot make '{reference.factory}' with args {dict(reference.args)}: "
            f"{type(error).__name__}: {error}; correct them in the job file"
        ) from error
