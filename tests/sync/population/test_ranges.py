"""The values that a hyperparameter may have."""

from __future__ import annotations

import math

import numpy as np
import pytest

from sparkdl.errors import ConfigError
from sparkdl.sync.population.ranges import Around, Range


@pytest.mark.parametrize(
    ("low", "high", "options", "message"),
    [
        (1.0, 1.0, {}, "needs low < high; received 1.0 and 1.0"),
        (0.0, 1.0, {"log": True}, "log=True needs low > 0; received 0.0"),
        (0.0, math.inf, {}, "needs low < high"),
        (1, 2, {"log": True, "step": 1}, "either log=True or a step"),
        (1, 2, {"step": 0}, "must be a number above 0; received 0"),
        (0.0, 2.0, {"step": -0.5}, "must be a number above 0"),
    ],
)
def test_wrong_ranges(low: float, high: float, options: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Range(low, high, **options)  # type: ignore[arg-type]


def test_a_step_leaves_the_values_that_can_be_reached_from_low() -> None:
    generator = np.random.default_rng(3)
    steps = Range(0.1, 0.75, step=0.2)
    drawn = {round(steps.sample(generator), 9) for _ in range(200)}
    assert drawn == {0.1, 0.3, 0.5, 0.7}
    assert steps.perturbed(0.5, [1.3], generator) == pytest.approx(0.7)
    assert steps.perturbed(0.7, [9.0], generator) == pytest.approx(0.7)
    assert steps.perturbed(0.1, [0.1], generator) == pytest.approx(0.1)


def test_whole_numbers_need_whole_ends_and_a_whole_step() -> None:
    assert Range(1, 8).is_whole
    assert Range(1, 8, step=2).is_whole
    assert not Range(1, 8.0).is_whole
    assert not Range(1, 8, step=0.5).is_whole


def test_around_is_a_range_of_logarithms() -> None:
    assert Around(factor=4).range_of(0.1, "lr") == Range(0.025, 0.4, log=True)
    with pytest.raises(ConfigError, match="factor must be more than 1; received 1"):
        Around(factor=1)
