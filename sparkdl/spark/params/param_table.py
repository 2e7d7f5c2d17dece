"""The Params of estimators and models, one row each.

A row is an entry of a TypedDict: the Param's name, its type, and an `Option` with all the rest. A
new Param is a row here, with ``fills="config"`` a field and a check in `config.TrainConfig`, the
file `accessors.pyi` made anew, and whoever reads the field. Setters, keys of job files and saving
follow; docs/extending.md has an example. Imports neither torch nor pyspark.
"""

from __future__ import annotations

import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import cache
from typing import Annotated, Any, Literal, Protocol, TypedDict, Union

from sparkdl import sync
from sparkdl.config import (
    RULES,
    STEPS_BETWEEN,
    EarlyStopping,
    Rule,
    TrainConfig,
    at_least,
    one_of,
)
from sparkdl.errors import ConfigError
from sparkdl.inputs import Named, Specification, check_names, named
from sparkdl.mesh import Mesh
from sparkdl.report.listeners.listener import Listener
from sparkdl.serialization.initial_weights import InitialWeights
from sparkdl.spark.params import converters
from sparkdl.spark.params.converters import Metrics, parts_of
from sparkdl.storage.storage import at_home
from sparkdl.sync.strategy import SyncStrategy


class ParamValues(Protocol):
    """The methods of an estimator or a model that the functions of this file need."""

    def value(self, name: str, /) -> Any:
        """The Param's value; None if it has none, or if there is no such Param."""
        ...

    def isSet(self, name: str, /) -> bool:
        """True if the user has set it."""
        ...


def specified_inputs(params: ParamValues) -> tuple[Named, ...]:
    """Return what ``inputs`` names; empty if it is not set; raises ConfigError."""
    value = params.value("inputs")
    if value is None:
        return ()
    for name in ("featuresCol", "inputCols"):
        if params.isSet(name):
            raise ConfigError(f"set either inputs or {name}, not both")
    entries = named(value)
    if not entries:
        raise ConfigError("inputs is empty; name at least one column")
    check_names(entries)
    return entries


def feature_columns(params: ParamValues) -> tuple[str, ...]:
    """The input columns in the module's order; none if ``inputs`` is set; raises ConfigError."""
    if specified_inputs(params):
        return ()
    several = params.value("inputCols")
    if several is None:
        several = [params.value("featuresCol") or ""]
    elif params.isSet("featuresCol"):
        raise ConfigError("set either featuresCol or inputCols, not both")
    if not several:
        raise ConfigError("inputCols is empty; name at least one column")
    if "" in several:
        name = "inputCols" if params.value("inputCols") else "featuresCol"
        raise ConfigError(
            f"{name} has an empty name; name the column (one that is called '' needs another name "
            "before: df.withColumnRenamed('', 'features'))"
        )
    return tuple(several)


def input_shapes(params: ParamValues) -> tuple[Any, ...]:
    """A shape or None for each input column; raises ConfigError."""
    shapes = params.value("inputShape")
    if shapes is not None and specified_inputs(params):
        raise ConfigError("inputShape goes with featuresCol and inputCols; use Tensor(shape=...)")
    return converters.shapes_by_input(shapes, len(feature_columns(params)))


def labels_of(params: ParamValues) -> tuple[Named, ...]:
    """Return what ``labels`` names; empty if it is not set; raises ConfigError."""
    value = params.value("labels")
    if value is None:
        return ()
    if params.value("labelCol") is not None:
        raise ConfigError("set either labels or labelCol, not both")
    if not value:
        raise ConfigError("labels is empty; name at least one column")
    if any(getattr(entry, "mask", None) for entry in value.values()):
        raise ConfigError("a label has no mask; let padding_value be what the loss ignores (-100)")
    return named(value)


def loss_of_labels(params: ParamValues) -> Any:
    """``loss``, of several labels a dict unless it is one for all; raises ConfigError."""
    from sparkdl.train.objective.label_losses import for_each

    loss, labels = params.value("loss"), labels_of(params)
    if labels:
        return for_each(loss, tuple(str(entry.argument) for entry in labels))
    if isinstance(loss, Mapping):
        raise ConfigError("loss is a dict by label, but labels is not set")
    return loss


