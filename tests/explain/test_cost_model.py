"""The cost model's formulae, where their values are known."""

from __future__ import annotations

import math
import random
import statistics

import pytest

from sparkdl.explain import cost_model
from sparkdl.explain.cost_model import (
    Calibration,
    Compute,
    Gang,
    Layout,
    Network,
    NetworkLink,
    StageCosts,
    fit_line,
)
from sparkdl.sync.averaging.period import AutoPeriod, RoundReport, steps_for_share

LINK = NetworkLink(latency_seconds=1e-3, byte_seconds=1e-6)


def test_a_ring_sends_a_part_of_the_tensor_in_each_message() -> None:
    assert cost_model.ring_seconds(LINK, 8000, 1) == 0
    assert cost_model.ring_seconds(LINK, 8000, 2) == pytest.approx(2 * (1e-3 + 4e-3))
    assert cost_model.ring_seconds(LINK, 8000, 8) == pytest.approx(14 * (1e-3 + 1e-3))


def test_more_workers_than_were_measured_take_longer_to_meet() -> None:
    gang = Gang(levels={}, network=None, launch_seconds=4.0, num_ranks=2)
    stages = StageCosts(fixed_seconds=0.3, byte_seconds=0, first_seconds=5.0)
    found = Calibration(gang=gang, stages=stages, task_levels={}, link_seconds=1.0)
    assert [found.start_seconds(in_rounds=False, world_size=n) for n in (1, 2)] == [5.0, 5.0]
    thousand = found.start_seconds(in_rounds=False, world_size=1002)
    assert thousand == pytest.approx(5.0 + 1000 * cost_model.MEETING_SECONDS)
    assert found.start_seconds(in_rounds=True, world_size=1002) == 6.0


def alone_on_machines(world_size: int) -> Layout:
    return Layout(world_size=world_size, num_nodes=world_size)


def test_a_tree_sends_all_of_it_on_every_level() -> None:
    network = Network(messages=LINK)
    for world_size, levels in ((2, 2), (8, 6), (9, 8)):
        found = network.sum_seconds(8000, alone_on_machines(world_size), "tree")
        assert found == pytest.approx(levels * (1e-3 + 8e-3))
    many = alone_on_machines(64)  # trees win with small tensors and many ranks only
    small, large = 8, 1e7
    assert network.sum_seconds(small, many, "tree") < network.sum_seconds(small, many, "ring")
    assert network.sum_seconds(large, many, "tree") > network.sum_seconds(large, many, "ring")


def test_sums_by_topology() -> None:
    shared = NetworkLink(latency_seconds=1e-5, byte_seconds=1e-9)
    network = Network(messages=LINK, shared=shared, shared_ranks=4)
    one, two = Layout(world_size=4, num_nodes=1), Layout(world_size=8, num_nodes=2)
    assert network.sum_seconds(8000, one, "shared") == pytest.approx(1e-5 + 8e-6)
    across = cost_model.ring_seconds(LINK, 2000, 2)
    assert network.sum_seconds(8000, two, "hierarchical") == pytest.approx(1e-5 + 8e-6 + across)
    uneven = Layout(world_size=7, num_nodes=2)
    assert network.sum_seconds(8000, uneven, "hierarchical") > across * 2
    assert network.sum_seconds(8000, two, "ring") == cost_model.ring_seconds(LINK, 8000, 8)
    without = Network(messages=LINK)
    assert without.sum_seconds(8000, one, "shared") == cost_model.ring_seconds(LINK, 8000, 4)


@pytest.mark.parametrize("count", [2, 8, 100, 1000])
@pytest.mark.parametrize("spread", [0.02, 0.2])
def test_the_slowest_of_many(count: int, spread: float) -> None:
    generator = random.Random(count)
    drawn = [
        max(math.exp(spread * generator.gauss(0, 1)) for _ in range(count))
        for _ in range(2_000_000 // count // 40 + 100)
    ]
    compute = Compute(threads=1, fixed_seconds=1, row_seconds=0, step_spread=spread)
    found = compute.slowest_seconds(0, waited_for=count, world_size=count)
    assert found == pytest.approx(statistics.mean(drawn), rel=0.03)


def test_long_rounds_wait_less_but_for_slow_hosts() -> None:
    quick = Compute(threads=1, fixed_seconds=0, row_seconds=1, step_spread=0.3)
    waits = [
        quick.slowest_seconds(1, waited_for=8, world_size=8, steps=steps) for steps in (1, 16, 256)
    ]
    assert waits[0] > waits[1] > waits[2] > quick.mean_seconds(1)
    assert waits[2] == pytest.approx(quick.mean_seconds(1), rel=0.05)
    slow_hosts = Compute(threads=1, fixed_seconds=0, row_seconds=1, rank_spread=0.3)
    first, last = (
        slow_hosts.slowest_seconds(1, waited_for=8, world_size=8, steps=steps) for steps in (1, 256)
    )
    assert first == pytest.approx(last)


def test_lines_through_points() -> None:
    assert fit_line([(0, 2), (10, 7)]) == pytest.approx((2, 0.5))
    assert fit_line([(4, 8)]) == pytest.approx((0, 2))
    intercept, slope = fit_line([(1, 5), (2, 4), (3, 3)])  # falling: no slope
    assert slope == 0
    assert 3 < intercept < 5
    intercept, slope = fit_line([(10, 1), (20, 4)])  # through the origin rather than below it
    assert intercept == 0
    assert 0.1 <= slope <= 0.2


def test_small_messages_count_as_much_as_large_ones() -> None:
    latency, byte = fit_line([(8, 1.0e-5), (64e3, 3.0e-5), (1e8, 2.0e-2 * 1.5)])
    assert latency == pytest.approx(1e-5, rel=0.2)
    assert byte == pytest.approx(3e-10, rel=0.2)


def test_the_period_is_the_one_that_training_would_find() -> None:
    found = round(steps_for_share(0.4, 0.01, 0.05))
    assert found == 760  # 0.4 / (760 * 0.01 + 0.4) is 5 %
    period = AutoPeriod(share=0.05)
    for _ in range(20):
        steps = period.steps(0)
        period.observe(
            RoundReport(
                steps=steps, step_seconds=steps * 0.01, merge_seconds=0.4, loss=1.0,
                learning_rate=0.1,
            )
        )  # fmt: skip
    assert period.steps(0) == found
