from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from sparkdl.config import TrainConfig
from sparkdl.train.modules.memory_format import in_memory_format
from tests.train.runs import make_data, run, seeded, weights


class Seen(nn.Module):
    """Keeps what it is given."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        self.values = values
        return values


def is_last(values: torch.Tensor) -> bool:
    return values.stride(1) == 1


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("turned", [False, True])
def test_layers_behind_a_convolution_see_channels_last(channels: int, turned: bool) -> None:
    seen = Seen()
    module = nn.Sequential(nn.Conv2d(channels, 4, 3), nn.ReLU(), nn.MaxPool2d(2), seen)
    images = torch.randn(2, channels, 9, 9)
    if turned:
        images = images.contiguous(memory_format=torch.channels_last)
    module(images.contiguous())
    assert not is_last(seen.values)
    expected = seen.values
    with in_memory_format(module, "channels_last"):
        module(images)
        assert is_last(seen.values)
        torch.testing.assert_close(seen.values, expected)
    module(images.contiguous())
    assert not is_last(seen.values)


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.ConvTranspose2d(2, 3, 3), (2, 2, 5, 5)),
        (nn.Conv3d(2, 3, 3), (2, 2, 5, 5, 5)),
        (nn.ConvTranspose3d(1, 3, 3), (2, 1, 5, 5, 5)),
    ],
)
def test_other_convolutions(layer: nn.Module, shape: tuple[int, ...]) -> None:
    values = torch.randn(shape)
    expected = layer(values)
    with in_memory_format(layer, "channels_last"):
        found = layer(values)
    assert is_last(found)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_single_images_and_named_inputs_stay_as_they_are() -> None:
    layer = nn.Conv2d(2, 3, 3)
    image = torch.randn(2, 5, 5)
    expected = layer(image)
    with in_memory_format(layer, "channels_last"):
        assert torch.equal(layer(image), expected)
        assert torch.equal(layer(input=image), expected)


def test_contiguous_adds_nothing() -> None:
    layer = nn.Conv2d(2, 3, 3)
    with in_memory_format(layer, "contiguous"):
        assert not layer._forward_pre_hooks


def net() -> nn.Module:
    layers = [nn.Conv2d(1, 3, 2), nn.Tanh(), nn.Conv2d(3, 2, 1), nn.Flatten(), nn.Linear(2, 1)]
    return nn.Sequential(nn.Unflatten(1, (1, 2, 2)), *layers).double()


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_training_gives_the_same_weights(optimizer: str) -> None:
    found: dict[str, Any] = {}
    for memory_format in ("contiguous", "channels_last"):
        config = TrainConfig(
            optimizer=optimizer,
            learning_rate=0.01,
            epochs=2,
            batch_size=8,
            memory_format=memory_format,  # type: ignore[arg-type]
        )
        module = seeded(net)
        outcome = run(module, config, make_data([40]))
        found[memory_format] = weights(module), outcome.history[-1]["loss"]
        assert all(parameter.is_contiguous() for parameter in module.parameters())
        assert not any(layer._forward_pre_hooks for layer in module.modules())
    a, b = found.values()
    assert torch.allclose(a[0], b[0], rtol=0, atol=1e-12)
    assert abs(a[1] - b[1]) < 1e-12