def loss_weights(params: ParamValues) -> dict[str, float]:
    """``lossWeights``, checked; raises ConfigError."""
    weights = params.value("lossWeights") or {}
    unknown = set(weights) - {entry.argument for entry in labels_of(params)}
    if unknown:
        raise ConfigError(f"lossWeights names {sorted(unknown)}, which are not in labels")
    if weights and not isinstance(loss_of_labels(params), Mapping):
        raise ConfigError("lossWeights needs a loss for each label; weigh inside your own loss")
    return dict(weights)


def cache_dir(params: ParamValues) -> str | None:
    """``cacheDir``, without a ``~``: processes on executors may have another home."""
    place = params.value("cacheDir")
    return None if place is None else at_home(place)


def output_columns(params: ParamValues) -> tuple[str, ...]:
    """The columns that the fitted model will add; those that are turned off are left out."""
    names = ("predictionCol", "rawPredictionCol", "probabilityCol")
    return tuple(filter(None, map(params.value, names)))


INFERENCE_BATCH_SIZE = 512
"""Default of a model's batchSize: fills the arithmetic units; larger was not faster on CPUs."""

AUTO = "auto"
"""A value of some Params: it is chosen before each fit, see docs/explain.md."""

UNKNOWN_LOSS = ""
"""Loss of a model whose own could not be saved with it."""

NOT_SET: Any = object()
"""Default of a Param that has none."""
OF_THE_FIELD: Any = object()
"""Default of a Param whose field has one."""


def _is_part(value: float) -> bool:
    return 0 < value < 1


_PART = Rule("must be more than 0 and less than 1", _is_part)


@dataclass(frozen=True)
class Option:
    """The properties of a Param, besides its name and type."""

    doc: str
    _: KW_ONLY
    convert: Callable[[Any], Any] | None = None
    """Gives the value to keep, or raises TypeError. None: it follows from the type."""
    check: Callable[[str, Any], Any] | None = None
    """The same, of ``doc`` and a value."""
    default: Any = OF_THE_FIELD
    """Left out: that of the field in TrainConfig; none where it fills another field."""
    fills: Literal["config", "checkpoint", "request", "nothing"] = "config"
    """The value that gets it: TrainConfig, its CheckpointConfig, FitRequest; or nothing, if only
    the estimator or the model itself reads it."""
    field: str = ""
    """The field's name there. Left out: the Param's in snake_case."""
    read: Callable[[Any], Any] | None = None
    """Derives the field's value from all Params. None: it is the Param's value, lists as tuples."""
    rule: Rule | None = None
    """The rule for its values. Left out: that of the field of its name in `RULES`."""
    in_job_file: Any = None
    """Type of its key in job files. None: it follows from that of the Param."""
    is_called_later: bool = False
    """True if an object that a job file names is a function, which is not called to make it."""
    job_file_doc: str = ""
    """Text that the documentation of the key in job files adds."""
    start: Any = None
    """Value that stands for `AUTO` in the checks that come before the choice."""
    name: str = ""
    """Name of the Param; `options` fills this in, and what follows."""
    key: str = ""
    """The name in snake_case, as job files have it."""
    type: Any = None
    """Type of the value that users give; a None and an `AUTO` in it are left out."""
    accepts_none: bool = False
    """True if its type has a None, which is a value of its own then."""
    accepts_auto: bool = False
    """True if its type has ``Literal["auto"]``."""

    @property
    def is_plain(self) -> bool:
        """True if JSON holds the value as it is; others are saved by `describe`."""
        return _is_plain(self.type)


