"""What holds for every compression."""

from __future__ import annotations

import dataclasses
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

from sparkdl.comm import compression
from sparkdl.comm.communicator import LocalCommunicator
from sparkdl.comm.compression.cast import BF16Compression, FP16Compression
from sparkdl.comm.compression.compression import Compression
from sparkdl.comm.compression.onebit import OneBitCompression
from sparkdl.comm.compression.powersgd import PowerSGD
from sparkdl.comm.compression.threshold import ThresholdCompression
from sparkdl.comm.compression.topk import TopKCompression
from sparkdl.comm.compression.twobit import TwoBitCompression
from sparkdl.config import TrainConfig
from sparkdl.errors import ConfigError
from sparkdl.serialization.json_objects import describe, restore
from tests.comm.compression.ranks import (
    KEEPING,
    SHAPES,
    Exchanged,
    Shapes,
    Threads,
    exchange,
    make,
    random_share,
    stored,
    unsent,
)
from tests.gang import Gang

ALL = {**KEEPING, "fp16": FP16Compression(), "bf16": BF16Compression()}
all_compressions = pytest.mark.parametrize("compression", ALL.values(), ids=ALL)
those_that_keep = pytest.mark.parametrize("compression", KEEPING.values(), ids=KEEPING)


def test_no_compression_is_left_out() -> None:
    tested = {type(found).__name__ for found in ALL.values()}
    assert tested == {path.removeprefix("sparkdl:") for path in compression.COMPRESSIONS.values()}
    assert all(found.keeps_residual == (name in KEEPING) for name, found in ALL.items())


@those_that_keep
@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 8])
def test_sent_and_kept_are_the_gradient(compression: Compression, world_size: int) -> None:
    found = Threads(world_size).run(exchange, compression)
    expected = torch.stack([one.shares for one in found]).sum(0)
    sent = torch.stack(found[0].estimates).sum(0)
    assert not torch.allclose(sent, expected, rtol=0, atol=1e-3)
    torch.testing.assert_close(sent + unsent(found, compression), expected, rtol=0, atol=1e-12)


@all_compressions
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_all_ranks_have_equal_bits(compression: Compression, dtype: torch.dtype) -> None:
    found = Threads(5).run(exchange, compression, SHAPES, dtype)
    for one in found:
        assert all(estimate.dtype is dtype for estimate in one.estimates)
        assert_same(one.estimates, found[0].estimates)
        assert_same(one.state, found[0].state)
    assert any(estimate.abs().sum() > 0 for estimate in found[0].estimates)


@all_compressions
@pytest.mark.parametrize(("world_size", "dtype"), [(2, torch.float32), (3, torch.float64)])
@pytest.mark.parametrize("shapes", [SHAPES, [(64, 48)], [(17,)], [(3,)]], ids=str)
def test_as_much_is_sent_as_the_formula_says(
    compression: Compression, dtype: torch.dtype, shapes: Shapes, world_size: int
) -> None:
    expected = compression.wire_bytes(shapes, dtype.itemsize, world_size)
    found = Threads(world_size).run(exchange, compression, shapes, dtype)
    assert_same([one.estimates for one in found], [found[0].estimates] * world_size)
    if expected is None:
        assert isinstance(compression, ThresholdCompression)
    else:
        assert [one.bytes_sent for one in found] == [expected] * world_size


@pytest.mark.gang
@all_compressions
def test_a_gang_and_threads_agree(gang3: Gang, compression: Compression) -> None:
    for mine, expected in zip(
        gang3.run(exchange, compression), Threads(3).run(exchange, compression), strict=True
    ):
        assert mine.bytes_sent == expected.bytes_sent
        # Sums of a cast are rounded, in the order in which ranks are added.
        tolerance = 1e-12 if compression.keeps_residual else 0.02
        for estimate, other in zip(mine.estimates, expected.estimates, strict=True):
            torch.testing.assert_close(estimate, other, rtol=0, atol=tolerance)


@pytest.mark.gang
@all_compressions
def test_several_buckets_under_way_at_once(gang: Gang, compression: Compression) -> None:
    for together, apart in gang.run(exchange_buckets, compression):
        assert_same(together, apart)


def exchange_buckets(comm: Any, compression: Compression) -> Any:
    buckets: list[Shapes] = [[(40, 30)], [(5,)], [(30, 20), (30,)], [(0,)]]
    results = []
    for at_once in (True, False):
        pending, flats = [], []
        for number, shapes in enumerate(buckets):
            compressor, numel = make(comm, compression, shapes, torch.float32)
            flats.append(random_share(comm, number, numel, torch.float32))
            pending.append(compressor.start(flats[-1]))
            if not at_once:
                pending.pop().wait()
        for message in pending:
            message.wait()
        results.append(flats)
    return results


