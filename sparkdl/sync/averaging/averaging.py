"""The base of strategies whose replicas train apart and then take the weighted mean of states.

Every replica trains alone for a round of steps; then all continue from the mean of their
parameters, buffers and, if wanted, optimizer states, each weighted by the samples it has seen
(McDonald et al., "Distributed Training Strategies for the Structured Perceptron", 2010), or from
what an `OuterRule` makes of it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, get_args

import torch

from sparkdl.config import require
from sparkdl.mesh import Mesh
from sparkdl.storage.stateful import Stateful
from sparkdl.sync.apart import ApartSynchronizer, why_not_apart
from sparkdl.sync.averaging.mean import MeanOfReplicas
from sparkdl.sync.averaging.outer_step import OuterRule
from sparkdl.sync.averaging.period import FixedPeriod, Period, RoundReport
from sparkdl.sync.averaging.state_pieces import Pieces
from sparkdl.sync.collective import CollectiveStrategy
from sparkdl.sync.exchange_pattern import ModelSize, Pattern
from sparkdl.sync.gradient_buckets import Changes
from sparkdl.sync.strategy import SetupArguments, Synchronizer

OptimizerState = Literal["average", "reset", "keep"]
Weighting = Literal["examples", "equal"]


@dataclass(frozen=True, kw_only=True)
class AveragingStrategy(CollectiveStrategy):
    """Base of strategies whose replicas train apart in rounds and then take their mean."""

    trains_apart = True
    averaging_period: Any
    """Steps of a round, or how these follow."""

    @property
    def weighting(self) -> Weighting:
        """The weight of a replica: by its samples in the round, or as much as any other."""
        return "examples"

    @property
    def optimizer_state(self) -> OptimizerState:
        """The treatment of the optimizers' states at the end of a round."""
        return "average"

    def pieces(self, num_replicas: int) -> Pieces:
        """Return how plain Spark stages cut replicas' states; one replica compresses nothing."""
        return Pieces.of(
            num_replicas,
            compression=self.resolved_compression() if num_replicas > 1 else None,
            count_equally=self.weighting == "equal",
        )

    def why_not_rounds(self) -> str | None:
        compression = self.resolved_compression()
        if compression and compression.codecs_of((1,), 1, torch.float32) is None:
            return (
                f"{type(compression).__name__} adds what a message leaves out to the next one, and "
                "no task keeps anything of its shard until the next round; use compression 'fp16', "
                "'bf16' or 'int8'"
            )
        if self.optimizer_state == "keep":
            return (
                "a lost task could not be run again if each replica kept an optimizer state of "
                "its own; average or reset it"
            )
        return None

    def why_not_divided(self, mesh: Mesh) -> str | None:
        return why_not_apart(mesh)

    def make_period(self) -> Period:
        """The lengths of rounds."""
        return FixedPeriod(self.averaging_period)

    def make_outer(self, world_size: int) -> OuterRule | None:
        """Make the rule that follows the mean; None: nothing follows."""
        return None

    def pattern(self, size: ModelSize, world_size: int) -> Pattern:
        """See `SyncStrategy.pattern`: once a round weights, buffers and averaged optimizers."""
        pattern = super().pattern(size, world_size)
        extra = size.buffer_bytes
        if self.optimizer_state == "average":
            extra += size.optimizer_bytes
        num_bytes = size.gradient_bytes + extra
        ratio = pattern.wire_ratio
        if ratio is not None:  # only the parameters are compressed
            ratio = (ratio * size.gradient_bytes + extra) / max(1, num_bytes)
        messages = 1 + (extra > 0)
        pattern = replace(pattern, num_bytes=num_bytes, wire_ratio=ratio, num_messages=messages)
        return self._in_rounds(pattern)

    def stages_pattern(self, size: ModelSize) -> Pattern:
        return self._in_rounds(super().stages_pattern(size))

    def _in_rounds(self, pattern: Pattern) -> Pattern:
        """The pattern with the length of rounds; of periods that adapt, the first round's."""
        period = self.make_period()
        return replace(pattern, period=period.steps(0), target_share=period.target_share)

    def setup(self, *setup: *SetupArguments) -> Synchronizer:
        return AveragingSynchronizer(*setup, strategy=self)


def check_choices(*, weighting: str = "equal", optimizer_state: str = "keep") -> None:
    """Raise ConfigError for what is no `Weighting` or no `OptimizerState`."""
    rule = "weighting must be 'examples' or 'equal'"
    require(weighting in get_args(Weighting), rule, weighting)
    rule = "optimizer_state must be 'average', 'reset' or 'keep'"
    require(optimizer_state in get_args(OptimizerState), rule, optimizer_state)