# fmt: off
class InputArguments(TypedDict, total=False):
    """The columns that go into the module."""

    featuresCol: Annotated[str, Option(
        "features column name.",
        default="features", fills="request", field="feature_cols", read=feature_columns)]
    inputCols: Annotated[list[str], Option(
        "input column names.",
        default=NOT_SET, fills="request", field="feature_cols", read=feature_columns)]
    inputs: Annotated[
        Mapping[str, str | Specification] | Sequence[str | Specification] | None, Option(
        "what goes into the module, in place of featuresCol and inputCols: a dict from the names "
        "of forward's arguments to columns or specifications (sparkdl.Tensor, Sequence, Image, "
        "Sparse), or a list of these by position.",
        job_file_doc='Columns, or objects such as ``{factory = "sparkdl:Image", args = {column '
        '= "photo"}}``.',
        convert=converters.to_inputs, fills="request", field="specified", read=specified_inputs)]
    weightCol: Annotated[str, Option(
        "weight column name. If this is not set or empty, we treat all instance weights as 1.0.",
        fills="request")]
    predictionCol: Annotated[str, Option(
        "prediction column name.", default="prediction", fills="nothing")]


class EstimatorArguments(InputArguments, total=False):
    """Keyword arguments that all estimators take."""

    module: Annotated[Callable[..., Any], Option(
        "the model to train: a torch.nn.Module, or a callable without arguments that makes one.",
        fills="request")]
    loss: Annotated[str | Callable[..., Any] | Mapping[str, str | Callable[..., Any]], Option(
        "loss function: a name ('cross_entropy', 'mse', ...), a torch loss module, or a callable "
        "(output, target) -> tensor; with several labels a dict of these by label, one for all, "
        "or a callable that gets a dict of all labels.",
        job_file_doc="A name, an object, or with several ``labels`` a table with one of these "
        "for each.", check=converters.to_loss, default=NOT_SET, read=loss_of_labels)]
    trainingStep: Annotated[Callable[..., Any] | None, Option(
        "function (module, inputs, target) that gives the loss of a batch, in place of loss of "
        "what forward returns (without a label target is None), for networks such as GANs; None: "
        "that of a LightningModule, else there is none.",
        job_file_doc="A function ``(module, inputs, target)``, and further ``args`` by name.",
        check=converters.to_step,
        is_called_later=True)]
    optimizer: Annotated[str | Callable[..., Any], Option(
        "optimizer: the name of a class in torch.optim, 'lars' or 'lamb', an optimizer class, or "
        "a callable params -> torch.optim.Optimizer; 'auto': what a LightningModule configures, "
        "else Adam.", check=converters.to_optimizer, default="auto", is_called_later=True)]
    optimizerParams: Annotated[
        Mapping[str, object], Option("keyword arguments of the optimizer (dict).")]
    learningRate: Annotated[float | Literal["auto"] | None, Option(
        "learning rate (> 0); None leaves the optimizer's own default; 'auto' tries rates on a "
        "sample before the fit. It is never scaled by the number of workers.", start=1e-3)]
    parameterGroups: Annotated[Mapping[str, Mapping[str, object]], Option(
        "options of the optimizer for some of the parameters (dict from a pattern of names, such "
        "as 'encoder' or 'head.0', to a dict such as {'lr': 1e-4}); no parameter may fit two.",
        convert=converters.to_groups)]
    frozenLayers: Annotated[list[str], Option(
        "patterns of the names of layers or parameters that do not train, such as 'encoder' or "
        "'layers.[0-3]' (list); BatchNorm in them keeps its statistics and uses them.",
        convert=converters.to_patterns)]
    initialWeights: Annotated[Any, Option(
        "weights to start from: a fitted model, a module, a state dict, the path or URL of a "
        "saved model or .safetensors file, or sparkdl.InitialWeights(...), which can leave some "
        "aside; None: those that the module has.",
        job_file_doc='A path or URL, or a table ``{source = "...", skip = ["..."]}``.',
        convert=converters.to_initial_weights, default=None, fills="request", in_job_file=str |
        InitialWeights)]
    initialState: Annotated[Any, Option(
        "a fitted model, or the path or URL of a saved one, whose training goes on: with its "
        "weights, optimizer, schedule and counters, on these rows; epochs are further ones. It "
        "must have been fitted with keepTrainingState. None: training begins.",
        job_file_doc="A path or URL.", convert=converters.to_initial_state, default=None,
        fills="request", in_job_file=str)]
    keepTrainingState: Annotated[bool, Option(
        "whether the model keeps what another fit needs to go on from it by initialState: the "
        "optimizer's state, which Adam makes twice as large as the weights, and counters. It is "
        "saved with the model.", default=False, fills="request")]
    scheduler: Annotated[Callable[..., Any] | None, Option(
        "learning rate schedule: a callable optimizer -> torch LRScheduler, such as "
        "sparkdl.warmup(...), stepped after every training step; ReduceLROnPlateau after every "
        "evaluation, with the value that earlyStopping monitors, or val_loss, or loss.",
        job_file_doc="A callable that gets the optimizer, and ``args`` by name.",
        check=converters.to_scheduler,
        is_called_later=True)]
    inputShape: Annotated[Sequence[int | Sequence[int] | None] | None, Option(
        "shape of one sample as the module expects it, such as (1, 28, 28); with several "
        "inputCols a list with a shape or None per column. None keeps the column's own shape.",
        job_file_doc="One shape, or with several ``input_cols`` a list of them.",
        convert=converters.to_shapes, default=None, fills="request", field="input_shapes",
        read=input_shapes)]
    augmentation: Annotated[Callable[..., Any] | None, Option(
        "function that changes the inputs of each training batch, on the device: it gets the "
        "input tensor, a tuple of several, or a dict by name, and returns the same.",
        check=converters.to_augmentation)]
    groupByLength: Annotated[int | None, Option(
        "batches (>= 2) whose rows are sorted by length together, so that sequences are padded "
        "less; None: rows are in random order.")]
    shuffleWindowBytes: Annotated[int | None, Option(
        "bytes of rows (>= 1) of a shard that are mixed at a time, if it has more; a worker keeps "
        "twice as many of each of its shards in memory. None: all rows, unless those of a host "
        "are more than half of its free memory.")]
    validationIndicatorCol: Annotated[str, Option(
        "boolean column that marks the rows used for validation instead of training; unset or "
        "empty: no validation, unless there is a validationFraction.",
        fills="request", field="validation_col")]
    validationFraction: Annotated[float | None, Option(
        "part of the rows that is used for validation instead of training (between 0 and 1), "
        "drawn by a hash of what inputs, label and weight hold: always the same rows, and equal "
        "ones together. None: none.", default=None, fills="request", rule=_PART)]
    validationInterval: Annotated[int | None, Option(
        "steps (>= 1) between evaluations on the validation rows within an epoch, besides that "
        "at its end; each waits for the end of a round. None: no others.")]
    epochs: Annotated[int, Option("passes over the training rows (>= 1).")]
    maxSteps: Annotated[int, Option(
        "optimizer steps after which training ends whatever the epoch (>= 1), -1 for no limit.")]
    batchSize: Annotated[int | Literal["auto"], Option(
        "rows of a shard in one step (>= 1); all shards together give numShards times as many, "
        "and each worker has one shard unless numShards is set. 'auto': as many as make a worker "
        "faster, fit into its memory and leave an epoch its steps.",
        start=TrainConfig.batch_size)]
    numWorkers: Annotated[int | Literal["auto"] | None, Option(
        "number of workers that train together, or of shards that train in rounds; None: one per "
        "executor, or one per GPU; 'auto': the number with which the fit is shortest, by the cost "
        "model of explain.", default=None, fills="request", rule=at_least(1))]
    minWorkers: Annotated[int | None, Option(
        "train with at least this many workers (>= 1) when numWorkers are not available: after a "
        "loss training goes on with those that are left, and with more when they are back. "
        "None: numWorkers.", default=None, fills="request", rule=at_least(1))]
    numShards: Annotated[int | None, Option(
        "fixed parts of the rows (>= numWorkers), of which each worker has one or more. What is "
        "learnt depends on them and not on the number of workers, so a later fit may go on with "
        "more or fewer, within an epoch too. None: one for each worker.",
        default=None, fills="request", rule=at_least(1))]
    elasticity: Annotated[str, Option(
        "up to what the result is the same for all numbers of workers: 'rounding', or 'bits', for "
        "which a worker trains on its shards one after the other, and which needs all-reduce.")]
    shards: Annotated[str, Option(
        "what makes a shard: 'rows' (assigned by a hash: equal data gives equal shards), "
        "'partitions' (the DataFrame's own, without a shuffle, where they are stable files; else "
        "rows), or 'auto' (partitions if these are large).",
        default="rows", fills="request", rule=one_of("auto", "rows", "partitions"))]
    cacheDir: Annotated[str | None, Option(
        "folder of the executors' local disks in which the spool is kept, so that a later fit on "
        "the same files with the same inputs does not read them again; 'sparkdl clean' removes "
        "it. None: the spool is removed when the fit ends.", default=None, fills="request",
        read=cache_dir)]
    seed: Annotated[int, Option("random seed.")]
    syncStrategy: Annotated[Literal["auto"] | str | SyncStrategy, Option(
        "how replicas are kept in agreement: a SyncStrategy, its name (such as 'allreduce' or "
        "'parameter_averaging'), or 'package.module:Class'; 'auto': all-reduce, or what agrees "
        "less often where all-reduce would take too long.",
        convert=sync.resolve, default="allreduce")]
    syncBatchNorm: Annotated[bool, Option(
        "whether BatchNorm layers train with the statistics of all workers' batches rather than "
        "of each worker's own.")]
    executionMode: Annotated[str, Option(
        "how workers run: 'gang' (all at once), 'rounds' (plain Spark stages, for strategies "
        "that average), or 'auto', which leaves it to the strategy.",
        default="auto", fills="request", rule=one_of("auto", "gang", "rounds"))]
    parallelism: Annotated[Mesh | None, Option(
        "sparkdl.Mesh(...): along which axes the workers divide the model; it says how many "
        "workers there are, too. None: each worker has all of it.",
        in_job_file=Mesh)]
    precision: Annotated[str, Option(
        "arithmetic of the forward pass: 'fp32', 'bf16', or 'fp16' with loss scaling.")]
    memoryFormat: Annotated[str, Option(
        "order of the values that convolutions work on: 'contiguous', or 'channels_last', which "
        "is often much faster and gives the same results but for rounding.")]
    compile: Annotated[bool, Option(
        "whether workers compile the module with torch.compile, which needs a C++ compiler there; "
        "the first steps take long, and results are the same but for rounding.")]
    gradientAccumulationSteps: Annotated[int, Option(
        "micro-batches into which each batch is cut, to save memory (>= 1).")]
    gradientClipNorm: Annotated[float | None, Option(
        "largest norm of the gradient of all parameters together (> 0); None: no clipping.")]
    divergenceFactor: Annotated[float | None, Option(
        "stop when the loss is this many times that of the first steps (> 1); None: stop only "
        "when it is infinite or NaN.")]
    device: Annotated[str, Option(
        "where workers train: 'auto' (a GPU if there is one), 'cpu' or 'cuda'.",
        check=converters.to_device)]
    deterministic: Annotated[bool, Option(
        "whether torch must use deterministic algorithms, for equal bits on GPUs.")]
    checkpointDir: Annotated[str | None, Option(
        "directory or URL for checkpoints that driver and executors can reach; a later fit with "
        "the same data, module, initial weights and Params goes on from there (a module that a "
        "factory makes has the same initial weights each time). None: the driver keeps the "
        "checkpoints while the fit runs.", fills="checkpoint", field="directory")]
    checkpointInterval: Annotated[int, Option(
        "steps between checkpoints (>= 1), -1 to write only the last.",
        fills="checkpoint", field="interval", rule=STEPS_BETWEEN)]
    maxRestarts: Annotated[int, Option(
        "how often training goes on from the last checkpoint after workers were lost (>= 0); "
        "progress refills it: only restarts without a newer checkpoint, or round, count.",
        default=3, fills="request", rule=at_least(0))]
    earlyStopping: Annotated[EarlyStopping | None, Option(
        "sparkdl.EarlyStopping(...): when to stop before the last epoch; None: never.",
        check=converters.to_early_stopping, in_job_file=EarlyStopping)]
    callbacks: Annotated[list[Any], Option(
        "observers called on every worker (list).", check=converters.to_callbacks)]
    metrics: Annotated[Metrics | None, Option(
        "what is computed on the validation rows besides the loss: a list of names ('accuracy', "
        "'f1', 'auroc', 'rmse', ...) and torchmetrics, or a dict from the name in the history to "
        "one of these (or a callable that makes one); with several labels a dict of these by "
        "label. None: the accuracy of a classifier; an empty list: nothing.",
        convert=converters.to_metrics)]
    trainingMetrics: Annotated[bool, Option(
        "whether metrics are computed on the training batches of each epoch as well, in the same "
        "pass; a step of 1 ms takes up to three quarters longer, one of 5 ms about a tenth.")]
    listeners: Annotated[list[Listener], Option(
        "observers on the driver (list), such as sparkdl.TensorBoard(...) and "
        "sparkdl.MLflow(...).",
        job_file_doc='Such as ``{factory = "sparkdl:TensorBoard", args = {log_dir = '
        '"runs/tensorboard"}}``.', default=[], fills="request")]
    reportDir: Annotated[str | None, Option(
        "directory or URL that the driver can reach, in which each fit leaves a folder with its "
        "report, report.html and run.json; 'sparkdl ui' shows them. None: nowhere.",
        job_file_doc="Left out: ``runs``. Empty: nowhere.", default=None, fills="request")]
    runName: Annotated[str | None, Option(
        "what the run is called, in its report, its lines and jobs, and in TensorBoard and MLflow; "
        "runs may share a name. None: by class and time. It does not change what is trained.",
        convert=converters.to_run_name, default=None, fills="request")]
    verbose: Annotated[int, Option(
        "what the driver shows: 0 nothing, 1 progress and the workers' warnings, 2 also their "
        "logs and what they print. At 0 warnings are logged.",
        default=1, fills="request", rule=at_least(0))]
    cpusPerWorker: Annotated[int | None, Option(
        "CPU cores per worker, asked for by stage-level scheduling; None: spark.task.cpus.",
        default=None, fills="request", rule=at_least(1))]
    gpusPerWorker: Annotated[float | None, Option(
        "GPUs per worker (may be a fraction), asked for by stage-level scheduling; None: "
        "spark.task.resource.gpu.amount.", default=None, fills="request", rule=at_least(0))]


