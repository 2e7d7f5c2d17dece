"""Spark's side of the Params of `param_table`: their classes, and what training gets of them."""

from __future__ import annotations

import copy
import inspect
import os
import sys
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar

from pyspark.ml.param import Param, Params, TypeConverters, shared
from pyspark.ml.util import MLWritable

from sparkdl import familiar_names
from sparkdl.config import CheckpointConfig, Task, TrainConfig
from sparkdl.errors import (
    ConfigError,
    ParamError,
    Problems,
    all_of,
    did_you_mean,
    meant,
    unknown_names,
)
from sparkdl.runtime.arguments import plain_value
from sparkdl.runtime.tracebacks import plainly
from sparkdl.spark.params.converters import NAMES, to_type
from sparkdl.spark.params.param_table import AUTO, NOT_SET, OF_THE_FIELD, Option, hints, options

P = TypeVar("P", bound="CheckedParams")
C = TypeVar("C", bound=type["CheckedParams"])

_SPARKS_CONVERTERS: Mapping[Any, Callable[[Any], Any]] = {
    int: TypeConverters.toInt,
    float: TypeConverters.toFloat,
    bool: TypeConverters.toBoolean,
    str: TypeConverters.toString,
    list[str]: TypeConverters.toListString,
}


_COLUMNS = 96
"""Width of what is shown by `help`."""
_SECTION = "Params"
"""Heading of the Params in the docstrings of classes."""


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
        names, wrong = self._names(), []
        if unknown := [name for name in kwargs if name not in names]:
            wrong.append(unknown_names(f"{type(self).__name__} has no Param", unknown, names))
        for name, value in kwargs.items():
            if name not in names:
                continue
            param, option = self.getParam(name), self._options.get(name)
            has_default = self._defaultParamMap.get(param) is not None
            if value is None and has_default and not (option and option.accepts_none):
                doc = "" if option is None else f": {option.doc}"
                default = self._defaultParamMap.get(param)
                wrong.append(f"{name} cannot be None; leave it out to have {default!r}{doc}")
                continue
            try:
                plain = plain_value(value)
                self._paramMap[param] = None if value is None else param.typeConverter(plain)
            except ParamError as error:
                wrong.append(str(error))
        if wrong:
            raise ParamError(all_of(wrong))
        return self

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuse to take ``estimator.epochs = 3`` for `setEpochs`, which it would not be."""
        kind = type(self)
        if name[0] != "_" and not isinstance(value, Param):
            param: str | None = name
            if kind.__module__.startswith("sparkdl.") and not hasattr(kind, name):
                names = {familiar_names.plain(one): one for one in self._options}
                param = familiar_names.same(name, names)
            if param in self._options:
                raise ParamError(
                    f"{kind.__name__} is not changed by {name} = ...; use "
                    f"{_method('set', str(param))}(...)"
                )
        super().__setattr__(name, value)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Say what to write in place of a name that there is not."""
            if name.startswith("_") or hasattr(type(self), name):
                return object.__getattribute__(self, name)  # raises its own error
            # Without an object, of which Python would suggest attributes that are private.
            message = f"{type(self).__name__} has no {name!r}{self._instead(name)}"
            raise AttributeError(message, name=name, obj=None)

    def _instead(self, name: str) -> str:
        """A remedy for a name that is no attribute: of other packages, or misspelt."""
        kind, torch = type(self), sys.modules.get("torch")
        call, more = familiar_names.METHODS.get(familiar_names.plain(name), ("", ""))
        if call:
            if not hasattr(kind, call.partition("(")[0]):
                call = f"fit(df).{call}" if hasattr(kind, "fit") else f"{call} of an estimator"
            return f"; use {call}{more}"
        if torch is not None and hasattr(torch.nn.Module, name):
            return f"; the network has it: {'fit(df).' * hasattr(kind, 'fit')}module.{name}"
        accessor, param = name[:3], name[3:]
        if accessor in ("set", "get") and param:
            found = meant(param, self._options)
            if found is None:
                return "; explainParams() lists the Params"
            return f"; did you mean {_method(accessor, found)!r}?"
        return did_you_mean(name, [one for one in dir(kind) if one[0] != "_"])

    def hasParam(self, paramName: str) -> bool:
        """True if there is a Param of this name.

        Spark would compute a property of that name, such as the module of a model, which may be
        large.
        """
        return isinstance(getattr(type(self), paramName, None), Param)

    def _names(self) -> list[str]:
        return [param.name for param in self.params]

    def value(self, name: str) -> Any:
        """The Param's value; None if it has none. An empty column name counts as none."""
        if not self.hasParam(name):
            return None
        param = self.getParam(name)
        value = self.getOrDefault(param) if self.isDefined(param) else None
        return None if value == "" and name.endswith("Col") else value


