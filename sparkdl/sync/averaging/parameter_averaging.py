"""Deeplearning4j's way: train apart for some batches, average parameters and optimizer, repeat."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from sparkdl.config import require
from sparkdl.mesh import Mesh
from sparkdl.sync.averaging.averaging import (
    AveragingStrategy,
    OptimizerState,
    Weighting,
    check_choices,
)
from sparkdl.sync.averaging.period import AutoPeriod, Period, check_period


@dataclass(frozen=True, kw_only=True)
class ParameterAveraging(AveragingStrategy):
    """Replicas train apart for ``averaging_period`` steps and continue from their mean.

    On plain Spark stages, which need no gang, or inside one (Param ``executionMode``). After
    Deeplearning4j's ``ParameterAveragingTrainingMaster``, but replicas count by the samples that
    they have seen, and Adam's count of steps is kept. With a period of one step and plain SGD it
    equals all-reduce.
    """

    prefers_rounds: ClassVar[bool] = True

    averaging_period: int | Literal["auto"] = 16
    """Steps of a round; ``"auto"`` holds agreeing near ``target_share`` of the time."""
    average_optimizer_state: bool = True
    """True if optimizer states are averaged too; otherwise each round begins with new ones."""
    weighting: Weighting = "examples"
    """A replica counts by its samples of the round (their weights), or ``"equal"``: as others."""
    target_share: float = 0.05
    """With ``"auto"``: the part of the time that agreeing may take."""

    def __post_init__(self) -> None:
        check_period(self.averaging_period, "auto")
        check_choices(weighting=self.weighting)
        require(0 < self.target_share < 1, "target_share must be in (0, 1)", self.target_share)

    @property
    def deterministic(self) -> bool:
        """A period that follows the clock gives other bits each time."""
        return self.averaging_period != "auto"

    @property
    def optimizer_state(self) -> OptimizerState:
        return "average" if self.average_optimizer_state else "reset"

    def why_not_divided(self, mesh: Mesh) -> str | None:
        if self.averaging_period == "auto":
            return (
                "averaging_period='auto' follows the clock of each worker, so that those of one "
                "replica would disagree; give a number of steps"
            )
        return super().why_not_divided(mesh)

    @classmethod
    def examples(cls) -> tuple[ParameterAveraging, ...]:
        return (cls(averaging_period="auto"),)

    def make_period(self) -> Period:
        is_auto = self.averaging_period == "auto"
        return AutoPeriod(share=self.target_share) if is_auto else super().make_period()
