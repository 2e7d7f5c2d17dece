"""A run's values: what the user asks for, what training needs, and what it gives back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sparkdl.config import TrainConfig
from sparkdl.data.plan import Column, TrainPlan
from sparkdl.inputs import Named
from sparkdl.report.listeners.listener import Listener
from sparkdl.report.summary import TrainingSummary
from sparkdl.serialization.initial_weights import InitialWeights
from sparkdl.serialization.packed_module import PackedModule
from sparkdl.spark.cluster.launch import Launch
from sparkdl.spark.frames.row_table import RowTable

if TYPE_CHECKING:
    from torch import nn

    from sparkdl.train.objective.loss import LossFunction


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
    """What is minimized, for what the driver asks of it."""
    table: RowTable


@dataclass(frozen=True, kw_only=True)
class Request:
    """What fits and runs of functions both ask for."""

    num_workers: int | None
    max_restarts: int
    verbose: int
    cpus_per_worker: int | None
    gpus_per_worker: float | None
    report_dir: str | None = None
    """Directory or URL in which the run leaves its record; None: nowhere."""
    listeners: tuple[Listener, ...] = ()
    name: str = "fit"
    """What is run, for its record."""
    params: tuple[Mapping[str, Any], ...] = ()
    """What was asked for, as `RunRecord.params` shows it."""


@dataclass(frozen=True, kw_only=True)
class FitRequest(Request):
    """What the estimator asks for."""

    module: Any
    """A ``torch.nn.Module``, or a callable without arguments that makes one."""
    config: TrainConfig
    feature_cols: tuple[str, ...]
    input_shapes: tuple[tuple[int, ...] | None, ...]
    label_col: str | None
    weight_col: str | None
    validation_col: str | None
    initial_weights: InitialWeights | None = None
    """Where training starts from; None: the weights that the module has."""
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

    @property
    def num_inputs(self) -> int:
        """Inputs of the module."""
        return len(self.specified or self.feature_cols)


@dataclass(frozen=True, kw_only=True)
class FitResult:
    """What the estimator gets."""

    module: nn.Module
    """Trained, on the CPU, in eval mode."""
    columns: tuple[Column, ...]
    """The feature columns, as the module takes them."""
    num_classes: int | None
    prediction_key: str | None
    """Where the module's output has the prediction; None: it is all of it."""
    summary: TrainingSummary
