"""Layouts: which layers are divided along the axis ``tensor``, by the names of layers."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from itertools import product

from torch import nn

from sparkdl.errors import ConfigError, did_you_mean
from sparkdl.mesh import Mesh
from sparkdl.runtime.name_patterns import some_of

DIMENSION = {"columns": 0, "rows": 1}
"""Of a Linear layer's weight, ``(outputs, inputs)``."""


def divided_layers(mesh: Mesh, module: nn.Module) -> dict[str, str]:
    """Name of each layer that is divided along ``tensor`` -> ``"columns"`` or ``"rows"``.

    Raises:
        ConfigError: a pattern means no Linear layer, or one whose size ``tensor`` does not divide,
            or two patterns contradict each other.
    """
    layers = dict(module.named_modules())
    found: dict[str, tuple[str, str]] = {}
    for pattern, cut in mesh.layout.items():
        names = [name for name in layers if any(fnmatchcase(name, one) for one in spread(pattern))]
        if not names:
            known = [name for name, layer in layers.items() if isinstance(layer, nn.Linear)]
            hint = did_you_mean(pattern.lstrip("*."), known) or f"; there are {some_of(known)}"
            raise ConfigError(f"Mesh: no layer fits {pattern!r} of the layout{hint}")
        for name in names:
            _check_layer(name, layers[name], pattern, cut, mesh.tensor)
            other, before = found.setdefault(name, (pattern, cut))
            if before != cut:
                raise ConfigError(
                    f"Mesh: both {other!r} and {pattern!r} of the layout mean {name!r}, one by "
                    f"{before} and one by {cut}; let one pattern mean it"
                )
    return {name: cut for name, (_, cut) in found.items()}


def _check_layer(name: str, layer: nn.Module, pattern: str, cut: str, parts: int) -> None:
    if not isinstance(layer, nn.Linear):
        raise ConfigError(
            f"Mesh: {pattern!r} of the layout means {name!r}, which is a {type(layer).__name__}; "
            "only Linear layers can be divided"
        )
    size = layer.weight.shape[DIMENSION[cut]]
    if size % parts:
        what = "outputs" if cut == "columns" else "inputs"
        raise ConfigError(
            f"Mesh: {name!r} has {size} {what}, which {parts} workers along tensor cannot share "
            "evenly; choose a tensor that divides them"
        )


def spread(pattern: str) -> list[str]:
    """A pattern with ``|`` as patterns without: ``a.q|k`` as ``a.q`` and ``a.k``."""
    parts = [part.split("|") for part in pattern.split(".")]
    return [".".join(chosen) for chosen in product(*parts)]


def trained_bytes(mesh: Mesh | None, module: nn.Module) -> int:
    """Bytes of what trains of ``module`` on a rank of ``mesh``, or on one that has all of it."""
    cuts = {} if mesh is None else cut_parameters(divided_layers(mesh, module), module)
    total = 0
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            parts = 1 if mesh is None else mesh.num_shards * (mesh.tensor if name in cuts else 1)
            total += -(-parameter.nbytes // parts)
    return total


def cut_parameters(layers: Mapping[str, str], module: nn.Module) -> dict[str, int]:
    """Name of each parameter of these layers that is cut -> the dimension along which it is."""
    found: dict[str, int] = {}
    for name, cut in layers.items():
        found[f"{name}.weight"] = DIMENSION[cut]
        if cut == "columns" and module.get_submodule(name).bias is not None:
            found[f"{name}.bias"] = 0
    return found
