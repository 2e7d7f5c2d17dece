"""Stacks of layers between which values are divided along their second dimension, the sequence.

After Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022:
what lies between layers by rows and by columns is no longer whole on each worker of ``tensor``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from sparkdl.errors import ConfigError, did_you_mean
from sparkdl.mesh import Mesh
from sparkdl.runtime.name_patterns import some_of, spread

SEQUENCE = 1
"""The dimension that is divided."""
_NORMS = (nn.LayerNorm, nn.RMSNorm)


@dataclass(frozen=True, kw_only=True)
class Stack:
    """An `nn.ModuleList` or `nn.Sequential`, by the names of layers."""

    name: str
    members: tuple[str, ...]
    columns: tuple[str, ...]
    """Layers by columns within, which compute with the whole sequence."""
    norms: tuple[str, ...]
    """Layers that compute with a part of it, and have whole parameters."""

    def has(self, layer: str) -> bool:
        """True of what is within."""
        return layer.startswith(f"{self.name}.")


def stacks(mesh: Mesh, module: nn.Module, layers: Mapping[str, str]) -> list[Stack]:
    """The stacks that the layout divides by ``"sequence"``; ``layers``: by columns and so on.

    Raises:
        ConfigError: a pattern means none, or one with layers that cannot compute so.
    """
    layout = {} if isinstance(mesh.layout, str) else mesh.layout
    found: dict[str, Stack] = {}
    for pattern, cut in layout.items():
        if cut == "sequence":
            named = {n: p for n, p in module.named_modules() if _is_stack(p)}
            meant = [n for n in named if any(fnmatchcase(n, one) for one in spread(pattern))]
            if not meant:
                hint = did_you_mean(pattern, list(named)) or f"; there are {some_of(list(named))}"
                raise ConfigError(
                    f"Mesh: no nn.ModuleList or nn.Sequential fits {pattern!r} of the layout{hint}"
                )
            found |= {name: _stack(name, named[name], layers) for name in meant}
    inner = [(a, b) for a in found.values() for b in found if a.has(b)]
    if inner:
        raise ConfigError(
            f"Mesh: the layout divides {inner[0][1]!r} by sequence, and {inner[0][0].name!r}, "
            "which it is part of; name one of them"
        )
    return list(found.values())


def _is_stack(part: nn.Module) -> bool:
    return isinstance(part, nn.ModuleList | nn.Sequential) and len(part) > 0


def _stack(name: str, part: nn.Module, layers: Mapping[str, str]) -> Stack:
    norms, columns = [], []
    for inner, layer in part.named_modules(prefix=name):
        cut = layers.get(inner)
        if isinstance(layer, _NORMS) and cut in (None, "sequence"):
            norms.append(inner)
        elif cut == "columns":
            columns.append(inner)
        elif cut not in ("rows", None) or (
            cut is None and any(True for _ in layer.parameters(recurse=False))
        ):
            raise ConfigError(
                f"Mesh: the layout divides {name!r} by sequence, and in it {inner!r}, a "
                f"{type(layer).__name__}, is neither divided by columns or rows nor a LayerNorm "
                "or RMSNorm"
            )
    members = tuple(f"{name}.{child}" for child, _ in part.named_children())
    return Stack(name=name, members=members, columns=tuple(columns), norms=tuple(norms))


def divide_sequence(stack: Stack, module: nn.Module, mesh: DeviceMesh) -> None:
    """The first layer of a stack gets a part of its values; what the last gives is put together.

    Before the layers are divided.
    """
    members = [module.get_submodule(name) for name in stack.members]
    members[0].register_forward_pre_hook(partial(_cut, stack, mesh))
    whole = _Whole(mesh)
    for name in stack.columns:
        module.get_submodule(name).register_forward_pre_hook(whole.of_input)
    for member in members:
        member.register_forward_hook(whole.forget)
    members[-1].register_forward_hook(partial(_joined, stack, mesh))


def undone(stack: Stack, module: nn.Module, mesh: DeviceMesh) -> list[Any]:
    """Hooks with which the layers of a stack get and give whole values."""

    def get(_: nn.Module, args: Any) -> Any:
        return (whole_of(args[0], mesh), *args[1:])

    def give(_: nn.Module, __: Any, output: Any) -> Any:
        return part_of(output, mesh)

    return [
        module.get_submodule(stack.members[0]).register_forward_pre_hook(get),
        module.get_submodule(stack.members[-1]).register_forward_hook(give, prepend=True),
    ]


def part_of(values: torch.Tensor, mesh: DeviceMesh, dimension: int = SEQUENCE) -> torch.Tensor:
    """This rank's part of values that all ranks have."""
    whole = DTensor.from_local(values, mesh, [Replicate()], run_check=False)
    return whole.redistribute(placements=[Shard(dimension)]).to_local()


def whole_of(values: torch.Tensor, mesh: DeviceMesh, dimension: int = SEQUENCE) -> torch.Tensor:
    """The values of which each rank has a part, which all ranks go on with alike."""
    found = DTensor.from_local(values, mesh, [Shard(dimension)], run_check=False)
    return found.redistribute(placements=[Replicate()]).to_local()


class _Whole:
    """The input of layers by columns, gathered once for all that get the same, and kept once."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh = mesh
        self._part: torch.Tensor | None = None
        self._whole: DTensor | None = None

    def of_input(self, _: nn.Module, args: Any) -> Any:
        if args[0] is not self._part:
            found = DTensor.from_local(args[0], self._mesh, [Shard(SEQUENCE)], run_check=False)
            self._part, self._whole = args[0], found.redistribute(placements=[Replicate()])
        return (self._whole, *args[1:])

    def forget(self, *_: Any) -> None:
        self._part = self._whole = None


def _cut(stack: Stack, mesh: DeviceMesh, _: nn.Module, args: Any) -> Any:
    values = args[0] if args else None
    if not isinstance(values, torch.Tensor) or values.dim() <= SEQUENCE:
        raise ConfigError(
            f"Mesh: the layout divides {stack.name!r} by sequence, so the first argument of its "
            "layers must be a tensor of the shape (rows, length, ...)"
        )
    if values.shape[SEQUENCE] % mesh.size():
        raise ConfigError(
            f"Mesh: {stack.name!r} gets values of the length {values.shape[SEQUENCE]}, which "
            f"tensor={mesh.size()} workers cannot share evenly; use rows of another length, or "
            "leave 'sequence' out of the layout"
        )
    return (part_of(values, mesh), *args[1:])


def _joined(stack: Stack, mesh: DeviceMesh, _: nn.Module, __: Any, output: Any) -> Any:
    if not isinstance(output, torch.Tensor):
        raise ConfigError(
            f"Mesh: the layout divides {stack.name!r} by sequence, so its layers must give a "
            f"tensor; they give a {type(output).__name__}"
        )
    return whole_of(output, mesh)
