"""Local SGD: train apart for some steps, take the mean; after a warm-up, by level, or adaptively.

Lin et al., "Don't Use Large Mini-Batches, Use Local SGD", ICLR 2020, for the rounds, their
warm-up (post-local SGD) and their levels; `period.AdaptivePeriod` for the adaptive period.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import nn

from sparkdl.comm.communicator import Communicator
from sparkdl.comm.topology import arrange
from sparkdl.comm.topology.hierarchical import ranks_by_node
from sparkdl.config import require
from sparkdl.mesh import Mesh
from sparkdl.sync.averaging.averaging import (
    AveragingStrategy,
    AveragingSynchronizer,
    OptimizerState,
    check_choices,
)
from sparkdl.sync.averaging.mean import MeanOfReplicas
from sparkdl.sync.averaging.period import AdaptivePeriod, FixedPeriod, Period, check_period
from sparkdl.sync.gradients.allreduce import AllReduce
from sparkdl.sync.strategy import Reduced, SetupArguments, Synchronizer


@dataclass(frozen=True, kw_only=True)
class LocalSGD(AveragingStrategy):
    """Replicas train apart for ``averaging_period`` steps and continue from their mean.

    With two periods ``(inside, between)`` the ranks of a node take their mean every ``inside``
    steps, and all ranks every ``between`` steps, for which those of a node agree first. With
    ``n`` bytes of parameters, ``L`` ranks on each node and ``W`` in all, a rank then sends per
    step ``(2 n (L - 1) / L + 24 (L - 1)) / inside + (2 n (W - 1) / W + 24 (W - 1)) / between``
    bytes along a ring; CPU ranks of a node use shared memory instead where ``topology`` is
    ``"auto"``. Only the mean of all ranks is compressed: links inside a node are fast. Checkpoints
    are written when all ranks agree.
    """

    averaging_period: int | Literal["adaptive"] | tuple[int, int] = 4
    """Steps of a round; ``"adaptive"`` begins with ``first_period`` and shortens rounds as the
    loss falls; two numbers are the periods inside a node and between nodes."""
    first_period: int = 16
    """With ``"adaptive"``: steps of the first round."""
    warmup_steps: int = 0
    """First steps of the run, in which gradients are exchanged exactly as by `AllReduce`."""
    optimizer_state: OptimizerState = "keep"
    """Treatment of the optimizers' states when weights are averaged."""

    def __post_init__(self) -> None:
        if not isinstance(self.averaging_period, int | str):  # lists, from files
            object.__setattr__(self, "averaging_period", tuple(self.averaging_period))
        inside, between = self.periods()
        if inside is None:
            check_period(between, "adaptive")
        else:
            check_period(inside)
            check_period(between)
            rule = "averaging_period between nodes must be a multiple of that inside a node"
            require(int(between) % inside == 0, rule, self.averaging_period)
        check_period(self.first_period, name="first_period")
        require(self.warmup_steps >= 0, "warmup_steps must not be negative", self.warmup_steps)
        check_choices(optimizer_state=self.optimizer_state)

    def periods(self) -> tuple[int | None, int | Literal["adaptive"]]:
        """Steps between two means inside a node, or None if there are none; and of all ranks."""
        period: Any = self.averaging_period
        if not isinstance(period, tuple):
            return None, period
        rule = "averaging_period must be one number of steps or two (inside a node, between nodes)"
        require(len(period) == 2, rule, period)
        return period[0], period[1]

    def why_not_rounds(self) -> str | None:
        if self.warmup_steps > 0:
            return "warm-up steps exchange gradients, for which all workers must run at once"
        if self.periods()[0] is not None:
            return "the ranks of a node agree inside a gang only; use one period"
        return super().why_not_rounds()

    def why_not_divided(self, mesh: Mesh) -> str | None:
        if self.periods()[0] is not None:
            return (
                "workers of one node belong to one replica there, whose parts have no mean; use "
                "one averaging_period"
            )
        return super().why_not_divided(mesh)

    @classmethod
    def examples(cls) -> tuple[LocalSGD, ...]:
        return (cls(averaging_period=16),)

    def make_period(self) -> Period:
        _, between = self.periods()
        if between == "adaptive":
            return AdaptivePeriod(first=self.first_period)
        return FixedPeriod(between)

    def setup(self, *setup: *SetupArguments) -> Synchronizer:
        made = LocalSGDSynchronizer(*setup, strategy=self)
        if self.warmup_steps == 0:
            return made
        model, _, comm = setup
        exchange = AllReduce(compression=self.compression)
        first = exchange.setup(model, lambda _: made.optimizer, comm)
        return WarmUp(first, made, self.warmup_steps)