class Saved(MLWritable):
    """Saves and loads estimators and models."""

    @plainly
    def save(self, path: str | os.PathLike[str]) -> None:
        """Save Params, and the module that is there, without pickle; see docs/persistence.md.

        Args:
            path: a folder that does not exist, by its path, ``~`` for the home, or its URL; to
                replace one use ``write().overwrite().save(path)``.

        Raises:
            StorageError: there is something, or the place cannot be written.
            ConfigError: the module, or the object that a Param holds, cannot be saved.
        """
        self.write().save(os.fspath(path))

    if not TYPE_CHECKING:

        @classmethod
        def load(cls, path: str | os.PathLike[str]) -> Self:
            """Load what `save` has written.

            Args:
                path: of the folder.

            Returns:
                An instance of this class.

            Raises:
                StorageError: the files are missing, damaged, or of another class.
                ConfigError: the code that they name cannot be imported, or is not trusted: see
                    ``read().trusting``.
            """
            return cls.read().load(path)


class TrainParams(CheckedParams, shared.HasSeed):
    """The base of the Params of all estimators."""


class ClassOutputParams(shared.HasProbabilityCol, shared.HasRawPredictionCol):
    """The classes by which Spark asks for the output columns of a classifier."""


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


def with_params(arguments: type, **defaults: Any) -> Callable[[C], C]:
    """Class decorator: give a class the Params of a TypedDict, with ``setX`` and ``getX`` for X.

    Constructor and ``setParams`` have the Params in their signatures, and the class has them in its
    docstring. ``defaults`` take the place of those of the TypedDict.
    """

    def decorate(cls: C) -> C:
        rows = dict(options(arguments))
        rows |= {name: replace(rows[name], default=value) for name, value in defaults.items()}
        rows = dict(sorted(rows.items(), key=lambda row: row[0] != "module"))  # that comes first
        cls._options = rows
        for name, option in rows.items():
            convert = option.convert or partial(to_type, option.type, option.doc)
            if option.check is not None:
                convert = partial(option.check, option.doc)
            elif option.convert is None and option.type in _SPARKS_CONVERTERS:
                convert = partial(_convert_as_spark, option)
            if option.accepts_auto:
                convert = partial(_auto_or, convert)
            convert = partial(_converted, option, convert)
            setattr(cls, name, Param(Params._dummy(), name, option.doc, typeConverter=convert))
            for accessor in (_setter(option), _getter(option)):
                if not hasattr(cls, accessor.__name__):
                    accessor.__qualname__ = f"{cls.__name__}.{accessor.__name__}"
                    accessor.__module__ = cls.__module__
                    setattr(cls, accessor.__name__, accessor)
        described = "\n".join(map(_described, rows.values()))
        cls.__doc__ = f"{inspect.getdoc(cls)}\n\n{_SECTION}:\n{described}\n"
        for method in ("__init__", "setParams"):
            made = vars(cls).get(method)
            if made is not None and takes_any(made):
                made.__signature__ = _signature(rows, hints(arguments), made)
        return cls

    return decorate


class _Unset:
    """The default, in signatures, of a Param that has no value before it is set."""

    def __repr__(self) -> str:
        return "<not set>"


def takes_any(function: Callable[..., Any]) -> bool:
    """True if a function takes arguments of any name."""
    return any(p.kind is p.VAR_KEYWORD for p in inspect.signature(function).parameters.values())


class _ShortSignature(inspect.Signature):
    """Reads as names and defaults in lines of help's width; types are in its parameters."""

    def __str__(self) -> str:
        shown = [f"{p.name}={p.default!r}" for p in self.parameters.values() if p.name != "self"]
        me = ["self"] * ("self" in self.parameters)
        text = ", ".join([*me, "*", *(one.replace(" ", "\0") for one in shown)])
        lines = textwrap.wrap(text, _COLUMNS, initial_indent="(", subsequent_indent="    ")
        return "\n".join(lines).replace("\0", " ") + ")"


