from __future__ import annotations

import pytest
import torch

from sparkdl.models import FCNR, MLP, Autoencoder


def test_any_shape_of_as_many_values_will_do() -> None:
    net = MLP(sizes=(12, 5), num_outputs=2)
    rows = torch.randn(4, 12)
    assert net(rows).shape == (4, 2)
    assert torch.equal(net(rows.reshape(4, 3, 2, 2)), net(rows))


def test_dropout_acts_in_training_only() -> None:
    net, rows = MLP(sizes=(12, 50), num_outputs=2, dropout=0.5), torch.randn(4, 12)
    assert not torch.equal(net(rows), net(rows))
    net.eval()
    assert torch.equal(net(rows), net(rows))


def test_hidden_layers_have_the_names_of_an_autoencoders() -> None:
    mine = MLP(sizes=(12, 5, 3), num_outputs=2).state_dict()
    others = Autoencoder(sizes=(12, 5, 3)).state_dict()
    shared = {name for name in others if name.startswith("encoder.")}
    assert {name for name in mine if not name.startswith("head.")} == shared
    assert all(mine[name].shape == others[name].shape for name in shared)


def test_fcn_r_begins_by_the_rule_of_glorot_and_bengio() -> None:
    torch.manual_seed(0)
    net = FCNR(sizes=(64, 512, 128))
    for layer in (net.encoder[0][0], net.encoder[1][0]):
        rows, columns = layer.weight.shape
        assert layer.weight.std().item() == pytest.approx((2 / (rows + columns)) ** 0.5, rel=0.02)
        assert layer.bias.abs().max() == 0


@pytest.mark.parametrize("num_classes", [2, 10])
def test_fcn_r_takes_images(num_classes: int) -> None:
    images = torch.randint(0, 256, (2, 1, 28, 28), dtype=torch.uint8)
    assert FCNR(num_classes=num_classes)(images).shape == (2, num_classes)
