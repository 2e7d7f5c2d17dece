from __future__ import annotations

from typing import Any

import pytest
import torch

from sparkdl.errors import ConfigError
from sparkdl.models import AlexNetR, LeNet5


def test_lenet_takes_both_customary_sizes() -> None:
    assert LeNet5()(torch.rand(2, 1, 28, 28)).shape == (2, 10)
    assert LeNet5(in_channels=3, padding=0)(torch.rand(2, 3, 32, 32)).shape == (2, 10)
    images = torch.rand(2, 1, 28, 28)
    padded = torch.nn.functional.pad(images, (2, 2, 2, 2))
    net, other = LeNet5(), LeNet5(padding=0)
    other.load_state_dict(net.state_dict())
    torch.testing.assert_close(net(images), other(padded))


@pytest.mark.parametrize("size", [(15, 15), (16, 16), (20, 33), (32, 32)])
def test_alexnet_r_takes_images_of_the_size_it_was_made_for(size: tuple[int, int]) -> None:
    net = AlexNetR(in_channels=1, image_size=size, widths=(3, 4, 5), num_classes=7)
    assert net(torch.rand(2, 1, *size)).shape == (2, 7)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"image_size": (14, 32)}, r"at least 15 pixels each; received \[14, 32\]; scale"),
        ({"image_size": (32,)}, r"image_size must be \(height, width\)"),
        ({"widths": (32, 32)}, r"widths must be three numbers; received \[32, 32\]"),
        ({"num_classes": 0}, "num_classes must be at least 1"),
    ],
)
def test_alexnet_r_refuses(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        AlexNetR(**arguments)


def test_lenet_refuses() -> None:
    with pytest.raises(ConfigError, match="padding must be at least 0; received -1"):
        LeNet5(padding=-1)
    with pytest.raises(ConfigError, match="in_channels must be at least 1"):
        LeNet5(in_channels=0)
