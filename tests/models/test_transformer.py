from __future__ import annotations

import math

import pytest
import torch

from sparkdl.errors import ConfigError
from sparkdl.models import TransformerNet
from sparkdl.models.transformer import _positions


def make(**more: int) -> TransformerNet:
    torch.manual_seed(1)
    return TransformerNet(num_outputs=3, num_tokens=9, width=16, feedforward=20, **more).eval()


def masked(lengths: list[int]) -> torch.Tensor:
    return torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]


def test_padding_changes_nothing_and_a_row_may_be_empty() -> None:
    net, words, lengths = make(), torch.randint(0, 9, (4, 6)), [6, 1, 0, 5]
    together = net(words, masked(lengths))
    for row, length in enumerate(lengths):
        alone = net(words[row : row + 1, :length], torch.ones(1, length, dtype=torch.bool))
        torch.testing.assert_close(together[row : row + 1], alone)


def test_the_order_of_the_values_counts() -> None:
    net, mask = make(), masked([4])
    words = torch.tensor([[1, 2, 3, 4]])
    assert not torch.allclose(net(words, mask), net(words.flip(1), mask))


def test_positions_are_those_of_the_paper() -> None:
    found = _positions(torch.zeros(1, 7, 4))
    for place in range(7):
        for pair in range(2):
            angle = place / 10000 ** (2 * pair / 4)
            assert found[place, 2 * pair] == pytest.approx(math.sin(angle), abs=1e-6)
            assert found[place, 2 * pair + 1] == pytest.approx(math.cos(angle), abs=1e-6)


def test_a_width_that_is_odd_or_cannot_be_shared_is_refused() -> None:
    with pytest.raises(ConfigError, match="width must be even; received 15"):
        TransformerNet(num_outputs=2, num_tokens=9, width=15, num_heads=3)
    with pytest.raises(ConfigError, match="multiple of num_heads; received 16 and 3"):
        TransformerNet(num_outputs=2, num_tokens=9, width=16, num_heads=3)