class RegressorArguments(EstimatorArguments, total=False):
    """Keyword arguments of `TorchRegressor`."""

    labelCol: Annotated[str, Option("label column name.", default="label", fills="request")]


class ClassArguments(TypedDict, total=False):
    """The output columns that only a classifier has."""

    probabilityCol: Annotated[str, Option(
        "Column name for predicted class conditional probabilities. Note: Not all models output "
        "well-calibrated probability estimates! These probabilities should be treated as "
        "confidences, not precise probabilities.", default="probability", fills="nothing")]
    rawPredictionCol: Annotated[str, Option(
        "raw prediction (a.k.a. confidence) column name.",
        default="rawPrediction", fills="nothing")]


class ClassifierArguments(RegressorArguments, ClassArguments, total=False):
    """Keyword arguments of `TorchClassifier`."""


class LabelsArguments(EstimatorArguments, total=False):
    """Keyword arguments of `TorchEstimator`, which can train without a label, or with several."""

    labelCol: Annotated[str, Option(
        "label column name. If this is not set or empty, the loss is called with the inputs as "
        "target.", fills="request")]
    labels: Annotated[Mapping[str, str | Specification] | None, Option(
        "several labels in place of labelCol: a dict from names to columns or specifications. "
        "The module returns a dict by these names, a tuple in their order, or one tensor for all.",
        convert=converters.to_labels, fills="request", read=labels_of)]
    lossWeights: Annotated[Mapping[str, float], Option(
        "by how much each label's loss counts in the sum: a dict by label; 1 where there is none.",
        default=NOT_SET, read=loss_weights)]


