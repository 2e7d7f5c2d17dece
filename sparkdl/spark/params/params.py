"""Which Params do the estimators and models have, and what becomes of each?

`FIELDS` is the one table between Spark's camelCase Params and the Python values that the rest of
the package works with. A Param is declared once, below, with its doc and its converter; setters
and getters follow from the declaration.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pyspark.ml.param import TypeConverters
from pyspark.ml.param.shared import (
    HasPredictionCol,
    HasProbabilityCol,
    HasRawPredictionCol,
    HasSeed,
    HasWeightCol,
)

from sparkdl.config import CheckpointConfig, Task, TrainConfig
from sparkdl.errors import ConfigError
from sparkdl.spark.params import converters
from sparkdl.spark.params.data_params import (
    DataParams,
    InputParams,
    input_shapes,
    labels_of,
    loss_of_labels,
    loss_weights,
)
from sparkdl.spark.params.param_base import declare

_NO_DEFAULT = ("loss", "lossWeights", "syncStrategy")
"""Params whose defaults are not those of `TrainConfig`."""


class ClassOutputParams(HasProbabilityCol, HasRawPredictionCol):
    """The output columns that only a classifier has."""


class TrainParams(DataParams, HasWeightCol, HasSeed, HasPredictionCol):
    """Params that all estimators share, but the label column."""

    module = declare(
        "module",
        "the model to train: a torch.nn.Module, or a callable without arguments that makes one.",
        converters.to_callable,
    )
    loss = declare(
        "loss",
        "loss function: a name ('cross_entropy', 'mse', ...), a torch loss module, or a callable "
        "(output, target) -> tensor; with several labels a dict of these by label, one for all, "
        "or a callable that gets a dict of all labels.",
        converters.to_losses,
    )
    trainingStep = declare(
        "trainingStep",
        "function (module, inputs, target) that gives the loss of a batch, in place of loss of "
        "what forward returns (without a label target is None), for networks such as GANs; None: "
        "that of a LightningModule, else there is none.",
        converters.to_callable,
    )
    optimizer = declare(
        "optimizer",
        "optimizer: the name of a class in torch.optim, 'lars' or 'lamb', an optimizer class, or "
        "a callable params -> torch.optim.Optimizer; 'auto': what a LightningModule configures, "
        "else Adam.",
        converters.to_name_or_callable,
    )
    optimizerParams = declare(
        "optimizerParams", "keyword arguments of the optimizer (dict).", converters.to_options
    )
    learningRate = declare(
        "learningRate",
        "learning rate (> 0); None leaves the optimizer's own default. It is never scaled by the "
        "number of workers.",
        TypeConverters.toFloat,
    )
    parameterGroups = declare(
        "parameterGroups",
        "options of the optimizer for some of the parameters (dict from a pattern of names, such "
        "as 'encoder' or '*.bias', to a dict such as {'lr': 1e-4}); no parameter may fit two.",
        converters.to_groups,
    )
    frozenLayers = declare(
        "frozenLayers",
        "patterns of the names of layers or parameters that do not train, such as 'encoder' or "
        "'layers.[0-3]' (list); BatchNorm in them keeps its statistics and uses them.",
        converters.to_patterns,
    )
    initialWeights = declare(
        "initialWeights",
        "weights to start from: a fitted model, a module, a state dict, the path or URL of a "
        "saved model or .safetensors file, or sparkdl.InitialWeights(...), which can leave some "
        "aside; None: those that the module has.",
        converters.to_initial_weights,
    )
    scheduler = declare(
        "scheduler",
        "learning rate schedule: a callable optimizer -> torch LRScheduler, such as "
        "sparkdl.warmup(...), stepped after every training step.",
        converters.to_callable,
    )
    validationIndicatorCol = declare(
        "validationIndicatorCol",
        "boolean column that marks the rows used for validation instead of training; unset or "
        "empty: no validation.",
        TypeConverters.toString,
    )
    epochs = declare("epochs", "passes over the training rows (>= 1).", TypeConverters.toInt)
    maxSteps = declare(
        "maxSteps",
        "optimizer steps after which training ends whatever the epoch (>= 1), -1 for no limit.",
        TypeConverters.toInt,
    )
    batchSize = declare(
        "batchSize",
        "rows that one worker uses in one step (>= 1); all workers together use numWorkers times "
        "as many.",
        TypeConverters.toInt,
    )
    numWorkers = declare(
        "numWorkers",
        "number of workers that train together, or of shards that train in rounds; None: one per "
        "executor, or one per GPU.",
        TypeConverters.toInt,
    )
    syncStrategy = declare(
        "syncStrategy",
        "how replicas are kept in agreement: a SyncStrategy, its name (such as 'allreduce' or "
        "'parameter_averaging'), or 'package.module:Class'.",
        converters.to_strategy,
    )
    syncBatchNorm = declare(
        "syncBatchNorm",
        "whether BatchNorm layers train with the statistics of all workers' batches rather than "
        "of each worker's own.",
        TypeConverters.toBoolean,
    )
    executionMode = declare(
        "executionMode",
        "how workers run: 'gang' (all at once), 'rounds' (plain Spark stages, for strategies that "
        "average), or 'auto', which leaves it to the strategy.",
        TypeConverters.toString,
    )
    precision = declare(
        "precision",
        "arithmetic of the forward pass: 'fp32', 'bf16', or 'fp16' with loss scaling.",
        TypeConverters.toString,
    )
    memoryFormat = declare(
        "memoryFormat",
        "order of the values that convolutions work on: 'contiguous', or 'channels_last', which is "
        "often much faster and gives the same results but for rounding.",
        TypeConverters.toString,
    )
    gradientAccumulationSteps = declare(
        "gradientAccumulationSteps",
        "micro-batches into which each batch is cut, to save memory (>= 1).",
        TypeConverters.toInt,
    )
    gradientClipNorm = declare(
        "gradientClipNorm",
        "largest norm of the gradient of all parameters together (> 0); None: no clipping.",
        TypeConverters.toFloat,
    )
    divergenceFactor = declare(
        "divergenceFactor",
        "how many times the loss of the first steps ends the fit as diverged (> 1); None: only a "
        "loss that is infinite or NaN.",
        TypeConverters.toFloat,
    )
    device = declare(
        "device", "where workers train: 'auto' (a GPU if there is one), 'cpu' or 'cuda'.",
        TypeConverters.toString,
    )  # fmt: skip
    deterministic = declare(
        "deterministic",
        "whether torch must use deterministic algorithms, for equal bits on GPUs.",
        TypeConverters.toBoolean,
    )
    checkpointDir = declare(
        "checkpointDir",
        "directory or URL for checkpoints that driver and executors can reach; a later fit with "
        "the same data, module, initial weights and Params goes on from there (a module that a "
        "factory makes has the same initial weights each time). None: the driver keeps the "
        "checkpoints while the fit runs.",
        TypeConverters.toString,
    )
    checkpointInterval = declare(
        "checkpointInterval",
        "steps between checkpoints (>= 1), -1 to write only the last.",
        TypeConverters.toInt,
    )
    maxRestarts = declare(
        "maxRestarts",
        "how often training goes on from the last checkpoint after workers were lost (>= 0).",
        TypeConverters.toInt,
    )
    earlyStopping = declare(
        "earlyStopping",
        "sparkdl.EarlyStopping(...): when to stop before the last epoch; None: never.",
        converters.to_early_stopping,
    )
    callbacks = declare(
        "callbacks", "observers called on every worker (list).", converters.to_callbacks
    )
    metrics = declare(
        "metrics",
        "torchmetrics computed on the validation rows: dict from name to metric (or a callable "
        "that makes one), or a list of metrics, named by class; with several labels a dict of "
        "these by label.",
        converters.to_metrics,
    )
    listeners = declare(
        "listeners",
        "observers on the driver (list), such as sparkdl.TensorBoard(...) and sparkdl.MLflow(...).",
        converters.to_listeners,
    )
    reportDir = declare(
        "reportDir",
        "directory or URL that the driver can reach, in which each fit leaves a folder with its "
        "report, report.html and run.json; 'sparkdl ui' shows them. None: nowhere.",
        TypeConverters.toString,
    )
    verbose = declare(
        "verbose",
        "what the driver shows: 0 nothing, 1 progress and the workers' warnings, 2 also their logs "
        "and what they print. At 0 warnings are logged.",
        TypeConverters.toInt,
    )
    cpusPerWorker = declare(
        "cpusPerWorker",
        "CPU cores per worker, asked for by stage-level scheduling; None: spark.task.cpus.",
        TypeConverters.toInt,
    )
    gpusPerWorker = declare(
        "gpusPerWorker",
        "GPUs per worker (may be a fraction), asked for by stage-level scheduling; None: "
        "spark.task.resource.gpu.amount.",
        TypeConverters.toFloat,
    )

    def __init__(self) -> None:
        super().__init__()
        config = TrainConfig()
        owners = {"config": config, "checkpoint": config.checkpoint}
        for name, field in FIELDS.items():
            if field.owner in owners and self.hasParam(name) and name not in _NO_DEFAULT:
                value = getattr(owners[field.owner], field.name)
                self._setDefault(**{name: dict(value) if isinstance(value, Mapping) else value})
        self._setDefault(
            optimizer="auto",
            syncStrategy="allreduce",
            executionMode="auto",
            inputShape=None,
            initialWeights=None,
            numWorkers=None,
            maxRestarts=3,
            listeners=[],
            reportDir=None,
            verbose=1,
            cpusPerWorker=None,
            gpusPerWorker=None,
        )


@dataclass(frozen=True)
class Field:
    """What a Param becomes: a field of one of the three values that `training_values` makes."""

    owner: str
    """``config`` (TrainConfig), ``checkpoint`` (its CheckpointConfig), ``request``."""
    name: str
    read: Callable[[TrainParams], Any] | None = None
    """How the field's value is derived, where it is not simply the Param's."""


FIELDS: Mapping[str, Field] = {
    "module": Field("request", "module"),
    "initialWeights": Field("request", "initial_weights"),
    "featuresCol": Field("request", "feature_cols", InputParams.feature_columns),
    "inputCols": Field("request", "feature_cols", InputParams.feature_columns),
    "inputShape": Field("request", "input_shapes", input_shapes),
    "inputs": Field("request", "specified", InputParams.specified),
    "labels": Field("request", "labels", labels_of),
    "labelCol": Field("request", "label_col"),
    "weightCol": Field("request", "weight_col"),
    "validationIndicatorCol": Field("request", "validation_col"),
    "numWorkers": Field("request", "num_workers"),
    "executionMode": Field("request", "execution_mode"),
    "maxRestarts": Field("request", "max_restarts"),
    "listeners": Field("request", "listeners", lambda params: tuple(params.value("listeners"))),
    "reportDir": Field("request", "report_dir"),
    "verbose": Field("request", "verbose"),
    "cpusPerWorker": Field("request", "cpus_per_worker"),
    "gpusPerWorker": Field("request", "gpus_per_worker"),
    "loss": Field("config", "loss", loss_of_labels),
    "lossWeights": Field("config", "loss_weights", loss_weights),
    "trainingStep": Field("config", "training_step"),
    "augmentation": Field("config", "augmentation"),
    "groupByLength": Field("config", "group_by_length"),
    "shuffleWindowBytes": Field("config", "shuffle_window_bytes"),
    "optimizer": Field("config", "optimizer"),
    "optimizerParams": Field("config", "optimizer_params"),
    "learningRate": Field("config", "learning_rate"),
    "parameterGroups": Field("config", "parameter_groups"),
    "frozenLayers": Field("config", "frozen_layers", lambda p: tuple(p.value("frozenLayers"))),
    "scheduler": Field("config", "scheduler"),
    "epochs": Field("config", "epochs"),
    "maxSteps": Field("config", "max_steps"),
    "batchSize": Field("config", "batch_size"),
    "seed": Field("config", "seed"),
    "precision": Field("config", "precision"),
    "memoryFormat": Field("config", "memory_format"),
    "gradientAccumulationSteps": Field("config", "gradient_accumulation_steps"),
    "gradientClipNorm": Field("config", "gradient_clip_norm"),
    "divergenceFactor": Field("config", "divergence_factor"),
    "device": Field("config", "device"),
    "deterministic": Field("config", "deterministic"),
    "metrics": Field("config", "metrics"),
    "earlyStopping": Field("config", "early_stopping"),
    "callbacks": Field("config", "callbacks", lambda params: tuple(params.value("callbacks"))),
    "syncStrategy": Field("config", "sync_strategy"),
    "syncBatchNorm": Field("config", "sync_batch_norm"),
    "checkpointDir": Field("checkpoint", "directory"),
    "checkpointInterval": Field("checkpoint", "interval"),
}
"""Param of an estimator -> what it becomes."""

FACE_ONLY: Mapping[str, str] = {
    "predictionCol": "handed to the model, which names its output column by it",
    "probabilityCol": "handed to the model, which names its output column by it",
    "rawPredictionCol": "handed to the model, which names its output column by it",
}
"""Params that training does not see -> who uses them."""

OBJECT_PARAMS = frozenset(
    ("module", "initialWeights", "loss", "optimizer", "optimizerParams", "parameterGroups",
     "scheduler", "syncStrategy", "earlyStopping", "callbacks", "listeners", "metrics", "outputs",
     "predictionOutput", "preprocessing", "postprocessing", "inputs", "labels", "augmentation",
     "trainingStep")
)  # fmt: skip
"""Params whose values may be objects: saved by `describe`, not as plain JSON."""


def training_values(params: TrainParams, task: Task) -> tuple[TrainConfig, dict[str, Any]]:
    """Turn Params into the training configuration and the other fields of a FitRequest.

    Raises:
        ConfigError: a value is wrong, or two contradict each other.
    """
    values: dict[str, dict[str, Any]] = {"config": {}, "checkpoint": {}, "request": {}}
    for name, field in FIELDS.items():
        value = field.read(params) if field.read else params.value(name)
        values[field.owner][field.name] = value
    request = values["request"]
    _check_request(request)
    checkpoint = CheckpointConfig(**values["checkpoint"])
    return TrainConfig(task=task, checkpoint=checkpoint, **values["config"]), request


def _check_request(request: Mapping[str, Any]) -> None:
    if request["module"] is None:
        raise ConfigError("module is not set; pass an nn.Module or a callable that makes one")
    for param, field, least in (
        ("numWorkers", "num_workers", 1),
        ("cpusPerWorker", "cpus_per_worker", 1),
        ("maxRestarts", "max_restarts", 0),
        ("verbose", "verbose", 0),
    ):
        if request[field] is not None and request[field] < least:
            raise ConfigError(f"{param} must be at least {least}; received {request[field]}")
    gpus = request["gpus_per_worker"]
    if gpus is not None and gpus < 0:
        raise ConfigError(f"gpusPerWorker must not be negative; received {gpus}")
