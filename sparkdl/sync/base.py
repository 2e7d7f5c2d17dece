"""What must a synchronization strategy offer to the training loop?

A strategy is two objects, because one must travel to the executors and the other cannot:
`SyncStrategy` holds the options, `Synchronizer` is the strategy at work in one worker.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn

    from sparkdl.comm import Communicator

MakeOptimizer = Callable[[Iterable["nn.Parameter"]], "torch.optim.Optimizer"]


@dataclass(frozen=True, kw_only=True)
class SyncStrategy(ABC):
    """How replicas are kept in agreement. Options only: frozen, picklable, kept in checkpoints.

    Example of a strategy of your own (pass it as ``syncStrategy=EveryOther()``)::

        @dataclass(frozen=True, kw_only=True)
        class EveryOther(SyncStrategy):
            def setup(self, model, make_optimizer, comm):
                return EveryOtherSynchronizer(model, make_optimizer(model.parameters()), comm)
    """

    @property
    def deterministic(self) -> bool:
        """Whether the same run gives the same bits; strategies driven by time say False."""
        return True

    @abstractmethod
    def setup(
        self, model: nn.Module, make_optimizer: MakeOptimizer, comm: Communicator
    ) -> Synchronizer:
        """Build the runtime half on one worker. Every rank calls it, with equal weights."""


class Synchronizer(ABC):
    """The strategy at work in one worker; owns model and optimizer.

    The loop calls, per step: ``zero_gradients``, forward and backward of each micro-batch (all
    but the last inside ``no_sync()``; ``start_sums`` between the last two), ``reduce_gradients``,
    the optimizer, ``after_step``.
    Gradients hold *sums* over the local batch of ``loss / global_batch_rows``, so that their sum
    over ranks is the gradient of the weighted mean over the global batch. A rank whose batch is
    empty runs no forward and no backward pass and does not call ``start_sums``, but makes all the
    other calls.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer

    def zero_gradients(self) -> None:
        """Forget the gradients of the last step; called before the first forward pass of one."""
        self.optimizer.zero_grad()

    @abstractmethod
    def no_sync(self) -> AbstractContextManager[None]:
        """Context in which backward passes add to the local gradients only."""

    def start_sums(self, sums: torch.Tensor) -> None:  # noqa: B027  # may stay
        """Offer what `reduce_gradients` will get, before the last backward pass of the step.

        A strategy may start to exchange it, so that nobody waits for it afterwards; ``sums`` is
        then its own.
        """

    @abstractmethod
    def reduce_gradients(self, sums: torch.Tensor) -> torch.Tensor:
        """Finish the exchange of gradients after the last backward pass of a step.

        Args:
            sums: a 1-D float64 tensor of numbers of this step that add up over samples.

        Returns:
            ``sums`` summed over the ranks that share a gradient (all, for all-reduce; this one,
            for strategies that train apart between rounds). All ranks must call.
        """

    @abstractmethod
    def after_step(self, step: int) -> bool:
        """Called after optimizer step number ``step`` (from 0). True: the round is closed."""

    @abstractmethod
    def close_round(self) -> None:
        """Bring the replicas to agreement now. Collective; leaves a checkpointable state."""

    def state_dict(self) -> dict[str, Any]:
        """What the strategy must remember, equal on all ranks (clocks, outer momentum)."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: B027  # may stay
        """Restore what `state_dict` gave."""

    def rank_state_dict(self) -> dict[str, Any]:
        """What only this rank must remember (residuals)."""
        return {}

    def load_rank_state_dict(self, state: dict[str, Any]) -> None:  # noqa: B027  # may stay
        """Restore what `rank_state_dict` gave."""

    def close(self) -> None:  # noqa: B027  # may stay
        """Release hooks and buffers; called once, also after a failure."""
