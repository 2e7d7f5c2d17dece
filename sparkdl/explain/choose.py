"""Chooses what the user has left to ``"auto"``, from measurements and predictions.

Pure: numbers in, values with their reasons out. docs/explain.md states the rules.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from sparkdl.errors import ConfigError
from sparkdl.explain.comparison import Option, first_good, workers_text
from sparkdl.explain.explanation import seconds_text
from sparkdl.report.page.html import size

_FASTER = 1.1
"""By which factor twice the batch must make a worker faster."""
_STEPS = 32
"""That an epoch shall keep at least: from few steps nothing is learnt."""
_LEAST_BATCH, _MOST_BATCH = 32, 4096
"""The smallest size that is chosen for speed, and the largest."""
_FIRST_BATCH = 8
"""The first size that is tried, so that memory is taken in small steps."""

NUM_RATES = 100
LOWEST_RATE, HIGHEST_RATE = 1e-7, 10.0
"""Learning rates that are tried, as by fastai's ``lr_find``."""
_AROUND = 5
"""Losses on each side of one over which the mean is taken."""
_ERRORS = 4
"""Standard errors by which the lowest mean must be below the first: lower ones come by chance."""
_BELOW = 10
"""By which factor the chosen rate is below that of the lowest loss."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The value that a Param has got in place of ``"auto"``."""

    param: str
    value: Any
    reason: str
    """One sentence, with the numbers."""


# --- workers and strategy ------------------------------------------------------------------------


def choose_workers(option: Option) -> Choice:
    """The fewest workers with which the fit is at most 5 % longer than at best.

    Raises:
        ConfigError: the strategy can be used with no number of workers.
    """
    _check_usable([option])
    best = option.best
    others = sorted(
        (p for p in option.predictions if p is not best),
        key=lambda p: (abs(p.workers - best.workers), p.workers),
    )[:2]
    shortest = min(option.predictions, key=lambda p: p.total_seconds)
    if shortest is not best and shortest not in others:
        others = [*others[:1], shortest]
    told = "".join(
        f", {seconds_text(p.total_seconds)} with {p.workers}"
        for p in sorted(others, key=lambda p: p.workers)
    )
    reason = f"the fit takes about {seconds_text(best.total_seconds)} with {workers_text(best)}"
    return Choice(param="numWorkers", value=best.workers, reason=reason + told)


def choose_strategy(ladder: Sequence[Option]) -> tuple[Choice, Option]:
    """The strategy that changes training least of those that agree quickly enough, and its option.

    Args:
        ladder: see `comparison.first_good`.

    Raises:
        ConfigError: none can be used.
    """
    _check_usable(ladder)
    option, reasons = first_good(ladder)
    best = option.best
    own = f"{option.name} spends {best.exchange_share:.0%} of a step on agreeing"
    own = (
        f"{own} with {workers_text(best)}"
        if best.workers > 1
        else "1 worker has nobody to agree with"
    )
    reason = "; ".join([own, *reasons])
    return Choice(param="syncStrategy", value=option.strategy, reason=reason), option


def _check_usable(options: Sequence[Option]) -> None:
    if not any(option.predictions for option in options):
        names = " or ".join(option.name for option in options)
        raise ConfigError(
            f"{names} cannot be used with any number of workers that the cluster has room for; "
            "explain(df) says why; set numWorkers and syncStrategy to values of your own"
        )


# --- the size of a batch -------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class BatchSizes:
    """The sizes that are tried: powers of two from ``first`` to ``most``."""

    first: int
    least: int
    """The smallest one that is chosen if it fits into memory."""
    most: int


