"""The names in a job file become an estimator with the user's objects, whose values are checked."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, get_args, get_origin

from sparkdl.cli.job_files.job_file import PARAMS, ObjectRef, TrainJob
from sparkdl.cli.job_files.toml_values import build
from sparkdl.errors import ConfigError, ParamError, Problems, did_you_mean
from sparkdl.runtime.public_names import import_object
from sparkdl.spark.params.param_table import Option

VALIDATION_COLUMN = "sparkdl_validation"
"""Marks the rows of ``validation.path``."""
_REMEDY = (
    "a module of your own, nets.py as nets:Net, lies in the folder in which sparkdl is started, or "
    "travels to driver and workers with spark-submit --py-files"
)


_KEYS = {option.name: key for key, option in PARAMS.items()}
_NAME = re.compile(rf"(?<!estimator\.)(?<!unknown key ')\b({'|'.join(_KEYS)})\b")
"""Pattern of a Param's name; what the user has misspelt so is quoted as it is."""


def in_file_words(text: str) -> str:
    """A message with the keys of ``[estimator]`` in place of the Params' names."""
    text = text.replace(f'column "{VALIDATION_COLUMN}"', "the column that marks [validation]")
    return _NAME.sub(lambda found: _KEYS[found[0]], text)


def check_training(job: TrainJob) -> None:
    """Raise ConfigError for wrong values of ``[model]`` and ``[estimator]``; needs no Spark."""
    from sparkdl.spark.fit.check_request import check_range, check_shards, check_values
    from sparkdl.spark.fit.check_training import check_sync_batch_norm
    from sparkdl.train.state import check_monitored

    estimator = make_estimator(job)
    try:
        # Initial weights and states may be where only Spark reads.
        request = replace(estimator._request(), initial_weights=None, initial_state=None)
        checked = check_values(request)
        config, has_validation = checked.request.config, request.validation is not None
        check_monitored(config, has_validation=has_validation, has_logs=checked.has_logs)
        check_range(request, checked.strategy, checked.mode)
        if request.num_workers is not None:
            checked.strategy.check(config, request.num_workers)
            check_sync_batch_norm(checked.module, config, request.num_workers, checked.mode)
            check_shards(request.num_shards, checked.strategy, request.num_workers)
    except ConfigError as error:
        raise ConfigError(in_file_words(str(error))) from error


def make_estimator(job: TrainJob) -> Any:
    """The estimator that a job describes, with the user's objects imported; raises ConfigError."""
    from sparkdl import estimator as faces

    kinds: dict[str, Callable[..., Any]] = {
        "classifier": faces.TorchClassifier,
        "regressor": faces.TorchRegressor,
        "estimator": faces.TorchEstimator,
    }
    problems, params = Problems(), dict[str, Any]()
    for key, value in job.estimator.given.items():
        with problems.caught():
            params[PARAMS[key].name] = _resolve(value, PARAMS[key], f"estimator.{key}")
    if job.validation is not None and job.validation.fraction is not None:
        params["validationFraction"] = job.validation.fraction
    elif job.validation is not None:
        params["validationIndicatorCol"] = VALIDATION_COLUMN
    estimator = kinds[job.estimator.kind]()
    with problems.caught():
        estimator._set(module=_partial(job.model, "model"))
    for name, value in params.items():
        key = f"estimator.{_KEYS.get(name, name)}"
        if not estimator.hasParam(name):
            kind = job.estimator.kind
            remedy = "leave it out, or choose another"
            problems.add(f"{key} is not for kind = '{kind}'; {remedy}")
            continue
        try:
            estimator.getParam(name).typeConverter(value)
        except ParamError as error:  # which begins with the Param's name
            problems.add(in_file_words(f"{key}{str(error).removeprefix(name)}"))
    problems.raise_all()
    return estimator._set(**params)


def _resolve(value: Any, option: Option, where: str) -> Any:
    """A value of ``[estimator]``, or a part of one, as its Param takes it."""
    if isinstance(value, str) and _mentions(option.type, Callable):
        if ":" in value:
            value = ObjectRef(factory=value)
        elif not _mentions(option.type, str):
            raise ConfigError(f"{where} must be 'package.module:name'; received {value!r}")
    if isinstance(value, ObjectRef):
        return _partial(value, where) if option.is_called_later else _made(value, where)
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


def _imported(reference: ObjectRef, where: str) -> Any:
    try:
        return import_object(reference.factory, _REMEDY)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def _partial(reference: ObjectRef, where: str) -> Any:
    """The named object, to be called later with its arguments."""
    named = _imported(reference, where)
    if not callable(named):
        raise ConfigError(f"{where}: '{reference.factory}' cannot be called: it is {named!r}")
    arguments = dict(reference.args)
    _check_arguments(named, arguments, f"{where}.args")
    for name, value in arguments.items():
        if isinstance(value, Mapping) and "factory" in value:
            arguments[name] = _partial(build(ObjectRef, value, "args"), f"{where}.args.{name}")
    return functools.partial(named, **arguments) if arguments else named


def _check_arguments(named: Callable[..., Any], arguments: Mapping[str, Any], where: str) -> None:
    """Refuse names of arguments that a callable does not take."""
    try:
        parameters = inspect.signature(named).parameters
    except (TypeError, ValueError):  # Python's own are not all described
        return
    if any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values()):
        return
    problems = Problems()
    for name in [name for name in arguments if name not in parameters]:
        hint = did_you_mean(name, parameters) or ";"
        problems.add(f"unknown key '{name}' in {where}{hint} known: {', '.join(parameters)}")
    problems.raise_all()


def _made(reference: ObjectRef, where: str) -> Any:
    """The named object; a class, or whatever has arguments, is called."""
    named = _partial(reference, where) if reference.args else _imported(reference, where)
    if not isinstance(named, type | functools.partial):
        return named
    try:
        return named()
    except Exception as error:  # whatever the user's classes raise when they are made
        raise ConfigError(
            f"{where}: cannot make '{reference.factory}' with args {dict(reference.args)}: "
            f"{type(error).__name__}: {error}; correct them in the job file"
        ) from error
