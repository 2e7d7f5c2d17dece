from __future__ import annotations

from typing import Any

import pytest
import torch

from sparkdl.comm.compression.onebit import OneBitCodec, OneBitCompression
from sparkdl.errors import ConfigError
from tests.comm.compression.ranks import Threads, make, random_share


def test_each_side_of_a_column_becomes_its_mean() -> None:
    values = torch.tensor([[1.0, 3.0, -2.0, -4.0] * 4, [0.0, 6.0, 0.0, 6.0] * 4, [-1.0] * 16])
    (codec,) = OneBitCodec.of_slices([(3, 16)], 1, torch.float32)
    residual = torch.zeros(48)
    message = torch.zeros(codec.message_bytes, dtype=torch.uint8)
    codec.encode(values.flatten(), residual, message)
    out = torch.zeros(48)
    codec.decode_add(message, out)
    expected = torch.tensor([[2.0, 2.0, -3.0, -3.0] * 4, [3.0] * 16, [-1.0] * 16])
    assert torch.equal(out.view(3, 16), expected)
    assert torch.equal(residual.view(3, 16), values - expected)
    assert codec.message_bytes == 3 * 2 * 4 + 48 // 8 + 2  # filled up to a multiple of 8
    codec.decode_add(message, out)
    assert torch.equal(out.view(3, 16), 2 * expected)


def quantized(values: torch.Tensor) -> torch.Tensor:
    """The rule of the paper for one column."""
    high = values >= 0
    result = torch.zeros_like(values)
    for side in (high, ~high):
        if side.any():
            result[side] = values[side].mean()
    return result


def test_two_stages_and_two_residuals() -> None:
    ours = Threads(2).run(exchange_rows)
    residuals = torch.zeros(2, 4, 16, dtype=torch.float64)
    sums_residuals = torch.zeros(4, 16, dtype=torch.float64)
    for step in range(4):
        sums = sums_residuals.clone()
        for rank in range(2):
            residuals[rank] += ours[rank][0][step].view(4, 16)
            sent = torch.stack([quantized(row) for row in residuals[rank]])
            residuals[rank] -= sent
            sums += sent
        expected = torch.stack([quantized(row) for row in sums])
        sums_residuals = sums - expected
        for rank in range(2):
            found = ours[rank][1][step].view(4, 16)
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-13)


def exchange_rows(comm: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Four rows, so that no row is cut."""
    compressor, _ = make(comm, OneBitCompression(warmup_steps=0), [(4, 16)], torch.float64)
    shares, estimates = [], []
    for step in range(4):
        flat = random_share(comm, step, 64, torch.float64)
        shares.append(flat.clone())
        compressor.start(flat).wait()
        estimates.append(flat)
    return shares, estimates


def test_a_long_column_has_one_mean() -> None:
    generator = torch.Generator().manual_seed(2)
    values = torch.randn(1_100_001, generator=generator, dtype=torch.float64)
    (codec,) = OneBitCodec.of_slices([(1_100_001,)], 1, torch.float64)
    residual = torch.zeros_like(values)
    message = torch.zeros(codec.message_bytes, dtype=torch.uint8)
    codec.encode(values, residual, message)
    out = torch.zeros_like(values)
    codec.decode_add(message, out)
    torch.testing.assert_close(out, quantized(values), rtol=0, atol=1e-12)


def test_warmup_is_exact() -> None:
    first, last = Threads(2).run(warm_up)[0]
    assert torch.equal(first[0], first[1])
    assert not torch.allclose(last[0], last[1])


def warm_up(comm: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    compressor, numel = make(comm, OneBitCompression(warmup_steps=2), [(20, 20)], torch.float64)
    results = []
    for step in range(3):
        flat = random_share(comm, step, numel, torch.float64)
        expected = flat.clone()
        comm.all_reduce(expected)
        compressor.start(flat).wait()
        results.append((flat, expected))
    return [results[1], results[2]]


def test_options_and_bytes() -> None:
    with pytest.raises(ConfigError, match="warmup_steps"):
        OneBitCompression(warmup_steps=-1)
    # Slices of 512 values in 8 rows: 64 bytes of bits, 64 of means, to one peer, twice.
    assert OneBitCompression().wire_bytes([(16, 64)], 4, 2) == 2 * 128
