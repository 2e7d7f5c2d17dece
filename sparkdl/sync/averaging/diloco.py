"""DiLoCo: replicas train apart for long; what they have moved is a gradient of an outer optimizer.

Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", 2023. In
fragments, and with overlap, as `streaming_diloco` has it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from sparkdl.comm.communicator import Communicator
from sparkdl.comm.compression.compression import Shapes
from sparkdl.errors import ConfigError
from sparkdl.sync.averaging.averaging import AveragingStrategy, OptimizerState
from sparkdl.sync.averaging.mean import SHARE_BYTES
from sparkdl.sync.averaging.outer_step import OuterOptimizer
from sparkdl.sync.averaging.period import FixedPeriod, Period, check_period
from sparkdl.sync.averaging.streaming_diloco import (
    Streaming,
    StreamingSynchronizer,
    fragments_of,
)
from sparkdl.sync.strategy import MakeOptimizer, Synchronizer


@dataclass(frozen=True, kw_only=True)
class DiLoCo(AveragingStrategy):
    """Rounds of many steps, after which an outer optimizer steps along the replicas' mean change.

    Each replica keeps its own (inner) optimizer's state; the paper's is AdamW. With the outer
    optimizer SGD, learning rate 1 and no momentum it is `LocalSGD`.

    With several fragments, or steps that overlap, it is Streaming DiLoCo: each fragment is agreed
    on at a time of its own, while training goes on. Then replicas keep weights of their own
    throughout, epochs end no rounds, and what is evaluated and returned is the replicas' mean.
    """

    averaging_period: int = 100
    """Steps between two agreements on the same weight (the paper: 500 for language models)."""
    outer_optimizer: str = "sgd"
    """Name of a class of torch.optim, in any case."""
    outer_learning_rate: float = 0.7
    """Learning rate of the outer optimizer, which steps along the mean change of a round."""
    outer_params: Mapping[str, Any] | None = None
    """Further options of the outer optimizer; None: the paper's momentum of 0.9 in Nesterov's form
    for SGD, torch's own defaults for others."""
    num_fragments: int = 1
    """Parts of the model that are agreed on one after the other, in equal distances."""
    overlap_steps: int = 0
    """Steps that are trained while a fragment travels."""
    mixing: float | None = None
    """How much of its own weights a replica keeps when a fragment arrives; None: 0.5 if steps
    overlap, as in the paper, otherwise 0, which forgets nothing but what differs."""

    def __post_init__(self) -> None:
        check_period(self.averaging_period)
        check_period(self.num_fragments, name="num_fragments")
        if self.num_fragments > self.averaging_period:
            raise ConfigError(
                f"num_fragments ({self.num_fragments}) must not exceed averaging_period "
                f"({self.averaging_period}): at most one fragment is sent in a step"
            )
        if not 0 <= self.overlap_steps < self.averaging_period:
            raise ConfigError(
                f"overlap_steps must be in [0, averaging_period); received {self.overlap_steps}: "
                "a fragment must have arrived before it is sent again"
            )
        if self.mixing is not None and not 0 <= self.mixing < 1:
            raise ConfigError(
                f"mixing must be in [0, 1); received {self.mixing}: with 1 replicas never agree"
            )
        if not self.outer_learning_rate > 0:
            raise ConfigError(
                f"outer_learning_rate must be positive; received {self.outer_learning_rate}"
            )
        self.make_outer(1)

    @property
    def optimizer_state(self) -> OptimizerState:
        return "keep"

    @property
    def kept(self) -> float:
        """What ``mixing`` means."""
        if self.mixing is not None:
            return self.mixing
        return 0.5 if self.overlap_steps else 0.0

    @property
    def is_streaming(self) -> bool:
        """Whether there are no rounds that all weights share."""
        return self.num_fragments > 1 or self.overlap_steps > 0 or self.kept > 0

    def make_period(self) -> Period:
        return FixedPeriod(self.averaging_period)

    def make_outer(self, world_size: int) -> OuterOptimizer:
        options = self.outer_params
        if options is None:
            is_sgd = self.outer_optimizer.lower() == "sgd"
            options = {"momentum": 0.9, "nesterov": True} if is_sgd else {}
        if "lr" in options:
            raise ConfigError("outer_params holds 'lr'; set outer_learning_rate instead")
        return OuterOptimizer(self.outer_optimizer, {"lr": self.outer_learning_rate, **options})

    def bytes_per_step(self, shapes: Shapes, element_size: int, world_size: int) -> float | None:
        """See `SyncStrategy.bytes_per_step`.

        The streaming form sends the whole model once more, uncompressed, when an epoch ends or a
        checkpoint is written.
        """
        if not self.is_streaming:
            return super().bytes_per_step(shapes, element_size, world_size)
        sent = 0
        for places in fragments_of(shapes, self.num_fragments):
            some = self.exchange_bytes([shapes[i] for i in places], element_size, world_size)
            if some is None:
                return None
            sent += some + SHARE_BYTES * (world_size - 1)
        return sent / self.averaging_period

    def setup(
        self, model: nn.Module, make_optimizer: MakeOptimizer, comm: Communicator
    ) -> Synchronizer:
        """See `SyncStrategy.setup`.

        Raises:
            ConfigError: the model has fewer layers than fragments are wanted.
        """
        if self.is_streaming:
            options = Streaming(
                averaging_period=self.averaging_period,
                num_fragments=self.num_fragments,
                overlap_steps=self.overlap_steps,
                kept=self.kept,
                compression=self.resolved_compression(),
                make_outer=self.make_outer,
            )
            return StreamingSynchronizer(model, make_optimizer, comm, options=options)
        return super().setup(model, make_optimizer, comm)
