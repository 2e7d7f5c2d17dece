"""A strategy at work along the axis ``data`` of a mesh, between replicas that are divided."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from sparkdl.comm.communicator import counting_anew
from sparkdl.sync.divided.dividing import divide
from sparkdl.sync.divided.layout import cut_parameters, divided_layers
from sparkdl.sync.divided.local_view import LocalGradients, local_view
from sparkdl.sync.divided.mesh_ranks import MeshRanks
from sparkdl.sync.divided_state import DividedState
from sparkdl.sync.regions import Region
from sparkdl.sync.strategy import MakeOptimizer, Reduced, Synchronizer, SyncStrategy

Fill = Callable[[nn.Module, Mapping[str, Region]], None]
"""Gets a divided module, and which part of each parameter is here."""


class MeshSynchronizer(Synchronizer):
    """Trains a part of a replica; the strategy exchanges it with the same parts of others.

    Torch gathers and divides layers (FSDP2), and computes them together (DTensor). The optimizer
    and the strategy work on a view of what lies on this rank, of plain tensors: an optimizer must
    treat each number by itself, see `check_mesh`.
    """

    def __init__(
        self,
        model: nn.Module,
        make_optimizer: MakeOptimizer,
        *,
        ranks: MeshRanks,
        strategy: SyncStrategy,
        compute_dtype: torch.dtype | None,
        watch: Callable[[nn.Module], Callable[[], None]],
        fill: Fill | None = None,
    ) -> None:
        """Divide ``model`` in place; collective.

        Args:
            model: on the device where it computes, with equal weights on all ranks.
            make_optimizer: of the parameters on this rank.
            ranks: the mesh.
            strategy: at work between replicas.
            compute_dtype: see `divide`.
            watch: gets the whole model where layers are divided by a layout; what it returns is
                called once they are, and raises if the model computes something else.
            fill: gives the model its weights if its parameters are on the meta device.
        """
        cut = cut_parameters(divided_layers(ranks.mesh, model), model)
        compare = watch(model) if cut else None
        regions = divide(model, ranks, compute_dtype)
        if fill is not None:
            fill(model, regions)
        if compare is not None:
            compare()
        self.model = model
        self._view = local_view(model)
        self._inner = strategy.setup(self._view, make_optimizer, ranks.replicas)
        self.optimizer = self._inner.optimizer
        self.divided = DividedState(
            self._view,
            self.optimizer,
            regions,
            is_kept=ranks.replicas.rank == 0,
            has_own_rows=ranks.tensors.rank == 0,
        )
        self._gradients = LocalGradients(model, self._view)
        self._shards = counting_anew(ranks.shards)
        self._tensors = counting_anew(ranks.tensors)
        named = dict(self._view.named_parameters())
        self._cut_along_tensor = {id(named[name]) for name in cut}
        self._device = next(iter(named.values())).device

    @property
    def bytes_sent(self) -> int:
        return self._inner.bytes_sent + self._shards.bytes_sent + self._tensors.bytes_sent

    def trained_parameters(self) -> list[nn.Parameter]:
        return self._inner.trained_parameters()

    def zero_gradients(self) -> None:
        self._inner.zero_gradients()
        self._gradients.attach()

    def no_sync(self) -> AbstractContextManager[None]:
        """See `Synchronizer.no_sync`.

        Gathered layers give their gradients back at once: no rank has room for those of all layers.
        """
        return self._inner.no_sync()

    def reduce_gradients(self, sums: torch.Tensor, divisor: float) -> Reduced:
        self._gradients.collect()
        self._shards.all_reduce(sums)
        return self._inner.reduce_gradients(sums, divisor)

    def gradient_norm(self, parameters: Iterable[nn.Parameter]) -> torch.Tensor:
        """See `Synchronizer.gradient_norm`: what is on several ranks counts once."""
        squares = torch.zeros(2, dtype=torch.float64, device=self._device)
        for parameter in parameters:
            if parameter.grad is not None:
                place = int(id(parameter) in self._cut_along_tensor)
                squares[place] += torch.linalg.vector_norm(parameter.grad).double() ** 2
        self._shards.all_reduce(squares)
        cut = squares[1:].clone()
        self._tensors.all_reduce(cut)
        return (squares[0] + cut[0]).sqrt()

    def after_step(self, step: int) -> bool:
        return self._inner.after_step(step)

    def close_round(self) -> None:
        self._inner.close_round()

    def state_dict(self) -> dict[str, Any]:
        return self._inner.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._inner.load_state_dict(state)

    def rank_state_dict(self) -> dict[str, Any]:
        return self._inner.rank_state_dict()

    def load_rank_state_dict(self, state: dict[str, Any]) -> None:
        self._inner.load_rank_state_dict(state)

    def close(self) -> None:
        self._gradients.release()
        self._inner.close()
