from __future__ import annotations

import pytest
import torch
from torch import nn

from sparkdl.sync.averaging.mean import merge


def test_weighted_mean_of_trees() -> None:
    states = [
        {"w": torch.tensor([1.0, 2.0]), "count": torch.tensor(3), "list": [torch.tensor(4.0)]},
        {"w": torch.tensor([3.0, 6.0]), "count": torch.tensor(9), "list": [torch.tensor(8.0)]},
    ]
    merged = merge(states, [3, 1])
    assert merged["w"].tolist() == [1.5, 3.0]
    assert merged["count"].item() == 3
    assert merged["list"][0].item() == 5.0
    assert states[0]["w"].tolist() == [1.0, 2.0]


def test_without_weight_a_state_has_no_part() -> None:
    states = [{"w": torch.tensor([float("nan")])}, {"w": torch.tensor([2.0])}]
    assert merge(states, [0, 5])["w"].tolist() == [2.0]
    with pytest.raises(ValueError, match="positive"):
        merge(states, [0, 0])


def test_mean_of_means_is_the_mean() -> None:
    states = [{"w": torch.randn(50, dtype=torch.float64)} for _ in range(5)]
    weights = [3.0, 0.0, 1.0, 7.0, 2.0]
    once = merge(states, weights)
    halves = [merge(states[:3], weights[:3]), merge(states[3:], weights[3:])]
    twice = merge(halves, [sum(weights[:3]), sum(weights[3:])])
    torch.testing.assert_close(once["w"], twice["w"], rtol=0, atol=1e-15)


def test_adams_steps_are_kept_and_its_moments_averaged() -> None:
    optimizers = []
    for steps in (2, 5, 0):
        net = nn.Linear(2, 1)
        optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
        for _ in range(steps):
            for parameter in net.parameters():
                parameter.grad = torch.full_like(parameter, float(steps))
            optimizer.step()
        optimizers.append(optimizer.state_dict())
    merged = merge(optimizers, [1, 3, 2])
    assert merged["state"][0]["step"].item() == 5
    expected = (optimizers[0]["state"][0]["exp_avg"] + 3 * optimizers[1]["state"][0]["exp_avg"]) / 4
    torch.testing.assert_close(merged["state"][0]["exp_avg"], expected)
    assert merged["param_groups"] == optimizers[0]["param_groups"]


def test_dtypes_stay() -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        merged = merge(
            [{"w": torch.ones(2, dtype=dtype)}, {"w": torch.zeros(2, dtype=dtype)}], [1, 1]
        )
        assert merged["w"].dtype == dtype
        assert merged["w"].tolist() == [0.5, 0.5]
