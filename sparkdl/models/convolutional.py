"""Convolutional networks without shortcuts: LeNet-5 and AlexNet-R."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from sparkdl.config import require
from sparkdl.errors import ConfigError
from sparkdl.models.layers import as_floats, check_positive


class LeNet5(nn.Module):
    """LeNet-5, for images of 28 x 28 pixels such as MNIST's.

    Takes ``(batch, in_channels, 28, 28)``, or 32 x 32 with ``padding=0``; uint8 from 0 to 255, or
    floating numbers as they are. Gives logits ``(batch, num_classes)``. 61,706 parameters.

    Source: LeCun, Bottou, Bengio and Haffner, "Gradient-based learning applied to document
    recognition" (1998), figure 2. Simpler in three places, as usual today: every map of the second
    convolution sees all maps below, the means of pooling have no coefficients of their own, and
    the last layer is linear.
    """

    def __init__(self, *, in_channels: int = 1, padding: int = 2, num_classes: int = 10) -> None:
        """Make the layers.

        Args:
            in_channels: channels of an image.
            padding: empty pixels that the first convolution adds at each edge.
            num_classes: number of logits.
        """
        super().__init__()
        check_positive(in_channels=in_channels, num_classes=num_classes)
        require(padding >= 0, "padding must be at least 0", padding)
        self.features = nn.Sequential(
            nn.Conv2d(in_channels, 6, kernel_size=5, padding=padding),
            nn.Tanh(),
            nn.AvgPool2d(2),
            nn.Conv2d(6, 16, kernel_size=5),
            nn.Tanh(),
            nn.AvgPool2d(2),
            nn.Flatten(),
            nn.Linear(16 * 5 * 5, 120),
            nn.Tanh(),
            nn.Linear(120, 84),
            nn.Tanh(),
        )
        self.head = nn.Linear(84, num_classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Logits of a batch of images."""
        logits: torch.Tensor = self.head(self.features(as_floats(images, self.head.weight)))
        return logits


class AlexNetR(nn.Module):
    """AlexNet-R, the small AlexNet of benchmarks on CIFAR-10: three convolutions, one layer.

    Takes ``(batch, in_channels, *image_size)``, uint8 from 0 to 255, or floating numbers as they
    are; gives logits ``(batch, num_classes)``. 85,098 parameters.

    Source: Shi, Wang, Xu and Chu, "Benchmarking State-of-the-Art Deep Learning Software Tools"
    (arXiv 1608.07249), after Krizhevsky's ``layers-18pct`` of cuda-convnet; the shapes are those
    of their programs (github.com/hclhkbu/dlbench, ``tools/torch/Models/alexnet.lua``), which leave
    out the normalization of local responses.
    """

    def __init__(
        self, *, in_channels: int = 3, image_size: Sequence[int] = (32, 32),
        widths: Sequence[int] = (32, 32, 64), num_classes: int = 10,
    ) -> None:  # fmt: skip
        """Make the layers.

        Args:
            in_channels: channels of an image.
            image_size: height and width in pixels, at least 15 each.
            widths: channels of the three convolutions.
            num_classes: number of logits.
        """
        super().__init__()
        check_positive(in_channels=in_channels, widths=widths, num_classes=num_classes)
        require(len(widths) == 3, "widths must be three numbers", list(widths))
        if len(image_size) != 2 or min(image_size) < 15:
            raise ConfigError(
                f"image_size must be (height, width) of at least 15 pixels each; received "
                f"{list(image_size)}; scale the images, for example by sparkdl.Image(size=...)"
            )
        first, second, third = widths
        self.features = nn.Sequential(
            nn.Conv2d(in_channels, first, kernel_size=5, padding=2),
            nn.MaxPool2d(3, stride=2),
            nn.ReLU(),
            nn.Conv2d(first, second, kernel_size=5, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(3, stride=2),
            nn.Conv2d(second, third, kernel_size=5, padding=2),
            nn.ReLU(),
            nn.AvgPool2d(3, stride=2),
            nn.Flatten(),
        )
        height, width = (_pooled(_pooled(_pooled(size))) for size in image_size)
        self.head = nn.Linear(third * height * width, num_classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Logits of a batch of images."""
        logits: torch.Tensor = self.head(self.features(as_floats(images, self.head.weight)))
        return logits


def _pooled(size: int) -> int:
    """Pixels that are left along an axis after pooling 3 by 3 in steps of 2."""
    return (size - 3) // 2 + 1
