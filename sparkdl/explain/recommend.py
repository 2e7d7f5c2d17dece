"""Recommends workers, strategy and period, with reasons, from predictions alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sparkdl.explain.predict_times import Prediction

TOLERANCE = 0.05
"""By how much a fit may be longer than the shortest one to do with fewer workers."""
LARGE_SHARE = 1 / 3
"""Part of a step from which on agreeing is worth another strategy, as docs/strategies.md says."""
SMALL_SHARE = 0.05
"""Part of the time that agreeing takes in rounds whose length is chosen for it: H2O's."""


@dataclass(frozen=True, kw_only=True)
class Option:
    """A strategy with all numbers of workers that it was predicted for."""

    name: str
    """As a user writes it."""
    predictions: tuple[Prediction, ...]
    """By number of workers; empty: it cannot be used."""
    in_rounds: bool = False

    def at(self, world_size: int) -> Prediction | None:
        """The prediction for so many workers, if there is one."""
        found = [p for p in self.predictions if p.world_size == world_size]
        return found[0] if found else None

    @property
    def best(self) -> Prediction:
        """The one with the fewest workers of those that are nearly as short as the shortest."""
        least = min(p.total_seconds for p in self.predictions)
        good = [p for p in self.predictions if p.total_seconds <= (1 + TOLERANCE) * least]
        return min(good, key=lambda p: p.world_size)


@dataclass(frozen=True, kw_only=True)
class Recommendation:
    """What to set, and why."""

    num_workers: int
    strategy: str
    averaging_period: int | None
    """Steps of a round; None: the strategy has no rounds of several steps."""
    total_seconds: float
    is_one_machine_faster: bool
    reasons: tuple[str, ...]


def recommend(ladder: Sequence[Option], planned: Option, num_workers: int) -> Recommendation:
    """Go down the ladder as far as communication makes it necessary.

    Args:
        ladder: strategies from the one that changes training least to the one that agrees most
            seldom.
        planned: the strategy that was asked for.
        num_workers: workers that were asked for.
    """
    usable = [option for option in ladder if option.predictions]
    chosen, reasons = _first_cheap(usable)
    first, best = usable[0], chosen.best
    # To agree more seldom is worth its change of training only if the fit is shorter by it.
    if chosen is not first and best.total_seconds > (1 - TOLERANCE) * first.best.total_seconds:
        chosen, best = first, first.best
        reasons.append(
            f"with {_workers(best)} {first.name} is as quick all the same: nothing that agrees "
            "more seldom makes the fit shorter"
        )
    is_one_machine = best.layout.num_nodes == 1 and any(
        p.world_size > best.world_size and (best.world_size == 1 or p.layout.num_nodes > 1)
        for p in chosen.predictions
    )
    reasons.insert(0, _why_one(chosen, best) if is_one_machine else _why_so_many(chosen, best))
    period = round(best.period) if 1 < best.period < best.steps_per_epoch else None
    if period is not None:
        reasons.append(
            f"in rounds of {period} steps agreeing takes {best.step.exchange_share:.1%} of the time"
        )
    asked = planned.at(num_workers)
    if (chosen.name, best.world_size) == (planned.name, num_workers):
        reasons.append("that is what the estimator asks for")
    elif asked is not None:
        reasons.append(
            f"{planned.name} with {_workers(asked)}, as the estimator asks for, takes "
            f"{seconds_text(asked.total_seconds)}"
        )
    return Recommendation(
        num_workers=best.world_size,
        strategy=chosen.name,
        averaging_period=period,
        total_seconds=best.total_seconds,
        is_one_machine_faster=is_one_machine,
        reasons=tuple(reasons),
    )


def _first_cheap(usable: Sequence[Option]) -> tuple[Option, list[str]]:
    """The first that spends little on agreeing with all workers, else the last; why not others."""
    widest = max(usable[0].predictions, key=lambda p: p.world_size).world_size
    reasons: list[str] = []
    for option in usable:
        wide = option.at(widest) or option.best
        if wide.world_size == 1 or wide.step.exchange_share <= LARGE_SHARE:
            return option, reasons
        reasons.append(
            f"{option.name} would spend {wide.step.exchange_share:.0%} of the time on agreeing "
            f"with {_workers(wide)}"
        )
    return usable[-1], reasons


def _why_so_many(option: Option, best: Prediction) -> str:
    least = min(option.predictions, key=lambda p: p.total_seconds)
    if least.world_size == best.world_size:
        return (
            f"with {option.name} the fit is shortest with {_workers(best)}: "
            f"{seconds_text(best.total_seconds)}"
        )
    return (
        f"with {option.name} and {_workers(best)} the fit takes "
        f"{seconds_text(best.total_seconds)}, with {least.world_size} at best "
        f"{seconds_text(least.total_seconds)}: not worth the slots"
    )


def _why_one(option: Option, best: Prediction) -> str:
    more = [p for p in option.predictions if p.world_size > best.world_size]
    others = min(more, key=lambda p: p.total_seconds)
    cores = "and all its cores" if best.world_size == 1 else "on one machine"
    lost = (
        f"spend {others.step.exchange_share:.0%} of a step on agreeing and "
        f"{_share(others.step.waiting_seconds, others.step.seconds):.0%} on waiting"
    )
    return (
        f"one machine is faster, or as fast: {seconds_text(best.total_seconds)} with "
        f"{_workers(best)} {cores}, {seconds_text(others.total_seconds)} with "
        f"{_workers(others)}, which {lost}"
    )


def _workers(prediction: Prediction) -> str:
    return f"{prediction.world_size} worker" + "s" * (prediction.world_size > 1)


def _share(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0


def seconds_text(seconds: float) -> str:
    """A duration as people say it."""
    if seconds < 1:
        return f"{seconds * 1000:.3g} ms"
    if seconds < 100:
        return f"{seconds:.3g} s"
    if seconds < 6000:
        return f"{seconds / 60:.3g} min"
    return f"{seconds / 3600:.3g} h"
