"""Asynchronous SGD: replicas train through a sharded parameter server, without waiting.

Every rank, or each of 64 if there are more, serves a slice of the parameters with its optimizer.
All train on all parameters: after each step a rank pushes its gradient to all slices and pulls
what the pushes of all ranks have made of the weights meanwhile (Dean et al., "Large Scale
Distributed Deep Networks", NIPS 2012, "Downpour").
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from sparkdl.comm.communicator import Communicator
from sparkdl.config import require
from sparkdl.errors import ConfigError
from sparkdl.mesh import Mesh
from sparkdl.sync.asynchronous.batch_share import BatchShare
from sparkdl.sync.asynchronous.parameter_client import SliceExchange
from sparkdl.sync.asynchronous.parameter_server import Push, ServerRules
from sparkdl.sync.asynchronous.parameter_slices import (
    MOST_SERVERS,
    ServedOptimizer,
    check_learning_rates,
)
from sparkdl.sync.averaging.period import check_period
from sparkdl.sync.exchange_pattern import ModelSize, Pattern
from sparkdl.sync.strategy import Reduced, SetupArguments, Synchronizer, SyncStrategy


@dataclass(frozen=True, kw_only=True)
class AsyncSGD(SyncStrategy):
    """Each rank's gradient is applied when it comes; nobody waits, or for the far behind only.

    A push is a step of the optimizer with the mean gradient of the rank's batch, at the learning
    rate times the rank's share of the global batch (1 / world size for equal shards). So the
    pushes of all ranks together go as far as one synchronous step, with weight decay and with
    optimizers like Adam too. The papers step at the full rate: multiply yours by the world size
    to do as they do, where it stays stable. Momentum decays with each push, not with each step of
    all: gradients that come late act like momentum by themselves, so less of it may be better.

    Gradients are clipped on each rank, before they are pushed. An optimizer sees a slice: what
    looks at all parameters at once, such as LAMB's ``clip_norm``, looks at the slice's.
    """

    staleness_bound: int | None = None
    """Number of steps that a rank may be ahead of the slowest before it waits: at step ``c`` it
    computes with weights that hold all gradients of the steps before ``c - staleness_bound``. None:
    it never waits. 0: synchronous; then the gradients of a step are summed in rank order and
    applied together, which equals all-reduce with any optimizer."""
    delay_compensation: float = 0.0
    """Strength lambda of DC-ASGD: ``g + lambda g g (w - w_old)`` is applied instead of ``g``, with
    ``w_old`` the weights that ``g`` was computed with. 0: plain. The paper takes 0.04, or 2 with
    ``compensation_decay=0.95``."""
    compensation_decay: float | None = None
    """Divides lambda by the root of a running mean of squared gradients, of which each gradient
    leaves so much (DC-ASGD-a); None: a constant lambda."""
    pull_period: int = 1
    """Steps between two pulls. Weights grow older by it, but never older than the bound."""

    def __post_init__(self) -> None:
        bound, period = self.staleness_bound, self.pull_period
        is_bound = not isinstance(bound, bool) and (bound is None or bound >= 0)
        require(is_bound, "staleness_bound must be None or at least 0", bound)
        check_period(period, name="pull_period")
        if bound is not None and period > bound + 1:
            raise ConfigError(
                f"with pull_period={period} weights grow older than staleness_bound={bound} "
                f"allows; use a pull_period of at most {bound + 1}"
            )
        strength = self.delay_compensation
        require(0 <= strength < math.inf, "delay_compensation must not be negative", strength)
        if bound == 0 and self.delay_compensation:
            raise ConfigError(
                "delay_compensation has no effect with staleness_bound=0, under which no gradient "
                "is late; leave one of them out"
            )
        decay = self.compensation_decay
        if decay is not None and not (0 <= decay < 1 and self.delay_compensation > 0):
            raise ConfigError(
                "compensation_decay must be in [0, 1) and needs a positive delay_compensation; "
                f"received {decay} with delay_compensation={self.delay_compensation}"
            )

    @property
    def deterministic(self) -> bool:
        """True if all gradients are waited for; else it is a matter of time whose comes first."""
        return self.staleness_bound == 0

    @property
    def trains_apart(self) -> bool:
        return self.staleness_bound != 0

    @classmethod
    def examples(cls) -> tuple[AsyncSGD, ...]:
        return cls(), cls(staleness_bound=4)

    def why_not_divided(self, mesh: Mesh) -> str | None:
        return "each worker of a replica would take weights of another time"

    def pattern(self, size: ModelSize, world_size: int) -> Pattern:
        """See `SyncStrategy.pattern`: a push to all slices, and now and then a pull from them.

        Each of ``S`` ranks serves an ``S``-th, so each way carries ``(W - 1) / S`` of the bytes
        into a server, and ``(W - 1) / W`` out of every rank; the messages of a push start together.
        A push is answered before the pull is sent, so the link is used in one direction at a time.
        At the end of a round one more pull travels, and the optimizer's state.
        """
        ways = 1 + 1 / self.pull_period
        sent = ways * (world_size - 1) / world_size * size.gradient_bytes
        ranks_per_server = world_size / min(world_size, MOST_SERVERS)
        return Pattern(
            kind="messages",
            num_bytes=size.gradient_bytes,
            copies=1 + ranks_per_server,
            latency_rounds=2 * ways,
            exchanged_bytes=(1 + ranks_per_server) * sent,
            sent_bytes=sent,
            lead=math.inf if self.staleness_bound is None else self.staleness_bound,
        )

    def setup(self, *setup: *SetupArguments) -> AsyncSynchronizer:
        return AsyncSynchronizer(*setup, strategy=self)


class AsyncSynchronizer(Synchronizer):
    """See `AsyncSGD`.

    Servers begin with the first step, when a resumed run's state is known. When a round is closed
    all ranks have equal weights and the whole optimizer's state, so that their number may change.
    """

    trains_apart = True
    # Weights and clocks are equal when a round is closed.
    shared_state: ClassVar = ("mean_squares",)
    rank_state: ClassVar = ("share",)
    optimizer: ServedOptimizer

    def __init__(self, *setup: *SetupArguments, strategy: AsyncSGD) -> None:
        self.model, self._make_optimizer, self._comm = setup
        comm = self._comm
        self._parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = ServedOptimizer(self._make_optimizer(self._parameters))
        self._rules = _rules(strategy, comm)
        if not self._rules.is_bulk:
            check_learning_rates(self.optimizer)
        self._pull_period = strategy.pull_period if comm.world_size > 1 else 1
        self._share = BatchShare(comm, self._parameters[0].device)
        self._present_share = 0.0
        self._steps_since_closed = 0
        self._mean_squares: dict[int, Any] = {}
        self._exchange: SliceExchange | None = None

    @property
    def bytes_sent(self) -> int:
        return 0 if self._exchange is None else self._exchange.bytes_sent

    def zero_gradients(self) -> None:
        """See `Synchronizer.zero_gradients`; the first call is collective."""
        if self._exchange is None:
            state = {"optimizer": self.optimizer.served_state, "mean_squares": self._mean_squares}
            self._exchange = SliceExchange(
                self._parameters, self._make_optimizer, self._comm, self._rules, state
            )
        self._exchange.zero_gradients()

    def reduce_gradients(self, sums: torch.Tensor, divisor: float) -> Reduced:
        """See `Synchronizer.reduce_gradients`; collective in the first step only."""
        weight = sums[1].item()
        in_bulk = self._rules.is_bulk
        self._present_share = weight / divisor if in_bulk else self._share.of(weight, divisor)
        return Reduced(sums, divisor)

    def after_step(self, step: int) -> bool:
        """Push and pull. A round may end after any step."""
        assert self._exchange is not None
        noted = self.optimizer.take()
        push = None
        if noted is not None and (self._present_share > 0 or self._rules.is_bulk):
            push = Push(self._present_share, noted)
        self._exchange.step(push, is_pulling=(step + 1) % self._pull_period == 0)
        self._steps_since_closed += 1
        return True

    def close_round(self) -> None:
        if self._steps_since_closed == 0:
            return
        assert self._exchange is not None
        state = self._exchange.close_round()
        self.optimizer.served_state = state["optimizer"]
        self._mean_squares = state["mean_squares"]
        if not self._rules.is_bulk:
            self._share.close_round()
        self._steps_since_closed = 0

    def close(self) -> None:
        if self._exchange is not None:
            self._exchange.close()


def _rules(options: AsyncSGD, comm: Communicator) -> ServerRules:
    """A gang of one has nobody to be late for: it trains as if without a server."""
    is_bulk = options.staleness_bound == 0 or comm.world_size == 1
    lead = None
    if options.staleness_bound is not None:  # what is pulled must be fresh enough until the next
        lead = options.staleness_bound - (options.pull_period - 1)
    return ServerRules(
        world_size=comm.world_size,
        is_bulk=is_bulk,
        lead=lead,
        delay_compensation=0.0 if is_bulk else options.delay_compensation,
        compensation_decay=options.compensation_decay,
        timeout_seconds=comm.timeout_seconds,
    )