class LocalSGDSynchronizer(AveragingSynchronizer):
    """See `LocalSGD`."""

    shared_state: ClassVar = (*AveragingSynchronizer.shared_state, "buffers_agree")

    def __init__(self, *setup: *SetupArguments, strategy: LocalSGD) -> None:
        super().__init__(*setup, strategy=strategy)
        self._inside_period, _ = strategy.periods()
        self._inside: MeanOfReplicas | None = None
        self._inside_comm: Communicator | None = None
        self._inside_weight = 0.0
        comm = setup[2]
        if self._inside_period is not None and comm.world_size > 1:
            self._inside_comm = arrange(
                comm.split(ranks_by_node(comm.nodes)),
                "auto" if strategy.topology == "auto" else "ring",
                device=self.parameters[0].device,
            )
            if self._inside_comm.world_size > 1:
                self._inside = MeanOfReplicas(self.model, self.optimizer, self._inside_comm)

    @property
    def bytes_sent(self) -> int:
        inside = 0 if self._inside_comm is None else self._inside_comm.bytes_sent
        return super().bytes_sent + inside

    def after_step(self, step: int) -> bool:
        is_closed = super().after_step(step)
        if self._inside_period is not None and self.round_steps % self._inside_period == 0:
            self._agree_inside()
        return is_closed

    def close_round(self) -> None:
        self._agree_inside()
        super().close_round()
        self._inside_weight = 0.0

    def close(self) -> None:
        if self._inside_comm is not None:
            self._inside_comm.close()
        super().close()

    def _agree_inside(self) -> None:
        """Take the mean over the ranks of this node, by their samples since the last one."""
        if self._inside is None or self.round_steps == 0:
            return
        seen = self.round_sums[1].item()
        shares = self._inside.shares(seen - self._inside_weight, with_buffers=True)
        self._inside_weight = seen
        if any(shares):
            self._take_mean(self._inside, shares)


class WarmUp(Synchronizer):
    """Trains with ``first`` for the run's first ``num_steps`` steps and from then on with ``then``.

    Both have the same model and optimizer.
    """

    def __init__(self, first: Synchronizer, then: AveragingSynchronizer, num_steps: int) -> None:
        self.model, self.optimizer = then.model, then.optimizer
        self.keeps_optimizer = then.keeps_optimizer
        self._first, self._then, self._num_steps = first, then, num_steps
        self._present: Synchronizer = first

    @property
    def bytes_sent(self) -> int:
        return self._first.bytes_sent + self._then.bytes_sent

    def zero_gradients(self) -> None:
        self._present.zero_gradients()

    def no_sync(self) -> AbstractContextManager[None]:
        return self._present.no_sync()

    def start_sums(self, sums: torch.Tensor) -> None:
        self._present.start_sums(sums)

    def early_sums(self, sums: torch.Tensor, *, waits: bool) -> torch.Tensor | None:
        return self._present.early_sums(sums, waits=waits)

    def reduce_gradients(self, sums: torch.Tensor, divisor: float) -> Reduced:
        return self._present.reduce_gradients(sums, divisor)

    def after_step(self, step: int) -> bool:
        is_closed = self._present.after_step(step)
        if self._is_warming_up and step + 1 >= self._num_steps:
            self._take_over()
        self.buffers_agree = self._present.buffers_agree
        return is_closed

    def follow_freezing(self) -> None:
        if self._is_warming_up:
            self._first.follow_freezing()
        self._then.follow_freezing()

    def mark_used(self, parameters: Iterable[nn.Parameter]) -> None:
        self._present.mark_used(parameters)

    def close_round(self) -> None:
        self._present.close_round()
        self.buffers_agree = self._present.buffers_agree

    def close(self) -> None:
        if self._is_warming_up:
            self._first.close()
        self._then.close()

    def state_dict(self) -> dict[str, Any]:
        first = self._first.state_dict() if self._is_warming_up else None
        return {**self._then.state_dict(), "warmup": first}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        first = state.get("warmup")
        if self._is_warming_up:
            if first is None:
                self._take_over()
            else:
                self._first.load_state_dict(first)
        self._then.load_state_dict(state)
        self.buffers_agree = self._present.buffers_agree

    def rank_state_dict(self) -> dict[str, Any]:
        first = self._first.rank_state_dict() if self._is_warming_up else None
        return {**self._then.rank_state_dict(), "warmup": first}

    def load_rank_state_dict(self, state: dict[str, Any]) -> None:
        self._then.load_rank_state_dict(state)
        if self._is_warming_up:
            self._first.load_rank_state_dict(state["warmup"])

    @property
    def _is_warming_up(self) -> bool:
        return self._present is self._first

    def begin(self) -> None:
        self._present.begin()

    def _take_over(self) -> None:
        self._first.close()
        self._then.begin()
        self._present = self._then
        self.trains_apart = self._then.trains_apart
