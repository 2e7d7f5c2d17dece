from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from sparkdl.comm.compression.bit_packing import packed_size
from sparkdl.comm.compression.threshold import (
    ThresholdCompression,
    decode_add,
    encode,
    reached_by,
    read_header,
)
from sparkdl.errors import ConfigError
from tests.comm.compression.ranks import Threads, exchange, make, random_share

# The numbers of the first tests are those of nd4j's CompressionTests and ThresholdAlgorithmTests,
# where this rule is the same.


def test_what_is_sent_and_what_is_left() -> None:
    residual = torch.zeros(6)
    values = torch.tensor([1.0, 2.0, 0.0, 0.0, -1.0, -1.0])
    message = encode(values, 1, residual, 1e-3)
    out = torch.zeros(6)
    assert decode_add(message, 1, out) == 4
    expected = torch.tensor([1e-3, 1e-3, 0.0, 0.0, -1e-3, -1e-3])
    assert torch.equal(out, expected)
    assert torch.equal(residual, values - expected)
    decode_add(message, 1, out)
    assert torch.equal(out, 2 * expected)


def test_nothing_reaches_the_threshold() -> None:
    for numel in (10, 1000):
        out, residual = torch.zeros(numel), torch.zeros(numel)
        message = encode(torch.full((numel,), 1e-4), 1, residual, 1e-3)
        assert decode_add(message, 1, out) == 0
        assert not out.any()
        assert torch.equal(residual, torch.full((numel,), 1e-4))


def test_dense_messages_treat_both_signs_alike() -> None:
    values = torch.tensor([0.0, -6e-4, 1e-3, -1e-3, 0.0, 0.0])
    message = encode(values, 1, torch.zeros(6), 1e-3)
    assert read_header(message) == (2, 1, 1e-3)
    out = torch.zeros(6)
    decode_add(message, 1, out)
    # Deeplearning4j sends half a threshold for -6e-4, but nothing for 6e-4.
    assert out.tolist() == torch.tensor([0.0, 0.0, 1e-3, -1e-3, 0.0, 0.0]).tolist()