def _signature(
    rows: Mapping[str, Option], types: Mapping[str, Any], function: Callable[..., Any]
) -> inspect.Signature:
    """The signature of a function that takes the Params by name."""
    before = inspect.signature(function)
    named = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=_Unset() if default_of(option) is NOT_SET else default_of(option),
            annotation=types[name],
        )
        for name, option in rows.items()
    ]
    me = before.parameters["self"]
    return _ShortSignature([me, *named], return_annotation=before.return_annotation)


def _described(option: Option) -> str:
    """An entry of a docstring: what a Param is, and its default."""
    default = default_of(option)
    shown = "not set" if default is NOT_SET else repr(default)
    return textwrap.fill(
        f"{option.name}: {option.doc} Default: {shown}.",
        _COLUMNS,
        initial_indent=" " * 4,
        subsequent_indent=" " * 8,
        break_on_hyphens=False,
    )


def _auto_or(convert: Callable[[Any], Any], value: Any) -> Any:
    return AUTO if isinstance(value, str) and value == AUTO else convert(value)


def _converted(option: Option, convert: Callable[[Any], Any], value: Any) -> Any:
    """Convert a value, and see that it keeps the rule; raises ParamError with the Param's name.

    Spark calls it as well, for the values of a grid and for `copy`.
    """
    try:
        converted = convert(value)
    except (TypeError, ConfigError) as error:  # without the converter's frames
        is_rule = str(error).startswith("must ")
        message = f"{option.name}{' ' if is_rule else ': '}{error}"
        if option.name == "featuresCol" and isinstance(value, list | tuple):
            message += "; put columns together with VectorAssembler or F.array, or name them as "
            message += "inputCols, each of which is an argument of forward"
        raise ParamError(message) from None
    if option.rule is not None and not (option.accepts_auto and converted == AUTO):
        try:
            option.rule.check(converted, option.name)
        except ConfigError as error:
            raise ParamError(str(error)) from None
    return converted


def _convert_as_spark(option: Option, value: Any) -> Any:
    """Convert a value as Spark does; its own errors fail to name some values, such as tuples."""
    try:
        return _SPARKS_CONVERTERS[option.type](value)
    except (TypeError, ValueError, OverflowError):
        name = NAMES.get(option.type, "a list of strings") + f" or {AUTO!r}" * option.accepts_auto
        raise TypeError(f"must be {name}; received {value!r}") from None


def _method(prefix: str, name: str) -> str:
    """Such as ``setEpochs``."""
    return f"{prefix}{name[0].upper()}{name[1:]}"


def _setter(option: Option) -> Callable[..., Any]:
    @plainly
    def setter(self: P, value: Any) -> P:
        return self._set(**{option.name: value})

    setter.__name__ = _method("set", option.name)
    setter.__doc__ = f"Set {option.name}: {option.doc}"
    return setter


def _getter(option: Option) -> Callable[..., Any]:
    def getter(self: Params) -> Any:
        return self.getOrDefault(option.name)

    getter.__name__ = _method("get", option.name)
    getter.__doc__ = f"Return {option.name}: {option.doc}"
    return getter


def training_values(params: TrainParams, task: Task) -> tuple[TrainConfig, dict[str, Any]]:
    """The training configuration and other fields of a FitRequest; raises ConfigError."""
    values: dict[str, dict[str, Any]] = {"config": {}, "checkpoint": {}, "request": {}}
    automatic: list[str] = []
    problems, config = Problems(), None
    for name, option in params._options.items():
        if option.fills == "nothing":
            continue
        value = None
        with problems.caught():
            value = option.read(params) if option.read else params.value(name)
        if name == "module" and value is None:
            problems.add("module is not set; pass an nn.Module or a callable that makes one")
        if option.accepts_auto and isinstance(value, str) and value == AUTO:
            automatic.append(name)
            value = option.start
        values[option.fills][option.field] = tuple(value) if isinstance(value, list) else value
    checkpoint = CheckpointConfig()
    with problems.caught():
        checkpoint = CheckpointConfig(**values["checkpoint"])
    with problems.caught():
        config = TrainConfig(task=task, checkpoint=checkpoint, **values["config"])
    problems.raise_all()
    assert config is not None
    values["request"]["automatic"] = tuple(automatic)
    return config, values["request"]
