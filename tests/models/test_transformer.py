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


@pytest.mark.parametrize("with_gradients", [False, True])  # torch takes a faster path without
def test_padding_changes_nothing(with_gradients: bool) -> None:
    net, words, lengths = make(), torch.randint(0, 9, (4, 6)), [6, 1, 3, 5]
    with torch.set_grad_enabled(with_gradients):
        together = net(words, masked(lengths))
        for row, length in enumerate(lengths):
            alone = net(words[row : row + 1, :length], torch.ones(1, length, dtype=torch.bool))
            torch.testing.assert_close(together[row : row + 1], alone)


def test_both_paths_of_torch_agree_also_where_all_is_padding() -> None:
    net, words, mask = make(), torch.randint(0, 9, (3, 4)), masked([4, 2, 3])
    mask[1] = False
    slow = net(words, mask)
    with torch.no_grad():
        fast = net(words, mask)
    torch.testing.assert_close(slow, fast)
    assert slow.isfinite().all()


def test_the_order_of_the_values_counts() -> None:
    net, mask = make(), masked([4])
    words = torch.tensor([[1, 2, 3, 4]])
    assert not torch.allclose(net(words, mask), net(words.flip(1), mask))


def test_layers_do_not_begin_alike() -> None:
    one, other = make().encoder.layers
    assert not torch.equal(one.self_attn.in_proj_weight, other.self_attn.in_proj_weight)


def test_positions_are_those_of_the_paper() -> None:
    found = _positions(torch.zeros(1, 7, 4))
    for place in range(7):
        for pair in range(2):
            angle = place / 10000 ** (2 * pair / 4)
            assert found[place, 2 * pair] == pytest.approx(math.sin(angle), abs=1e-6)
            assert found[place, 2 * pair + 1] == pytest.approx(math.cos(angle), abs=1e-6)


@pytest.mark.parametrize(("width", "heads"), [(15, 3), (16, 3)])
def test_a_width_that_cannot_be_shared_is_refused(width: int, heads: int) -> None:
    with pytest.raises(ConfigError, match=f"even and a multiple .* received {width} and {heads}"):
        TransformerNet(num_outputs=2, num_tokens=9, width=width, num_heads=heads)
