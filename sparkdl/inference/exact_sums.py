"""How are many numbers added so that neither their order nor their grouping shows in the sum?

Each sum is kept as two float64: the rounded sum, and the sum of what rounding lost (Neumaier,
"Rundungsfehleranalyse einiger Verfahren zur Summation endlicher Summen", 1974). Batches are added
by `math.fsum`, which rounds once. The relative error of a sum of n numbers of one sign is then
about 1e-16, whatever n is.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any


def exact_sum(values: Iterable[float]) -> float:
    """The sum, rounded once; infinities and NaN count as in ordinary addition."""
    values = list(values)
    try:
        return math.fsum(values)
    except (ValueError, OverflowError):  # opposite infinities; a sum beyond the largest float
        return sum(values)


@dataclass
class Sums:
    """Sums by name."""

    _parts: dict[Hashable, tuple[float, float]] = field(default_factory=dict)

    def add(self, name: Hashable, value: float) -> None:
        """Add one number to a sum."""
        high, low = self._parts.get(name, (0.0, 0.0))
        total = high + value
        if math.isfinite(total):
            lost = (high - total) + value if abs(high) >= abs(value) else (value - total) + high
            low += lost
        self._parts[name] = (total, low)

    def merge(self, other: Sums) -> None:
        """Add all sums of another part."""
        for name, (high, low) in other._parts.items():
            self.add(name, high)
            self.add(name, low)

    def __getitem__(self, name: Hashable) -> float:
        high, low = self._parts.get(name, (0.0, 0.0))
        return high + low if math.isfinite(high) else high

    def __iter__(self) -> Iterator[Hashable]:
        return iter(self._parts)

    def to_dict(self) -> dict[Any, tuple[float, float]]:
        """As plain values."""
        return dict(self._parts)

    @classmethod
    def from_dict(cls, parts: Mapping[Any, tuple[float, float]]) -> Sums:
        """Inverse of `to_dict`."""
        return cls({name: (high, low) for name, (high, low) in parts.items()})


@dataclass
class Moments:
    """Weighted mean and sum of squared distances from it, of parts that are united.

    Chan, Golub, LeVeque: "Updating formulae and a pairwise algorithm for computing sample
    variances", 1979.
    """

    weight: float = 0.0
    mean: float = 0.0
    squares: float = 0.0
    """Sum over rows of weight times squared distance from the mean."""

    @classmethod
    def of(cls, values: list[float], weights: list[float]) -> Moments:
        """Of one batch."""
        weight = exact_sum(weights)
        if not weight > 0:
            return cls()
        pairs = list(zip(values, weights, strict=True))
        mean = exact_sum(v * w for v, w in pairs) / weight
        return cls(weight, mean, exact_sum(w * (v - mean) ** 2 for v, w in pairs))

    def merge(self, other: Moments) -> None:
        """Unite with another part."""
        weight = self.weight + other.weight
        if not weight > 0:
            return
        distance = other.mean - self.mean
        self.mean += distance * (other.weight / weight)
        self.squares += other.squares + distance**2 * (self.weight * other.weight / weight)
        self.weight = weight
