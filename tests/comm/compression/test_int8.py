from __future__ import annotations

import pytest
import torch

from sparkdl.comm.compression.int8 import Int8Codec, Int8Compression
from sparkdl.errors import ConfigError


def encoded(
    values: torch.Tensor, *, per_row: bool = True
) -> tuple[Int8Codec, torch.Tensor, torch.Tensor]:
    shape = tuple(values.shape)
    (codec,) = Int8Codec.of_slices([shape], 1, values.dtype, per_row=per_row)
    residual = torch.zeros(values.numel(), dtype=values.dtype)
    message = torch.zeros(codec.message_bytes, dtype=torch.uint8)
    codec.encode(values.flatten(), residual, message)
    return codec, message, residual.view(shape)  # type: ignore[return-value]


def decoded(codec: Int8Codec, message: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    out = torch.zeros(like.numel(), dtype=like.dtype)
    codec.decode_add(message, out)
    return out.view(like.shape)


def test_the_largest_value_of_a_row_is_127_steps() -> None:
    values = torch.arange(-20.0, 20.0, dtype=torch.float64).view(2, 20)
    codec, message, residual = encoded(values)
    scales = torch.tensor([[20.0], [19.0]], dtype=torch.float64) / 127
    assert message[:16].view(torch.float64).tolist() == scales.flatten().tolist()
    expected = (values / scales).round() * scales
    torch.testing.assert_close(decoded(codec, message, values), expected, rtol=0, atol=1e-14)
    torch.testing.assert_close(residual, values - expected, rtol=0, atol=1e-14)
    assert (residual.abs() <= scales / 2 + 1e-14).all()


def test_a_tensor_may_share_a_scale() -> None:
    values = torch.arange(-20.0, 20.0).view(2, 20)
    _, message, _ = encoded(values, per_row=False)
    assert message[:4].view(torch.float32).item() == torch.tensor(20.0) / 127
    assert len(message) == 48
    assert len(encoded(values)[1]) == 48  # two scales fill the eight bytes


@pytest.mark.parametrize("size", [0.0, 1e-44, 1e-38, 1e38])
@pytest.mark.parametrize("length", [1, 7, 40])
def test_very_small_and_very_large_values(size: float, length: int) -> None:
    values = torch.full((length,), size)
    values[::2] *= -1
    codec, message, residual = encoded(values)
    found = decoded(codec, message, values)
    torch.testing.assert_close(found + residual, values)
    if size < 1e-40:  # one over the scale would be infinite: all is kept
        assert not found.any() and torch.equal(residual, values)
    else:
        torch.testing.assert_close(found, values)


def test_options() -> None:
    with pytest.raises(ConfigError, match="scale"):
        Int8Compression(scale="channel")  # type: ignore[arg-type]


def test_bytes() -> None:
    # Two ranks: slices of 32 values; 3 rows begin in each: 16 + 2 * 8 and 8 + 16 + 8 values.
    assert Int8Compression().wire_bytes([(4, 16)], 4, 2) == 2 * (2 * 4 + 32)
    assert Int8Compression(scale="tensor").wire_bytes([(4, 16)], 8, 2) == 2 * (8 + 32)
