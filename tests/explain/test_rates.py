"""What lies between two measured numbers of workers, and beyond them."""

from __future__ import annotations

import pytest

from sparkdl.explain.cost_model import Calibration, Compute, Layout, Level, Stages, interpolated

ONE = Compute(fixed_seconds=0.1, row_seconds=0.001, step_spread=0.0, rank_spread=0.2)
FOUR = Compute(fixed_seconds=0.4, row_seconds=0.004, step_spread=0.3, rank_spread=0.2)
CALIBRATION = Calibration(
    levels=(
        Level(ranks_per_node=4, threads=1, compute=FOUR),
        Level(ranks_per_node=1, threads=4, compute=ONE),
    ),
    network=None,
    stages={
        4: Stages(fixed_seconds=0.4, byte_seconds=2e-9),
        1: Stages(fixed_seconds=0.1, byte_seconds=1e-9),
    },
)


@pytest.mark.parametrize(
    ("number", "expected"), [(1, 0.1), (2, 0.2), (3, 0.3), (4, 0.4), (5, 0.4), (1000, 0.4)]
)
def test_numbers_between_neighbours_and_those_of_the_nearest(number: int, expected: float) -> None:
    found = interpolated({4: FOUR, 1: ONE}, number)
    assert found.fixed_seconds == pytest.approx(expected)
    assert found.row_seconds == pytest.approx(expected / 100)
    assert found.step_spread == pytest.approx(expected - 0.1)
    assert found.rank_spread == pytest.approx(0.2)


def test_fewer_than_were_measured_are_like_the_fewest() -> None:
    assert interpolated({4: FOUR, 8: ONE}, 2) == FOUR


def test_a_step_by_the_workers_of_a_machine() -> None:
    layout = Layout(world_size=6, num_nodes=2)
    assert CALIBRATION.compute(layout, "sum").fixed_seconds == pytest.approx(0.3)


@pytest.mark.parametrize(
    ("workers", "slots", "fixed", "each"),
    [
        (1, None, 0.1, 1e-9),
        (1, 4, 0.1, 1e-9),
        (3, None, 0.3, 1e-9 * 5 / 3),
        (3, 1, 0.1, 1e-9),
        (8, 4, 0.4, 2e-9),
        (8, None, 0.4, 2e-9),
    ],
)
def test_a_round_by_the_tasks_that_run_at_a_time(
    workers: int, slots: int | None, fixed: float, each: float
) -> None:
    layout = Layout(world_size=workers, num_nodes=1)
    found = CALIBRATION.round_seconds(1e6, layout, slots)
    assert found == pytest.approx(fixed + workers * 1e6 * each)
