from __future__ import annotations

import torch

from sparkdl.models.demo import DigitsNet, PhotoNet


def test_digits_net_takes_bytes_and_floats_alike() -> None:
    net = DigitsNet(num_classes=7, hidden=8).eval()
    images = torch.randint(0, 17, (3, 1, 8, 8), dtype=torch.uint8)
    logits = net(images)
    assert logits.shape == (3, 7)
    assert torch.equal(logits, net(images.float()))


def test_dropout_acts_in_training_only() -> None:
    images = torch.randint(0, 17, (3, 1, 8, 8))
    net = DigitsNet()
    assert not torch.equal(net(images), net(images))
    net.eval()
    assert torch.equal(net(images), net(images))


def test_photo_net_takes_images_of_any_size() -> None:
    net = PhotoNet(3, channels=1, hidden=4).eval()
    for size in ((8, 8), (17, 30)):
        images = torch.randint(0, 256, (2, 1, *size), dtype=torch.uint8)
        assert net(images).shape == (2, 3)
