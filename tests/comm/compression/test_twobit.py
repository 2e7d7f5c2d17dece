from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from sparkdl.comm.compression.twobit import CountCodec, TwoBitCodec, TwoBitCompression
from sparkdl.errors import ConfigError
from tests.comm.compression.ranks import Threads, make, random_share


def test_values_that_reach_the_threshold_are_sent_as_it() -> None:
    values = torch.tensor([0.5, 0.49, -0.5, -0.49, 3.0, -3.0, 0.0])
    codec = TwoBitCodec(7, 0.5, 1)
    residual = torch.zeros(7)
    message = torch.zeros(codec.message_bytes, dtype=torch.uint8)
    codec.encode(values, residual, message)
    out = torch.zeros(7)
    codec.decode_add(message, out)
    assert out.tolist() == [1.0, 0.0, -1.0, 0.0, 1.0, -1.0, 0.0]
    assert torch.equal(residual, values - 0.5 * out)
    assert codec.message_bytes == 16


def test_thresholds_are_exact() -> None:
    for threshold in (0.1, 1e-3, 1 / 3, 7.7):
        exact = torch.tensor(threshold)
        below, above = exact.nextafter(torch.tensor(0.0)), exact.nextafter(torch.tensor(9.0))
        values = torch.stack([below, exact, above, -below, -exact, -above])
        codec = TwoBitCodec(6, threshold, 1)
        message = torch.zeros(codec.message_bytes, dtype=torch.uint8)
        codec.encode(values, torch.zeros(6), message)
        out = torch.zeros(6)
        codec.decode_add(message, out)
        assert out.tolist() == [0.0, 1.0, 1.0, 0.0, -1.0, -1.0]


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_mxnets_rule_and_the_mean(world_size: int) -> None:
    ours = Threads(world_size).run(exchange_some)
    residuals = torch.zeros(world_size, 133, dtype=torch.float64)
    for step in range(4):
        expected = torch.zeros(133, dtype=torch.float64)
        for rank in range(world_size):
            residuals[rank] += world_size * ours[rank][0][step]
            high, low = residuals[rank] >= 0.7, residuals[rank] <= -0.7
            sent = 0.7 * (high.double() - low.double())
            residuals[rank] -= sent
            expected += sent / world_size
        torch.testing.assert_close(ours[0][1][step], expected, rtol=0, atol=1e-13)


def exchange_some(comm: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    compressor, numel = make(comm, TwoBitCompression(threshold=0.7), [(19, 7)], torch.float64)
    shares, estimates = [], []
    for step in range(4):
        flat = random_share(comm, step, numel, torch.float64)
        shares.append(flat.clone())
        compressor.start(flat).wait()
        estimates.append(flat)
    return shares, estimates


@pytest.mark.parametrize("world_size, size", [(1, 24), (7, 24), (8, 40), (127, 40), (128, 72)])
def test_sums_are_exact_for_any_number_of_ranks(world_size: int, size: int) -> None:
    codec = CountCodec(31, 0.25, world_size)
    assert codec.message_bytes == size
    counts = torch.arange(-15.0, 16.0).mul_(world_size / 15).round_()
    message = torch.zeros(size, dtype=torch.uint8)
    codec.encode(counts, torch.zeros(31), message)
    out = torch.ones(31)
    codec.decode_add(message, out)
    assert torch.equal(out, 1 + 0.25 * counts)


@pytest.mark.parametrize("threshold", [0.0, -1.0, math.nan, math.inf])
def test_options(threshold: float) -> None:
    with pytest.raises(ConfigError, match="threshold"):
        TwoBitCompression(threshold=threshold)


def test_bytes() -> None:
    # Slices of 512 values: 128 bytes of codes and 256 of counts, 8 before each, to one peer.
    assert TwoBitCompression().wire_bytes([(16, 64)], 4, 2) == 136 + 264