class AveragingSynchronizer(ApartSynchronizer):
    """See `AveragingStrategy`."""

    buffers_agree = True
    shared_state: ClassVar[tuple[str, ...]] = ("period", "outer", "mean")
    rank_state: ClassVar = ("mean",)

    def __init__(self, *setup: *SetupArguments, strategy: AveragingStrategy) -> None:
        super().__init__(*setup)
        self._strategy = strategy
        self.keeps_optimizer = strategy.optimizer_state == "keep"
        self._period = strategy.make_period()
        self._outer = strategy.make_outer(self._comm.world_size)
        self._replicas = MeanOfReplicas(self.model, self.optimizer, self._comm)
        self._changes: Changes | None = None
        compression = strategy.resolved_compression()
        if compression is not None and self._comm.world_size > 1:
            self._changes = Changes(self.parameters, self._comm, compression)
        self._mean = self._changes or Stateful()
        self._needs_anchor = self._outer is not None or self._changes is not None
        self._anchor: list[torch.Tensor] = []
        self._set_anchor()
        self._round_length = 0
        self._round_began = 0.0

    def zero_gradients(self) -> None:
        super().zero_gradients()
        if self.round_steps == 0:
            self._round_began = time.perf_counter()

    def begin(self) -> None:
        """See `Synchronizer.begin`; buffers differ until the first round ends."""
        super().begin()
        self._set_anchor()
        self.buffers_agree = False

    def after_step(self, step: int) -> bool:
        if self.round_steps == 0:
            self._round_length = self._period.steps(step)
        self.round_steps += 1
        if self.round_steps < self._round_length:
            return False
        self.close_round()
        return True

    def close_round(self) -> None:
        if self.round_steps == 0:
            return
        step_seconds = time.perf_counter() - self._round_began
        weight = self.round_sums[1].item()
        if self._strategy.weighting == "equal":
            weight = float(weight > 0)
        shares = self._replicas.shares(weight, self.learning_rate(), with_buffers=True)
        began = time.perf_counter()  # after `shares`, in which ranks wait for the slowest
        if any(shares):
            self._agree(shares)
        self.parameters = self.trained_parameters()
        if self._period.needs_report:
            self._period.observe(self._report(step_seconds, time.perf_counter() - began))
        super().close_round()

    def follow_freezing(self) -> None:
        """See `Synchronizer.follow_freezing`; within a round what has trained in it is averaged."""
        if self._needs_anchor:
            Synchronizer.follow_freezing(self)
        now = {id(parameter) for parameter in self.trained_parameters()}
        own = {id(parameter) for parameter in self.parameters} if self.round_steps else set()
        self.parameters = [p for p in self.model.parameters() if id(p) in now | own]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `Synchronizer.load_state_dict`; the model must have been restored before."""
        super().load_state_dict(state)
        self._set_anchor()

    def _agree(self, shares: Sequence[float]) -> None:
        self._take_mean(self._replicas, shares, self._changes)
        self.buffers_agree = True
        if self._outer is not None:
            with torch.no_grad():
                self._outer.step(self._anchor, self.parameters, self._replicas.learning_rate)
        self._set_anchor()

    def _take_mean(
        self, mean: MeanOfReplicas, shares: Sequence[float], changes: Changes | None = None
    ) -> None:
        """Replace all that the strategy averages by its mean over some ranks.

        Parameters travel as compressed ``changes`` since the round began, or else as they are.
        """
        with torch.no_grad():
            if changes is None:
                mean.tensors(self.parameters, shares)
            else:
                changes.take(self.parameters, self._anchor)
                changes.start_all(shares[self._comm.rank])
                changes.wait()
                for parameter, begin, change in zip(
                    self.parameters, self._anchor, changes.tensors, strict=True
                ):
                    torch.add(begin, change, out=parameter)
            mean.buffers(shares)
        if self._strategy.optimizer_state == "average":
            mean.optimizer_state(shares)
        elif self._strategy.optimizer_state == "reset":
            self.optimizer.state.clear()

    def _set_anchor(self) -> None:
        if self._needs_anchor:
            self._anchor = [parameter.detach().clone() for parameter in self.parameters]

    def _report(self, step_seconds: float, merge_seconds: float) -> RoundReport:
        """Share what the round has shown; collective."""
        mine = torch.cat([self.round_sums, torch.tensor([step_seconds, merge_seconds])])
        everyone = self._comm.all_gather(mine.to(self.parameters[0].device)).cpu()
        losses, weights = everyone[:, 0].sum().item(), everyone[:, 1].sum().item()
        return RoundReport(
            steps=self.round_steps,
            step_seconds=everyone[:, 2].max().item(),
            merge_seconds=everyone[:, 3].max().item(),
            loss=losses / weights if weights > 0 else float("nan"),
            learning_rate=self._replicas.learning_rate,
        )