@all_compressions
def test_a_restored_state_gives_the_same_bits(compression: Compression) -> None:
    found = Threads(3).run(interrupted, longer(compression))
    for uninterrupted, resumed in found:
        assert_same(resumed, uninterrupted)


def longer(compression: Compression) -> Compression:
    """With the options that depend on the step, if it has some."""
    match compression:
        case OneBitCompression() | PowerSGD():
            return dataclasses.replace(compression, warmup_steps=3)
        case TopKCompression():
            return dataclasses.replace(compression, warmup_steps=6, momentum=0.9)
        case ThresholdCompression():
            return dataclasses.replace(compression, residual_clip=1.5, clip_every=3)
    return compression


def interrupted(comm: Any, compression: Compression) -> Any:
    compressor, numel = make(comm, compression, SHAPES, torch.float32)
    results = []
    for step in range(8):
        if step == 4:
            states = stored(compressor.state_dict()), stored(compressor.rank_state_dict())
        flat = random_share(comm, step, numel, torch.float32)
        compressor.start(flat).wait()
        results.append(flat)
    again, _ = make(comm, compression, SHAPES, torch.float32)
    again.load_state_dict(states[0])
    again.load_rank_state_dict(states[1])
    resumed = []
    for step in range(4, 8):
        flat = random_share(comm, step, numel, torch.float32)
        again.start(flat).wait()
        resumed.append(flat)
    return results[4:], resumed


@all_compressions
@pytest.mark.parametrize("shapes", [[(0,)], [(0, 3), (0,)]], ids=str)
def test_an_empty_bucket(compression: Compression, shapes: Shapes) -> None:
    assert compression.wire_bytes(shapes, 4, 3) in (0, None)
    for one in Threads(3).run(exchange, compression, shapes):
        assert [len(estimate) for estimate in one.estimates] == [0, 0, 0]


@all_compressions
@pytest.mark.parametrize("shapes", [[()], [(1,)], [(1, 1)], [(2, 1), (1,)]], ids=str)
def test_tiny_buckets(compression: Compression, shapes: Shapes) -> None:
    for one in Threads(3).run(exchange, compression, shapes):
        assert all(estimate.isfinite().all() for estimate in one.estimates)


@all_compressions
def test_zeros_stay_zeros(compression: Compression) -> None:
    for one in Threads(3).run(exchange, compression, SHAPES, torch.float32, 2, 0.0):
        assert not any(estimate.any() for estimate in one.estimates)
        for kept in one.rank_state.values():
            assert not kept.any()


@those_that_keep
def test_after_zeros_the_next_gradients_travel(compression: Compression) -> None:
    for one in Threads(2).run(zeros_then_values, compression):
        assert one.abs().sum() > 0


def zeros_then_values(comm: Any, compression: Compression) -> torch.Tensor:
    compressor, numel = make(comm, compression, SHAPES, torch.float32)
    compressor.start(torch.zeros(numel)).wait()
    total = torch.zeros(numel)
    for step in range(3):
        flat = random_share(comm, step, numel, torch.float32) * 10
        compressor.start(flat).wait()
        total += flat
    return total


@all_compressions
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_reaches_all_ranks(compression: Compression, poison: float) -> None:
    for estimate in Threads(3).run(poisoned, compression, poison):
        assert not estimate.isfinite().all()


def poisoned(comm: Any, compression: Compression, poison: float) -> torch.Tensor:
    compressor, numel = make(comm, compression, SHAPES, torch.float32)
    flat = random_share(comm, 0, numel, torch.float32)
    if comm.rank == 1:
        flat[700] = poison
    compressor.start(flat).wait()
    return flat


