from __future__ import annotations

import pytest
import torch
from torch import nn

from sparkdl.errors import ConfigError
from sparkdl.models import CifarResNet, ResNet20, ResNet50, ResNet56


def depth(net: nn.Module) -> int:
    """Layers with weights, without those of shortcuts: what the names count."""
    return sum(
        isinstance(module, nn.Conv2d | nn.Linear)
        for name, module in net.named_modules()
        if "shortcut" not in name
    )


@pytest.mark.parametrize(("kind", "layers"), [(ResNet20, 20), (ResNet56, 56), (ResNet50, 50)])
def test_depth_is_that_of_the_name(kind: type[CifarResNet], layers: int) -> None:
    assert depth(kind(width=2)) == layers


def test_stages_have_the_papers_sizes() -> None:
    images = torch.rand(1, 3, 32, 32)
    for net, wanted in (
        (ResNet20(), [(16, 32, 32), (32, 16, 16), (64, 8, 8)]),
        (ResNet50(width=4), [(16, 32, 32), (32, 16, 16), (64, 8, 8), (128, 4, 4)]),
    ):
        maps, sizes = net.eval().stem(images), []
        for stage in net.stages:
            maps = stage(maps)
            sizes.append(tuple(maps.shape[1:]))
        assert sizes == wanted


def test_shortcuts_of_option_a_skip_pixels_and_add_empty_channels() -> None:
    net = ResNet20(width=2).eval()
    maps = torch.rand(1, 2, 6, 6)
    out = net.stages[1][0](maps)  # at the beginning a block is its shortcut
    assert torch.equal(out[:, :2], maps[:, :, ::2, ::2])
    assert out[:, 2:].abs().max() == 0 and out.shape == (1, 4, 3, 3)


@pytest.mark.parametrize("is_bottleneck", [False, True])
def test_images_may_have_any_size(is_bottleneck: bool) -> None:
    net = CifarResNet(blocks=(1, 2), width=4, is_bottleneck=is_bottleneck, in_channels=1)
    for size in ((8, 8), (9, 13)):
        assert net(torch.rand(2, 1, *size)).shape == (2, 10)


@pytest.mark.parametrize("kind", [ResNet20, ResNet50])
def test_every_part_learns_from_the_second_step_on(kind: type[CifarResNet]) -> None:
    torch.manual_seed(0)
    net, images = kind(width=4), torch.rand(8, 3, 32, 32)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(images), torch.arange(8)).backward()
        optimizer.step()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in net.parameters())


def test_refusals() -> None:
    with pytest.raises(ConfigError, match="at least one stage"):
        CifarResNet(blocks=())
    with pytest.raises(ConfigError, match=r"blocks must be at least 1.*received \(1, 0\)"):
        CifarResNet(blocks=(1, 0))
