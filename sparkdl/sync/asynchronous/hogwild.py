"""Hogwild: the ranks of a node train on one set of weights in shared memory, without locks.

Recht et al., "Hogwild!: A Lock-Free Approach to Parallelizing Stochastic Gradient Descent", NIPS
2011: updates may overwrite each other, which costs little where they are small or touch different
weights. Between nodes weights are averaged now and then, as H2O's Deep Learning does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from sparkdl.comm.communicator import Communicator, counting_anew
from sparkdl.comm.topology.hierarchical import groups_of
from sparkdl.comm.topology.shared_memory import NoSharedMemory, map_together
from sparkdl.config import TrainConfig
from sparkdl.errors import ClusterError, ConfigError
from sparkdl.mesh import Mesh
from sparkdl.sync.apart import ApartSynchronizer
from sparkdl.sync.asynchronous.batch_share import BatchShare
from sparkdl.sync.asynchronous.parameter_slices import check_learning_rates
from sparkdl.sync.averaging.mean import MeanOfReplicas
from sparkdl.sync.averaging.period import check_period
from sparkdl.sync.exchange_pattern import ModelSize, Pattern
from sparkdl.sync.strategy import Reduced, SetupArguments, SyncStrategy

_LINE_BYTES = 64
"""Parameters begin at multiples of it, as in memory that torch takes by itself."""


@dataclass(frozen=True, kw_only=True)
class Hogwild(SyncStrategy):
    """The ranks of a node step one shared set of weights, each with an optimizer of its own.

    Nobody waits: a gradient may be of weights that others have changed since. A rank steps at the
    learning rate times its share of the node's batch, so that the ranks of a node together go as
    far as one synchronous step would. The paper steps at the full rate: multiply yours by the
    number of ranks of a node to do as it does. On CPUs of Linux only.
    """

    averaging_period: int = 16
    """Steps after which nodes take the mean of their weights, each counting by its samples. On one
    node there is nothing to average."""

    def __post_init__(self) -> None:
        check_period(self.averaging_period)

    deterministic = False  # whose update comes first is a matter of time
    trains_apart = True

    def why_not_rounds(self) -> str | None:
        return "the workers of a node share memory, for which they must run at once"

    def check(self, config: TrainConfig, world_size: int) -> None:
        if config.device == "cuda":
            raise ConfigError(
                "Hogwild shares weights in the CPU's memory; use device='cpu' or another strategy"
            )

    def why_not_divided(self, mesh: Mesh) -> str | None:
        return "the workers of a node would share the weights of which each has a part"

    def pattern(self, size: ModelSize, world_size: int) -> Pattern:
        """See `SyncStrategy.pattern`: a sum over machines, along a ring; none inside one."""
        return Pattern(
            num_bytes=size.gradient_bytes,
            period=self.averaging_period,
            copies=3,
            between_nodes=True,
        )

    def setup(self, *setup: *SetupArguments) -> HogwildSynchronizer:
        return HogwildSynchronizer(*setup, period=self.averaging_period)


class HogwildSynchronizer(ApartSynchronizer):
    """See `Hogwild`.

    While a round is closed each rank has a copy of the weights for itself, which nobody changes.
    """

    keeps_optimizer = True
    rank_state: ClassVar = ("share",)

    def __init__(self, *setup: *SetupArguments, period: int) -> None:
        super().__init__(*setup)
        for parameter in self.parameters:
            if parameter.device.type != "cpu":
                raise ConfigError(
                    f"Hogwild shares weights in the CPU's memory, and the module is on "
                    f"{parameter.device}; use device='cpu' or another strategy"
                )
        check_learning_rates(self.optimizer)
        self._period = period
        self._own = [parameter.data for parameter in self.parameters]
        comm = setup[2]
        inside, between = groups_of(comm.nodes)
        self._num_nodes = len(inside)
        self._local = comm.split(inside)
        self._across: Communicator | None = None
        if self._num_nodes > 1:
            across = comm.split(between)
            self._across = counting_anew(across) if self._local.rank == 0 else None
        self._shared = self._own
        if any(len(group) > 1 for group in inside):
            self._shared = _share(self.parameters, self._local, comm)
        self._is_closed = True
        self._share = BatchShare(self._local, torch.device("cpu"))
        self._present_share = 1.0
        self._rates: list[Any] = []
        self._hooks = [
            self.optimizer.register_step_pre_hook(self._take_share),
            self.optimizer.register_step_post_hook(self._give_share_back),
        ]

    @property
    def bytes_sent(self) -> int:
        return 0 if self._across is None else self._across.bytes_sent

    def zero_gradients(self) -> None:
        """See `Synchronizer.zero_gradients`; collective in the node where a round begins."""
        if self._is_closed:
            self._open_round()
        super().zero_gradients()

    def reduce_gradients(self, sums: torch.Tensor, divisor: float) -> Reduced:
        self._present_share = self._share.of(sums[1].item(), divisor)
        return super().reduce_gradients(sums, divisor)

    def after_step(self, step: int) -> bool:
        """See `Synchronizer.after_step`; on one node a round may end after any step."""
        self.round_steps += 1
        if self._num_nodes > 1 and self.round_steps == self._period:
            self._average()
            super().close_round()
        return self._num_nodes == 1 or self.round_steps == 0

    def close_round(self) -> None:
        if self._is_closed:
            return
        if self._num_nodes > 1 and self.round_steps > 0:
            self._average()
        self._local.barrier()  # from here on nobody steps
        with torch.no_grad():
            torch._foreach_copy_(self._own, self._shared)
        self._use(self._own)
        self._share.close_round()
        super().close_round()
        self._is_closed = True

    def close(self) -> None:
        if not self._is_closed:
            torch._foreach_copy_(self._own, self._shared)
            self._use(self._own)
        self._shared = self._own
        for hook in self._hooks:
            hook.remove()
        super().close()

    def _open_round(self) -> None:
        """Train on the shared weights from here on; the node's first rank says what they are."""
        self._local.barrier()  # all have taken what the last round ended with
        if self._local.rank == 0:
            with torch.no_grad():
                torch._foreach_copy_(self._shared, self._own)
        self._local.barrier()
        self._use(self._shared)
        self._is_closed = False

    def _average(self) -> None:
        """Take the mean over nodes. Collective; the ranks of a node stand still meanwhile."""
        weight = self.round_sums[1:].clone()
        self._local.all_reduce(weight)
        if self._across is not None:
            mean = MeanOfReplicas(self.model, self.optimizer, self._across)
            shares = mean.shares(weight.item())
            if any(shares):
                mean.tensors(self.parameters, shares)
        self._local.barrier()

    def _use(self, tensors: Sequence[torch.Tensor]) -> None:
        for parameter, tensor in zip(self.parameters, tensors, strict=True):
            parameter.data = tensor

    def _take_share(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._rates = [group["lr"] for group in optimizer.param_groups]
        if self._present_share != 1:
            for group in optimizer.param_groups:
                group["lr"] = group["lr"] * self._present_share

    def _give_share_back(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group, rate in zip(optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate


def _share(
    parameters: Sequence[nn.Parameter], local: Communicator, everyone: Communicator
) -> list[torch.Tensor]:
    """Tensors like ``parameters`` that the ranks of the node share, or ClusterError. Collective."""
    starts = [0]
    for parameter in parameters:
        starts.append(starts[-1] + -(-parameter.nbytes // _LINE_BYTES) * _LINE_BYTES)
    try:
        file = map_together(local, max(starts[-1], 1), everyone)
    except NoSharedMemory as error:
        raise ClusterError(
            f"Hogwild needs memory that the workers of a node share, and there is none ({error}); "
            "run the executors of a node in one container, or use another strategy, such as "
            "AsyncSGD"
        ) from error
    file.close()
    memory = torch.frombuffer(file.buffer, dtype=torch.uint8)
    return [
        memory[start : start + parameter.nbytes].view(parameter.dtype).view(parameter.shape)
        for start, parameter in zip(starts[:-1], parameters, strict=True)
    ]