class ModelArguments(InputArguments, total=False):
    """Params that all models have; a fitted model has its estimator's values."""

    outputs: Annotated[Mapping[str, Any], Option(
        "output columns besides the prediction: dict from column name to sparkdl.Output(...), or "
        "to the key or index (or a tuple of them) of a part of what the module returns.",
        convert=converters.to_outputs, default={}, fills="nothing")]
    predictionOutput: Annotated[Any, Option(
        "the part of what the module returns of which the prediction is made: "
        "sparkdl.Output(...), a key, an index or a tuple of them; None: all of it.",
        convert=converters.to_output, default=None, fills="nothing")]
    preprocessing: Annotated[Callable[..., Any] | None, Option(
        "function called with the input tensors of a batch, on the device; it gives the module's "
        "argument, or a tuple of several.", default=None, fills="nothing")]
    postprocessing: Annotated[Callable[..., Any] | None, Option(
        "function called with what the module returned for a batch, on the device; transform "
        "takes what it gives, with one row per sample, in its place.",
        default=None, fills="nothing")]
    labelCol: Annotated[str, Option(
        "label column name, for evaluate and scores. If this is not set or empty, the loss is "
        "called with the inputs as target.", fills="nothing")]
    loss: Annotated[str | Callable[..., Any] | Mapping[str, str | Callable[..., Any]], Option(
        "loss function, for evaluate and scores: a name ('cross_entropy', 'mse', ...), a torch "
        "loss module, or a callable (output, target) -> tensor; or a dict of these by label.",
        fills="nothing")]
    labels: Annotated[Mapping[str, str | Specification] | None, Option(
        "several labels in place of labelCol, for evaluate and scores: a dict from names to "
        "columns or specifications.", convert=converters.to_labels, fills="nothing")]
    lossWeights: Annotated[Mapping[str, float], Option(
        "by how much each label's loss counts, for evaluate and scores: a dict by label; 1 where "
        "there is none.", fills="nothing")]
    batchSize: Annotated[int, Option(
        "rows per forward pass of the module (>= 1).",
        default=INFERENCE_BATCH_SIZE, fills="nothing")]
    device: Annotated[str, Option(
        "where tasks predict: 'auto' (a GPU if the task has one), 'cpu' or 'cuda'.",
        check=converters.to_device, default="auto", fills="nothing")]
    parallelism: Annotated[Mesh | Literal["auto"] | None, Option(
        "sparkdl.Mesh(...): along which axes the tasks of transform divide a model whose weights "
        "lie in a storage; None: each has all of it; 'auto': that along which it was trained, if "
        "Spark grants a Python worker less memory than the weights take, else None.",
        default="auto", fills="nothing")]


