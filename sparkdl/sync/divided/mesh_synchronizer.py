"""A strategy at work along the axis ``data`` of a mesh, between replicas that are divided."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from sparkdl.comm.communicator import counting_anew
from sparkdl.data.collate import Arguments
from sparkdl.errors import ConfigError
from sparkdl.sync.divided.callback_changes import own_memory_kept
from sparkdl.sync.divided.channels import share_statistics
from sparkdl.sync.divided.dividing import divide
from sparkdl.sync.divided.exchanges import Exchanges
from sparkdl.sync.divided.layout import cut_parameters, divided_layers
from sparkdl.sync.divided.local_view import LocalGradients, local_view
from sparkdl.sync.divided.mesh_ranks import MeshRanks
from sparkdl.sync.divided.pipeline import Pipeline
from sparkdl.sync.divided_state import DividedState
from sparkdl.sync.regions import Region
from sparkdl.sync.strategy import (
    TAKES_FROZEN,
    MakeOptimizer,
    Reduced,
    Synchronizer,
    SyncStrategy,
)

Fill = Callable[[nn.Module, Mapping[str, Region]], None]
"""Gets a divided module, and which part of each parameter is here."""


class MeshSynchronizer(Synchronizer):
    """Trains a part of a replica; the strategy exchanges it with the same parts of others.

    Torch gathers and divides layers (FSDP2), and computes them together (DTensor). The optimizer
    and the strategy work on a view of what lies on this rank, of plain tensors: an optimizer must
    treat each number by itself, see `check_mesh`.
    """

    pipeline: Pipeline | None = None

    def __init__(
        self,
        model: nn.Module,
        make_optimizer: MakeOptimizer,
        *,
        ranks: MeshRanks,
        strategy: SyncStrategy,
        compute_dtype: torch.dtype | None,
        check: Callable[[nn.Module, Mapping[str, str], MeshRanks, Pipeline | None], None],
        example: Arguments | None = None,
        fill: Fill | None = None,
    ) -> None:
        """Divide ``model`` in place; collective.

        Args:
            model: on the device where it computes, with equal weights on all ranks; or with
                parameters on the meta device.
            make_optimizer: of the parameters on this rank.
            ranks: the mesh.
            strategy: at work between replicas.
            compute_dtype: see `divide`.
            check: gets the divided model where a layout divides layers, with these, the mesh and
                the pipeline; raises if the model computes something else.
            example: inputs of some rows, where the model computes; a pipeline needs them.
            fill: gives the model its weights if its parameters are on the meta device.
        """
        self._mesh = ranks.mesh
        layers = divided_layers(ranks.mesh, model)
        cut = cut_parameters(layers, model)
        is_staged = ranks.mesh.pipeline > 1
        of_own = OfOwn(make_optimizer, list(model.named_parameters()), thaws=not is_staged)
        if is_staged:
            assert example is not None
            self.pipeline = Pipeline(model, ranks.mesh, ranks.stages, example)
            has = self.pipeline.has
            layers = {name: how for name, how in layers.items() if has(f"{name}.weight")}
        regions = divide(model, ranks, compute_dtype, self.pipeline)
        self._exchanges = None
        if ranks.shard_mesh is not None:  # before the check computes
            root = model if self.pipeline is None else self.pipeline.roots[0]
            device = torch.device(ranks.shard_mesh.device_type)
            self._exchanges = Exchanges(root, ranks.shards, device)
        if fill is not None:
            fill(model, regions)
        if layers:
            check(model, layers, ranks, self.pipeline)
        self.model = model
        self._view = local_view(model)
        of_own.names = [name for name, _ in self._view.named_parameters()]
        self._inner = strategy.setup(self._view, of_own, ranks.replicas)
        self.optimizer = self._inner.optimizer
        has_rows = self.pipeline is None or self.pipeline.is_last
        self.divided = DividedState(
            self._view,
            self.optimizer,
            regions,
            is_kept=ranks.replicas.rank == 0,
            has_own_rows=ranks.tensors.rank == 0 and has_rows,
            stepped=of_own.stepped if is_staged else None,
        )
        self._shards = counting_anew(ranks.shards)
        self._tensors = counting_anew(ranks.tensors)
        named = dict(self._view.named_parameters())
        self._cut_along_tensor = {id(named[name]) for name in cut if name in named}
        self._by_channels = [
            model.get_submodule(name) for name, how in layers.items() if how == "channels"
        ]
        self._device = next(iter(named.values())).device
        used = None if self._exchanges is None else self._exchanges.used
        self._gradients = LocalGradients(model, self._view, used)
        self.keeps_optimizer = self._inner.keeps_optimizer
        self._note_agreement()

    @property
    def bytes_sent(self) -> int:
        sent = self._inner.bytes_sent + self._shards.bytes_sent + self._tensors.bytes_sent
        return sent + (0 if self.pipeline is None else self.pipeline.comm.bytes_sent)

    def trained_parameters(self) -> list[nn.Parameter]:
        return self._inner.trained_parameters()

    def callbacks_act(self) -> AbstractContextManager[None]:
        """See `Synchronizer.callbacks_act`."""
        if not self._mesh.is_divided:
            return nullcontext()
        return own_memory_kept(self.model, f"parallelism=Mesh({self._mesh})")

    def zero_gradients(self) -> None:
        self._inner.zero_gradients()
        self._gradients.attach()

    def no_sync(self) -> AbstractContextManager[None]:
        """See `Synchronizer.no_sync`.

        Gathered layers give their gradients back at once: no rank has room for those of all layers.
        """
        return self._inner.no_sync()

    def start_sums(self, sums: torch.Tensor) -> None:
        if self._shards.world_size == 1:  # else they are summed over these first
            self._inner.start_sums(sums)

    def early_sums(self, sums: torch.Tensor, *, waits: bool) -> torch.Tensor | None:
        if self._shards.world_size > 1:
            if not waits:
                return None
            self._shards.all_reduce(sums)
        return self._inner.early_sums(sums, waits=waits)

    def reduce_gradients(self, sums: torch.Tensor, divisor: float) -> Reduced:
        marks = self._gradients.marks()
        if self._exchanges is not None:
            self._exchanges.end_step()
            both = torch.cat([sums, torch.tensor(marks, dtype=sums.dtype, device=sums.device)])
            self._shards.all_reduce(both)
            sums = both[: len(sums)]
            if not all(marks):  # else nobody need wait for those of the others
                marks = (both[len(sums) :] > 0).tolist()
        self._inner.mark_used(self._gradients.collect(marks))
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
        total = squares[0] + cut[0]
        if self.pipeline is not None:
            self.pipeline.comm.all_reduce(total)
        return total.sqrt()

    def after_step(self, step: int) -> bool:
        is_closed = self._inner.after_step(step)
        self._note_agreement()
        return is_closed

    def close_round(self) -> None:
        self._inner.close_round()
        share_statistics(self._by_channels, self._tensors)
        if self.pipeline is not None:
            self.pipeline.share_buffers()
        self._note_agreement()

    def state_dict(self) -> dict[str, Any]:
        """Nothing: what the strategy remembers is of this rank's part, see `rank_state_dict`."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.begin()

    def begin(self) -> None:
        self._inner.begin()
        self._note_agreement()

    def rank_state_dict(self) -> dict[str, Any]:
        return {"shared": self._inner.state_dict(), "own": self._inner.rank_state_dict()}

    def load_rank_state_dict(self, state: dict[str, Any]) -> None:
        self._inner.load_state_dict(state["shared"])
        self._inner.load_rank_state_dict(state["own"])
        self._note_agreement()

    def _note_agreement(self) -> None:
        self.trains_apart = self._inner.trains_apart
        # the strategy does not know those of the ranks along shard
        self.buffers_agree = self._inner.buffers_agree and self._shards.world_size == 1

    def close(self) -> None:
        self._gradients.release()
        self._inner.close()


