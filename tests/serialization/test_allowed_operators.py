"""Does the list of operators have what exports of ordinary modules hold, and nothing dangerous?

``python -m tests.serialization.test_allowed_operators`` prints the list for the torch that is here.
"""

from __future__ import annotations

import re
import textwrap
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from sparkdl.errors import ConfigError, DataError
from sparkdl.serialization.allowed_operators import ALLOWED, CHECKED
from sparkdl.serialization.exported_program import read_program, write_program

X2, X3, X4, X5 = (torch.randn(4, 8, *(6,) * k) for k in range(4))
I2 = torch.randint(0, 5, (4, 8))

LAYERS: list[tuple[nn.Module, tuple[torch.Tensor, ...]]] = [
    *((kind(), (X2,)) for kind in (
        nn.ReLU, nn.ReLU6, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish, nn.Sigmoid,
        nn.LogSigmoid, nn.Tanh, nn.Hardtanh, nn.Hardsigmoid, nn.Hardswish, nn.Hardshrink,
        nn.Softplus, nn.Softshrink, nn.Softsign, nn.Tanhshrink, nn.LeakyReLU, nn.PReLU, nn.RReLU,
        nn.GLU, nn.Softmin, nn.Identity, nn.Flatten, nn.Dropout, nn.AlphaDropout,
    )),
    (nn.ReLU(inplace=True), (X2 + 1,)), (nn.Hardswish(inplace=True), (X2,)),
    (nn.GELU(approximate="tanh"), (X2,)),
    (nn.Threshold(0.1, 2.0), (X2,)), (nn.Softmax(1), (X2,)), (nn.LogSoftmax(1), (X2,)),
    (nn.Softmax2d(), (X4,)), (nn.Unflatten(1, (2, 4)), (X2,)),
    (nn.Linear(8, 3), (X2,)), (nn.Bilinear(8, 8, 3), (X2, X2)),
    (nn.Conv1d(8, 4, 3, padding=1), (X3,)), (nn.Conv2d(8, 4, 3, padding="same"), (X4,)),
    (nn.Conv2d(8, 8, 3, groups=8, dilation=2, padding=2), (X4,)), (nn.Conv3d(8, 4, 3), (X5,)),
    (nn.Conv2d(8, 4, 3, padding=1, padding_mode="reflect"), (X4,)),
    (nn.ConvTranspose1d(8, 4, 3), (X3,)), (nn.ConvTranspose2d(8, 4, 3, stride=2), (X4,)),
    (nn.ConvTranspose3d(8, 4, 3), (X5,)),
    (nn.BatchNorm1d(8), (X2,)), (nn.BatchNorm2d(8), (X4,)), (nn.BatchNorm3d(8), (X5,)),
    (nn.InstanceNorm1d(8, affine=True), (X3,)), (nn.InstanceNorm2d(8), (X4,)),
    (nn.GroupNorm(2, 8), (X4,)), (nn.LayerNorm(8), (X2,)), (nn.RMSNorm(8), (X2,)),
    (nn.LocalResponseNorm(2), (X4,)), (nn.CrossMapLRN2d(2), (X4,)),
    (nn.MaxPool1d(2), (X3,)), (nn.MaxPool2d(2), (X4,)), (nn.MaxPool3d(2), (X5,)),
    (nn.AvgPool1d(2), (X3,)), (nn.AvgPool2d(2), (X4,)), (nn.AvgPool3d(2), (X5,)),
    (nn.LPPool2d(2.0, 2), (X4,)), (nn.FractionalMaxPool2d(2, output_size=3), (X4,)),
    (nn.AdaptiveAvgPool1d(2), (X3,)), (nn.AdaptiveAvgPool2d(2), (X4,)),
    (nn.AdaptiveAvgPool2d(1), (X4,)), (nn.AdaptiveAvgPool3d(2), (X5,)),
    (nn.AdaptiveMaxPool1d(2), (X3,)), (nn.AdaptiveMaxPool2d(2), (X4,)),
    (nn.AdaptiveMaxPool3d(2), (X5,)),
    (nn.ReflectionPad2d(1), (X4,)), (nn.ReplicationPad1d(1), (X3,)), (nn.ZeroPad2d(1), (X4,)),
    (nn.ReplicationPad2d(1), (X4,)), (nn.ConstantPad1d(1, 2.0), (X3,)),
    (nn.CircularPad2d(1), (X4,)), (nn.ReflectionPad1d(1), (X3,)),
    *((nn.Upsample(scale_factor=2, mode=mode), (x,)) for mode, x in (
        ("nearest", X3), ("nearest", X4), ("nearest", X5), ("linear", X3), ("bilinear", X4),
        ("bicubic", X4), ("trilinear", X5), ("nearest-exact", X4),
    )),
    (nn.PixelShuffle(2), (X4,)), (nn.PixelUnshuffle(2), (X4,)), (nn.ChannelShuffle(2), (X4,)),
    (nn.Fold((6, 6), 2), (torch.randn(4, 8, 25),)), (nn.Unfold(2), (X4,)),
    (nn.CosineSimilarity(), (X2, X2)), (nn.PairwiseDistance(), (X2, X2)),
    (nn.Embedding(5, 3, padding_idx=0), (I2,)), (nn.EmbeddingBag(5, 3, mode="mean"), (I2,)),
    (nn.Embedding(5, 3, max_norm=1.0), (I2,)),
    *((kind(6, 5, num_layers=2, batch_first=True, bidirectional=both), (X3,))
      for kind in (nn.RNN, nn.LSTM, nn.GRU) for both in (False, True)),
    (nn.RNN(6, 5, nonlinearity="relu"), (X3,)), (nn.LSTM(6, 5, proj_size=2), (X3,)),
    *((kind(8, 5), (X2,)) for kind in (nn.RNNCell, nn.LSTMCell, nn.GRUCell)),
    (nn.TransformerEncoderLayer(6, 2, 8, batch_first=True), (X3,)),
    (nn.TransformerEncoderLayer(6, 2, 8, norm_first=True, activation="gelu"), (X3,)),
    (nn.TransformerDecoderLayer(6, 2, 8, batch_first=True), (X3, X3)),
    (nn.Transformer(6, 2, 1, 1, 8, batch_first=True), (X3, X3)),
    (nn.utils.parametrizations.weight_norm(nn.Linear(8, 3)), (X2,)),
    (nn.utils.parametrizations.spectral_norm(nn.Linear(8, 3)), (X2,)),
]  # fmt: skip
"""Layers of torch.nn, and what each is called with."""

