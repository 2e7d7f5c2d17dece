"""What do both ways of training need of a run, and what do they give back?"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pyspark.sql import SparkSession

from sparkdl.config import TrainConfig
from sparkdl.data.plan import TrainPlan
from sparkdl.report.live.progress import View
from sparkdl.report.recorder import Recorder
from sparkdl.serialization.packed_module import PackedModule
from sparkdl.spark.link import Link
from sparkdl.spark.settings import Settings
from sparkdl.spark.shards import ShardTable
from sparkdl.spark.slots import Slots
from sparkdl.spark.sourcetable import SourceTable

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run's fixed values once the data is known."""

    spark: SparkSession
    run_id: str
    run_key: str
    plan: TrainPlan
    config: TrainConfig
    module: nn.Module
    """The driver's copy; it gets the trained weights."""
    packed: PackedModule
    table: ShardTable | SourceTable
    slots: Slots
    link: Link
    settings: Settings
    view: View
    max_restarts: int
    recorder: Recorder


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What came of a run; the weights are in its module."""

    history: list[dict[str, float]]
    steps: int
    restarts: int
    seconds: dict[str, float] = field(default_factory=dict)
    """Phase -> seconds."""
    throughput_by_rank: list[float] = field(default_factory=list)
    bytes_sent_by_rank: list[int] = field(default_factory=list)
    population: list[dict[str, float]] = field(default_factory=list)

    def to_summary(self, plan: TrainPlan, laps: dict[str, float], seconds: float) -> Any:
        """The record for the user."""
        from sparkdl.report.summary import TrainingSummary

        return TrainingSummary(
            history=self.history,
            phase_seconds={**{f"fit: {name}": lap for name, lap in laps.items()}, **self.seconds},
            restarts=self.restarts,
            rows=plan.num_rows,
            validation_rows=plan.num_validation_rows,
            steps=self.steps,
            world_size=plan.world_size,
            throughput_by_rank=self.throughput_by_rank,
            bytes_sent_by_rank=self.bytes_sent_by_rank,
            population=self.population,
            seconds=seconds,
        )