class OfOwn:
    """Makes the optimizer of what of a model's parameters is on this rank.

    Groups are those of all parameters with their whole shapes: a function of the user's, or a
    pattern of names, may tell parameters by their sizes, or mean some that are elsewhere. All have
    the attributes that the user has given to them.
    """

    def __init__(
        self, make: MakeOptimizer, parameters: Sequence[tuple[str, nn.Parameter]], *, thaws: bool
    ) -> None:
        """Keep ``make``, for the whole model's ``parameters``, whose values are not looked at.

        ``thaws``: ``make`` gets those that are frozen too if it wants them.
        """
        self._make = make
        takes_frozen = thaws and getattr(make, TAKES_FROZEN, False)
        setattr(self, TAKES_FROZEN, takes_frozen)
        self._all = {
            name: nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad)
            for name, p in parameters
            if p.requires_grad or takes_frozen
        }
        self._attributes = {name: dict(vars(parameter)) for name, parameter in parameters}
        for name, whole in self._all.items():
            vars(whole).update(self._attributes[name])
        self.names: Sequence[str] = ()
        """Names of the parameters on this rank."""
        self.stepped: list[str] = []
        """Names of all parameters by the numbers that they would have in an optimizer of all."""

    def __call__(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        here = [name for name in self.names if name in self._all]
        own = dict(zip(here, parameters, strict=True))
        every = {
            name: own[name] if name in own else nn.Parameter(torch.zeros((1,) * whole.dim()))
            for name, whole in self._all.items()
        }
        for name, parameter in every.items():
            vars(parameter).update(self._attributes[name])
        optimizer = self._make(every.values())
        groups = optimizer.param_groups
        whole = whole_groups(self._make, self._all)
        names = {id(parameter): name for name, parameter in every.items()}
        if whole != [[names[id(p)] for p in group["params"]] for group in groups]:
            options = self._make(self._all.values()).param_groups
            of_device = {key: value for key, value in groups[0].items() if key in _OF_DEVICE}
            members = [[every[name] for name in some] for some in whole]
            groups[:] = [
                {**group, **of_device, "params": some}
                for group, some in zip(options, members, strict=True)
            ]
        self.stepped = [name for some in whole for name in some]
        for group in groups:
            group["params"] = [p for p in group["params"] if names[id(p)] in own]
        for name in every.keys() - own.keys():
            optimizer.state.pop(every[name], None)  # Adagrad begins with one
        return optimizer


_OF_DEVICE = ("fused", "foreach", "capturable")
"""Options that torch chooses by the device of parameters."""


def whole_groups(make: MakeOptimizer, parameters: Mapping[str, nn.Parameter]) -> list[list[str]]:
    """The names of the parameters that ``make`` puts into each group, of whole ones.

    ``parameters`` are on the meta device.

    Raises:
        ConfigError: ``make`` looks at their numbers, of which no rank of a mesh has all.
    """
    try:
        groups = make(parameters.values()).param_groups
    except ConfigError:
        raise
    except (NotImplementedError, RuntimeError) as error:
        raise ConfigError(
            "Mesh: the function that makes the optimizer looks at the numbers of parameters, of "
            f"which a worker has a part only: {error}; let it tell them by their shapes or order"
        ) from error
    names = {id(parameter): name for name, parameter in parameters.items()}
    return [[names[id(p)] for p in group["params"]] for group in groups]