@pytest.mark.parametrize("numel, words", [(15, 5), (31, 6), (32, 6), (1000, 67)])
def test_the_longest_message(numel: int, words: int) -> None:
    message = encode(torch.ones(numel), 1, torch.zeros(numel), 1.0)
    assert len(message) == -(-4 * words // 8) * 8
    assert words < numel // 16 + 6


@pytest.mark.parametrize("numel", [1, 10, 100, 1000, 10_000, 1_200_000])
@pytest.mark.parametrize("threshold", [0.1, 1.0, 2.0, 3.5])
@pytest.mark.parametrize("is_dense", [False, True])
def test_the_shorter_message_says_what_the_rule_says(
    numel: int, threshold: float, is_dense: bool
) -> None:
    generator = torch.Generator().manual_seed(3)
    values = torch.randn(numel, generator=generator, dtype=torch.float64)
    residual = torch.zeros_like(values)
    message = encode(values, 1, residual, threshold, is_dense)
    out = torch.zeros_like(values)
    num_sent = decode_add(message, 1, out)
    expected = threshold * values.sign() * (values.abs() >= threshold)
    assert torch.equal(out, expected)
    assert num_sent == expected.count_nonzero()
    torch.testing.assert_close(out + residual, values, rtol=0, atol=1e-15)
    if not is_dense:
        shorter = min(4 * num_sent, packed_size(numel, 2))
        assert len(message) == 16 + -(-shorter // 8) * 8 or numel < 64
    assert len(message) < 4 * (numel / 16 + 6)


def test_values_add_up_to_the_threshold() -> None:
    options = ThresholdCompression(threshold=1.0, min_sparsity=0.0)
    found = Threads(2).run(exchange, options, [(200,)], torch.float64, 4, 0.15)
    # 0.3 a step in units of a rank's own estimate.
    assert [estimate.unique().tolist() for estimate in found[0].estimates] == [[0], [0], [0], [1]]


def test_how_the_threshold_adapts() -> None:
    options = ThresholdCompression(threshold=1e-3, min_sparsity=1e-3, max_sparsity=1e-2, decay=0.95)
    assert options.adapted(1e-3, 1 / 16) == 1e-3 / 0.95
    assert options.adapted(1e-3 / 0.95, 1 / 16) == 1e-3 / 0.95 / 0.95
    assert options.adapted(1e-3, 1e-4) == 1e-3 * 0.95
    assert options.adapted(1e-3, 5e-3) == 1e-3
    assert ThresholdCompression().decay == pytest.approx(0.966, abs=1e-3)


def test_all_ranks_adapt_alike() -> None:
    found = Threads(3).run(uneven)
    assert found[0] == found[1] == found[2]
    # One rank of three sends all of its values: a third, which is more than wanted.
    assert found[0]["threshold"] == 0.5 / ThresholdCompression().decay


def uneven(comm: Any) -> dict[str, Any]:
    compressor, _ = make(comm, ThresholdCompression(threshold=0.5), [(50,)], torch.float32)
    compressor.start(torch.full((50,), 1.0 if comm.rank == 1 else 0.0)).wait()
    return compressor.state_dict()


def test_the_first_threshold_suits_the_first_gradients() -> None:
    found = Threads(3).run(first_steps)
    assert found[0] == found[1] == found[2]
    # Nobody has a gradient; then rank 1 has none, and 2 percent of the others' values are 30 and 60
    # or more, of which few enough reach the mean.
    assert found[0] == [None, 45.0, 45.0]


def first_steps(comm: Any) -> list[float | None]:
    options = ThresholdCompression(max_sparsity=0.02)
    compressor, numel = make(comm, options, [(10, 10)], torch.float32)
    found = []
    for step in range(3):
        flat = torch.zeros(numel)
        if step and comm.rank != 1:
            flat[40:42] = torch.tensor([10.0, -20.0]) * (1 + comm.rank / 2)
        compressor.start(flat).wait()
        found.append(compressor.state_dict()["threshold"])
    return found


def test_few_values_are_enough_for_a_first_threshold() -> None:
    assert reached_by(torch.tensor([0.0, -3.0, 0.0, 2.0]), 0.25) == 3.0
    assert reached_by(torch.tensor([0.0, -3.0, 0.0, 2.0]), 0.75) == 3.0
    assert reached_by(torch.zeros(4), 0.5) == 0.0


def test_what_waits_is_clipped_now_and_then() -> None:
    found = Threads(1).run(clipped)[0]
    assert found == [9.0, 18.0, 5.0, 14.0, 23.0, 5.0]


def clipped(comm: Any) -> list[float]:
    options = ThresholdCompression(
        threshold=1.0, min_sparsity=0.0, max_sparsity=1.0, residual_clip=5.0, clip_every=3
    )
    compressor, _ = make(comm, options, [(1,)], torch.float32)
    found = []
    for _ in range(6):
        compressor.start(torch.tensor([10.0])).wait()
        found.append(compressor.rank_state_dict()["residual"].item())
    return found


def test_sparse_steps_send_little() -> None:
    found = Threads(1).run(adapt_to_normal_values)[0]
    assert all(0.5e-2 < part < 1.5e-2 for part in found[-20:])


def adapt_to_normal_values(comm: Any) -> list[float]:
    compressor, numel = make(comm, ThresholdCompression(), [(100, 100)], torch.float32)
    found = []
    for step in range(300):
        flat = random_share(comm, step, numel, torch.float32)
        compressor.start(flat).wait()
        found.append(flat.count_nonzero().item() / numel)
    return found


@pytest.mark.parametrize(
    "options",
    [
        {"threshold": 0.0},
        {"threshold": math.inf},
        {"max_sparsity": 1.0},
        {"min_sparsity": 0.1, "max_sparsity": 0.1},
        {"min_sparsity": -0.1},
        {"max_sparsity": 1.1},
        {"decay": 1.0},
        {"decay": 0.0},
        {"residual_clip": 0.5},
        {"clip_every": 0},
    ],
)
def test_options(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        ThresholdCompression(**options)
