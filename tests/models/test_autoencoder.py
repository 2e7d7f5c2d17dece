from __future__ import annotations

import pytest
import torch

from sparkdl.errors import ConfigError
from sparkdl.models import MLP, Autoencoder
from sparkdl.serialization.initial_weights import InitialWeights, load_initial_weights


def test_the_shape_of_the_rows_comes_back() -> None:
    net = Autoencoder(sizes=(12, 5, 3))
    rows = torch.randn(4, 3, 2, 2)
    assert net(rows).shape == rows.shape
    assert net.encoder(rows.flatten(1)).shape == (4, 3)


def test_restored_values_have_no_bounds() -> None:
    net = Autoencoder(sizes=(2, 3))
    with torch.no_grad():
        net.decoder[0][0].bias.fill_(9.0)
        net.decoder[0][0].weight.zero_()
    assert net(torch.zeros(1, 2)).tolist() == [[9.0, 9.0]]


def test_corruption_empties_that_part_of_the_values_and_in_training_only() -> None:
    seen: list[torch.Tensor] = []
    net = Autoencoder(sizes=(1000, 2), corruption=0.3)
    net.encoder.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    rows = torch.ones(20, 1000)
    net(rows)
    net.eval()(rows)
    assert set(seen[0].unique().tolist()) == {0.0, 1.0}
    assert (seen[0] == 0).float().mean() == pytest.approx(0.3, abs=0.02)
    assert torch.equal(seen[1], rows)


def test_weights_of_a_shallower_one_fit_a_deeper_one_and_an_mlp() -> None:
    first, second = Autoencoder(sizes=(6, 4)), Autoencoder(sizes=(6, 4, 2))
    load_initial_weights(second, InitialWeights(source=first, skip=("*coder.1",)))
    for name, value in first.state_dict().items():
        assert torch.equal(second.state_dict()[name], value)
    net = MLP(sizes=(6, 4, 2), num_outputs=3)
    load_initial_weights(net, InitialWeights(source=second, skip=("decoder", "head")))
    assert torch.equal(net.encoder[1][0].weight, second.encoder[1][0].weight)


@pytest.mark.parametrize("corruption", [-0.1, 1.0])
def test_corruption_out_of_range_is_refused(corruption: float) -> None:
    with pytest.raises(ConfigError, match="corruption must be at least 0 and less than 1"):
        Autoencoder(sizes=(6, 4), corruption=corruption)
