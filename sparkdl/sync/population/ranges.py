"""The values that a hyperparameter may have, for searches and for populations."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from sparkdl.config import require
from sparkdl.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True)
class Range:
    """Numbers from ``low`` to ``high``, both included.

    A search (`tune`) tries whole numbers only if both ends, and the step, are whole.

    Example::

        Range(1e-5, 1e-1, log=True)
        Range(16, 256, step=16)
    """

    low: float
    """Smallest value."""
    high: float
    """Largest value."""
    _: KW_ONLY
    log: bool = False
    """True if small numbers are as likely as large ones of the same relative width, as suits
    learning rates; else all numbers are equally likely."""
    step: float | None = None
    """Distance between the values, from ``low`` on; None: any number."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.low) and math.isfinite(self.high) and self.low < self.high):
            raise ConfigError(f"a Range needs low < high; received {self.low} and {self.high}")
        require(self.low > 0 or not self.log, "a Range with log=True needs low > 0", self.low)
        if self.log and self.step is not None:
            raise ConfigError("a Range has either log=True or a step; leave one of them out")
        is_step = self.step is None or (math.isfinite(self.step) and self.step > 0)
        require(is_step, "the step of a Range must be a number above 0", self.step)

    @property
    def is_whole(self) -> bool:
        """True if a search tries whole numbers."""
        return all(isinstance(v, int) for v in (self.low, self.high, self.step) if v is not None)

    def sample(self, generator: np.random.Generator) -> float:
        """A new value."""
        if not self.log:
            return self._allowed(float(generator.uniform(self.low, self.high)))
        return self._allowed(math.exp(generator.uniform(math.log(self.low), math.log(self.high))))

    def perturbed(
        self, value: float, factors: Sequence[float], generator: np.random.Generator
    ) -> float:
        """``value`` times one of ``factors``, within the bounds."""
        return self._allowed(value * factors[int(generator.integers(len(factors)))])

    def _allowed(self, value: float) -> float:
        """The nearest value of the range."""
        if self.step is not None:
            num_steps = round((value - self.low) / self.step)
            most = math.floor((self.high - self.low) / self.step + 1e-9)
            value = self.low + self.step * min(num_steps, most)
        return float(min(max(value, self.low), self.high))


@dataclass(frozen=True)
class Around:
    """Numbers around the user's own value, from a ``factor``-th of it to ``factor`` times it."""

    factor: float = 10.0
    """Factor by which values may be smaller or larger than the user's own."""

    def __post_init__(self) -> None:
        require(1 < self.factor < math.inf, "factor must be more than 1", self.factor)

    def range_of(self, own: Any, name: str) -> Range:
        """The range around the user's own value of what has the name.

        Raises:
            ConfigError: it is no number above 0.
        """
        if isinstance(own, bool) or not isinstance(own, int | float) or not own > 0:
            raise ConfigError(
                f"{name!r} has values Around its own, which is {own}, and not a number above 0; "
                "set it, or give a Range or a list of values"
            )
        return Range(low=own / self.factor, high=own * self.factor, log=True)


Mutation: TypeAlias = Range | Around | Sequence[float]
"""Source of a hyperparameter's values; a sequence lists all values, in their order."""