@all_compressions
def test_a_tensor_larger_than_a_block(compression: Compression) -> None:
    shapes = [(700, 1000), (1_200_001,)]
    found = Threads(2).run(exchange, compression, shapes, torch.float32, 1)
    assert_same(found[1].estimates, found[0].estimates)
    if compression.keeps_residual:
        expected = found[0].shares + found[1].shares
        sent = found[0].estimates[0]
        torch.testing.assert_close(sent + unsent(found, compression), expected, rtol=0, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@all_compressions
def test_a_gpu_gives_what_a_cpu_gives(compression: Compression) -> None:
    on_cpu, numel = make(LocalCommunicator(), compression, SHAPES, torch.float64)
    views = [torch.zeros(shape, dtype=torch.float64, device="cuda") for shape in SHAPES]
    on_gpu = compression.make(views, LocalCommunicator())
    for step in range(3):
        flat = random_share(LocalCommunicator(), step, numel, torch.float64)
        there = flat.cuda()
        on_cpu.start(flat).wait()
        on_gpu.start(there).wait()
        torch.testing.assert_close(there.cpu(), flat, rtol=0, atol=1e-10)


@those_that_keep
def test_coarse_dtypes_are_refused(compression: Compression) -> None:
    with pytest.raises(ConfigError, match="bfloat16"):
        compression.make([torch.zeros(3, dtype=torch.bfloat16)], LocalCommunicator())


@those_that_keep
def test_loss_scaling_is_refused(compression: Compression) -> None:
    compression.check(TrainConfig(precision="bf16"), 2)
    with pytest.raises(ConfigError, match="scale"):
        compression.check(TrainConfig(precision="fp16"), 2)


def test_loss_scaling_goes_with_casts() -> None:
    for cast in (FP16Compression(), BF16Compression()):
        cast.check(TrainConfig(precision="fp16"), 2)


@all_compressions
def test_options_travel_and_are_described(compression: Compression) -> None:
    assert pickle.loads(pickle.dumps(compression)) == compression
    assert restore(describe(compression)) == compression


# Least squares on two ranks: the loss after the same steps, at most, in units of that without
# compression.
CONVERGES: dict[str, tuple[Compression, float]] = {
    "fp16": (FP16Compression(), 1.001),
    "bf16": (BF16Compression(), 1.001),
    "int8": (compression.resolve("int8"), 1.001),  # type: ignore[dict-item]
    "onebit": (OneBitCompression(warmup_steps=10), 1.001),
    "twobit": (TwoBitCompression(), 1.001),
    "threshold": (ThresholdCompression(max_sparsity=0.03), 1.01),
    "topk": (TopKCompression(density=0.05), 1.001),
    "topk with momentum": (TopKCompression(density=0.05, momentum=0.5, warmup_steps=40), 1.001),
    "powersgd": (PowerSGD(), 1.001),
}


@pytest.fixture(scope="module")
def plain(gangs: Callable[[int], Gang]) -> float:
    """The loss without compression."""
    (loss, _), _ = gangs(2).run(least_squares, None)
    assert isinstance(loss, float)
    return loss


@pytest.mark.slow
@pytest.mark.gang
@pytest.mark.parametrize("name", CONVERGES)
def test_least_squares_reach_the_loss_without_compression(
    gang: Gang, plain: float, name: str
) -> None:
    compression, tolerance = CONVERGES[name]
    (loss, weights), (_, others) = gang.run(least_squares, compression)
    assert_same(weights, others)
    assert loss < tolerance * plain


def least_squares(comm: Any, compression: Compression | None) -> tuple[float, torch.Tensor]:
    """Loss over both ranks' data after gradient descent, and the weights."""
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(128, 32, generator=generator)
    outputs = inputs @ torch.randn(32, 24, generator=generator)
    outputs += torch.randn(128, 24, generator=generator)
    mine = slice(comm.rank * 64, comm.rank * 64 + 64)
    flat = torch.zeros(24 * 32 + 24)
    weight, bias = torch.zeros(24, 32), torch.zeros(24)
    compressor = None
    if compression is not None:
        compressor = compression.make([flat[:768].view(24, 32), flat[768:]], comm)
    for step in range(400):
        learning_rate = 0.1 * (1 - step / 400)
        error = inputs[mine] @ weight.T + bias - outputs[mine]
        flat[:768] = (error.T @ inputs[mine]).flatten() / 128
        flat[768:] = error.sum(0) / 128
        if compressor is None:
            comm.all_reduce(flat)
        else:
            compressor.start(flat).wait()
        weight -= learning_rate * flat[:768].view(24, 32)
        bias -= learning_rate * flat[768:]
    loss = (inputs @ weight.T + bias - outputs).square().mean().item()
    return loss, torch.cat([weight.flatten(), bias])


def assert_same(found: Any, expected: Any) -> None:
    """Equal bits, in trees of tensors."""
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_the_helpers_see_differences() -> None:
    one, other = Exchanged([], torch.zeros(2), {}, {}, 0), torch.ones(2)
    with pytest.raises(AssertionError):
        assert_same([one.shares], [other])
