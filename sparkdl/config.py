"""The values that a user has asked for, frozen and checked when they are made.

`TrainConfig` is the training half of the estimator's Params under Python names; the rows of
`sparkdl.spark.params.param_table` fill it and document its fields.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from sparkdl.errors import ConfigError

Task = Literal["classification", "regression", "custom"]
Precision = Literal["fp32", "bf16", "fp16"]
MemoryFormat = Literal["contiguous", "channels_last"]

PRECISIONS = get_args(Precision)
MEMORY_FORMATS = get_args(MemoryFormat)
DEVICES = ("auto", "cpu", "cuda")


@dataclass(frozen=True, kw_only=True)
class EarlyStopping:
    """Stop when a monitored value has not improved for some epochs.

    Needs validation rows when ``monitor`` starts with ``val_``. The decision is taken at the end
    of an epoch from values that are equal on all ranks, so all ranks stop together.
    """

    monitor: str = "val_loss"
    """Key of the history: ``loss``, ``val_loss``, or ``val_<metric name>``."""
    patience: int = 3
    """Epochs without improvement after which training stops."""
    min_delta: float = 0.0
    """Smallest change that counts as an improvement."""
    mode: Literal["min", "max"] = "min"
    """Whether smaller or larger values are better."""
    restore_best: bool = True
    """Whether the fitted model gets the weights of the best epoch rather than the last."""

    def __post_init__(self) -> None:
        if self.patience < 1:
            raise ConfigError(f"patience must be at least 1; received {self.patience}")
        if not self.min_delta >= 0:
            raise ConfigError(f"min_delta must not be negative; received {self.min_delta}")
        if self.mode not in ("min", "max"):
            raise ConfigError(f"mode must be 'min' or 'max'; received {self.mode!r}")


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Where checkpoints go and how often."""

    directory: str | None = None
    """Path or URL that driver and executors can reach; None: the driver keeps the checkpoints."""
    interval: int = 500
    """Steps between checkpoints; -1 writes none but the one at the end."""
    keep: int = 2
    """Newest checkpoints kept."""

    def __post_init__(self) -> None:
        if self.interval != -1 and self.interval < 1:
            raise ConfigError(
                f"checkpointInterval must be a number of steps of at least 1, or -1 to disable; "
                f"received {self.interval}"
            )
        if self.keep < 1:
            raise ConfigError(f"keep must be at least 1; received {self.keep}")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How every worker trains. Picklable: it travels to the executors with cloudpickle."""

    task: Task = "custom"
    loss: Any = "mse"
    """Name, nn.Module with a ``reduction``, or callable ``(output, target)``; see
    `train.objective.loss`. With several labels a mapping by their names, or a callable that gets a
    dict of all."""
    loss_weights: Mapping[str, float] = field(default_factory=dict)
    training_step: Any = None
    augmentation: Any = None
    group_by_length: int | None = None
    shuffle_window_bytes: int | None = None
    optimizer: Any = "sgd"
    """Name (see `train.optimizers`, any case), such a class, or ``params -> Optimizer``."""
    optimizer_params: Mapping[str, Any] = field(default_factory=dict)
    learning_rate: float | None = None
    parameter_groups: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Pattern (see `runtime.name_patterns`) -> options of the optimizer."""
    frozen_layers: tuple[str, ...] = ()
    """Patterns; see `sync.frozen_layers`."""
    scheduler: Any = None
    """Callable ``optimizer -> LRScheduler``; stepped after every training step."""
    epochs: int = 1
    max_steps: int = -1
    batch_size: int = 32
    seed: int = 0
    precision: Precision = "fp32"
    memory_format: MemoryFormat = "contiguous"
    gradient_accumulation_steps: int = 1
    gradient_clip_norm: float | None = None
    device: str = "auto"
    divergence_factor: float | None = 1e4
    deterministic: bool = False
    metrics: Mapping[str, Callable[[], Any] | Any] = field(default_factory=dict)
    """Name -> torchmetrics.Metric, or a callable without arguments that makes one."""
    early_stopping: EarlyStopping | None = None
    callbacks: tuple[Any, ...] = ()
    sync_strategy: Any = None
    """A `sync.SyncStrategy`; None means ``AllReduce()``."""
    sync_batch_norm: bool = False
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)

    def __post_init__(self) -> None:
        _at_least_one(epochs=self.epochs, batchSize=self.batch_size)
        _at_least_one(gradientAccumulationSteps=self.gradient_accumulation_steps)
        if self.max_steps != -1 and self.max_steps < 1:
            raise ConfigError(
                f"maxSteps must be at least 1, or -1 for no limit; received {self.max_steps}"
            )
        if self.precision not in PRECISIONS:
            raise ConfigError(f"precision must be one of {PRECISIONS}; received {self.precision!r}")
        if self.memory_format not in MEMORY_FORMATS:
            raise ConfigError(
                f"memoryFormat must be one of {MEMORY_FORMATS}; received {self.memory_format!r}"
            )
        if self.device not in DEVICES:
            raise ConfigError(f"device must be one of {DEVICES}; received {self.device!r}")
        if self.learning_rate is not None and not self.learning_rate > 0:
            raise ConfigError(f"learningRate must be positive; received {self.learning_rate}")
        if self.gradient_clip_norm is not None and not self.gradient_clip_norm > 0:
            raise ConfigError(
                f"gradientClipNorm must be positive; received {self.gradient_clip_norm}"
            )
        if self.divergence_factor is not None and not self.divergence_factor > 1:
            raise ConfigError(
                f"divergenceFactor must be more than 1; received {self.divergence_factor}"
            )
        if self.group_by_length is not None and self.group_by_length < 2:
            raise ConfigError(f"groupByLength must be at least 2; received {self.group_by_length}")
        if self.shuffle_window_bytes is not None and self.shuffle_window_bytes < 1:
            raise ConfigError(
                f"shuffleWindowBytes must be at least 1; received {self.shuffle_window_bytes}"
            )
        if not all(weight >= 0 for weight in self.loss_weights.values()):
            raise ConfigError(f"lossWeights must not be negative; received {self.loss_weights}")
        if self.gradient_accumulation_steps > self.batch_size:
            raise ConfigError(
                f"gradientAccumulationSteps ({self.gradient_accumulation_steps}) cannot exceed "
                f"batchSize ({self.batch_size}): a micro-batch needs at least one sample"
            )


def _at_least_one(**counts: int) -> None:
    for name, value in counts.items():
        if value < 1:
            raise ConfigError(f"{name} must be at least 1; received {value}")
