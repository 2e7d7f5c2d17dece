"""A run's values: what the user asks for, what training needs, and what it gives back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from sparkdl.config import Looks, TrainConfig, require
from sparkdl.data.plan import Column, TrainPlan
from sparkdl.inputs import Named
from sparkdl.report.listeners.listener import Listener
from sparkdl.report.summary import TrainingSummary
from sparkdl.serialization.initial_state import InitialState
from sparkdl.serialization.initial_weights import InitialWeights
from sparkdl.serialization.travel.packed_module import PackedModule
from sparkdl.spark.cluster.launch import Launch
from sparkdl.spark.frames.row_table import RowTable

if TYPE_CHECKING:
    from torch import nn

    from sparkdl.serialization.stored_module import StoredModule
    from sparkdl.serialization.travel.shared_values import SharedValue
    from sparkdl.train.objective.loss import LossFunction
    from sparkdl.train.training_state import TrainingState


@dataclass(frozen=True, kw_only=True)
class Run(Launch):
    """A run's fixed values once the data is known."""

    run_key: str
    """Names its checkpoints."""
    plan: TrainPlan
    config: TrainConfig
    module: nn.Module
    """The driver's copy; it gets the trained weights."""
    packed: PackedModule
    objective: LossFunction
    """The loss that is minimized, for what the driver asks of it."""
    table: RowTable
    looks: Looks | None = None
    """Options of what rank 0 looks at in its layers for reports and listeners; None: nothing."""
    begins_from: TrainingState | None = None
    """State that an earlier fit has left; None: training begins."""
    keeps_state: bool = False
    """True if `Trained.left` is wanted."""
    shared: tuple[SharedValue, ...] = ()
    """The objects that the module shares with what else is in ``config``."""


@dataclass(frozen=True, kw_only=True)
class Trained:
    """The results of a run besides the weights."""

    summary: TrainingSummary
    was_stopped: bool
    """True if a callback or `EarlyStopping` ended it."""
    left: Mapping[str, Any] | None
    """The result of `training_state.left_by`; None if it is not kept."""
    stored_at: str | None = None
    """Folder of the link's storage that has the weights; None: the module has them."""
    module: nn.Module | None = None
    """Another one than the run's, where callbacks have changed layers."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """The options that fits and runs of functions both have."""

    num_workers: int | None
    max_restarts: int
    verbose: int
    cpus_per_worker: int | None
    gpus_per_worker: float | None
    report_dir: str | None = None
    """Directory or URL in which the run leaves its record; None: nowhere."""
    listeners: tuple[Listener, ...] = ()
    kind: ClassVar[Literal["fit", "run"]] = "fit"
    """Kind of the run: a fit, or the run of a function."""
    name: str = "fit"
    """Name of what is run, for its record."""
    run_name: str | None = None
    """The user's name for the run."""
    params: tuple[Mapping[str, Any], ...] = ()
    """Params that were asked for, as `RunRecord.params` shows them."""


@dataclass(frozen=True, kw_only=True)
class FitRequest(Request):
    """The request of the estimator."""

    module: Any
    """A ``torch.nn.Module``, or a callable without arguments that makes one."""
    config: TrainConfig
    feature_cols: tuple[str, ...]
    input_shapes: tuple[tuple[int, ...] | None, ...]
    output_cols: tuple[str, ...] = ()
    """Columns that the model will add, which the rows must not have yet."""
    label_col: str | None
    weight_col: str | None
    validation_col: str | None
    validation_fraction: float | None = None
    """Part of the rows for validation, drawn by their hash."""
    min_workers: int | None = None
    """Fewest workers that train; None: as many as `num_workers`."""
    num_shards: int | None = None
    """Fixed parts of the rows; None: one for each worker."""
    shards: str = "rows"
    """Rule for what makes a shard: ``rows``, ``partitions`` or ``auto``."""
    cache_dir: str | None = None
    """Folder of the executors' local disks in which spools are kept for later fits; None: none."""
    initial_weights: InitialWeights | None = None
    """Weights that training starts from; None: the weights that the module has."""
    initial_state: InitialState | None = None
    """The model whose training goes on; None: training begins."""
    keep_training_state: bool = False
    """True if the result has what another fit needs to go on."""
    execution_mode: str = "auto"
    """``auto``, ``gang`` or ``rounds``."""
    specified: tuple[Named, ...] = ()
    """Inputs that were specified; then there are no ``feature_cols``."""
    on_epoch: Callable[[Mapping[str, float]], None] | None = None
    """Is given each epoch's history record, on the driver; what it raises ends the fit."""
    labels: tuple[Named, ...] = ()
    """Several labels by name; then there is no ``label_col``."""
    automatic: tuple[str, ...] = ()
    """Params that are ``"auto"``: the values here only stand for those that will be chosen."""
    chosen: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Such Params once they are chosen; see `TrainingSummary.chosen`."""

    def __post_init__(self) -> None:
        column = self.validation_col
        is_one = column is None or self.validation_fraction is None
        require(is_one, "set either validationFraction or validationIndicatorCol", column)

    @property
    def validation(self) -> str | float | None:
        """The column that marks rows for validation, or their fraction; None: there are none."""
        return self.validation_fraction if self.validation_col is None else self.validation_col

    @property
    def num_inputs(self) -> int:
        """Inputs of the module."""
        return len(self.specified or self.feature_cols)


@dataclass(frozen=True, kw_only=True)
class FitResult:
    """The results that the estimator gets."""

    module: nn.Module | StoredModule
    """Trained, on the CPU, in eval mode; or where its weights lie."""
    columns: tuple[Column, ...]
    """The feature columns, as the module takes them."""
    num_classes: int | None
    prediction_key: str | None
    """Key of the prediction in the module's output; None: it is all of it."""
    summary: TrainingSummary
    training_state: TrainingState | None = None
    """State that another fit needs to go on; None if it is not kept."""
