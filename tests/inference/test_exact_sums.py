from __future__ import annotations

import math
import random
from fractions import Fraction

import pytest

from sparkdl.inference.exact_sums import Moments, Sums, exact_sum

generator = random.Random(0)
NUMBERS = [generator.uniform(-1, 1) * 10 ** generator.randint(-12, 12) for _ in range(5000)]
EXACT = float(sum(map(Fraction, NUMBERS)))


def summed(numbers: list[float], cuts: int) -> float:
    """The sum over parts of parts."""
    whole = Sums()
    for start in range(cuts):
        part = Sums()
        for number in numbers[start::cuts]:
            part.add("x", number)
        whole.merge(Sums.from_dict(part.to_dict()))
    return whole["x"]


@pytest.mark.parametrize("cuts", [1, 2, 7, 1000])
def test_neither_order_nor_grouping_shows(cuts: int) -> None:
    shuffled = NUMBERS[:]
    random.Random(cuts).shuffle(shuffled)
    assert summed(shuffled, cuts) == EXACT
    assert math.fsum(NUMBERS) == EXACT != sum(sorted(NUMBERS, reverse=True))


def test_infinities_and_nan_count_as_they_do_in_addition() -> None:
    assert exact_sum([1.0, math.inf]) == math.inf
    assert math.isnan(exact_sum([math.inf, -math.inf]))
    assert exact_sum([1.7e308, 1.7e308]) == math.inf
    sums = Sums()
    for value in (1.0, math.inf, 2.0):
        sums.add("x", value)
    assert sums["x"] == math.inf
    other = Sums()
    other.add("x", -math.inf)
    sums.merge(other)
    assert math.isnan(sums["x"])
    assert sums["never seen"] == 0.0
    assert list(sums) == ["x"]


@pytest.mark.parametrize("cuts", [1, 3, 50])
def test_moments_of_parts_are_those_of_the_whole(cuts: int) -> None:
    values = [1e6 + generator.gauss(0, 1) for _ in range(999)]
    weights = [generator.choice([0.0, 0.5, 2.0]) for _ in values]
    total = sum(map(Fraction, weights))
    pairs = [(Fraction(v), Fraction(w)) for v, w in zip(values, weights, strict=True)]
    mean = sum(v * w for v, w in pairs) / total
    squares = sum(w * (v - mean) ** 2 for v, w in pairs)
    whole = Moments()
    for start in range(cuts):
        whole.merge(Moments.of(values[start::cuts], weights[start::cuts]))
    whole.merge(Moments())
    assert whole.weight == pytest.approx(float(total), rel=1e-15)
    assert whole.mean == pytest.approx(float(mean), rel=1e-15)
    assert whole.squares == pytest.approx(float(squares), rel=1e-9)


def test_moments_without_weight_are_empty() -> None:
    assert Moments.of([1.0], [0.0]) == Moments.of([], []) == Moments()
