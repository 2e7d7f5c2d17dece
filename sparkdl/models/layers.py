"""Functions that the reference networks share."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import nn

from sparkdl.config import require
from sparkdl.errors import unknown

ACTIVATIONS: dict[str, type[nn.Module]] = {
    "gelu": nn.GELU,
    "relu": nn.ReLU,
    "sigmoid": nn.Sigmoid,
    "tanh": nn.Tanh,
}
"""Names that ``activation`` accepts."""


def as_floats(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Inputs as the floating numbers of a weight ``like``, on the device where they are.

    Bytes, which is how images arrive, become 0 to 1; other numbers keep their values.
    """
    floats = values.to(like.dtype)
    return floats / 255 if values.dtype == torch.uint8 else floats


def hidden_layers(sizes: Sequence[int], activation: str, dropout: float = 0.0) -> nn.Sequential:
    """Fully connected layers from ``(batch, sizes[0])`` to ``(batch, sizes[-1])``.

    Each is a `torch.nn.Sequential` of a linear layer, its activation and, if any, dropout. So the
    names of the weights are ``<layer>.0.weight`` and ``<layer>.0.bias`` whatever the options.
    ConfigError if there is no layer, a size is no positive number, or the activation is unknown.
    """
    rule = "sizes must hold the number of features and the width of at least one hidden layer"
    require(len(sizes) >= 2, rule, list(sizes))
    check_positive(sizes=sizes)
    if activation not in ACTIVATIONS:
        raise unknown("activation", activation, ACTIVATIONS)
    layers = []
    for narrow, wide in pairwise(sizes):
        parts = [nn.Linear(narrow, wide), ACTIVATIONS[activation]()]
        layers.append(nn.Sequential(*parts, *[nn.Dropout(dropout)] * (dropout > 0)))
    return nn.Sequential(*layers)


def check_positive(**values: int | Sequence[int]) -> None:
    """Raise ConfigError, with the name, for sizes that are no whole numbers of at least 1."""
    for name, value in values.items():
        numbers = value if isinstance(value, Sequence) else (value,)
        are_sizes = all(isinstance(number, int) and number >= 1 for number in numbers)
        require(are_sizes, f"{name} must be at least 1, in whole numbers", value)
