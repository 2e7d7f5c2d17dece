"""Patterns say what strategies send, as the strategies' own formulae do."""

from __future__ import annotations

import math

import pytest

from sparkdl.explain.comparison import PLAIN, strategy_text
from sparkdl.explain.predict_times import sent_bytes
from sparkdl.explain.traffic import ModelSize, pattern_of
from sparkdl.sync import STRATEGIES, resolve
from sparkdl.sync.asynchronous.async_sgd import AsyncSGD
from sparkdl.sync.averaging.local_sgd import LocalSGD
from sparkdl.sync.averaging.parameter_averaging import ParameterAveraging
from sparkdl.sync.gradients.allreduce import AllReduce
from sparkdl.sync.strategy import MakeOptimizer, Synchronizer, SyncStrategy

SIZE = ModelSize(
    shapes=((512, 512), (512,), (10, 512), (10,)), element_size=4,
    replica_bytes=4 * (512 * 512 + 512 + 5120 + 10), buffer_bytes=0, optimizer_bytes=0,
)  # fmt: skip


@pytest.mark.parametrize("strategy", PLAIN, ids=strategy_text)
@pytest.mark.parametrize("world_size", [2, 8, 64])
def test_bytes_are_those_of_the_strategy(strategy: SyncStrategy, world_size: int) -> None:
    own = strategy.bytes_per_step(SIZE.shapes, SIZE.element_size, world_size)
    if strategy.why_not_gang() is not None or own is None:
        return
    found = sent_bytes(pattern_of(strategy, SIZE, world_size, in_rounds=False), world_size)
    assert found == pytest.approx(own, rel=0.02)


def test_every_named_strategy_has_a_pattern() -> None:
    for name in set(STRATEGIES) - {"populationbasedtraining"}:
        strategy = resolve(name)
        pattern = pattern_of(strategy, SIZE, 4, in_rounds=strategy.why_not_gang() is not None)
        assert pattern.num_bytes > 0, name


def test_who_waits_for_whom() -> None:
    def waits(strategy: SyncStrategy) -> float:
        return pattern_of(strategy, SIZE, 4, in_rounds=False).waits_every

    assert waits(AllReduce()) == 1
    assert waits(LocalSGD(averaging_period=8)) == 8
    assert waits(AsyncSGD(staleness_bound=4)) == 5
    assert math.isinf(waits(AsyncSGD()))


def test_averaging_sends_the_optimizer_too() -> None:
    size = ModelSize(
        shapes=SIZE.shapes, element_size=4, replica_bytes=SIZE.replica_bytes, buffer_bytes=0,
        optimizer_bytes=2 * SIZE.replica_bytes,
    )  # fmt: skip
    averaged = pattern_of(ParameterAveraging(averaging_period=4), size, 4, in_rounds=False)
    assert averaged.num_bytes == 3 * SIZE.replica_bytes
    kept = pattern_of(LocalSGD(averaging_period=4), size, 4, in_rounds=False)
    assert kept.num_bytes == SIZE.replica_bytes


def test_rounds_carry_the_whole_state() -> None:
    pattern = pattern_of(ParameterAveraging(averaging_period="auto"), SIZE, 4, in_rounds=True)
    assert (pattern.kind, pattern.period) == ("stages", None)
    assert pattern.num_bytes == SIZE.checkpoint_bytes


def test_a_strategy_of_the_users_own_sums_what_it_says() -> None:
    class Halved(SyncStrategy):
        def bytes_per_step(
            self, shapes: object, element_size: int, world_size: int
        ) -> float | None:
            return 1000.0

        def setup(self, model: object, make_optimizer: MakeOptimizer, comm: object) -> Synchronizer:
            raise AssertionError("only described here")

    found = sent_bytes(pattern_of(Halved(), SIZE, 4, in_rounds=False), 4)
    assert found == pytest.approx(1000)


def test_strategies_are_written_as_users_write_them() -> None:
    assert strategy_text(AllReduce()) == "AllReduce()"
    assert strategy_text(AllReduce(compression="bf16")) == "AllReduce(compression='bf16')"
    assert strategy_text(LocalSGD(averaging_period=8)) == "LocalSGD(averaging_period=8)"
