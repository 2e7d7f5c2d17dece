from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from sparkdl.errors import TrainingDiverged
from sparkdl.train.modules.precision import NumberFormat

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)],
)
def test_autocast(precision: Any, dtype: torch.dtype) -> None:
    with NumberFormat(precision, CPU).autocast():
        assert nn.Linear(2, 2)(torch.ones(1, 2)).dtype == dtype


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_gradients_have_their_true_size(precision: Any) -> None:
    number_format = NumberFormat(precision, CPU)
    weight = nn.Parameter(torch.tensor(2.0))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    number_format.backward(3.0 * weight)
    number_format.unscale(optimizer)
    assert weight.grad == 3.0
    assert number_format.step(optimizer)
    assert weight.item() == 0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_backward_of_a_quotient(dtype: torch.dtype) -> None:
    number_format = NumberFormat("fp32", CPU)
    for divisor in (3, 3, 7, 1):
        one, other = (torch.tensor(0.7, dtype=dtype, requires_grad=True) for _ in range(2))
        number_format.backward(one.sin(), divisor)
        (other.sin() / divisor).backward()
        assert torch.equal(one.grad, other.grad)


def test_overflow_skips_the_step_and_lowers_the_scale() -> None:
    number_format = NumberFormat("fp16", CPU)
    assert number_format.may_skip_steps
    assert not NumberFormat("bf16", CPU).may_skip_steps
    weight = nn.Parameter(torch.tensor(2.0))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    before = number_format.state_dict()["scale"]
    for skipped in range(40):
        weight.grad = None
        number_format.backward(weight * torch.inf)
        number_format.unscale(optimizer)
        if skipped == 0:
            assert number_format.step(optimizer) is False
            assert number_format.state_dict()["scale"] == before / 2
            other = NumberFormat("fp16", CPU)
            other.load_state_dict(number_format.state_dict())
            assert other.state_dict() == number_format.state_dict()
        elif skipped < 32:
            assert number_format.step(optimizer) is False
        else:
            with pytest.raises(TrainingDiverged, match="at any loss scale"):
                number_format.step(optimizer)
            break
    assert weight.item() == 2.0


def test_a_rank_whose_first_batch_is_empty_can_step() -> None:
    number_format = NumberFormat("fp16", torch.device("cpu"))
    net = torch.nn.Linear(2, 1)
    net.weight.grad = torch.full_like(net.weight, number_format.state_dict()["scale"])
    net.bias.grad = torch.zeros_like(net.bias)
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    before = net.weight.detach().clone()
    number_format.unscale(optimizer)
    assert number_format.step(optimizer)
    torch.testing.assert_close(before - net.weight.detach(), torch.ones(1, 2))
