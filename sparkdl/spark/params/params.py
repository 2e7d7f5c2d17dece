"""Spark's side of the Params of `param_table`: their classes, and what training gets of them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar, TypeVar

from pyspark.ml.param import Param, Params, TypeConverters, shared

from sparkdl.config import CheckpointConfig, Task, TrainConfig, require
from sparkdl.errors import ConfigError, ParamError, did_you_mean
from sparkdl.runtime.tracebacks import plainly
from sparkdl.spark.params.converters import NAMES, to_type
from sparkdl.spark.params.param_table import AUTO, NOT_SET, OF_THE_FIELD, Option, options

P = TypeVar("P", bound="CheckedParams")
C = TypeVar("C", bound=type["CheckedParams"])

_SPARKS_CONVERTERS: Mapping[Any, Callable[[Any], Any]] = {
    int: TypeConverters.toInt,
    float: TypeConverters.toFloat,
    bool: TypeConverters.toBoolean,
    str: TypeConverters.toString,
    list[str]: TypeConverters.toListString,
}


class CheckedParams(
    shared.HasFeaturesCol, shared.HasInputCols, shared.HasWeightCol, shared.HasPredictionCol
):
    """Params that refuse unknown names, and None where a value is needed."""

    _options: ClassVar[Mapping[str, Option]] = {}
    """The rows of the class; `with_params` sets them."""

    def __init__(self) -> None:
        super().__init__()
        defaults = {name: default_of(option) for name, option in self._options.items()}
        self._setDefault(**{k: v for k, v in defaults.items() if v is not NOT_SET})

    def _set(self: P, **kwargs: Any) -> P:
        for name, value in kwargs.items():
            if name not in self._names():
                raise ParamError(f"{type(self).__name__} has no Param {name!r}{self._hint(name)}")
            param = self.getParam(name)
            has_default = self._defaultParamMap.get(param) is not None
            option = self._options.get(name)
            if value is None and has_default and not (option and option.accepts_none):
                raise ParamError(f'Invalid param value given for param "{name}": None')
            try:
                self._paramMap[param] = None if value is None else param.typeConverter(value)
            except (TypeError, ConfigError) as error:  # without the converter's frames
                message = f'Invalid param value given for param "{name}": {error}'
                raise ParamError(message) from None
        return self

    def hasParam(self, paramName: str) -> bool:
        """True if there is a Param of this name.

        Spark would compute a property of that name, such as the module of a model, which may be
        large.
        """
        return isinstance(getattr(type(self), paramName, None), Param)

    def _names(self) -> list[str]:
        return [param.name for param in self.params]

    def _hint(self, name: str) -> str:
        return did_you_mean(name, self._names()) or f"; known: {', '.join(self._names())}"

    def value(self, name: str) -> Any:
        """The Param's value; None if it has none. An empty column name counts as none."""
        if not self.hasParam(name):
            return None
        param = self.getParam(name)
        value = self.getOrDefault(param) if self.isDefined(param) else None
        return None if value == "" and name.endswith("Col") else value


class TrainParams(CheckedParams, shared.HasSeed):
    """What all estimators are."""


class ClassOutputParams(shared.HasProbabilityCol, shared.HasRawPredictionCol):
    """What Spark asks by these classes: that there are the output columns of a classifier."""


def default_of(option: Option) -> Any:
    """The default of a row; `NOT_SET` if there is none."""
    if option.default is not OF_THE_FIELD:
        return option.default if option.default is NOT_SET else copy.copy(option.default)
    config = TrainConfig()
    owner = {"config": config, "checkpoint": config.checkpoint}.get(option.fills)
    if owner is None:
        return NOT_SET
    value = getattr(owner, option.field)
    return dict(value) if isinstance(value, Mapping) else value


def with_params(arguments: type) -> Callable[[C], C]:
    """Class decorator: give a class the Params of a TypedDict, with ``setX`` and ``getX`` for X."""

    def decorate(cls: C) -> C:
        cls._options = options(arguments)
        for name, option in cls._options.items():
            convert = option.convert or partial(to_type, option.type, option.doc)
            if option.convert is None and option.type in _SPARKS_CONVERTERS:
                convert = partial(_convert_as_spark, option.type)
            if option.accepts_auto:
                convert = partial(_auto_or, convert)
            setattr(cls, name, Param(Params._dummy(), name, option.doc, typeConverter=convert))
            for accessor in (_setter(option), _getter(option)):
                if not hasattr(cls, accessor.__name__):
                    accessor.__qualname__ = f"{cls.__name__}.{accessor.__name__}"
                    accessor.__module__ = cls.__module__
                    setattr(cls, accessor.__name__, accessor)
        return cls

    return decorate


def _auto_or(convert: Callable[[Any], Any], value: Any) -> Any:
    return AUTO if isinstance(value, str) and value == AUTO else convert(value)


def _convert_as_spark(kind: Any, value: Any) -> Any:
    """What Spark makes of a value; its own errors fail to name some values, such as tuples."""
    try:
        return _SPARKS_CONVERTERS[kind](value)
    except (TypeError, ValueError, OverflowError):
        name = NAMES.get(kind, "a list of strings")
        raise TypeError(f"must be {name}; received {value!r}") from None


def _setter(option: Option) -> Callable[..., Any]:
    @plainly
    def setter(self: P, value: Any) -> P:
        return self._set(**{option.name: value})

    setter.__name__ = f"set{option.name[0].upper()}{option.name[1:]}"
    setter.__doc__ = f"Set {option.name}: {option.doc}"
    return setter


def _getter(option: Option) -> Callable[..., Any]:
    def getter(self: Params) -> Any:
        return self.getOrDefault(option.name)

    getter.__name__ = f"get{option.name[0].upper()}{option.name[1:]}"
    getter.__doc__ = f"Return {option.name}: {option.doc}"
    return getter


def training_values(params: TrainParams, task: Task) -> tuple[TrainConfig, dict[str, Any]]:
    """The training configuration and other fields of a FitRequest; raises ConfigError."""
    values: dict[str, dict[str, Any]] = {"config": {}, "checkpoint": {}, "request": {}}
    automatic: list[str] = []
    for name, option in params._options.items():
        if option.fills == "nothing":
            continue
        value = option.read(params) if option.read else params.value(name)
        if name == "module" and value is None:
            raise ConfigError("module is not set; pass an nn.Module or a callable that makes one")
        if option.accepts_auto and isinstance(value, str) and value == AUTO:
            automatic.append(name)
            value = option.start
        if option.least is not None and value is not None:
            require(value >= option.least, f"{name} must be at least {option.least}", value)
        values[option.fills][option.field] = tuple(value) if isinstance(value, list) else value
    checkpoint = CheckpointConfig(**values["checkpoint"])
    values["request"]["automatic"] = tuple(automatic)
    return TrainConfig(task=task, checkpoint=checkpoint, **values["config"]), values["request"]
