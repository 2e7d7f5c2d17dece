"""The values that a user has asked for, frozen and checked when they are made.

`TrainConfig` is the training half of the estimator's Params under Python names; the rows of
`sparkdl.spark.params.param_table` fill it and document its fields.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from operator import le, lt
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

from sparkdl.errors import ConfigError, Problems, did_you_mean

if TYPE_CHECKING:
    import torch

Mode = Literal["auto", "min", "max"]
Precision = Literal["fp32", "bf16", "fp16"]
MemoryFormat = Literal["contiguous", "channels_last"]
Elasticity = Literal["rounding", "bits"]
Device = Literal["auto", "cpu", "cuda"]

_LARGER_IS_BETTER = (
    "acc", "accuracy", "auroc", "average_precision", "cohen_kappa", "explained_variance", "f1",
    "mcc", "precision", "r2", "recall", "specificity",
)  # fmt: skip


def require(is_right: bool, rule: str, received: object) -> None:
    """Refuse a value that breaks a rule: raises ConfigError with both."""
    if not is_right:
        raise ConfigError(f"{rule}; received {received!r}")


def _no_remedy(value: Any) -> str:
    return ""


@dataclass(frozen=True)
class Rule:
    """A rule for the values of a setting. None, which says that it is not set, keeps all rules."""

    text: str
    """The rule in words, such as ``must be at least 1``."""
    is_kept_by: Callable[[Any], bool]
    remedy: Callable[[Any], str] = field(default=_no_remedy, repr=False)
    """What to write in place of a value that breaks it, after a semicolon; empty: not known."""

    def check(self, value: Any, name: str) -> None:
        """Refuse a value that breaks the rule: raises ConfigError."""
        if value is not None and not self.is_kept_by(value):
            raise ConfigError(f"{name} {self.text}; received {value!r}{self.remedy(value)}")


def at_least(least: int) -> Rule:
    """Return the rule for numbers with a smallest one."""
    return Rule(f"must be at least {least}", partial(le, least))


def one_of(*known: str) -> Rule:
    """Return the rule for a setting that is one of some words."""
    return Rule(f"must be one of {known}", known.__contains__, partial(did_you_mean, known=known))


def _instead_of_device(name: str) -> str:
    if name.startswith(("cuda:", "gpu")):
        return "; write 'cuda': each worker takes the GPU that Spark assigns to it"
    return did_you_mean(name, get_args(Device))


def _is_limit(steps: int) -> bool:
    return steps == -1 or steps >= 1


def _is_seed(seed: int) -> bool:
    return -(2**63) <= seed < 2**64


def _are_weights(weights: Mapping[str, float]) -> bool:
    return all(weight >= 0 for weight in weights.values())


_POSITIVE = Rule("must be positive", partial(lt, 0))
STEPS_BETWEEN = Rule("must be a number of steps of at least 1, or -1 to disable", _is_limit)

RULES: Mapping[str, Rule] = {
    "epochs": at_least(1),
    "batch_size": at_least(1),
    "gradient_accumulation_steps": at_least(1),
    "max_steps": Rule("must be at least 1, or -1 for no limit", _is_limit),
    "seed": Rule("must be at least -2**63 and less than 2**64", _is_seed),
    "precision": one_of(*get_args(Precision)),
    "memory_format": one_of(*get_args(MemoryFormat)),
    "device": replace(one_of(*get_args(Device)), remedy=_instead_of_device),
    "elasticity": one_of(*get_args(Elasticity)),
    "learning_rate": _POSITIVE,
    "gradient_clip_norm": _POSITIVE,
    "divergence_factor": Rule("must be more than 1", partial(lt, 1)),
    "validation_interval": at_least(1),
    "group_by_length": at_least(2),
    "shuffle_window_bytes": at_least(1),
    "loss_weights": Rule("must not be negative", _are_weights),
}
"""Field of `TrainConfig` -> the rule for its values."""


def direction(monitor: str, mode: Mode) -> Literal["min", "max"]:
    """Return ``max`` if larger values of a key of the history are better, otherwise ``min``.

    ``auto`` goes by the name: ``max`` for a metric that has one and is a share of what is right,
    such as ``val_accuracy``, also of one of several labels; ``min`` for all else.
    """
    require(mode in get_args(Mode), "mode must be 'auto', 'min' or 'max'", mode)
    if mode != "auto":
        return mode
    name = f"{monitor.removeprefix('val_')}_"
    return "max" if any(name.startswith(f"{metric}_") for metric in _LARGER_IS_BETTER) else "min"


@dataclass(frozen=True, kw_only=True)
class EarlyStopping:
    """Stop when a monitored value has not improved for some epochs.

    Needs validation rows when ``monitor`` starts with ``val_``. The decision is taken after an
    evaluation from values that are equal on all ranks, so all ranks stop together.
    """

    monitor: str = "val_loss"
    """Key of the history: ``loss``, ``val_loss``, or ``val_<metric name>``."""
    patience: int = 3
    """Epochs without improvement after which training stops; evaluations, where
    ``validationInterval`` asks for some within epochs."""
    min_delta: float = 0.0
    """Smallest change that counts as an improvement."""
    mode: Mode = "auto"
    """Direction in which values are better; ``auto``: larger ones of metrics such as
    ``val_accuracy``, ``val_f1``, ``val_auroc`` or ``val_r2``, smaller ones of all else."""
    restore_best: bool = True
    """True if the fitted model gets the weights of the best epoch (evaluation) rather than the
    last."""

    def __post_init__(self) -> None:
        require(self.patience >= 1, "patience must be at least 1", self.patience)
        require(self.min_delta >= 0, "min_delta must not be negative", self.min_delta)
        direction(self.monitor, self.mode)

    @property
    def direction(self) -> Literal["min", "max"]:
        """Return ``max`` if larger values are better, otherwise ``min``."""
        return direction(self.monitor, self.mode)

    @property
    def may_stop(self) -> bool:
        """False if it chooses the best weights only, as in the trials of a search."""
        return self.patience < sys.maxsize


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """The place of checkpoints, and how often they are written."""

    directory: str | None = None
    """Path or URL that driver and executors can reach; None: the driver keeps the checkpoints."""
    interval: int = 500
    """Steps between checkpoints; -1 writes none but the one at the end."""
    keep: int = 2
    """Newest checkpoints kept."""

    def __post_init__(self) -> None:
        STEPS_BETWEEN.check(self.interval, "checkpointInterval")
        require(self.keep >= 1, "keep must be at least 1", self.keep)


@dataclass(frozen=True, kw_only=True)
class ExplainOptions:
    """``[explain]``: how much is measured where a fit is explained; see docs/explain.md."""

    calibrate: bool = True
    """True if steps and exchanges are measured on the cluster; else the plan has no times."""
    num_rows: int | None = None
    """Number of rows, those for validation included, where counting them takes too long."""
    num_workers: tuple[int, ...] = ()
    """Numbers of workers to predict besides those that there are slots for."""
    count_seconds: float = 60.0
    """Longest that looking at some rows may take, and that counting them may."""
    measure_seconds: float = 0.6
    """About how long each of some ten measurements may take."""

    def __post_init__(self) -> None:
        rows, workers = self.num_rows, self.num_workers
        require(rows is None or rows >= 1, "num_rows must be at least 1", rows)
        require(all(n >= 1 for n in workers), "num_workers must be at least 1", workers)
        for name in ("count_seconds", "measure_seconds"):
            seconds = getattr(self, name)
            require(seconds > 0, f"{name} must be positive", seconds)


@dataclass(frozen=True, kw_only=True)
class Looks:
    """Options of what rank 0 reports of its layers, besides how far a step moves them."""

    every: int | None = None
    """Steps between two looks; None: once per epoch, and twenty times in a run of fewer epochs."""
    histograms: bool = False
    """True if weights and gradients are counted by size."""
    images: int = 0
    """Number of images of the first batch that are kept, if inputs are images."""

    def __post_init__(self) -> None:
        require(self.every is None or self.every >= 1, "every must be at least 1", self.every)
        require(self.images >= 0, "images must not be negative", self.images)

    def __or__(self, other: Looks) -> Looks:
        """Return options that give both what they ask for."""
        return Looks(
            every=min(filter(None, (self.every, other.every)), default=None),
            histograms=self.histograms or other.histograms,
            images=max(self.images, other.images),
        )


@dataclass(frozen=True)
class Task:
    """The task that a module learns from its labels. Of this one only the loss knows.

    A subclass says more: which values labels have, which losses fit, what metrics compare, how
    predictions are scored. It has a file of its own in `sparkdl.inference`, and estimator and model
    name it. Tasks have no state, and travel to workers.
    """

    name: ClassVar[str] = "custom"
    has_one_label: ClassVar[bool] = False
    """True if each row has one label, and one prediction, which are compared."""
    labels: ClassVar[Literal["any", "classes", "numbers"]] = "any"
    """Values of the label column: as it has them, class numbers from 0, or floating ones."""
    gives_logits: ClassVar[bool] = False
    """True if the module gives a logit for each class, or that of class 1 alone."""
    default_metrics: ClassVar[tuple[str, ...]] = ()
    """Names of those that a user gets who names none."""
    compares: ClassVar[frozenset[str]] = frozenset({"classes", "numbers"})
    """Kinds of values that metrics by name may compare."""

    def check_loss(self, loss: Any) -> None:
        """Raise ConfigError for a loss of torch's kind that does not fit the labels."""

    def compared(
        self, output: torch.Tensor, target: torch.Tensor, predictions: Callable[[Any], Any]
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return what metrics see of a batch; None: output and target as the loss gets them.

        ``predictions`` is the loss's, `LossFunction.predictions`.
        """
        return None

    def num_classes(self, output: Any) -> int:
        """Return how many classes the module tells apart by what it returned for some rows.

        0: it tells none apart. ConfigError if the module cannot learn this task.
        """
        return 0

    def add_rows(
        self,
        part: Any,
        predicted: torch.Tensor,
        target: torch.Tensor,
        weights: torch.Tensor,
        ignored: int,
    ) -> None:
        """Add to the sums of an evaluation what `scores` needs of a batch.

        Args:
            part: has the sums, an `evaluate_rows.Part`.
            predicted: that which becomes the prediction, ``(batch, ...)``.
            target: the labels, ``(batch,)`` or ``(batch, 1)``.
            weights: by how much each row counts, ``(batch,)`` in float64 on the CPU.
            ignored: the class number that the loss does not count; -1 if there is none.
        """

    def scores(self, part: Any) -> Any:
        """Return the measures, a `scores.Scores`, by the sums of all rows.

        None: there are no measures, or no row counts.
        """
        return None


CUSTOM = Task()


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Options of training on every worker. Picklable: they travel to executors with cloudpickle."""

    task: Task = CUSTOM
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
    """Callable ``optimizer -> LRScheduler``; stepped after every training step, or, if it is
    torch's ReduceLROnPlateau, after every evaluation."""
    epochs: int = 1
    max_steps: int = -1
    batch_size: int = 32
    seed: int = 0
    precision: Precision = "fp32"
    memory_format: MemoryFormat = "contiguous"
    compile: bool = False
    gradient_accumulation_steps: int = 1
    gradient_clip_norm: float | None = None
    device: str = "auto"
    divergence_factor: float | None = 1e4
    deterministic: bool = False
    metrics: Mapping[str, Callable[[], Any] | Any] | None = None
    """Name -> torchmetrics.Metric, a callable without arguments that makes one, or a name of
    `train.objective.named_metrics`; None: a classifier's accuracy."""
    training_metrics: bool = False
    validation_interval: int | None = None
    early_stopping: EarlyStopping | None = None
    callbacks: tuple[Any, ...] = ()
    sync_strategy: Any = None
    """A `sync.SyncStrategy`; None means ``AllReduce()``."""
    sync_batch_norm: bool = False
    parallelism: Any = None
    """A `mesh.Mesh`; None: each worker has the whole model."""
    elasticity: Elasticity = "rounding"
    """Up to what the weights are equal for all numbers of workers; see `train.shard_states`."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)

    def __post_init__(self) -> None:
        problems, batch, parts = Problems(), self.batch_size, self.gradient_accumulation_steps
        for name, rule in RULES.items():
            first, *others = name.split("_")
            with problems.caught():
                rule.check(getattr(self, name), first + "".join(map(str.capitalize, others)))
        problems.raise_all()
        if self.compile and self.elasticity == "bits":
            raise ConfigError(
                "compile does not go with elasticity='bits': what the compiler makes may depend on "
                "the first batch of a worker; unset one of the two"
            )
        if self.compile and self.sync_batch_norm:
            raise ConfigError(
                "compile does not go with syncBatchNorm, whose layers exchange statistics, and no "
                "compiled code can; unset one of the two"
            )
        if parts > batch:
            raise ConfigError(
                f"gradientAccumulationSteps ({parts}) cannot exceed batchSize ({batch}): a "
                "micro-batch needs at least one sample"
            )
