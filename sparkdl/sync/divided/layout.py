"""Layouts: which layers are divided along the axis ``tensor``, by the names of layers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from fnmatch import fnmatchcase

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from sparkdl.errors import ConfigError, did_you_mean
from sparkdl.mesh import Mesh, paired
from sparkdl.runtime.name_patterns import some_of, spread
from sparkdl.sync.divided.found_layout import found_layers
from sparkdl.sync.divided.sequence import stacks

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_OUTPUTS: dict[type[nn.Module], int] = {
    nn.Linear: 0, nn.Embedding: 1, **dict.fromkeys(_CONVOLUTIONS, 0),
}  # fmt: skip
"""Kind of a layer that can be divided -> the dimension of its weight that its outputs have. The
other one is that of its inputs."""


def _dimension(layer: nn.Module, cut: str) -> int:
    """Along which dimension the weight of a layer is divided."""
    if cut == "channels":
        return 0
    outputs = next(number for kind, number in _OUTPUTS.items() if isinstance(layer, kind))
    return 1 - outputs if cut == "rows" else outputs


def divided_layers(mesh: Mesh, module: nn.Module) -> dict[str, str]:
    """Name of each layer that is divided along ``tensor`` -> how it is, one of `mesh.CUTS`.

    Raises:
        ConfigError: a pattern means no layer that can be divided, or one whose size ``tensor``
            does not divide, two patterns contradict each other, or nothing is found of a layout
            ``"auto"``.
    """
    if not isinstance(mesh.layout, str):
        named = _named_layers(mesh.layout, module, mesh.tensor)
        found_stacks = stacks(mesh, module, named)
        return named | {norm: "sequence" for stack in found_stacks for norm in stack.norms}
    if mesh.tensor == 1:
        return {}
    found = found_layers(
        module, mesh.tensor, lambda layout, part: _named_layers(layout, part, mesh.tensor)
    )
    if found:
        return found
    linear = {name: layer for name, layer in module.named_modules() if isinstance(layer, nn.Linear)}
    chain = [(name, layer.in_features, layer.out_features) for name, layer in linear.items()]
    pairs = paired(chain, mesh.tensor)
    what = "give the mesh a layout such as {'*.mlp.0': 'columns', '*.mlp.2': 'rows'}"
    if pairs:
        what = f"if nothing but elementwise functions lies within a pair, set layout={pairs}"
    sizes = some_of([f"{name} ({taken} -> {given})" for name, taken, given in chain]) or "none"
    raise ConfigError(
        f"Mesh: nothing is found in {type(module).__name__} that tensor={mesh.tensor} can divide. "
        "A tensor_layout of a module is taken, and pairs of Linear layers of an nn.Sequential that "
        f"has no forward of its own. Else {what}; its Linear layers are: {sizes}"
    )


def _named_layers(layout: Mapping[str, str], module: nn.Module, tensor: int) -> dict[str, str]:
    layers = dict(module.named_modules())
    uses = Counter(id(p) for _, p in module.named_parameters(remove_duplicate=False))
    found: dict[str, tuple[str, str]] = {}
    for pattern, cut in layout.items():
        if cut == "sequence":
            continue  # of stacks
        names = [name for name in layers if any(fnmatchcase(name, one) for one in spread(pattern))]
        if not names:
            known = [name for name, layer in layers.items() if isinstance(layer, tuple(_OUTPUTS))]
            hint = did_you_mean(pattern.lstrip("*."), known) or f"; there are {some_of(known)}"
            raise ConfigError(f"Mesh: no layer fits {pattern!r} of the layout{hint}")
        for name in names:
            _check_layer(name, layers[name], pattern, cut, tensor)
            if any(uses[id(parameter)] > 1 for parameter in layers[name].parameters()):
                raise ConfigError(
                    f"Mesh: {pattern!r} of the layout means {name!r}, which shares parameters with "
                    "another layer; such layers cannot be divided"
                )
            other, before = found.setdefault(name, (pattern, cut))
            if before != cut:
                raise ConfigError(
                    f"Mesh: both {other!r} and {pattern!r} of the layout mean {name!r}, one by "
                    f"{before} and one by {cut}; let one pattern mean it"
                )
    return {name: cut for name, (_, cut) in found.items()}


def _check_layer(name: str, layer: nn.Module, pattern: str, cut: str, parts: int) -> None:
    meant = f"Mesh: {pattern!r} of the layout means {name!r}"
    kinds = (_NormBase,) if cut == "channels" else tuple(_OUTPUTS)
    if not name:
        raise ConfigError(
            f"Mesh: {pattern!r} of the layout means the module itself; only layers within it can "
            "be divided: put it into an nn.Sequential"
        )
    if not isinstance(layer, kinds) or isinstance(layer, nn.SyncBatchNorm):
        what = "only a BatchNorm can be divided by channels"
        if cut != "channels":
            what = "only Linear, Embedding and convolution layers can be divided so"
        raise ConfigError(f"{meant}, which is a {type(layer).__name__}; {what}")
    if isinstance(layer, _CONVOLUTIONS) and (layer.groups > 1 or cut == "gathered"):
        raise ConfigError(
            f"{meant}, a convolution; those without groups can be divided by columns and by rows"
        )
    own = [own_name for own_name, _ in layer.named_parameters()]
    if cut != "channels":
        own += [own_name for own_name, _ in layer.named_buffers()]
    if not {"weight"} <= set(own) <= {"weight", "bias"}:
        raise ConfigError(
            f"{meant}, whose parameters and buffers are {', '.join(own)}; only layers with weight "
            "and bias alone can be divided"
        )
    if isinstance(layer, nn.Embedding) and _has_options(layer):
        raise ConfigError(
            f"{meant}, an Embedding with padding_idx, max_norm, scale_grad_by_freq or sparse; "
            "leave it whole, or leave these out"
        )
    size = layer.get_parameter("weight").shape[_dimension(layer, cut)]
    if size % parts:
        what = {"rows": "inputs", "channels": "channels"}.get(cut, "outputs")
        raise ConfigError(
            f"Mesh: {name!r} has {size} {what}, which {parts} workers along tensor cannot share "
            "evenly; choose a tensor that divides them"
        )


def _has_options(layer: nn.Embedding) -> bool:
    has_limits = layer.padding_idx is not None or layer.max_norm is not None
    return has_limits or layer.scale_grad_by_freq or layer.sparse


def cut_parameters(layers: Mapping[str, str], module: nn.Module) -> dict[str, int]:
    """Name of each parameter of these layers that is cut -> the dimension along which it is."""
    found: dict[str, int] = {}
    for name, cut in layers.items():
        if cut == "sequence":
            continue
        layer = module.get_submodule(name)
        found[f"{name}.weight"] = _dimension(layer, cut)
        if cut != "rows" and getattr(layer, "bias", None) is not None:
            found[f"{name}.bias"] = 0
    return found
