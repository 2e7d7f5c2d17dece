"""The time left is right within a factor of two, or it is not said."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from sparkdl.report.live.progress import TimeLeft


def said(pauses: Iterable[float], report_seconds: float = 0.5) -> list[tuple[float, float]]:
    """What is said and what is true, whenever something is said, of steps that take so long."""
    ends, now = [], 0.0
    for pause in pauses:
        now += pause
        ends.append(now)
    time_left, found = TimeLeft(), []
    for tick in range(1, int(ends[-1] / report_seconds)):
        at = tick * report_seconds
        step = sum(end <= at for end in ends)
        time_left.take(at, step)
        shown = time_left.seconds(at, len(ends))
        if shown is not None:
            found.append((shown, ends[-1] - at))
    return found


COMPILED = [12.0, *[0.05] * 599]
"""The run that was said to last 2:00:22, 30 s before its end."""
WARMS_UP = [9.0, 6.0, 3.0, 1.0, *[0.1] * 400]
EVALUATES = ([0.02] * 99 + [4.0]) * 8
SLOW = [20.0] * 12
RECORDED = [
    (1.3, 0), (19.1, 5), (19.4, 9), (19.6, 14), (19.9, 20), (20.1, 23), (20.3, 28), (21.4, 53),
    (22.4, 73), (23.5, 96), (24.5, 118), (25.6, 139), (26.6, 159), (27.6, 181), (28.7, 202),
    (30.3, 220), (31.7, 235), (33.3, 249), (34.4, 263), (35.4, 283), (36.4, 302), (37.4, 323),
    (38.5, 340), (39.6, 360), (40.6, 377), (41.7, 395), (42.7, 414), (43.7, 433), (44.8, 451),
    (45.8, 468), (46.9, 486), (48.0, 504), (49.1, 521), (50.1, 542), (51.2, 559), (52.2, 575),
    (53.2, 597), (54.3, 611), (55.3, 630), (56.6, 651), (57.7, 669), (58.8, 686), (59.8, 703),
    (60.5, 714),
]  # fmt: skip
"""Seconds and steps of conf/digits.toml, two workers on two cores that others used too."""


def test_a_recorded_run_is_judged_well_from_its_third_second_on() -> None:
    time_left, (end, total), said_at = TimeLeft(), RECORDED[-1], []
    for now, step in RECORDED[:-1]:
        time_left.take(now, step)
        shown = time_left.seconds(now, total)
        if shown is not None:
            said_at.append(now)
            assert shown == pytest.approx(end - now, rel=0.3, abs=1.5)
    assert 20 < said_at[0] < 23


@pytest.mark.parametrize(
    ("pauses", "since"),
    [(COMPILED, 0.0), (WARMS_UP, 0.0), (EVALUATES, 8.0), (SLOW, 0.0)],
)
def test_what_is_said_is_about_right(pauses: list[float], since: float) -> None:
    """``since``: when all that repeats has been seen once."""
    found = [pair for pair in said(pauses) if pair[1] < sum(pauses) - since]
    assert found, "nothing is ever said"
    wrong = [(s, true) for s, true in found if not true / 2 - 5 < s < 2 * true + 5]
    assert wrong == []


def test_a_slow_first_step_says_nothing() -> None:
    time_left = TimeLeft()
    time_left.take(0.0, 0)
    time_left.take(12.0, 1)
    assert time_left.seconds(12.0, 600) is None
    for tick in range(1, 5):
        time_left.take(12.0 + tick, 1 + 20 * tick)
    assert time_left.seconds(16.0, 601) == pytest.approx(26.0)


def test_between_reports_time_goes_on() -> None:
    time_left = TimeLeft(100)
    for second in range(6):
        time_left.take(float(second), 100 + second)
    assert time_left.seconds(5.0, 125) == pytest.approx(20.0)
    assert time_left.seconds(8.0, 125) == pytest.approx(17.0)
    assert time_left.seconds(99.0, 125) == 0.0
    assert time_left.seconds(5.0, 105) is None  # the end is there


def test_after_a_long_pause_it_counts_as_one_of_all_steps() -> None:
    time_left = TimeLeft()
    for now, step in [(0.0, 1), (1.0, 2), (2.0, 3), (3.0, 4), (903.0, 5)]:
        time_left.take(now, step)
    assert time_left.seconds(903.0, 9) == pytest.approx(4 * 900.0, rel=0.1)