class ClassifierModelArguments(ModelArguments, ClassArguments, total=False):
    """Params of `TorchClassifierModel`."""
# fmt: on


@cache
def hints(arguments: type) -> Mapping[str, Any]:
    """The types of a TypedDict of this file, by the Param's name."""
    return typing.get_type_hints(arguments)


@cache
def options(arguments: type) -> Mapping[str, Option]:
    """The rows of a TypedDict of this file, by the Param's name."""
    found = {}
    for name, row in typing.get_type_hints(arguments, include_extras=True).items():
        hint, option = typing.get_args(row)
        parts = tuple(p for p in parts_of(hint) if p not in (types.NoneType, Literal["auto"]))
        key = re.sub(r"[A-Z]", lambda upper: f"_{upper[0].lower()}", name)
        found[name] = replace(
            option,
            name=name,
            key=key,
            field=option.field or key,
            rule=option.rule or RULES.get(key),
            type=Union[parts],  # noqa: UP007
            accepts_none=types.NoneType in parts_of(hint),
            accepts_auto=Literal["auto"] in parts_of(hint),
        )
    return found


def _is_plain(hint: Any) -> bool:
    parts = parts_of(hint)
    if len(parts) > 1:
        return all(map(_is_plain, parts))
    if typing.get_origin(hint) in (list, Sequence, Mapping):
        return all(map(_is_plain, typing.get_args(hint)))
    return hint in (str, int, float, bool, types.NoneType)
