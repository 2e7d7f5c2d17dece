"""Do modules come back with the same structure, and are the others refused?"""

from __future__ import annotations

import json
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import nn

from sparkdl.serialization.compare_modules import find_difference
from sparkdl.serialization.json_objects import DescribeError, describe, restore
from tests.describable import NeedsWidth, Plain, Tied

MODULES: list[Any] = [
    lambda: nn.Linear(3, 2, bias=False, dtype=torch.float64),
    lambda: nn.Conv1d(2, 4, 3, padding="same", padding_mode="circular"),
    lambda: nn.Conv2d(2, 4, (3, 5), stride=2, dilation=(1, 2), groups=2, bias=False),
    lambda: nn.Conv3d(1, 2, 3),
    lambda: nn.ConvTranspose2d(2, 4, 3, output_padding=1, stride=2),
    lambda: nn.BatchNorm1d(5, eps=1e-3, momentum=None),
    lambda: nn.BatchNorm2d(5, affine=False, track_running_stats=False),
    lambda: nn.LayerNorm((3, 4), elementwise_affine=False),
    lambda: nn.LayerNorm(4, bias=False),
    lambda: nn.GroupNorm(2, 4),
    lambda: nn.InstanceNorm2d(3, affine=True),
    lambda: nn.RMSNorm(4),
    lambda: nn.Dropout(0.25, inplace=True),
    lambda: nn.Flatten(0, 1),
    lambda: nn.Unflatten(1, (2, 3)),
    lambda: nn.MaxPool2d(2, stride=1, ceil_mode=True),
    lambda: nn.AvgPool2d(2, divisor_override=3),
    lambda: nn.AdaptiveAvgPool2d((1, None)),
    lambda: nn.Embedding(10, 3, padding_idx=0),
    lambda: nn.EmbeddingBag(10, 3, mode="sum"),
    lambda: nn.LSTM(3, 4, num_layers=2, batch_first=True, dropout=0.1, bidirectional=True),
    lambda: nn.LSTM(3, 4, proj_size=2, bias=False),
    lambda: nn.GRU(3, 4),
    lambda: nn.RNN(3, 4, nonlinearity="relu"),
    lambda: nn.LSTMCell(3, 4),
    lambda: nn.MultiheadAttention(8, 2, add_bias_kv=True, batch_first=True),
    lambda: nn.MultiheadAttention(8, 2, bias=False, kdim=4, vdim=4),
    lambda: nn.TransformerEncoderLayer(8, 2, 16, 0.0, "gelu", norm_first=True, batch_first=True),
    lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2),
    lambda: nn.TransformerDecoderLayer(8, 2, 16, bias=False),
    lambda: nn.ReLU(inplace=True),
    lambda: nn.ReLU6(),
    lambda: nn.GELU("tanh"),
    lambda: nn.LeakyReLU(0.3),
    lambda: nn.PReLU(4, init=0.1),
    lambda: nn.Hardtanh(-2.0, 2.0),
    lambda: nn.Softplus(2.0, 10.0),
    lambda: nn.Softmax(dim=1),
    lambda: nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True),
    lambda: nn.Identity(),
    lambda: nn.Bilinear(2, 3, 4),
    lambda: nn.PixelShuffle(2),
    lambda: nn.ZeroPad2d(2),
    lambda: nn.CosineSimilarity(dim=0),
    lambda: nn.MSELoss(reduction="sum"),
    lambda: nn.CrossEntropyLoss(torch.tensor([1.0, 2.0]), label_smoothing=0.1),
    lambda: nn.BCEWithLogitsLoss(pos_weight=torch.tensor([3.0])),
    lambda: nn.SmoothL1Loss(beta=0.5),
    lambda: nn.HuberLoss(delta=2.0),
    lambda: nn.ModuleList([nn.Linear(2, 2), nn.ReLU()]),
    lambda: nn.ModuleDict({"b": nn.Linear(2, 2), "a": nn.ReLU()}),
    lambda: nn.Sequential(OrderedDict(first=nn.Linear(2, 2), second=nn.Sequential(nn.Tanh()))),
    lambda: nn.Sequential(),
    lambda: nn.Sequential(Plain(), nn.ReLU()),
    lambda: Plain(),
    lambda: Tied(),
    lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2)).bfloat16(),
]


@pytest.mark.parametrize("make", MODULES, ids=lambda make: type(make()).__name__)
def test_modules_come_back(make: Any) -> None:
    module = make()
    back = restore(json.loads(json.dumps(describe(module))))
    assert type(back) is type(module) and repr(back) == repr(module)
    assert find_difference(module, back) is None
    back.load_state_dict(module.state_dict())


def test_the_losses_weights_come_back_with_the_loss() -> None:
    loss = nn.CrossEntropyLoss(torch.tensor([1.0, 5.0]))
    output, target = torch.randn(4, 2), torch.tensor([0, 1, 1, 0])
    assert torch.equal(restore(describe(loss))(output, target), loss(output, target))


def test_frozen_parameters_stay_frozen() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    module[0].requires_grad_(False)
    back = restore(describe(module))
    assert [p.requires_grad for p in back.parameters()] == [False, False, True, True]


def test_the_training_mode_does_not_matter_and_is_kept() -> None:
    module = nn.Sequential(nn.Dropout(), Plain()).eval()
    describe(module)
    assert not module.training and not module[1].layer.training


def test_random_numbers_go_on_as_if_nothing_had_been_described() -> None:
    module = Plain()
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    restore(describe(module))
    assert torch.equal(torch.rand(1), expected)


def changed(**attributes: Any) -> nn.Module:
    module = Plain()
    for name, value in attributes.items():
        setattr(module, name, value)
    return module


def hooked() -> nn.Module:
    module = nn.Linear(2, 2)
    module.register_forward_hook(lambda *_: None)
    return module


def tied_by_hand() -> nn.Module:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    module[1].weight = module[0].weight
    return module


def patched() -> nn.Module:
    module = nn.Linear(2, 2)
    module.forward = lambda x: x  # type: ignore[method-assign, assignment]
    return module


def local_class() -> nn.Module:
    class Inside(nn.Module):
        pass

    return Inside()


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: Plain(5), "layer.weight|layer.bias"),
        (lambda: changed(scale=2.0), "differs in scale"),
        (lambda: changed(scale=lambda x: x), "differs in scale"),
        (lambda: changed(extra=1), "differs in extra"),
        (lambda: changed(grid=torch.ones(3)), "the buffers of it"),
        (lambda: changed(scale=nn.Linear(1, 1)), "scale.bias"),
        (lambda: changed(scale=[nn.Linear(1, 1)]), "differs in scale"),
        (lambda: NeedsWidth(3), "needs the arguments width"),
        (lambda: nn.Sequential(NeedsWidth(3)), "needs the arguments width"),
        (hooked, "_forward_hooks"),
        (tied_by_hand, "which parameters are shared"),
        (patched, "forward"),
        (local_class, "defined inside a function"),
        (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)), "Parametrized"),
        (lambda: nn.LazyLinear(3), "without a shape yet"),
    ],
)
def test_what_would_come_back_different_is_refused(make: Any, why: str) -> None:
    with pytest.raises(DescribeError, match=why):
        describe(make())
