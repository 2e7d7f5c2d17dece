from __future__ import annotations

import pytest
import torch

from sparkdl.errors import ConfigError
from sparkdl.models import LSTMNet


def masked(lengths: list[int]) -> torch.Tensor:
    return torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]


def test_padding_changes_nothing() -> None:
    net = LSTMNet(num_outputs=3, num_tokens=9, num_layers=2).eval()
    words, lengths = torch.randint(0, 9, (4, 6)), [6, 1, 3, 5]
    together = net(words, masked(lengths))
    for row, length in enumerate(lengths):
        alone = net(words[row : row + 1, :length], torch.ones(1, length, dtype=torch.bool))
        torch.testing.assert_close(together[row : row + 1], alone)


def test_the_order_of_the_values_counts() -> None:
    net, mask = LSTMNet(num_outputs=3, num_tokens=9).eval(), masked([4])
    words = torch.tensor([[1, 2, 3, 4]])
    assert not torch.allclose(net(words, mask), net(words.flip(1), mask))


def test_rows_without_values_give_what_a_state_of_zeros_gives() -> None:
    net = LSTMNet(num_outputs=3, num_tokens=9).eval()
    found = net(torch.tensor([[5, 5], [1, 2]]), torch.tensor([[False] * 2, [True] * 2]))
    assert torch.equal(found[0], net.head.bias)
    assert not torch.allclose(found[1], net.head.bias)


def test_numbers_may_have_one_feature_or_several() -> None:
    mask = masked([3, 2])
    one = LSTMNet(num_outputs=1, num_features=1)
    numbers = torch.randn(2, 3)
    torch.testing.assert_close(one(numbers, mask), one(numbers[:, :, None], mask))
    assert LSTMNet(num_outputs=1, num_features=5)(torch.randn(2, 3, 5), mask).shape == (2, 1)


def test_dropout_with_one_layer_is_no_warning_and_acts() -> None:
    net, mask = LSTMNet(num_outputs=2, num_tokens=9, dropout=0.5), masked([3, 2])
    words = torch.randint(0, 9, (2, 3))
    assert not torch.equal(net(words, mask), net(words, mask))


def test_refusals() -> None:
    with pytest.raises(ConfigError, match="num_tokens must be at least 1"):
        LSTMNet(num_outputs=2, num_tokens=0)
    with pytest.raises(ConfigError, match="width must be at least 1"):
        LSTMNet(num_outputs=2, width=0)
