"""The interface of a synchronization strategy to the training loop, the driver and `explain`.

A strategy is two objects, because one must travel to the executors and the other cannot:
`SyncStrategy` holds the options, `Synchronizer` is the strategy at work in one worker.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, TypeAlias

from sparkdl.config import TrainConfig
from sparkdl.errors import ConfigError
from sparkdl.mesh import Mesh
from sparkdl.storage.stateful import Stateful
from sparkdl.sync.exchange_pattern import ModelSize, Pattern

if TYPE_CHECKING:
    import torch
    from torch import nn

    from sparkdl.comm.communicator import Communicator
    from sparkdl.data.batches import Batch
    from sparkdl.data.plan import TrainPlan
    from sparkdl.sync.divided_state import DividedState

MakeOptimizer = Callable[[Iterable["nn.Parameter"]], "torch.optim.Optimizer"]
Autocast = Callable[[], AbstractContextManager[object]]
SetupArguments: TypeAlias = "tuple[nn.Module, MakeOptimizer, Communicator]"
"""Arguments of `SyncStrategy.setup`, and of every synchronizer that it makes."""


TAKES_FROZEN = "takes_frozen"
"""Attribute of a `MakeOptimizer` that is True if it wants frozen parameters too."""


def parameters_for(make_optimizer: MakeOptimizer, model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters for an optimizer: those that train, or also those that may come to."""
    takes_frozen = getattr(make_optimizer, TAKES_FROZEN, False)
    return [p for p in model.parameters() if p.requires_grad or takes_frozen]


@dataclass(frozen=True, kw_only=True)
class SyncStrategy(ABC):
    """The rule for agreement of replicas; options only: frozen, picklable, kept in checkpoints.

    Example of a strategy of your own (pass it as ``syncStrategy=EveryOther()``)::

        @dataclass(frozen=True, kw_only=True)
        class EveryOther(SyncStrategy):
            def setup(self, model, make_optimizer, comm):
                return EveryOtherSynchronizer(model, make_optimizer(model.parameters()), comm)

    docs/extending.md has it whole. What `explain` and the tests need to know of a strategy has
    defaults here, which the strategy's own file overrides.
    """

    prefers_rounds: ClassVar[bool] = False
    """True if ``executionMode="auto"`` means plain Spark stages rather than a gang."""

    def why_not_rounds(self) -> str | None:
        """Why this cannot run on plain Spark stages; None if it can."""
        return "it exchanges something at every step, for which all workers must run at once"

    def why_not_gang(self) -> str | None:
        """Why this cannot run in a gang; None if it can."""
        return None

    def why_not_divided(self, mesh: Mesh) -> str | None:
        """Why this cannot run between replicas that are divided along ``mesh``; None if it can.

        There `setup` gets a module of what lies on a rank, which computes nothing, and the ranks
        that have the same part. All ranks of a replica must decide alike.
        """
        return "it may look at whole weights, of which a worker has a part only"

    def hold_out(self, plan: TrainPlan) -> TrainPlan:
        """The plan with those training rows set aside that must not be trained on.

        Called on the driver once the rows are known. A shard whose ``num_rows`` is lowered has its
        last rows set aside; they are its validation rows then.

        Raises:
            DataError: there are too few rows.
        """
        return plan

    @property
    def deterministic(self) -> bool:
        """True if the same run gives the same bits; strategies driven by time say False."""
        return True

    @property
    def is_elastic(self) -> bool:
        """True if the weights follow from each step's united batch, whoever trains on what part.

        Then there may be fewer workers than shards, and a run may go on with another number of
        workers in the middle of an epoch. False where a worker keeps something of its own.
        """
        return False

    @property
    def trains_apart(self) -> bool:
        """True if replicas ever take steps that do not wait for those of the others."""
        return False

    def check(self, config: TrainConfig, world_size: int) -> None:  # noqa: B027  # may stay
        """Refuse, on the driver and before any job, what makes no sense together.

        Raises:
            ConfigError: with the reason.
        """

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:  # noqa: B027  # may stay
        """Refuse, on the driver and before any job, an optimizer that does not fit.

        Raises:
            ConfigError: with the reason.
        """

    @property
    def work_shares(self) -> Mapping[str, float] | None:
        """Relative speeds of workers by patterns of their hosts' names; None: all alike."""
        return None

    @classmethod
    def examples(cls) -> tuple[SyncStrategy, ...]:
        """Forms that stand for the strategy: `explain` and the benchmarks compare them."""
        return (cls(),)

    def pattern(self, size: ModelSize, world_size: int) -> Pattern:
        """Return what the workers of a gang exchange; `explain` predicts bytes and times from it.

        By default a sum of all gradients at every step; each rank is on a node of its own.
        """
        return Pattern(num_bytes=size.gradient_bytes, copies=3)

    def stages_pattern(self, size: ModelSize) -> Pattern:
        """The same of rounds on plain Spark stages; by default all steps are one round."""
        return Pattern(kind="stages", num_bytes=size.checkpoint_bytes, period=math.inf)

    @abstractmethod
    def setup(
        self, model: nn.Module, make_optimizer: MakeOptimizer, comm: Communicator
    ) -> Synchronizer:
        """Build the runtime half on one worker. Every rank calls it, with equal weights."""


