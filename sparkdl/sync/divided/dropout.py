"""Dropout between divided layers: workers along ``tensor`` draw what one worker would."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.modules.dropout import _DropoutNd

from sparkdl.comm.communicator import Communicator
from sparkdl.errors import ConfigError

Shapes = Mapping[str, Sequence[tuple[int, ...]]]
"""Name of each Dropout -> the shapes of what it was called with, in the order of calls."""


@contextmanager
def dropout_shapes(module: nn.Module) -> Iterator[Shapes]:
    """Note with what shapes the Dropouts of ``module`` are called inside."""
    found: dict[str, list[tuple[int, ...]]] = defaultdict(list)
    with ExitStack() as stack:
        for name, part in module.named_modules():

            def note(_: nn.Module, inputs: Any, name: str = name) -> None:
                found[name].append(tuple(inputs[0].shape))

            if isinstance(part, _DropoutNd):
                stack.callback(part.register_forward_pre_hook(note).remove)
        yield found


def draw_whole_masks(module: nn.Module, whole: Shapes, here: Shapes, tensors: Communicator) -> None:
    """Have each Dropout that gets a part of its values here draw for all, and take its part.

    Args:
        module: whose layers are divided.
        whole: of the module before that.
        here: of the same calls with the divided layers.
        tensors: the ranks that compute together; their generators are in the same state.

    Raises:
        ConfigError: one does not treat each number by itself.
    """
    for name, shapes in here.items():
        cut: dict[int, int] = {}
        """Dimension that is divided, by the number of dimensions."""
        for before, now in zip(whole[name], shapes, strict=True):
            pairs = enumerate(zip(before, now, strict=True))
            cut |= {len(now): place for place, sizes in pairs if sizes[0] != sizes[1]}
        if not cut:
            continue
        layer = module.get_submodule(name)
        if type(layer) is not nn.Dropout:
            raise ConfigError(
                f"Mesh: with this layout {name!r}, a {type(layer).__name__}, gets a part of its "
                "values, of which it would not draw what one worker draws; use nn.Dropout there"
            )
        layer.forward = partial(  # type: ignore[method-assign]
            _dropped, layer, cut, tensors.rank, tensors.world_size
        )


def _dropped(
    layer: nn.Dropout, cut: Mapping[int, int], part: int, parts: int, values: torch.Tensor
) -> torch.Tensor:
    """``layer`` applied to a part of its values along a dimension."""
    dimension = cut.get(values.dim())
    if not layer.training or layer.p == 0 or dimension is None:
        return F.dropout(values, layer.p, layer.training, layer.inplace)
    # numbers are drawn in the order in which values lie in memory
    order = sorted(range(values.dim()), key=values.stride, reverse=True)
    size = values.shape[dimension]
    sizes = [values.shape[n] * (parts if n == dimension else 1) for n in order]
    ones = torch.ones(sizes, dtype=values.dtype, device=values.device)
    mask = F.dropout(ones, layer.p).permute([order.index(n) for n in range(values.dim())])
    mask = mask.narrow(dimension, part * size, size)
    return values.mul_(mask) if layer.inplace else values * mask
