"""Residual networks, in the shapes for images of 32 x 32 pixels."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional as F

from sparkdl.config import require
from sparkdl.models.layers import as_floats, check_positive


class CifarResNet(nn.Module):
    """A residual network for small images: a 3 x 3 convolution, stages of blocks, a mean, a layer.

    Takes ``(batch, in_channels, height, width)`` of any size, uint8 from 0 to 255, or floating
    numbers as they are; gives logits ``(batch, num_classes)``. Each stage after the first halves
    height and width and doubles the channels. `ResNet20`, `ResNet56` and `ResNet50` are the
    published ones; this class makes others, such as smaller ones::

        CifarResNet(blocks=(1, 1, 1), width=8, in_channels=1)

    Weights begin by the rule of He et al. (arXiv 1502.01852), and each block as its shortcut alone:
    the scale of its last BatchNorm is 0 (Goyal et al., arXiv 1706.02677, section 5.1), without
    which the deep ones need a warm-up. The statistics of the BatchNorm layers are those of each
    worker's batch, unless ``syncBatchNorm=True``.
    """

    def __init__(
        self, *, blocks: Sequence[int], width: int = 16, is_bottleneck: bool = False,
        in_channels: int = 3, num_classes: int = 10,
    ) -> None:  # fmt: skip
        """Make the layers.

        Args:
            blocks: number of blocks in each stage.
            width: channels of the first convolution and of the first stage's 3 x 3 convolutions.
            is_bottleneck: blocks of 1 x 1, 3 x 3 and 1 x 1 convolutions that give four times
                their width, with projections as shortcuts where shapes change; otherwise two
                convolutions of 3 x 3, and shortcuts without parameters.
            in_channels: channels of an image.
            num_classes: number of logits.
        """
        super().__init__()
        rule = "blocks must hold the number of blocks of at least one stage"
        require(bool(blocks), rule, blocks)
        check_positive(blocks=blocks, width=width, in_channels=in_channels, num_classes=num_classes)
        block = _Bottleneck if is_bottleneck else _Basic
        self.stem = _convolution(in_channels, width, kernel_size=3)
        stages, channels = [], width
        for stage, num_blocks in enumerate(blocks):
            inner = width * 2**stage
            strides = (1 if stage == 0 else 2, *[1] * (num_blocks - 1))
            layers = []
            for stride in strides:
                layers.append(block(channels, inner, stride))
                channels = inner * block.expansion
            stages.append(nn.Sequential(*layers))
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(channels, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def tensor_layout(self, tensor: int) -> dict[str, str]:
        """A `Mesh.layout` for ``tensor`` workers; what they cannot share evenly stays whole.

        In each block the first convolution and the next one are a pair, with their BatchNorm
        between them.
        """
        found: dict[str, str] = {}
        for number, stage in enumerate(self.stages):
            assert isinstance(stage, nn.Sequential)
            block = stage[0]
            convolution = block.get_submodule("first.0")
            assert isinstance(convolution, nn.Conv2d)
            if convolution.out_channels % tensor == 0:
                after = "second" if isinstance(block, _Bottleneck) else "last"
                prefix = f"stages.{number}.*"
                found[f"{prefix}.first.0"] = "columns"
                found[f"{prefix}.first.1"] = "channels"
                found[f"{prefix}.{after}.0"] = "rows"
        return found

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Logits of a batch of images."""
        maps = F.relu(self.stem(as_floats(images, self.head.weight)))
        logits: torch.Tensor = self.head(self.stages(maps).mean((2, 3)))
        return logits


class ResNet20(CifarResNet):
    """ResNet-20 for CIFAR-10: images ``(batch, 3, 32, 32)``, logits ``(batch, num_classes)``.

    269,722 parameters. Source: He, Zhang, Ren and Sun, "Deep Residual Learning for Image
    Recognition" (arXiv 1512.03385), section 4.2 with n = 3: three stages of 16, 32 and 64 channels,
    shortcuts of option A (every second pixel, new channels are zero).
    """

    def __init__(self, *, width: int = 16, in_channels: int = 3, num_classes: int = 10) -> None:
        super().__init__(
            blocks=(3, 3, 3), width=width, in_channels=in_channels, num_classes=num_classes
        )


class ResNet56(CifarResNet):
    """ResNet-56 for CIFAR-10: images ``(batch, 3, 32, 32)``, logits ``(batch, num_classes)``.

    853,018 parameters. Source: as `ResNet20`, with n = 9. It is one of the networks of Shi et al.
    (arXiv 1608.07249).
    """

    def __init__(self, *, width: int = 16, in_channels: int = 3, num_classes: int = 10) -> None:
        super().__init__(
            blocks=(9, 9, 9), width=width, in_channels=in_channels, num_classes=num_classes
        )


class ResNet50(CifarResNet):
    """ResNet-50 with the stem for small images: ``(batch, 3, 32, 32)``, logits ``(batch, 10)``.

    23,520,842 parameters. Source: He, Zhang, Ren and Sun (arXiv 1512.03385), table 1. For images of
    32 x 32 pixels a 3 x 3 convolution takes the place of the 7 x 7 one and the pooling. In
    blocks that halve the image, the 3 x 3 convolution does it, as in torchvision.
    """

    def __init__(self, *, width: int = 64, in_channels: int = 3, num_classes: int = 10) -> None:
        super().__init__(
            blocks=(3, 4, 6, 3), width=width, is_bottleneck=True, in_channels=in_channels,
            num_classes=num_classes,
        )  # fmt: skip


class _Basic(nn.Module):
    """Two 3 x 3 convolutions beside a shortcut without parameters (option A of section 4.2)."""

    expansion = 1

    def __init__(self, in_channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.stride, self.num_new = stride, width - in_channels
        self.first = _convolution(in_channels, width, kernel_size=3, stride=stride)
        self.last = _convolution(width, width, kernel_size=3, scale=0.0)

    def forward(self, maps: torch.Tensor) -> torch.Tensor:
        shortcut = maps[:, :, :: self.stride, :: self.stride] if self.stride > 1 else maps
        if self.num_new:
            shortcut = F.pad(shortcut, (0, 0, 0, 0, 0, self.num_new))
        return F.relu(self.last(F.relu(self.first(maps))) + shortcut)


class _Bottleneck(nn.Module):
    """1 x 1, 3 x 3 and 1 x 1 convolutions; the shortcut is projected where shapes change."""

    expansion = 4

    def __init__(self, in_channels: int, width: int, stride: int) -> None:
        super().__init__()
        out_channels = width * self.expansion
        self.first = _convolution(in_channels, width, kernel_size=1)
        self.second = _convolution(width, width, kernel_size=3, stride=stride)
        self.last = _convolution(width, out_channels, kernel_size=1, scale=0.0)
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or in_channels != out_channels:
            self.shortcut = _convolution(in_channels, out_channels, kernel_size=1, stride=stride)

    def forward(self, maps: torch.Tensor) -> torch.Tensor:
        hidden = F.relu(self.second(F.relu(self.first(maps))))
        return F.relu(self.last(hidden) + self.shortcut(maps))


def _convolution(
    in_channels: int, out_channels: int, *, kernel_size: int, stride: int = 1, scale: float = 1.0
) -> nn.Sequential:
    """A convolution and a BatchNorm that begins with ``scale``."""
    norm = nn.BatchNorm2d(out_channels)
    nn.init.constant_(norm.weight, scale)
    padding = kernel_size // 2
    return nn.Sequential(
        nn.Conv2d(in_channels, out_channels, kernel_size, stride, padding, bias=False), norm
    )
