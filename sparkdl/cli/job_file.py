"""What can be said in a job file?

One TOML file describes one job: `TrainJob`, `EvaluateJob` or `PredictJob`; `studyfile` has
`TuneJob`. Their fields are the file's sections, the sections' fields its keys. Reading a job file
neither imports the user's code nor starts Spark; objects are named as ``package.module:name`` and
imported by `job`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, TypeVar

from sparkdl.cli.toml_values import apply_settings, build, read_toml
from sparkdl.config import EarlyStopping
from sparkdl.errors import ConfigError
from sparkdl.serialization.initial_weights import InitialWeights

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class DataSection:
    """``[data]``, ``[test]``: rows to read, as ``spark.read.format(format).load(path)``."""

    format: Literal["parquet", "csv", "json", "orc", "table"] = "parquet"
    path: str | tuple[str, ...] | None = None
    """Where the files are; every format but ``table`` needs it."""
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
    """Share of the rows of ``[data]``, drawn by the hash of a row: the same rows every time."""
    seed: int = 0
    """Another seed draws other rows."""
    path: str | tuple[str, ...] | None = None
    """Files of the same format, options and columns as ``[data]``."""

    def __post_init__(self) -> None:
        if (self.fraction is None) == (self.path is None):
            raise ConfigError("needs either 'fraction' or 'path'")
        if self.fraction is not None and not 0 < self.fraction < 1:
            raise ConfigError(f"fraction must be between 0 and 1; received {self.fraction}")


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


@dataclass(frozen=True, kw_only=True)
class EstimatorSection:
    """``[estimator]``: the Params of the estimator in snake_case; see its own documentation.

    What is left out keeps the estimator's default. Where a Param takes an object, give a name
    ``"package.module:name"`` or a table ``{factory = "package.module:name", args = {...}}``.
    """

    kind: Literal["classifier", "regressor", "estimator"] = "classifier"
    loss: str | Mapping[str, Any] | None = None
    """A name, an object, or with several ``labels`` a table with one of these for each."""
    loss_weights: Mapping[str, float] | None = None
    optimizer: str | None = None
    optimizer_params: Mapping[str, Any] | None = None
    learning_rate: float | None = None
    parameter_groups: Mapping[str, Mapping[str, Any]] | None = None
    frozen_layers: tuple[str, ...] | None = None
    initial_weights: str | InitialWeights | None = None
    """A path or URL, or a table ``{source = "...", skip = ["..."]}``."""
    scheduler: str | ObjectRef | None = None
    """A callable that gets the optimizer, and ``args`` by name."""
    features_col: str | None = None
    input_cols: tuple[str, ...] | None = None
    input_shape: tuple[int | tuple[int, ...], ...] | None = None
    """One shape, or with several ``input_cols`` a list of them."""
    inputs: Mapping[str, str | ObjectRef] | tuple[str | ObjectRef, ...] | None = None
    """Columns, or objects such as ``{factory = "sparkdl:Image", args = {column = "photo"}}``."""
    training_step: str | ObjectRef | None = None
    """A function ``(module, inputs, target)``, and further ``args`` by name."""
    augmentation: str | ObjectRef | None = None
    group_by_length: int | None = None
    label_col: str | None = None
    labels: Mapping[str, str | ObjectRef] | None = None
    weight_col: str | None = None
    validation_indicator_col: str | None = None
    prediction_col: str | None = None
    probability_col: str | None = None
    raw_prediction_col: str | None = None
    epochs: int | None = None
    max_steps: int | None = None
    batch_size: int | None = None
    shuffle_window_bytes: int | None = None
    num_workers: int | None = None
    seed: int | None = None
    sync_strategy: str | ObjectRef | None = None
    execution_mode: str | None = None
    sync_batch_norm: bool | None = None
    precision: str | None = None
    memory_format: str | None = None
    gradient_accumulation_steps: int | None = None
    gradient_clip_norm: float | None = None
    divergence_factor: float | None = None
    device: str | None = None
    deterministic: bool | None = None
    checkpoint_dir: str | None = None
    checkpoint_interval: int | None = None
    max_restarts: int | None = None
    early_stopping: EarlyStopping | None = None
    callbacks: tuple[ObjectRef, ...] | None = None
    metrics: Mapping[str, ObjectRef] | None = None
    listeners: tuple[ObjectRef, ...] | None = None
    """Such as ``{factory = "sparkdl:TensorBoard", args = {log_dir = "runs/tensorboard"}}``."""
    report_dir: str | None = None
    """Where the run leaves its report; without it ``runs``. Empty: nowhere."""
    verbose: int | None = None
    cpus_per_worker: int | None = None
    gpus_per_worker: float | None = None

    @property
    def given(self) -> dict[str, Any]:
        """The Params that the file sets, under their names here."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        return {k: v for k, v in values.items() if v is not None and k != "kind"}


@dataclass(frozen=True, kw_only=True)
class ExplainSection:
    """``[explain]``: how much is measured where a training job is explained; see docs/explain.md.

    What is left out keeps the default of the estimator's ``explain``. Training has no use for it.
    """

    calibrate: bool | None = None
    """Whether steps are measured; else the plan has no times."""
    num_rows: int | None = None
    """Number of rows, where counting them takes too long."""
    num_workers: tuple[int, ...] | None = None
    """Numbers of workers to predict besides those that there are slots for."""
    count_seconds: float | None = None
    """Longest that looking at some rows may take, and that counting them may."""
    measure_seconds: float | None = None
    """About how long each of some ten measurements may take."""

    @property
    def given(self) -> dict[str, Any]:
        """What the file sets: arguments of ``explain``."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class TrainOutput:
    """``[output]`` of training: where the model goes."""

    path: str
    overwrite: bool = False
    """Whether a model that is there already is replaced."""


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
    """What to do where something is there already."""
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
    """Entries of Spark's configuration; see `spark.starting` for those that may come too late."""


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
    explain: ExplainSection = field(default_factory=ExplainSection)
    spark: SparkSection = field(default_factory=SparkSection)

    def __post_init__(self) -> None:
        if self.validation is not None and self.estimator.validation_indicator_col is not None:
            raise ConfigError(
                "give either the section [validation] or estimator.validation_indicator_col, "
                "a column that marks the validation rows; not both"
            )


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


def load_job(kind: type[T], path: str | Path | None, settings: Iterable[str] = ()) -> T:
    """Read a job file, with ``settings`` of the form ``section.key=value`` laid over it.

    Args:
        kind: the job's class.
        path: the file; None: the settings are the whole job.
        settings: those of the command line.

    Raises:
        ConfigError: the file or a setting is wrong; the message begins with the file's path.
    """
    tables = read_toml(path) if path is not None else {}
    try:
        return build(kind, apply_settings(tables, settings))
    except ConfigError as error:
        raise ConfigError(f"{path or 'the command line'}: {error}") from error


def check_reference(reference: str, name: str) -> None:
    """Refuse what is not of the form ``package.module:name``.

    Raises:
        ConfigError: it is not.
    """
    module, separator, attribute = reference.partition(":")
    parts = [*module.split("."), *attribute.split(".")]
    if not separator or not all(part.isidentifier() for part in parts):
        raise ConfigError(
            f"{name} must have the form 'package.module:name'; received {reference!r}"
        )