FUNCTIONS: list[Callable[[torch.Tensor, torch.Tensor], Any]] = [
    lambda x, i: torch.cat([x, x], 1) + torch.stack([x, x], 1).sum(1).repeat(1, 2),
    lambda x, i: (x.split(4, 1), x.chunk(2, 1), x.unbind(1), torch.tensor_split(x, 2, 1)),
    lambda x, i: (x.view(-1, 2, 4), x.reshape(-1, 2, 4).permute(0, 2, 1), x.unsqueeze(1).mT),
    lambda x, i: (x[:, 1:], x[:, ::2], x[:, -1], x[..., None], x[:, [0, 2]], x[x > 0]),
    lambda x, i: (x.expand(2, -1, -1), x.flip(1), x.roll(1, 1), x.tile(1, 2), x.squeeze()),
    lambda x, i: (x.gather(1, i), x.scatter(1, i, 1.0), x.scatter_add(1, i, x), x.take(i)),
    lambda x, i: (x.index_select(1, i[0]), x.index_fill(1, i[0], 0.0), x.index_add(1, i[0], x)),
    lambda x, i: (torch.zeros_like(x).index_put((i[:, 0],), x), x.masked_fill(x > 0, 0.0)),
    lambda x, i: (x.sort(1), x.argsort(1), x.topk(3, 1), x.kthvalue(2, 1), x.median(1), x.mode(1)),
    lambda x, i: (x.max(), x.min(), x.max(1), x.min(1), x.amax(1), x.amin(1), x.aminmax()),
    lambda x, i: (x.sum(), x.mean(), x.prod(), x.sum(1), x.mean(1), x.prod(1), x.logsumexp(1)),
    lambda x, i: (x.std(1), x.var(1), x.norm(), x.norm(dim=1), torch.var_mean(x, 1), x.any(1)),
    lambda x, i: (x.cumsum(1), x.cumprod(1), x.cummax(1), x.logcumsumexp(1), x.diff(dim=1)),
    lambda x, i: (x.argmax(1), x.argmin(1), x.all(1), x.any(), x.count_nonzero(1), x.nansum(1)),
    lambda x, i: (x @ x.T, x.matmul(x.T), torch.bmm(x[None], x.T[None]), x.mm(x.T), x[0] @ x[0]),
    lambda x, i: torch.einsum("bi,bj->bij", x, x),
    lambda x, i: (torch.addmm(x[:, :1], x, x.T), torch.baddbmm(x[None, :, :1], x[None], x.T[None])),
    lambda x, i: (torch.outer(x[0], x[1]), torch.cross(x[:, :3], x[:, 3:6], 1), x.tril(), x.triu()),
    lambda x, i: (torch.cdist(x, x), x.diagonal(), torch.diag(x[0]), torch.diag_embed(x)),
    lambda x, i: (torch.kron(x, x), torch.tensordot(x, x, ([1], [1])), torch.block_diag(x, x)),
    lambda x, i: (torch.linalg.norm(x), torch.linalg.vector_norm(x, dim=1), F.normalize(x)),
    lambda x, i: (torch.linalg.inv(x[:4, :4]), torch.linalg.det(x[:4, :4]), torch.linalg.qr(x)),
    lambda x, i: (torch.fft.rfft(x), torch.fft.fft(x).real, torch.fft.irfft(torch.fft.rfft(x))),
    lambda x, i: (torch.view_as_real(torch.complex(x, x)), torch.complex(x, x).abs()),
    lambda x, i: (torch.arange(8) + x, torch.linspace(0, 1, 8) * x, torch.eye(8) @ x.T),
    lambda x, i: (torch.zeros(8) + x, torch.ones(8) * x, torch.full((8,), 2.0) + x, x.new_zeros(3)),
    lambda x, i: (torch.ones_like(x), torch.full_like(x, 2), x.new_ones(3), x.new_full((3,), 1.0)),
    lambda x, i: (x.to(torch.float64), x.half(), x.bool(), x.long(), x.type_as(i), x.float()),
    lambda x, i: (x.clone(), x.detach(), x.contiguous(), x.abs_(), x.add_(1), x.mul_(2)),
    lambda x, i: (torch.where(x > 0, x, -x), x.clamp(0, 1), x.clamp(min=0), x.clamp_min(0.1)),
    lambda x, i: (F.one_hot(i, 5), i.bincount(minlength=5) if i.dim() == 1 else i, i % 3, i // 2),
    lambda x, i: (F.pad(x, (1, 1)), F.pad(x[:, None], (1, 1), mode="reflect"), x.unfold(1, 2, 1)),
    lambda x, i: (F.scaled_dot_product_attention(x[None], x[None], x[None]), F.softmax(x, 1)),
    lambda x, i: (F.cross_entropy(x, i[:, 0]), F.mse_loss(x, x), F.l1_loss(x, x)),
    lambda x, i: (F.huber_loss(x, x), F.kl_div(x, x), F.smooth_l1_loss(x, x)),
    lambda x, i: F.binary_cross_entropy_with_logits(x, x),
    lambda x, i: F.grid_sample(x[:, None, None], torch.zeros(x.shape[0], 1, 2, 2)),
    lambda x, i: F.affine_grid(torch.eye(2, 3).expand(x.shape[0], 2, 3), [x.shape[0], 1, 2, 2]),
    lambda x, i: (torch.searchsorted(x[0], x), torch.bucketize(x, x[0]), torch.isin(i, i[0])),
    lambda x, i: (torch.meshgrid(x[0], x[1], indexing="ij"), torch.cartesian_prod(x[0], x[1])),
    lambda x, i: (x.repeat_interleave(2, 1), torch.bernoulli(x.sigmoid()), torch.rand_like(x)),
    lambda x, i: (x.swapaxes(0, 1), x.movedim(0, 1), torch.rot90(x), x.flatten(0), x.ravel()),
    lambda x, i: (torch.lerp(x, x, 0.5), torch.addcmul(x, x, x), torch.addcdiv(x, x, x)),
    lambda x, i: (x.nan_to_num(), x.renorm(2, 0, 1.0), torch.renorm(x, 2, 0, 1.0), x.isfinite()),
]  # fmt: skip
"""What users' modules call, in groups; ``x`` is ``(batch, 8)`` and ``i`` are whole numbers."""


class _Called(nn.Module):
    def __init__(self, function: Callable[[torch.Tensor, torch.Tensor], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor, i: torch.Tensor) -> Any:
        return self.function(x, i)


def operators(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> set[str]:
    """Operators in the program of a module, without their overloads."""
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.export.export(module.eval(), inputs)
    graphs = [part for part in program.graph_module.modules() if hasattr(part, "graph")]
    targets = [node.target for part in graphs for node in part.graph.nodes]
    kept = [target for target in targets if isinstance(target, torch._ops.OpOverload)]
    return {str(target.overloadpacket) for target in kept}


def of_the_tags() -> set[str]:
    """Operators that torch itself says work on elements, or calls the core of ATen.

    The dispatcher knows them all, `torch.ops.aten` those alone that somebody has asked for.
    """
    found = set()
    names = torch._C._dispatch_get_all_op_names()
    for name in {name[6:].partition(".")[0] for name in names if name.startswith("aten::")}:
        packet = getattr(torch.ops.aten, name, None)
        overloads = getattr(packet, "overloads", list)()
        tags = {tag for one in overloads for tag in getattr(packet, one).tags}
        if tags & {torch.Tag.pointwise, torch.Tag.core}:
            found.add(f"aten.{name}")
    return found


DANGEROUS = re.compile(
    r"aten\.(_unsafe\w*|\w*as_strided\w*|set_?|set_data|resize\w*|\w*from_file|\w*empty\w*|data"
    r"|_(?!assert|weight_norm|upsample_nearest_exact|_)\w*|native_\w*|\w*_storage|record_stream"
    r"|mkldnn\w*|cudnn\w*|miopen\w*|\w*_backward\w*|\w*sparse\w*|\w*quantize\w*"
    r"|fractional_max_pool\w*|max_unpool\w*)"
)
"""Left out though torch has a tag for some: they go around checks, believe that sizes fit, or see
memory that nobody has written."""


def exported() -> set[str]:
    """Operators in programs of the layers and functions above."""
    found = set()
    for module, inputs in LAYERS:
        found |= operators(module, inputs)
    for function in FUNCTIONS:
        found |= operators(_Called(function), (X2, I2))
    return found


@pytest.mark.slow
def test_the_list_has_what_exports_of_ordinary_modules_hold() -> None:
    found = exported()
    assert len(found) > 200
    assert {name for name in found if not DANGEROUS.fullmatch(name)} <= ALLOWED


def test_the_list_has_what_torch_says_works_on_elements() -> None:
    """A later torch may have more of them; what is in the list is there in this one."""
    assert {name for name in of_the_tags() if not DANGEROUS.fullmatch(name)} <= ALLOWED


def test_the_list_has_nothing_dangerous() -> None:
    assert not [name for name in ALLOWED if DANGEROUS.fullmatch(name)]
    assert not [name for name in ALLOWED if not re.fullmatch(r"aten\.\w+", name)]


class _Recurrent(nn.Module):
    """Calls the operator itself, as a program may that no module has made."""

    def __init__(self, recurrent: torch.Tensor) -> None:
        super().__init__()
        self.recurrent = nn.Parameter(recurrent)
        self.inputs = nn.Parameter(torch.zeros(20, 6))

    def forward(self, x: torch.Tensor) -> Any:
        state = [x.new_zeros(1, x.shape[0], 5)] * 2
        weights = [self.inputs, self.recurrent]
        return torch.ops.aten.lstm.input(x, state, weights, False, 1, 0.0, False, False, True)[0]


def test_sizes_are_looked_at_where_operators_do_not() -> None:
    keys, values = torch.randn(1, 2, 64, 8), torch.randn(1, 2, 7, 8)
    attention = CHECKED[torch.ops.aten.scaled_dot_product_attention.default]
    assert attention(keys, keys, keys).shape == keys.shape
    norm = CHECKED[torch.ops.aten._weight_norm.default]
    assert norm(torch.ones(4, 3), torch.ones(4, 1), 0).shape == (4, 3)
    for call in (
        lambda: attention(keys, keys, values),
        lambda: norm(torch.ones(4, 3), torch.ones(1, 1), 0),
    ):
        with pytest.raises(DataError, match="do not fit each other"):
            call()


aten = torch.ops.aten
WEIGHT, THREE = torch.ones(4, 3), torch.tensor([0, 1, 2])
IMAGE, GRID = torch.ones(1, 3, 4, 4), torch.zeros(1, 4, 4, 2)
LAST = torch.ones(1, 3, 4, 4, dtype=torch.uint8).to(memory_format=torch.channels_last)
LEAST = torch.tensor([-(2**63)])
GOOD: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
    (aten.embedding_bag.default, (WEIGHT, THREE, torch.tensor([0, 2])), {}),
    (aten.embedding_bag.padding_idx,
     (WEIGHT, THREE, torch.tensor([0, 0, 3]), False, 1, False, None, True, 0), {}),
    (aten.grid_sampler.default, (IMAGE, GRID, 0, 1, False), {}),
    (aten.repeat_interleave.Tensor, (THREE,), {"output_size": 3}),
    (aten.repeat_interleave.self_Tensor, (WEIGHT, torch.tensor([1, 0, 2, 0]), 0), {}),
    (aten.div.Tensor_mode, (LEAST, torch.tensor([2])), {"rounding_mode": "trunc"}),
    (aten.div.Tensor_mode, (WEIGHT, -WEIGHT), {"rounding_mode": "trunc"}),
    (aten.div.Scalar_mode, (LEAST, -1), {"rounding_mode": "floor"}),
    (aten.upsample_nearest2d.default, (IMAGE, [8, 6], 2.0, 1.5), {}),
    (aten.upsample_bilinear2d.default, (IMAGE, [1, 1], False), {"scales_h": 0.3}),
    (aten._upsample_nearest_exact2d.default, (LAST, [9, 9]), {}),
]  # fmt: skip
"""Operators that are looked at, and arguments with which they stay within their tensors."""
BAD: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
    (aten.embedding_bag.default, (WEIGHT, THREE, torch.tensor([0, -900000, 3])), {}),
    (aten.embedding_bag.padding_idx,
     (WEIGHT, THREE, torch.tensor([0, 2, 1]), False, 0, False, None, False, 0), {}),
    (aten.embedding_bag.default, (WEIGHT, THREE, torch.tensor([1, 2])), {}),
    (aten.embedding_bag.default, (WEIGHT, THREE), {"offsets": torch.tensor([0, 4])}),
    (aten.embedding_bag.default, (WEIGHT, THREE - 1, torch.tensor([0])), {}),
    (aten.embedding_bag.default, (WEIGHT, THREE + 2, torch.tensor([0])), {}),
    (aten.grid_sampler.default, (IMAGE, GRID, 9, 0, False), {}),
    (aten.grid_sampler_2d.default, (IMAGE, GRID, 0, -1, False), {}),
    (aten.repeat_interleave.Tensor, (torch.tensor([2**62] * 4 + [3]),), {"output_size": 3}),
    (aten.repeat_interleave.self_Tensor, (THREE, torch.tensor([2**40, -(2**40), 3]), 0), {}),
    (aten.div.Tensor_mode, (LEAST, torch.tensor([-1])), {"rounding_mode": "trunc"}),
    (aten.div_.Scalar_mode, (LEAST.clone(), -1), {"rounding_mode": "trunc"}),
    (aten._upsample_nearest_exact2d.default, (LAST, [9, 9], 1e-30, 1e-30), {}),
    (aten.upsample_trilinear3d.default, (X5, [6, 6, 6], False), {"scales_d": float("nan")}),
]  # fmt: skip
"""The same with which torch reads or writes elsewhere, shows memory, or ends the process."""


@pytest.mark.parametrize(("operator", "args", "named"), GOOD)
def test_arguments_that_fit_give_what_the_operator_gives(
    operator: Any, args: tuple[Any, ...], named: dict[str, Any]
) -> None:
    found, expected = CHECKED[operator](*args, **named), operator(*args, **named)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(("operator", "args", "named"), BAD)
def test_arguments_that_lead_elsewhere_are_an_error(
    operator: Any, args: tuple[Any, ...], named: dict[str, Any]
) -> None:
    with pytest.raises(DataError, match="do not fit each other"):
        CHECKED[operator](*args, **named)


class _Bags(nn.Module):
    """Takes its offsets from a constant, as a file may that somebody has changed."""

    def __init__(self, offsets: list[int]) -> None:
        super().__init__()
        self.offsets = nn.Parameter(torch.tensor(offsets), requires_grad=False)
        self.table = nn.Parameter(torch.ones(9, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = aten.embedding_bag.padding_idx(
            self.table, x.flatten(), self.offsets, False, 0, False, None, False, 0
        )[0]
        return x + found.sum()


def test_a_program_with_offsets_that_lead_elsewhere_is_an_error() -> None:
    x = torch.ones(2, 3, dtype=torch.int64)
    assert read_program(write_program(_Bags([0, 1]), (x,)))(x).shape == (2, 3)
    with pytest.raises(ConfigError, match="do not fit each other"):
        write_program(_Bags([0, 900000]), (x,))


@pytest.mark.parametrize(
    "kind",
    [
        nn.LSTM(6, 5, 2, bidirectional=True, batch_first=True),
        nn.LSTM(6, 5, proj_size=2, batch_first=True),
        nn.GRU(6, 5, 2, bidirectional=True, batch_first=True),
        nn.GRU(6, 5, bias=False, batch_first=True),
        nn.RNN(6, 5, 2, nonlinearity="relu", batch_first=True),
        nn.RNN(6, 5, bidirectional=True, batch_first=True),
    ],
)
def test_recurrent_programs_still_run(kind: nn.RNNBase) -> None:
    x = torch.randn(4, 8, 6)
    program = read_program(write_program(kind, (x,)))
    assert torch.equal(program(x)[0], kind.eval()(x)[0])


def test_a_recurrent_program_with_weights_that_are_too_small_is_an_error() -> None:
    with pytest.raises(ConfigError, match="do not fit each other"):
        write_program(_Recurrent(torch.zeros(1, 5)), (torch.randn(2, 3, 6),))


if __name__ == "__main__":
    found = {name for name in of_the_tags() | exported() if not DANGEROUS.fullmatch(name)}
    print("\n".join(textwrap.wrap(" ".join(sorted(found)).replace("aten.", ""), 96)))
