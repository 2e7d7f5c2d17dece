"""The networks that the project's own examples train."""

from __future__ import annotations

import torch
from torch import nn


class DigitsNet(nn.Module):
    """A small convolutional network for grey images of 8 x 8 pixels, such as scikit-learn's digits.

    Takes ``(batch, 1, 8, 8)`` with values from 0 to 16, of any numeric dtype; gives logits
    ``(batch, num_classes)``.
    """

    def __init__(self, num_classes: int = 10, hidden: int = 64, dropout: float = 0.5) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, hidden // 2, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.Conv2d(hidden // 2, hidden, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Dropout(dropout / 2),
            nn.Flatten(),
            nn.Linear(hidden * 16, hidden),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(hidden, num_classes),
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Logits of a batch of images."""
        logits: torch.Tensor = self.layers(images.float() / 16)
        return logits


class PhotoNet(nn.Module):
    """A small convolutional network for images of any size.

    Takes uint8 ``(batch, channels, height, width)``; gives logits ``(batch, num_classes)``.
    """

    def __init__(self, num_classes: int, channels: int = 3, hidden: int = 32) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(channels, hidden, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(hidden, 2 * hidden, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(4),
            nn.Flatten(),
            nn.Linear(32 * hidden, num_classes),
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Logits of a batch of images."""
        logits: torch.Tensor = self.layers(images.float() / 255)
        return logits
