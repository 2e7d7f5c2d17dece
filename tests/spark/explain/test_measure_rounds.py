"""What some timed rounds say of the costs of a round."""

from __future__ import annotations

import pytest

from sparkdl.spark.explain.measure_rounds import TimedRound, stages_of


def timed(seconds: float, step_seconds: float) -> TimedRound:
    return TimedRound(seconds=seconds, step_seconds=step_seconds, num_bytes=1000)


ROUNDS = {
    1: [timed(3.0, 0.5), timed(0.7, 0.12), timed(0.6, 0.10), timed(0.8, 0.11)],
    5: [timed(1.0, 0.50), timed(0.9, 0.52)],
}


def test_the_least_of_what_rounds_take_beyond_their_steps() -> None:
    found = stages_of(ROUNDS, 0.15, most=100)
    assert found.step_seconds == pytest.approx(0.1)  # 0.51 less 0.11, by four
    assert found.stages.seconds(500, 2) == pytest.approx(0.4)  # of the last round with five steps
    assert found.stages.fixed_seconds == 0.15
    assert found.first_seconds == pytest.approx(3.0 - 0.1 - 0.4)


def test_an_epoch_of_three_steps_has_no_rounds_of_five() -> None:
    found = stages_of(ROUNDS, 0.15, most=3)
    assert found.step_seconds == pytest.approx(0.2)  # 0.51 less 0.11, by two
    assert found.stages.seconds(500, 2) == pytest.approx(0.3)


def test_an_epoch_of_one_step_has_short_rounds_only() -> None:
    found = stages_of(ROUNDS, 0.15, most=1)
    assert found.step_seconds == pytest.approx(0.11)
    assert found.stages.seconds(500, 2) == pytest.approx(0.6 - 0.11)


def test_an_empty_job_may_have_taken_longer_than_a_round() -> None:
    found = stages_of(ROUNDS, 9.0, most=100)
    assert found.stages.fixed_seconds == pytest.approx(0.4)
    assert found.stages.byte_seconds == 0