def batch_sizes(rows_per_worker: int, num_parts: int) -> BatchSizes:
    """Sizes of which an epoch keeps some steps, up to one from which on nothing is gained.

    Args:
        rows_per_worker: training rows of a worker.
        num_parts: micro-batches of a batch, each of which has a row at least.
    """
    whole = _power_of_two(max(1, rows_per_worker))
    most = min(whole, _MOST_BATCH, max(_LEAST_BATCH, _power_of_two(rows_per_worker // _STEPS)))
    parts = 1 << (num_parts - 1).bit_length()
    most = max(most, parts)
    least = max(min(_LEAST_BATCH, most), parts)
    return BatchSizes(first=max(min(_FIRST_BATCH, most), parts), least=least, most=most)


def _power_of_two(number: int) -> int:
    """The largest one that is not more than ``number``; 1 at least."""
    return 1 << max(0, number.bit_length() - 1)


@dataclass(frozen=True, kw_only=True)
class TriedBatch:
    """What a size of batches takes a worker."""

    rows: int
    rows_per_second: float
    num_bytes: int
    """That the steps took, beyond what the process held before."""


@dataclass(frozen=True, kw_only=True)
class BatchTrial:
    """Sizes of batches that were tried, each twice the one before it."""

    sizes: BatchSizes
    limit_bytes: int
    """That a step may take: half of a worker's part of what is free."""
    tried: tuple[TriedBatch, ...] = ()
    refused: str = ""
    """What the device said to the size after them; empty: nothing."""

    @property
    def next_rows(self) -> int | None:
        """The size to try next; None if there is no reason to."""
        if not self.tried:
            return self.sizes.first
        rows = 2 * self.tried[-1].rows
        return None if self._why_no_more(rows) else rows

    def with_size(self, batch: TriedBatch) -> BatchTrial:
        """The trial with one more size."""
        return replace(self, tried=(*self.tried, batch))

    @property
    def best(self) -> TriedBatch:
        """The largest one that fits into memory and makes a worker faster."""
        *before, last = self.tried
        if before and (self._is_no_faster or last.num_bytes > self.limit_bytes):
            return before[-1]
        return last

    def choice(self) -> Choice:
        """The best size, and why it is no other."""
        best = self.best
        rates = ", ".join(
            f"{one.rows_per_second:,.0f} with {one.rows}"
            for one in self.tried
            if one is not best and one.rows in (best.rows // 2, 2 * best.rows)
        )
        reason = (
            f"a worker trains {best.rows_per_second:,.0f} rows/s with {best.rows} rows"
            + f" ({rates})" * bool(rates)
            + f", for which a step takes {size(best.num_bytes)} of the {size(self.limit_bytes)} "
            f"that it may; {self._why_no_more(2 * self.tried[-1].rows)}"
        )
        return Choice(param="batchSize", value=best.rows, reason=reason)

    @property
    def _is_no_faster(self) -> bool:
        """True if the last size makes a worker not much faster than the one before it."""
        if len(self.tried) < 2 or self.tried[-1].rows <= self.sizes.least:
            return False
        before, last = self.tried[-2:]
        return last.rows_per_second < _FASTER * before.rows_per_second

    def _why_no_more(self, rows: int) -> str:
        """Why so many rows, twice the last, are not tried; empty if they are."""
        if self.refused:
            return f"{rows} did not fit: {self.refused}"
        taken = self.tried[-1].num_bytes
        grown = taken - self.tried[-2].num_bytes if len(self.tried) > 1 else taken / 2
        expected = taken + 2 * max(0.0, grown)
        if expected > self.limit_bytes:
            return f"{rows} would take about {size(expected)}"
        if self._is_no_faster:
            return f"{rows // 2} is faster by less than {_FASTER - 1:.0%}"
        if rows > self.sizes.most:
            return f"with {rows} an epoch would have fewer than {_STEPS} steps" if (
                rows <= _MOST_BATCH
            ) else "more is not tried"  # fmt: skip
        return ""


# --- the learning rate ---------------------------------------------------------------------------


def rate_at(number: int) -> float:
    """The learning rate of a step of the range test, from 0."""
    return float(LOWEST_RATE * (HIGHEST_RATE / LOWEST_RATE) ** (number / (NUM_RATES - 1)))


def choose_rate(losses: Sequence[float]) -> Choice:
    """A tenth of the rate at which the loss, as the mean of its neighbours, is lowest.

    Where no rate lowers the loss by more than it varies, the optimizer's own default is left.

    Args:
        losses: of the steps of the range test, finite, until it ended.
    """
    means = [
        statistics.fmean(losses[max(0, place - _AROUND) : place + _AROUND + 1])
        for place in range(len(losses))
    ]
    first = losses[: 2 * _AROUND + 1]
    lowest = min(range(len(means)), key=means.__getitem__, default=0)
    error = statistics.stdev(first) / len(first) ** 0.5 if len(first) > 1 else 0.0
    if not means or means[lowest] >= statistics.fmean(first) - _ERRORS * error:
        reason = (
            f"no rate from {LOWEST_RATE:g} to {HIGHEST_RATE:g} lowered the loss, so the "
            "optimizer's own default is left"
        )
        return Choice(param="learningRate", value=None, reason=reason)
    rate = float(f"{rate_at(lowest) / _BELOW:.2g}")
    reason = (
        f"over {len(losses)} steps with growing rates the loss fell from "
        f"{statistics.fmean(first):.4g} to {means[lowest]:.4g} at a rate of {rate_at(lowest):.2g}, "
        f"of which this is a tenth"
    )
    return Choice(param="learningRate", value=rate, reason=reason)
