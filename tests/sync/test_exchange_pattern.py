"""Patterns say what strategies send, as the strategies' own formulae do."""

from __future__ import annotations

import math

from sparkdl.explain.comparison import strategy_text
from sparkdl.sync import known_strategies
from sparkdl.sync.asynchronous.async_sgd import AsyncSGD
from sparkdl.sync.averaging.local_sgd import LocalSGD
from sparkdl.sync.averaging.parameter_averaging import ParameterAveraging
from sparkdl.sync.exchange_pattern import ModelSize
from sparkdl.sync.gradients.allreduce import AllReduce
from sparkdl.sync.strategy import SyncStrategy

SIZE = ModelSize(
    shapes=((512, 512), (512,), (10, 512), (10,)), element_size=4,
    replica_bytes=4 * (512 * 512 + 512 + 5120 + 10), buffer_bytes=0, optimizer_bytes=0,
)  # fmt: skip


def test_alone_nothing_is_sent() -> None:
    for kind in known_strategies():
        for strategy in kind.examples():
            assert strategy.pattern(SIZE, 1).sent_bytes_per_step(1) in (0, None)


def test_who_waits_for_whom() -> None:
    def waits(strategy: SyncStrategy) -> float:
        return strategy.pattern(SIZE, 4).waits_every

    assert waits(AllReduce()) == 1
    assert waits(LocalSGD(averaging_period=8)) == 8
    assert waits(AsyncSGD(staleness_bound=4)) == 5
    assert math.isinf(waits(AsyncSGD()))


def test_averaging_sends_the_optimizer_too() -> None:
    size = ModelSize(
        shapes=SIZE.shapes, element_size=4, replica_bytes=SIZE.replica_bytes, buffer_bytes=0,
        optimizer_bytes=2 * SIZE.replica_bytes,
    )  # fmt: skip
    averaged = ParameterAveraging(averaging_period=4).pattern(size, 4)
    assert averaged.num_bytes == 3 * SIZE.replica_bytes
    kept = LocalSGD(averaging_period=4).pattern(size, 4)
    assert kept.num_bytes == SIZE.replica_bytes


def test_rounds_carry_the_whole_state() -> None:
    pattern = ParameterAveraging(averaging_period="auto").stages_pattern(SIZE)
    assert (pattern.kind, pattern.target_share) == ("stages", 0.05)
    assert pattern.num_bytes == SIZE.checkpoint_bytes


def test_strategies_are_written_as_users_write_them() -> None:
    assert strategy_text(AllReduce()) == "AllReduce()"
    assert strategy_text(AllReduce(compression="bf16")) == "AllReduce(compression='bf16')"
    assert strategy_text(LocalSGD(averaging_period=8)) == "LocalSGD(averaging_period=8)"
