"""The sections and keys of job files, as dataclasses; one TOML file describes one job.

The fields of `TrainJob`, `EvaluateJob` and `PredictJob` are the file's sections, the sections'
fields its keys. Reading a job file neither imports the user's code nor starts Spark: objects are
named as ``package.module:name`` and imported by `job_objects`.
"""

from __future__ import annotations

import os
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, Union, get_args, get_origin

from sparkdl.cli.job_files.toml_values import MissingKey, apply_settings, build, read_toml
from sparkdl.config import ExplainOptions, require
from sparkdl.errors import ConfigError, ConfigErrors, all_of
from sparkdl.spark.params.converters import parts_of
from sparkdl.spark.params.param_table import ClassifierArguments, LabelsArguments, Option, options

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class DataSection:
    """``[data]``, ``[test]``: rows to read, as ``spark.read.format(format).load(path)``."""

    format: Literal["parquet", "csv", "json", "orc", "table"] = "parquet"
    path: str | tuple[str, ...] | None = None
    """Place of the files; every format but ``table`` needs it."""
    table: str | None = None
    """Name of a catalog table; the format ``table`` needs it."""
    options: Mapping[str, str | bool | int | float] = field(default_factory=dict)
    """Options of Spark's reader, for example ``header = true`` for CSV."""
    schema: str | None = None
    """Columns and types as SQL writes them, ``"label INT, image BINARY"``; else Spark infers."""
    select: tuple[str, ...] = ()
    """SQL expressions that make the columns, ``"array(x1, x2) AS features"``; else all columns."""

    def __post_init__(self) -> None:
        needed, other = ("table", "path") if self.format == "table" else ("path", "table")
        if getattr(self, needed) is None:
            raise ConfigError(f"format '{self.format}' needs the key '{needed}'")
        if getattr(self, other) is not None:
            raise ConfigError(f"format '{self.format}' does not take the key '{other}'")


@dataclass(frozen=True, kw_only=True)
class ValidationSection:
    """``[validation]``: rows that measure progress during training, a share or files apart."""

    fraction: float | None = None
    """Share of the rows of ``[data]``; see ``estimator.validation_fraction``."""
    path: str | tuple[str, ...] | None = None
    """Files of the same format, options and columns as ``[data]``."""

    def __post_init__(self) -> None:
        if (self.fraction is None) == (self.path is None):
            raise ConfigError("needs either 'fraction' or 'path'")
        is_share = self.fraction is None or 0 < self.fraction < 1
        require(is_share, "fraction must be between 0 and 1", self.fraction)


@dataclass(frozen=True, kw_only=True)
class ObjectRef:
    """An object of the user's code and, if it is to be called, the arguments.

    An argument may be a table of this form itself; it is passed as something to be called.
    """

    factory: str
    """``package.module:name``"""
    args: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_reference(self.factory, "factory")


PARAMS: Mapping[str, Option] = {
    option.key: option
    for option in (*options(ClassifierArguments).values(), *options(LabelsArguments).values())
    if option.name != "module"
}
"""Key of ``[estimator]`` -> the Param that it sets; the module has a section of its own."""


def key_type(hint: Any) -> Any:
    """The type of the key in job files for a Param's type; objects are named by `ObjectRef`."""
    origin, arguments = get_origin(hint), get_args(hint)
    if len(parts_of(hint)) > 1:
        return Union[tuple(key_type(p) for p in parts_of(hint) if p is not types.NoneType)]  # noqa: UP007
    if hint in (str, int, float, bool):
        return hint
    if hint is object:
        return Any
    if origin in (list, Sequence):
        return types.GenericAlias(tuple, (key_type(arguments[0]), ...))
    if origin is Mapping:
        return types.GenericAlias(Mapping, (str, key_type(arguments[1])))
    return str | ObjectRef if origin is Callable else ObjectRef


def _with_params(cls: type[T]) -> type[T]:
    """Class decorator: a field for each of `PARAMS`."""
    for key, option in PARAMS.items():
        kind = option.in_job_file or key_type(option.type)
        if option.accepts_auto and kind is not str:
            kind |= Literal["auto"]
        cls.__annotations__[key] = kind | None
        doc = f"{option.doc} {option.job_file_doc}".rstrip()
        setattr(cls, key, field(default=None, metadata={"doc": doc}))
    return cls


@dataclass(frozen=True, kw_only=True)
@_with_params
class EstimatorSection:
    """``[estimator]``: the Params of the estimator in snake_case; see its own documentation.

    What is left out keeps the estimator's default. Where a Param takes an object, give a name
    ``"package.module:name"`` or a table ``{factory = "package.module:name", args = {...}}``.
    """

    kind: Literal["classifier", "regressor", "estimator"] = "classifier"

    if TYPE_CHECKING:

        def __init__(self, **values: Any) -> None:
            """Take ``kind`` and the keys of `PARAMS`."""

        def __getattr__(self, key: str) -> Any:
            """Keys of `PARAMS`."""

    @property
    def given(self) -> dict[str, Any]:
        """The Params that the file sets, under their names here."""
        return {key: value for key in PARAMS if (value := getattr(self, key)) is not None}


@dataclass(frozen=True, kw_only=True)
class TrainOutput:
    """``[output]`` of training: where the model goes."""

    path: str
    overwrite: bool = False
    """True if a model that is there already is replaced."""


@dataclass(frozen=True, kw_only=True)
class SavedModel:
    """``[model]`` of evaluation and prediction: a model that training saved."""

    path: str


@dataclass(frozen=True, kw_only=True)
class EvaluationSection:
    """``[evaluation]``: what predictions are compared with."""

    label_col: str | None = None
    """The column with the labels; without it that of training."""
    weight_col: str | None = None
    """Weight of a row; without it that of training. Empty: all rows count the same."""