class Reduced(NamedTuple):
    """The result of a step's exchange; the gradients themselves are in the parameters."""

    sums: torch.Tensor
    """Numbers that add up over samples, over all samples that the gradients are of."""
    divisor: float
    """Number by which the losses behind these gradients were divided; 0 if no gradients have come
    yet, so that the optimizer must be left out."""
    ranks: tuple[int, ...] | None = None
    """Ranks whose samples these are, where a rank's may be left out; None: everyone's."""


class Pipelined(Protocol):
    """A model that is computed in stages by several ranks, of which this rank has some.

    The methods are collective along the ranks that compute the stages of the same rows.
    """

    comm: Communicator
    """Ranks that compute the stages of the same rows, in the order of the stages."""
    skeleton: nn.Module
    """A copy of the whole module, whose parameters have no values."""

    @property
    def is_last(self) -> bool:
        """True if this rank has what the model returns."""

    def train(
        self, batch: Batch, make_loss: Callable[[Any, Batch], torch.Tensor], autocast: Autocast
    ) -> None:
        """Forward and backward passes of all rows of ``batch``, which all of these ranks have.

        On the last stage ``make_loss`` gets what the model returns for some of the rows, and these,
        and gives what is differentiated. ``autocast`` makes the context of forward passes.
        """

    def look(self, batch: Batch, see: Callable[[Any, Batch], None], autocast: Autocast) -> None:
        """Forward passes alone; ``see`` gets outputs and rows on the last stage."""

    def from_last(self, values: dict[str, Any] | None) -> dict[str, Any]:
        """The JSON values that the rank with the last stage gives, on all of these ranks."""

    def of_all_ranks(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """A state dict of the whole module; what other ranks have is on the meta device."""

    def broadcast_by(
        self, state: Mapping[str, torch.Tensor]
    ) -> Callable[[torch.Tensor], torch.Tensor]:
        """A function that gives the whole of each tensor of ``state`` on the CPU."""


class Synchronizer(Stateful, ABC):
    """The strategy at work in one worker; owns model and optimizer.

    The loop calls, per step: ``zero_gradients``, forward and backward of each micro-batch (all
    but the last inside ``no_sync()``; ``start_sums`` between the last two), ``reduce_gradients``,
    the optimizer, ``after_step``.
    Gradients hold *sums* over the local batch of ``loss / divisor``, so that their sum over ranks
    is the gradient of the weighted mean over the global batch. A rank whose batch is empty runs no
    forward and no backward pass and does not call ``start_sums``, unless modules talk to those of
    other ranks (``syncBatchNorm``), but makes all the other calls; it leaves out the optimizer if
    replicas train apart.

    Before it evaluates or writes a checkpoint the loop calls ``close_round``. From then until the
    next ``zero_gradients`` the model holds the weights that all replicas agree on; a strategy whose
    replicas keep weights of their own puts them back there.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    trains_apart: bool = False
    """True if gradients are those of the rank's own batch only, in the present step."""
    keeps_optimizer: bool = False
    """True if each rank's optimizer has a state of its own when a round is closed."""
    is_late: bool = False
    """True if the present step was concluded without this rank, whose batch is of no use then."""
    buffers_agree: bool = False
    """True if `close_round` makes buffers equal as well; otherwise the loop does, each epoch."""
    divided: DividedState | None = None
    """The state of this rank where parameters are divided among ranks; None: it has them whole."""
    pipeline: Pipelined | None = None
    """Computes the model in stages, of which this rank has some; None: the rank computes it all."""

    def trained_parameters(self) -> list[nn.Parameter]:
        """Return the parameters that the optimizer changes on this rank."""
        return [p for p in self.model.parameters() if p.requires_grad]

    def gradient_norm(self, parameters: Iterable[nn.Parameter]) -> torch.Tensor:
        """The norm of the gradients of all that trains, ``()``; collective where it is divided.

        ``parameters`` are `trained_parameters`.
        """
        import torch

        from sparkdl.sync.sparse_gradients import values_of

        gradients = [p.grad for p in parameters if p.grad is not None]
        return torch.nn.utils.get_total_norm(list(values_of(gradients)))

    def follow_freezing(self) -> None:
        """Go on with other parameters that train: someone has set ``requires_grad`` of some.

        Called between steps, on all ranks; nothing changes if they are the same as before.

        Raises:
            ConfigError: this strategy cannot.
        """
        raise ConfigError(
            "requires_grad of parameters was changed while training runs, which this strategy does "
            "not follow; use AllReduce or ParameterAveraging without options, or freeze and "
            "unfreeze between fits, of which the second has the first one's model as initialWeights"
        )

    def callbacks_act(self) -> AbstractContextManager[None]:
        """Context in which callbacks have the model; ConfigError if they leave what is not seen."""
        return nullcontext()

    def zero_gradients(self) -> None:
        """Forget the gradients of the last step; called before the first forward pass of one."""
        for parameter in self._all_parameters:
            parameter.grad = None

    @cached_property
    def _all_parameters(self) -> list[nn.Parameter]:
        """The parameters of the model, which take as long as a small step to be looked up."""
        return list(self.model.parameters())

    def mark_used(self, parameters: Iterable[nn.Parameter]) -> None:
        """Note that parameters were used in this step where no hook of theirs can have run."""

    def no_sync(self) -> AbstractContextManager[None]:
        """Context in which backward passes add to the local gradients only; here they always do."""
        return nullcontext()

    def start_sums(self, sums: torch.Tensor) -> None:
        """Offer what `reduce_gradients` will get, before the last backward pass of the step.

        A strategy may start to exchange it, so that nobody waits for it afterwards; ``sums`` is
        then its own.
        """

    def early_sums(self, sums: torch.Tensor, *, waits: bool) -> torch.Tensor | None:
        """Predict what `reduce_gradients` gives for ``sums``, before a step's last backward pass.

        All ranks call it, also without samples, or none does. None: it is known afterwards only, or
        it takes a wait for the other ranks, and ``waits`` is False.
        """
        return sums if self.trains_apart else None

    @abstractmethod
    def reduce_gradients(self, sums: torch.Tensor, divisor: float) -> Reduced:
        """Finish the exchange of gradients after the last backward pass of a step.

        Args:
            sums: a 1-D float64 tensor of numbers of this step that add up over samples: the
                weighted losses and the weights.
            divisor: what the losses of this step were divided by; equal on all ranks.

        Returns:
            ``sums`` over the ranks that share a gradient (all, for all-reduce; this one, where
            replicas train apart), with the divisor; those of an earlier step where the gradients
            are of an earlier step. All ranks must call.
        """

    @abstractmethod
    def after_step(self, step: int) -> bool:
        """Called after optimizer step number ``step`` (from 0).

        Returns:
            Whether `close_round` may be called now without changing the course of training;
            equal on all ranks.
        """

    @abstractmethod
    def close_round(self) -> None:
        """Bring the replicas to agreement now. Collective; leaves a checkpointable state."""

    def begin(self) -> None:
        """Begin anew where the model is, which has got other weights than at ``setup``.

        Called in place of ``load_state_dict`` where what was remembered lies in parts that do not
        fit this rank.
        """

    @property
    def bytes_sent(self) -> int:
        """Bytes this rank has sent for the strategy's sake so far."""
        return 0

    def close(self) -> None:
        """Release hooks, buffers and gradients; called once, also after a failure."""
        for parameter in self._all_parameters:
            parameter.grad = None
