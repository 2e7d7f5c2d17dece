"""Sees, in one process, whether layers by rows would get parts of what they get without a mesh.

The module is run whole, and then as a worker along ``tensor`` runs it: of what a layer by columns
gives, there is this worker's part, and a layer by rows gets such a part. That is compared with the
same part of the whole input. Then the layer gets the whole input, as the sum over workers would
have it, and what follows is as without a mesh. So a difference shows whatever the layers weigh.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from sparkdl.errors import ConfigError
from sparkdl.mesh import Mesh
from sparkdl.sync.divided.channels import CHANNELS
from sparkdl.sync.divided.layout import divided_layers
from sparkdl.sync.divided.stages import plain_attention

_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
"""Largest difference of inputs, as a part of the largest number, by their dtype."""
_ELSE = 0.03
"""The same for shorter formats."""
_REMEDY = (
    "let layers by columns be followed by layers by rows, with nothing between them but what "
    "treats each number by itself and has no parameters; and let the module take sizes from its "
    "tensors"
)


def check_parts(module: nn.Module, mesh: Mesh, call: Callable[[], object]) -> None:
    """Compare what ``call`` does with ``module`` whole and as the workers along ``tensor`` do it.

    ``call`` must do the same each time. The layers within a list that ``mesh`` divides by sequence
    have parts of other kinds; these are left to the workers.

    Raises:
        ConfigError: they differ, with the name of the layer.
    """
    if mesh.tensor == 1 or mesh.divides_sequence:
        return
    layers = divided_layers(mesh, module)
    whole = {name: list[torch.Tensor]() for name in layers}
    with ExitStack() as stack:
        for name, part in _taking(module, layers):
            stack.callback(part.register_forward_pre_hook(_recording(whole[name])).remove)
        _run(call)
    for number in (0, mesh.tensor - 1):
        places = dict.fromkeys(layers, 0)
        with ExitStack() as stack:
            for name, how in layers.items():
                layer = module.get_submodule(name)
                if how in ("columns", "channels"):
                    hook = _giving(_dimension(layer), mesh.tensor, number)
                    stack.callback(layer.register_forward_hook(hook).remove)
            for name, part in _taking(module, layers):
                before = _comparing(name, _dimension(part), whole[name], places, mesh, number)
                stack.callback(part.register_forward_pre_hook(before).remove)
            try:
                _run(call)
            except ConfigError:
                raise
            except Exception as error:  # it has run whole
                reason, *_ = str(error).splitlines() or [type(error).__name__]
                raise ConfigError(
                    f"Mesh: the module cannot compute with this layout: {reason}; {_REMEDY}"
                ) from error


def _taking(module: nn.Module, layers: dict[str, str]) -> list[tuple[str, nn.Module]]:
    """The layers that get parts of values; ids of an Embedding are whole."""
    parts = [(name, module.get_submodule(name), how) for name, how in layers.items()]
    return [
        (name, part) for name, part, how in parts
        if how == "channels" or (how == "rows" and not isinstance(part, nn.Embedding))
    ]  # fmt: skip


def _dimension(layer: nn.Module) -> int:
    return -1 if isinstance(layer, nn.Linear | nn.Embedding) else CHANNELS


def _recording(kept: list[torch.Tensor]) -> Any:
    def hook(_: nn.Module, inputs: Any) -> None:
        kept.extend(value.detach().clone() for value in inputs[:1])

    return hook


def _giving(dimension: int, parts: int, number: int) -> Any:
    def hook(_: nn.Module, __: Any, output: torch.Tensor) -> torch.Tensor:
        return output.chunk(parts, dimension)[number].contiguous()

    return hook


def _comparing(
    name: str, dimension: int, whole: list[torch.Tensor], places: dict[str, int], mesh: Mesh,
    number: int,
) -> Any:  # fmt: skip
    def hook(_: nn.Module, inputs: Any) -> Any:
        if not inputs:
            raise ConfigError(
                f"Mesh: the layer {name!r} of the layout is called by keyword; call it by "
                "position, as in self.layer(x)"
            )
        place, places[name] = places[name], places[name] + 1
        found = inputs[0]
        expected = (
            whole[place].chunk(mesh.tensor, dimension)[number] if place < len(whole) else None
        )
        if expected is None or not _is_same(found.detach(), expected):
            raise ConfigError(
                f"Mesh: with this layout the module computes something else: {name!r} does not get "
                f"a part of what it gets without a mesh; {_REMEDY}"
            )
        return (whole[place], *inputs[1:])

    return hook


def _is_same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    if found.shape != expected.shape:
        return False
    if not expected.numel():
        return True
    difference = (found - expected).abs().max().item()
    largest = max(1e-30, expected.abs().max().item())
    return difference <= _TOLERANCE.get(expected.dtype, _ELSE) * largest


def _run(call: Callable[[], object]) -> None:
    with plain_attention(), _WithoutDropout():
        call()


class _WithoutDropout(TorchFunctionMode):
    """Lets dropout drop nothing, which would draw other numbers for parts."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if "dropout" in name:
            return args[0] if args else kwargs["input"]
        if "dropout_p" in kwargs:
            kwargs["dropout_p"] = 0.0
        if name == "scaled_dot_product_attention" and len(args) > 4:
            args = (*args[:4], 0.0, *args[5:])
        return func(*args, **kwargs)