@dataclass(frozen=True, kw_only=True)
class EvaluateOutput:
    """``[output]`` of evaluation: a file, by its path or URL, for the numbers as JSON."""

    path: str


@dataclass(frozen=True, kw_only=True)
class PredictOutput:
    """``[output]`` of prediction: where the rows with their predictions go."""

    path: str
    format: Literal["parquet", "csv", "json", "orc"] = "parquet"
    mode: Literal["error", "overwrite", "append"] = "error"
    """Action to take where something is there already."""
    columns: tuple[str, ...] = ()
    """Columns to write; all of them if empty."""
    options: Mapping[str, str | bool | int | float] = field(default_factory=dict)
    """Options of Spark's writer."""


@dataclass(frozen=True, kw_only=True)
class SparkSection:
    """``[spark]``: the session. What ``spark-submit`` was given holds unless it is set here."""

    app_name: str | None = None
    master: str | None = None
    """``local[2]``, ``spark://...``, ``yarn``, or ``sc://...`` for a Spark Connect server."""
    conf: Mapping[str, str | bool | int | float] = field(default_factory=dict)
    """Entries of Spark's configuration; see `spark_session` for those that may come too late."""


@dataclass(frozen=True, kw_only=True)
class TrainJob:
    """A file for ``jobs/train.py``."""

    data: DataSection
    model: ObjectRef
    """Class or function that makes the nn.Module, importable on driver and workers."""
    output: TrainOutput
    validation: ValidationSection | None = None
    test: DataSection | None = None
    """Rows that training never sees; the saved model is evaluated on them at the end."""
    estimator: EstimatorSection = field(default_factory=EstimatorSection)
    explain: ExplainOptions = field(default_factory=ExplainOptions)
    spark: SparkSection = field(default_factory=SparkSection)

    def __post_init__(self) -> None:
        for key in ("validation_indicator_col", "validation_fraction"):
            if self.validation is not None and getattr(self.estimator, key) is not None:
                raise ConfigError(f"give either the section [validation] or estimator.{key}")


@dataclass(frozen=True, kw_only=True)
class EvaluateJob:
    """A file for ``jobs/evaluate.py``."""

    data: DataSection
    model: SavedModel
    evaluation: EvaluationSection = field(default_factory=EvaluationSection)
    output: EvaluateOutput | None = None
    spark: SparkSection = field(default_factory=SparkSection)


@dataclass(frozen=True, kw_only=True)
class PredictJob:
    """A file for ``jobs/predict.py``."""

    data: DataSection
    model: SavedModel
    output: PredictOutput
    spark: SparkSection = field(default_factory=SparkSection)


def load_job(
    kind: type[T],
    path: str | Path | None,
    settings: Sequence[str] = (),
    check: Callable[[T], None] | None = None,
) -> T:
    """Read a job file, if there is one, with ``settings``, ``section.key=value``, laid over it.

    ``check`` raises ConfigError for values that the types allow. The message of a ConfigError
    begins with the file's path, or with the setting without which it would not be.
    """
    tables = read_toml(path) if path is not None else {}

    def made(settings: Sequence[str]) -> T:
        job = build(kind, apply_settings(tables, settings))
        if check is not None:
            check(job)
        return job

    def problems(settings: Sequence[str]) -> Sequence[ConfigError]:
        try:
            made(settings)
        except ConfigErrors as several:
            return several.errors
        except ConfigError as error:
            return [error]
        return []

    try:
        return made(settings)
    except ConfigError as error:
        wrong = error.errors if isinstance(error, ConfigErrors) else [error]
        blamed = dict.fromkeys(map(str, wrong), str(path or "the command line"))
        for number, setting in enumerate(settings if not isinstance(error, MissingKey) else ()):
            without = problems([*settings[:number], *settings[number + 1 :]])
            if not any(isinstance(one, MissingKey) for one in without):
                own = blamed.keys() - {str(one) for one in without}
                blamed |= {one: f"--set {setting}" for one in own if "--set" not in blamed[one]}
        raise ConfigError(all_of(f"{who}: {what}" for what, who in blamed.items())) from error


def brings_modules(section: SparkSection) -> bool:
    """True if the session will bring modules along, so that none can be imported before."""
    defaults = spark_defaults()
    return _PY_FILES in section.conf or _PY_FILES in defaults or "--py-files" in defaults


def spark_defaults() -> str:
    """The text that Spark's own configuration has, and what is given to ``spark-submit``.

    Spark's launcher reads variables from a script, of which this process knows nothing else.
    """
    places = [(os.environ.get("SPARK_CONF_DIR"), ""), (os.environ.get("SPARK_HOME"), "conf")]
    if (found := find_spec("pyspark")) is not None and found.origin is not None:
        places.append((str(Path(found.origin).parent), "conf"))
    folders = [Path(folder, below) for folder, below in places if folder is not None]
    files = [folder / name for folder in folders for name in _OF_SPARK]
    texts = [file.read_text(encoding="utf-8", errors="replace") for file in files if file.is_file()]
    return "\n".join([*texts, os.environ.get("PYSPARK_SUBMIT_ARGS", "")])


_OF_SPARK = ("spark-defaults.conf", "spark-env.sh", "core-site.xml")
_PY_FILES = "spark.submit.pyFiles"


def check_reference(reference: str, name: str) -> None:
    """Raise ConfigError for what is not of the form ``package.module:name``."""
    module, separator, attribute = reference.partition(":")
    parts = [*module.split("."), *attribute.split(".")]
    is_reference = bool(separator) and all(part.isidentifier() for part in parts)
    require(is_reference, f"{name} must have the form 'package.module:name'", reference)
