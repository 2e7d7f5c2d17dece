"""Operators of ATen that an exported program may hold, and checks of those that torch leaves out.

Many operators that torch has besides write or read outside their tensors when their arguments are
wrong, and a file's may be. The list has what exports of torch.nn's layers and of the functions that
modules usually call hold, what torch marks as working on elements (``Tag.pointwise``) or as the
core of ATen, and close relatives of these. Left out are those that go around checks
(``_unsafe_index``), choose memory by themselves (``as_strided``, ``set_``), show memory that nobody
has written (``empty``), and the inner ones that trust their callers (``native_batch_norm``).
``python -m tests.serialization.test_allowed_operators`` prints the first three parts anew.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from sparkdl.errors import DataError

_NAMES = """
__ilshift__ __ixor__ __lshift__ __rshift__ __xor__ _assert_scalar _assert_tensor_metadata
_upsample_nearest_exact2d _weight_norm abs abs_ acos acos_ acosh acosh_ adaptive_avg_pool1d
adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d
adaptive_max_pool3d add add_ addbmm addcdiv addcdiv_ addcmul addcmul_ addmm addmv addr
affine_grid_generator alias all allclose alpha_dropout amax amin aminmax angle any arange argmax
argmin argsort asin asin_ asinh asinh_ atan atan2 atan2_ atan_ atanh atanh_ atleast_1d
atleast_2d avg_pool1d avg_pool2d avg_pool3d baddbmm batch_norm bernoulli bilinear
binary_cross_entropy binary_cross_entropy_with_logits bincount bitwise_and bitwise_and_
bitwise_left_shift bitwise_left_shift_ bitwise_not bitwise_not_ bitwise_or bitwise_or_
bitwise_right_shift bitwise_right_shift_ bitwise_xor bitwise_xor_ block_diag bmm
broadcast_tensors bucketize cartesian_prod cat cdist ceil ceil_ celu celu_ chain_matmul
channel_shuffle chunk clamp clamp_ clamp_max clamp_max_ clamp_min clamp_min_ clip clip_ clone
col2im complex concat conj_physical conj_physical_ constant_pad_nd contiguous conv1d conv2d
conv3d conv_transpose1d conv_transpose2d conv_transpose3d convolution copy copy_ copysign
corrcoef cos cos_ cosh cosh_ cosine_similarity count_nonzero cov cross cross_entropy_loss cummax
cumprod cumsum cumulative_trapezoid deg2rad deg2rad_ detach detach_ diag diag_embed diagonal
diff digamma digamma_ div div_ dot dropout dropout_ dstack einsum elu elu_ embedding
embedding_bag embedding_renorm_ eq equal erf erf_ erfc erfc_ erfinv erfinv_ exp exp2 exp2_ exp_
expand expand_as expm1 expm1_ eye feature_dropout fft_fft fft_fft2 fft_ifft fft_ifft2 fft_irfft
fft_irfft2 fft_rfft fft_rfft2 fill fill_ flatten flip float_power float_power_ floor floor_
floor_divide fmax fmin fmod fmod_ frac frac_ frexp full full_like gather gcd ge gelu glu
grid_sampler grid_sampler_2d group_norm gru gru_cell gt hann_window hardshrink hardsigmoid
hardsigmoid_ hardswish hardswish_ hardtanh hardtanh_ heaviside histc hstack huber_loss hypot
hypot_ i0 i0_ igamma igamma_ igammac igammac_ im2col imag index index_add index_add_ index_copy
index_fill index_fill_ index_put index_put_ index_select inner instance_norm is_nonzero isfinite
isin isinf isnan isneginf isposinf istft item kl_div kron kthvalue l1_loss layer_norm lcm ldexp
ldexp_ le leaky_relu leaky_relu_ lerp lerp_ lgamma lgamma_ lift_fresh_copy linalg_cholesky
linalg_det linalg_eigh linalg_inv linalg_matrix_norm linalg_norm linalg_pinv linalg_qr
linalg_slogdet linalg_solve linalg_svd linalg_vector_norm linear linspace log log10 log10_ log1p
log1p_ log2 log2_ log_ log_sigmoid log_softmax logaddexp logaddexp2 logcumsumexp logical_and
logical_and_ logical_not logical_not_ logical_or logical_or_ logical_xor logical_xor_ logit
logit_ logsumexp lstm lstm_cell lt mT margin_ranking_loss masked_fill masked_fill_
masked_scatter matmul matrix_power max max_pool1d max_pool2d max_pool2d_with_indices max_pool3d
max_pool3d_with_indices maximum mean median meshgrid min minimum mish mm mode movedim mse_loss
mul mul_ multinomial mv mvlgamma mvlgamma_ nan_to_num nan_to_num_ nanmean nanmedian nansum
narrow ne neg neg_ new_full new_ones new_zeros nextafter nextafter_ nll_loss nonzero norm
numpy_T one_hot ones ones_like outer pad pairwise_distance permute pixel_shuffle pixel_unshuffle
poisson_nll_loss polygamma polygamma_ positive pow pow_ prelu prod quantile rad2deg rad2deg_
rand rand_like randint randint_like randn randn_like randperm ravel real reciprocal reciprocal_
reflection_pad1d reflection_pad2d reflection_pad3d relu relu6 relu_ remainder remainder_ renorm
repeat repeat_interleave replication_pad1d replication_pad2d replication_pad3d reshape
reshape_as rms_norm rnn_relu rnn_tanh rnn_tanh_cell roll rot90 round round_ rrelu rsqrt rsqrt_
rsub scalar_tensor scaled_dot_product_attention scatter scatter_ scatter_add scatter_add_
scatter_reduce searchsorted select select_scatter selu selu_ sgn sgn_ sigmoid sigmoid_ sign
sign_ signbit silu silu_ sin sin_ sinc sinc_ sinh sinh_ slice slice_scatter smooth_l1_loss
soft_margin_loss softmax softplus softshrink sort special_airy_ai special_bessel_j0
special_bessel_j1 special_bessel_y0 special_bessel_y1 special_chebyshev_polynomial_t
special_chebyshev_polynomial_u special_chebyshev_polynomial_v special_chebyshev_polynomial_w
special_entr special_erfcx special_hermite_polynomial_h special_hermite_polynomial_he
special_i0e special_i1 special_i1e special_laguerre_polynomial_l special_legendre_polynomial_p
special_log_ndtr special_modified_bessel_i0 special_modified_bessel_i1
special_modified_bessel_k0 special_modified_bessel_k1 special_ndtri
special_scaled_modified_bessel_k0 special_scaled_modified_bessel_k1
special_shifted_chebyshev_polynomial_t special_shifted_chebyshev_polynomial_u
special_shifted_chebyshev_polynomial_v special_shifted_chebyshev_polynomial_w
special_spherical_bessel_j0 special_xlog1py special_zeta split split_with_sizes sqrt sqrt_
square square_ squeeze squeeze_ stack std std_mean stft sub sub_ sum swapaxes sym_is_contiguous
sym_numel sym_size sym_storage_offset sym_stride take tan tan_ tanh tanh_ tensor_split tensordot
threshold tile to topk trace transpose transpose_ trapezoid tril tril_indices
triplet_margin_loss triu triu_indices true_divide trunc trunc_ type_as unbind unflatten unfold
unique_consecutive unsqueeze unsqueeze_ upsample_bicubic2d upsample_bilinear2d upsample_linear1d
upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_trilinear3d var var_mean vdot
view view_as view_as_complex view_as_real vstack where xlogy xlogy_ zero_ zeros zeros_like
"""
ALLOWED = frozenset(f"aten.{name}" for name in _NAMES.split())


def _require(fits: bool, operator: str) -> None:
    if not fits:
        raise DataError(
            f"the exported program calls {operator} with arguments that do not fit each other; the "
            "file is damaged, or somebody has changed it"
        )


def _lstm(
    values: torch.Tensor, state: Sequence[torch.Tensor], weights: Sequence[torch.Tensor],
    has_biases: bool, num_layers: int, dropout: float, train: bool, bidirectional: bool,
    batch_first: bool,
) -> Any:  # fmt: skip
    """``aten.lstm.input``, whose kernels for CPUs believe that the sizes fit."""
    directions = 2 if bidirectional else 1
    _require(len(state) == 2 and values.dim() == 3, "lstm")
    num_rows, output, hidden = values.shape[1 - batch_first], state[0].shape[-1], state[1].shape[-1]
    states = [(num_layers * directions, num_rows, size) for size in (output, hidden)]
    expected = []
    for layer in range(num_layers):
        size = values.shape[2] if layer == 0 else output * directions
        own = [(4 * hidden, size), (4 * hidden, output), *([(4 * hidden,)] * 2 * has_biases)]
        expected += (own + [(output, hidden)] * (output != hidden)) * directions
    _require([tuple(tensor.shape) for tensor in state] == states, "lstm")
    _require([tuple(weight.shape) for weight in weights] == expected, "lstm")
    return torch.ops.aten.lstm.input(
        values, state, weights, has_biases, num_layers, dropout, train, bidirectional, batch_first
    )


def _recurrent(operator: Any, num_gates: int) -> Callable[..., Any]:
    """``aten.gru.input`` and its like, whose kernels for CPUs believe that the sizes fit."""

    def call(
        values: torch.Tensor, state: torch.Tensor, weights: Sequence[torch.Tensor],
        has_biases: bool, num_layers: int, dropout: float, train: bool, bidirectional: bool,
        batch_first: bool,
    ) -> Any:  # fmt: skip
        directions, name = 2 if bidirectional else 1, str(operator)
        _require(values.dim() == 3 and state.dim() == 3, name)
        num_rows, hidden = values.shape[1 - batch_first], state.shape[-1]
        _require(tuple(state.shape) == (num_layers * directions, num_rows, hidden), name)
        expected = []
        for layer in range(num_layers):
            size = values.shape[2] if layer == 0 else hidden * directions
            rows = num_gates * hidden
            expected += ([(rows, size), (rows, hidden)] + [(rows,)] * 2 * has_biases) * directions
        _require([tuple(weight.shape) for weight in weights] == expected, name)
        return operator(
            values, state, weights, has_biases, num_layers, dropout, train, bidirectional,
            batch_first,
        )  # fmt: skip

    return call


def _attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *others: Any, **named: Any
) -> Any:
    """``aten.scaled_dot_product_attention``, which reads as many values as there are keys."""
    _require(key.shape[:-1] == value.shape[:-1], "scaled_dot_product_attention")
    _require(query.shape[-1] == key.shape[-1], "scaled_dot_product_attention")
    return torch.ops.aten.scaled_dot_product_attention.default(query, key, value, *others, **named)


def _weight_norm(values: torch.Tensor, norms: torch.Tensor, dim: int = 0) -> Any:
    """``aten._weight_norm``, which ends the process where the sizes do not fit."""
    sizes = [size if axis == dim % values.dim() else 1 for axis, size in enumerate(values.shape)]
    _require(list(norms.shape) == sizes, "weight_norm")
    return torch.ops.aten._weight_norm.default(values, norms, dim)


def _embedding_bag(given: Mapping[str, Any]) -> bool:
    """Offsets in order, within the indices, and these within the weights."""
    weight, indices, offsets = given["weight"], given["indices"], given["offsets"]
    if indices.dim() != 1 or offsets.dim() != 1 or weight.dim() != 2:
        return False
    bounds = torch.cat([offsets, offsets.new_tensor([len(indices)])])
    is_within = bool(((indices >= 0) & (indices < len(weight))).all())
    return is_within and int(bounds[0]) == 0 and bool((bounds.diff() >= 0).all())


def _grid_sampler(given: Mapping[str, Any]) -> bool:
    """Modes that there are: with others nothing is written to the result."""
    return given["interpolation_mode"] in (0, 1, 2) and given["padding_mode"] in (0, 1, 2)


def _repeat_interleave(given: Mapping[str, Any]) -> bool:
    """Counts whose sum, which torch compares with the size of the result, does not overflow."""
    repeats = given["repeats"]
    return bool((repeats >= 0).all()) and float(repeats.double().sum()) < _MOST_REPEATS


def _division(given: Mapping[str, Any]) -> bool:
    """No quotient of whole numbers that is too large by one, for which a processor stops."""
    values, divisor = given["self"], given["other"]
    dtype = torch.result_type(values, divisor)
    if given["rounding_mode"] != "trunc" or dtype.is_floating_point or dtype is torch.bool:
        return True
    return not bool(((values == torch.iinfo(dtype).min) & (divisor == -1)).any())


def _upsample(given: Mapping[str, Any]) -> bool:
    """Scales that lead to no place behind the end of the input."""
    scales = [value for name, value in given.items() if name.startswith("scales")]
    sizes = zip(given["self"].shape[2:], given["output_size"], scales, strict=False)
    return all(scale is None or size * scale >= result * _ROUNDED for size, result, scale in sizes)


_MOST_REPEATS = 2.0**62
_ROUNDED = 1 - 1e-6


def _checked(operator: Any, fits: Callable[[Mapping[str, Any]], bool]) -> Callable[..., Any]:
    """Return a function that calls an operator if ``fits`` accepts its arguments, by name."""
    defaults = {one.name: one.default_value for one in operator._schema.arguments}

    def call(*args: Any, **named: Any) -> Any:
        given = {**defaults, **dict(zip(defaults, args, strict=False)), **named}
        _require(fits(given), str(operator))
        return operator(*args, **named)

    return call


def _all_checked() -> dict[Any, Callable[..., Any]]:
    aten = torch.ops.aten
    checks: list[tuple[Callable[[Mapping[str, Any]], bool], list[Any]]] = [
        (_embedding_bag, [aten.embedding_bag.default, aten.embedding_bag.padding_idx]),
        (_grid_sampler, [aten.grid_sampler.default, aten.grid_sampler_2d.default]),
        (_repeat_interleave, [aten.repeat_interleave.Tensor, aten.repeat_interleave.self_Tensor]),
        (
            _division,
            [
                aten.div.Tensor_mode,
                aten.div.Scalar_mode,
                aten.div_.Tensor_mode,
                aten.div_.Scalar_mode,
            ],
        ),
        (
            _upsample,
            [
                getattr(aten, name.removeprefix("aten.")).default
                for name in sorted(ALLOWED)
                if "upsample" in name
            ],
        ),
    ]
    return {one: _checked(one, fits) for fits, operators in checks for one in operators}


CHECKED: dict[Any, Callable[..., Any]] = {
    torch.ops.aten.lstm.input: _lstm,
    torch.ops.aten.gru.input: _recurrent(torch.ops.aten.gru.input, 3),
    torch.ops.aten.rnn_tanh.input: _recurrent(torch.ops.aten.rnn_tanh.input, 1),
    torch.ops.aten.rnn_relu.input: _recurrent(torch.ops.aten.rnn_relu.input, 1),
    torch.ops.aten.scaled_dot_product_attention.default: _attention,
    torch.ops.aten._weight_norm.default: _weight_norm,
    **_all_checked(),
}
"""Operators of the list, and what is called in their place."""
UNCHECKED = frozenset(
    f"torch.ops.aten.{name}.data" for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")
)
"""Overloads of the list for which there is no check."""
_CONSTANTS: dict[str, type] = {
    "ScalarType": torch.dtype,
    "Layout": torch.layout,
    "MemoryFormat": torch.memory_format,
}


def has_tensors(name: str, overload: str) -> bool:
    """True unless an operator computes with plain numbers, for which a processor may stop."""
    space, _, name = name.partition(".")
    operator = getattr(getattr(getattr(torch.ops, space), name, None), overload, None)
    if operator is None:  # which is another error
        return True
    schema = operator._schema
    return any("Tensor" in str(one.type) for one in (*schema.arguments, *schema.returns))


def strange_constant(operator: Any, args: Sequence[Any], named: Mapping[str, Any]) -> str | None:
    """Name of an argument that is a number where torch has a constant, which it looks up."""
    if not isinstance(operator, torch._ops.OpOverload):
        return None
    declared = operator._schema.arguments
    given = {**{one.name: value for one, value in zip(declared, args, strict=False)}, **named}
    for one in declared:
        kind = _CONSTANTS.get(str(one.real_type).removeprefix("Optional[").rstrip("]"))
        if kind is not None and not isinstance(given.get(one.name), kind | None):
            return str(one.name)
    return None
