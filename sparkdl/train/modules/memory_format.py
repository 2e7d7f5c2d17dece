"""Lays the values of images out in memory as convolutions on CPUs like them: channels last.

The formats are torch's. Parameters keep their own; what is turned is the input of convolutions, and
the layers behind a convolution keep the order in which it gives its output. Results differ from
those of the other order by rounding only.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from sparkdl.config import MemoryFormat

_FORMATS = {
    nn.Conv2d: torch.channels_last,
    nn.ConvTranspose2d: torch.channels_last,
    nn.Conv3d: torch.channels_last_3d,
    nn.ConvTranspose3d: torch.channels_last_3d,
}


@contextlib.contextmanager
def in_memory_format(module: nn.Module, memory_format: MemoryFormat) -> Iterator[None]:
    """Have the convolutions of ``module`` work on ``memory_format`` inside the block.

    ``contiguous`` changes nothing; ``channels_last`` puts a pixel's channels next to each other,
    for convolutions in two and three dimensions.
    """
    handles = []
    if memory_format == "channels_last":
        handles = [
            layer.register_forward_pre_hook(partial(_turn_input, wanted))
            for layer in module.modules()
            for kind, wanted in _FORMATS.items()
            if isinstance(layer, kind)
        ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _turn_input(
    wanted: torch.memory_format, layer: nn.Module, inputs: tuple[Any, ...]
) -> tuple[Any, ...]:
    """A forward hook; copies nothing where the order is right already."""
    dim = 4 if wanted is torch.channels_last else 5
    if not inputs or inputs[0].dim() != dim:  # named, or a single image
        return inputs
    return (_turned(inputs[0], wanted), *inputs[1:])


def _turned(values: torch.Tensor, wanted: torch.memory_format) -> torch.Tensor:
    if values.shape[1] > 1:
        return values.contiguous(memory_format=wanted)
    # One channel lies the same way in both orders; torch goes by the strides, so change these.
    values = values.contiguous()
    strides = list(values.stride())
    strides[1] = 1
    return values.as_strided(values.shape, strides)
