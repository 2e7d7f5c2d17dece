"""What some timed rounds say of the costs of a round."""

from __future__ import annotations

import pytest

from sparkdl.spark.explain.measure_gang import TimedRound, stages_of


def timed(num_steps: int, seconds: float, step_seconds: float) -> TimedRound:
    return TimedRound(
        num_steps=num_steps, seconds=seconds, step_seconds=step_seconds, num_bytes=1000
    )


def rounds(longest: int) -> list[TimedRound]:
    return [
        timed(1, 3.0, 0.5), timed(1, 0.7, 0.12), timed(1, 0.6, 0.10), timed(1, 0.8, 0.11),
        timed(longest, 1.0, 0.50), timed(longest, 0.9, 0.52),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("longest", "step_seconds", "overhead"),
    [
        (5, 0.1, 0.4),  # 0.51 less 0.11, by four; of the last round
        (3, 0.2, 0.3),  # an epoch of three steps has no rounds of five
        (1, 0.12, 0.6 - 0.12),  # nor one of a single step
    ],
)
def test_the_least_of_what_rounds_take_beyond_their_steps(
    longest: int, step_seconds: float, overhead: float
) -> None:
    found = stages_of(rounds(longest), 0.15)
    assert found.step_seconds == pytest.approx(step_seconds)
    assert found.fixed_seconds == 0.15
    assert found.byte_seconds == pytest.approx((overhead - 0.15) / 1000)
    assert found.first_seconds == pytest.approx(3.0 - step_seconds - overhead)


def test_an_empty_job_may_have_taken_longer_than_a_round() -> None:
    found = stages_of(rounds(5), 9.0)
    assert found.fixed_seconds == pytest.approx(0.4)
    assert found.byte_seconds == 0
