from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from sparkdl.errors import ConfigError
from sparkdl.models.layers import as_floats, check_positive, hidden_layers


def test_bytes_are_scaled_and_other_numbers_kept() -> None:
    like = torch.zeros(1)
    assert as_floats(torch.tensor([0, 51, 255], dtype=torch.uint8), like).tolist() == [
        0.0, pytest.approx(0.2), 1.0
    ]  # fmt: skip
    assert as_floats(torch.tensor([0, 51, 255]), like).tolist() == [0.0, 51.0, 255.0]
    assert as_floats(torch.tensor([0.5, 300.0]), like).tolist() == [0.5, 300.0]
    for dtype in (torch.float64, torch.bfloat16):
        assert as_floats(torch.ones(2, dtype=torch.uint8), like.to(dtype)).dtype == dtype


def test_names_of_hidden_weights_do_not_depend_on_the_options() -> None:
    names = ["0.0.weight", "0.0.bias", "1.0.weight", "1.0.bias"]
    for options in (("relu", 0.0), ("tanh", 0.5)):
        layers = hidden_layers((5, 4, 3), *options)
        assert [name for name, _ in layers.named_parameters()] == names
        assert layers(torch.randn(2, 5)).shape == (2, 3)
    assert any(isinstance(part, nn.Dropout) for part in layers.modules())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (((5,), "relu"), r"sizes must hold .* at least one hidden layer; received \[5\]"),
        (((5, 0), "relu"), r"sizes must be at least 1, in whole numbers; received \(5, 0\)"),
        (((5, 2.5), "relu"), r"sizes must be at least 1"),
        (((5, 2), "swish"), "unknown activation 'swish'; known: gelu, relu, sigmoid, tanh"),
    ],
)
def test_what_makes_no_layers_is_refused(arguments: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        hidden_layers(*arguments)


def test_every_size_is_looked_at() -> None:
    check_positive(width=1, sizes=[2, 3])
    with pytest.raises(ConfigError, match="width must be at least 1"):
        check_positive(sizes=[1], width=0)
