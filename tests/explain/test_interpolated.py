"""What lies between two measured numbers of workers, and beyond them."""

from __future__ import annotations

import pytest

from sparkdl.explain.cost_model import Calibration, Compute, Layout, StageCosts, interpolated

ONE = Compute(threads=4, fixed_seconds=0.1, row_seconds=0.001, step_spread=0.0, rank_spread=0.2)
FOUR = Compute(threads=1, fixed_seconds=0.4, row_seconds=0.004, step_spread=0.3, rank_spread=0.2)


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


@pytest.mark.parametrize(
    ("slots", "in_rounds", "expected"), [(None, False, 0.3), (None, True, 0.4), (2, True, 0.1)]
)
def test_a_step_by_the_workers_that_run_on_a_machine(
    slots: int | None, in_rounds: bool, expected: float
) -> None:
    calibration = Calibration(
        gang=None,
        levels={4: FOUR, 1: ONE},
        task_levels={3: FOUR, 1: ONE},
        stages=StageCosts(fixed_seconds=0.4, byte_seconds=2e-9),
    )
    layout = Layout(world_size=6, num_nodes=2, num_slots=slots)
    assert calibration.compute(layout, in_rounds=in_rounds).fixed_seconds == pytest.approx(expected)
