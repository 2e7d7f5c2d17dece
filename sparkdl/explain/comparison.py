"""Compares other numbers of workers and strategies, and chooses among them; see docs/explain.md."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from sparkdl.errors import ConfigError
from sparkdl.explain.explanation import Recommendation, ScalingRow, StrategyRow, seconds_text
from sparkdl.explain.predict_times import Prediction, Predictor
from sparkdl.sync import known_strategies
from sparkdl.sync.averaging.local_sgd import LocalSGD
from sparkdl.sync.averaging.parameter_averaging import ParameterAveraging
from sparkdl.sync.gradients.allreduce import AllReduce
from sparkdl.sync.strategy import SyncStrategy

TOLERANCE = 0.05
"""Part by which a fit may be longer than the shortest one to do with fewer workers."""
LARGE_SHARE = 1 / 3
"""Part of a step from which on agreeing is worth another strategy, as docs/strategies.md says."""
SMALL_SHARE = 0.05
"""Part of the time that agreeing takes in rounds whose length is chosen for it: H2O's."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The value that a Param has got in place of ``"auto"``."""

    param: str
    value: Any
    reason: str
    """One sentence, with the numbers."""


@dataclass(frozen=True, kw_only=True)
class ComparedStrategy:
    """A strategy with all numbers of workers that it was predicted for."""

    strategy: SyncStrategy
    predictions: tuple[Prediction, ...]
    """Predictions by number of workers; empty: it cannot be used."""

    @property
    def name(self) -> str:
        """The strategy as a user writes it."""
        return strategy_text(self.strategy)

    def at(self, world_size: int) -> Prediction | None:
        """The prediction for so many workers, if there is one."""
        found = [p for p in self.predictions if p.workers == world_size]
        return found[0] if found else None

    @property
    def best(self) -> Prediction:
        """The one with the fewest workers of those that are nearly as short as the shortest."""
        least = min(p.total_seconds for p in self.predictions)
        good = [p for p in self.predictions if p.total_seconds <= (1 + TOLERANCE) * least]
        return min(good, key=lambda p: p.workers)


def option(
    predictor: Predictor, strategy: SyncStrategy, world_sizes: Iterable[int], *, in_rounds: bool
) -> ComparedStrategy:
    """The strategy with each number of workers that it can have."""
    return ComparedStrategy(
        strategy=strategy,
        predictions=tuple(
            predictor.predict(strategy, world_size, in_rounds=in_rounds)
            for world_size in world_sizes
            if predictor.why_not(strategy, world_size, in_rounds=in_rounds) is None
        ),
    )


def ladder(predictor: Predictor, world_sizes: Sequence[int]) -> list[ComparedStrategy]:
    """Strategies from the one that changes training least to the one that agrees least."""
    topology = _topology(predictor, world_sizes)
    gang = [
        AllReduce(topology=topology),
        AllReduce(compression="bf16", topology=topology),
        _local_sgd(predictor, max(world_sizes), topology),
    ]
    stages = ParameterAveraging(averaging_period="auto", target_share=SMALL_SHARE)
    return [
        *(option(predictor, strategy, world_sizes, in_rounds=False) for strategy in gang),
        option(predictor, stages, world_sizes, in_rounds=True),
    ]


def _topology(predictor: Predictor, world_sizes: Sequence[int]) -> str:
    """A tree if all-reduce is quicker along it; what is learned does not depend on it."""
    usual, tree = (
        option(predictor, AllReduce(topology=topology), world_sizes, in_rounds=False)
        for topology in ("auto", "tree")
    )
    if not usual.predictions or not tree.predictions:
        return "auto"
    limit = (1 - TOLERANCE) * usual.best.total_seconds
    return "tree" if tree.best.total_seconds < limit else "auto"


def _local_sgd(predictor: Predictor, world_size: int, topology: str) -> LocalSGD:
    """With as long a round as holds agreeing at a small share of the time."""
    strategy = LocalSGD(topology=topology)
    if world_size == 1 or predictor.why_not(strategy, world_size, in_rounds=False) is not None:
        return strategy
    pattern = dataclasses.replace(
        strategy.pattern(predictor.size, world_size), target_share=SMALL_SHARE
    )
    steps = predictor.steps(pattern, world_size, predictor.batch_size(world_size)).settled()
    return LocalSGD(averaging_period=max(2, round(steps.pattern.period)), topology=topology)


def scaling(
    predictor: Predictor, strategy: SyncStrategy, world_sizes: Iterable[int], *, in_rounds: bool
) -> tuple[ScalingRow, ...]:
    """The strategy with each number of workers."""
    predictions = option(predictor, strategy, world_sizes, in_rounds=in_rounds).predictions
    if not predictions:
        return ()
    one = predictor.predict(strategy, 1, in_rounds=in_rounds)
    global_batch = len(predictor.plan.shards) * predictor.plan.batch_size
    rows = []
    for found in predictions:
        same = None
        if (batch_size := global_batch // found.workers) >= 1:
            same = predictor.predict(
                strategy, found.workers, in_rounds=in_rounds, batch_size=batch_size
            ).epoch_seconds
        speedup = one.epoch_seconds / found.epoch_seconds
        rows.append(ScalingRow(**vars(found), speedup=speedup, same_global_batch_seconds=same))
    return tuple(rows)


def strategies(
    predictor: Predictor, own: SyncStrategy, world_size: int, *, in_rounds: bool
) -> tuple[StrategyRow, ...]:
    """The strategy that was asked for, then the others, with the same number of workers."""
    forms = [(own, in_rounds)]
    for kind in known_strategies():
        forms += [(one, one.prefers_rounds) for one in kind.examples()]
    of_row = {field.name for field in dataclasses.fields(StrategyRow)}
    rows = []
    for place, (strategy, mode) in enumerate(forms):
        if place and (strategy, mode) == forms[0]:
            continue
        why_not, numbers = predictor.why_not(strategy, world_size, in_rounds=mode), {}
        if why_not is None:
            found = vars(predictor.predict(strategy, world_size, in_rounds=mode))
            numbers = {name: value for name, value in found.items() if name in of_row}
        rows.append(
            StrategyRow(
                strategy=strategy_text(strategy),
                mode="rounds" if mode else "gang",
                why_not=why_not,
                **numbers,
            )
        )
    return tuple(rows)


def world_sizes(slots: int | None, ranks: int, planned: int, wanted: Iterable[int]) -> list[int]:
    """The numbers of workers that are looked at: powers of two up to the slots, and others."""
    most = slots or ranks
    powers = {2**i for i in range(most.bit_length())}
    return sorted({*powers, most, planned, *wanted})


def strategy_text(strategy: SyncStrategy) -> str:
    """The strategy as a user writes it, without what is the default."""
    given = [
        f"{field.name}={getattr(strategy, field.name)!r}"
        for field in dataclasses.fields(strategy)
        if field.init and getattr(strategy, field.name) != field.default
    ]
    return f"{type(strategy).__name__}({', '.join(given)})"


def choose_strategy(ladder: Sequence[ComparedStrategy]) -> tuple[Choice, ComparedStrategy]:
    """The strategy that changes training least of those that agree quickly enough, and its option.

    The ``ladder`` goes from the one that changes training least to the one that agrees most seldom.
    Raises ConfigError if none can be used.
    """
    usable = _usable(ladder)
    chosen, reasons = _first_cheap(usable)
    first, best = usable[0], chosen.best
    # To agree more seldom is worth its change of training only if the fit is shorter by it.
    if chosen is not first and best.total_seconds > (1 - TOLERANCE) * first.best.total_seconds:
        chosen, best = first, first.best
        reasons.append(
            f"with {workers_text(best)} {first.name} is as quick all the same: nothing that "
            "agrees more seldom makes the fit shorter"
        )
    own = "1 worker has nobody to agree with"
    if best.workers > 1:
        share = f"{best.exchange_share:.0%} of a step"
        own = f"{chosen.name} spends {share} on agreeing with {workers_text(best)}"
    reason = "; ".join([own, *reasons])
    return Choice(param="syncStrategy", value=chosen.strategy, reason=reason), chosen


def choose_workers(option: ComparedStrategy) -> Choice:
    """The fewest workers with a fit at most 5 % longer than the shortest; raises ConfigError."""
    _usable([option])
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


def recommend(
    ladder: Sequence[ComparedStrategy], planned: ComparedStrategy, num_workers: int
) -> Recommendation:
    """Return what `choose_strategy` and `choose_workers` choose, and why; raises as they do."""
    strategy, chosen = choose_strategy(ladder)
    workers, best = choose_workers(chosen), chosen.best
    is_one_machine = best.nodes == 1 and any(
        p.workers > best.workers and (best.workers == 1 or p.nodes > 1) for p in chosen.predictions
    )
    reasons = [_why_one(chosen, best) if is_one_machine else workers.reason, strategy.reason]
    period = round(best.period) if 1 < best.period < best.steps_per_epoch else None
    if period is not None:
        reasons.append(
            f"in rounds of {period} steps agreeing takes {best.exchange_share:.1%} of the time"
        )
    usable = _usable(ladder)
    least = min(option.best.total_seconds for option in usable)
    quick = next(one for one in usable if one.best.total_seconds <= (1 + TOLERANCE) * least)
    if quick.best.total_seconds < (1 - TOLERANCE) * best.total_seconds:
        reasons.append(
            f"{quick.name} with {workers_text(quick.best)} would take "
            f"{seconds_text(quick.best.total_seconds)}, but changes what is learned"
        )
    asked = planned.at(num_workers)
    if (chosen.name, best.workers) == (planned.name, num_workers):
        reasons.append("that is what the estimator asks for")
    elif asked is not None:
        reasons.append(
            f"{planned.name} with {workers_text(asked)}, as the estimator asks for, takes "
            f"{seconds_text(asked.total_seconds)}"
        )
    return Recommendation(
        num_workers=best.workers,
        strategy=chosen.name,
        sync_strategy=chosen.strategy,
        averaging_period=period,
        total_seconds=best.total_seconds,
        is_one_machine_faster=is_one_machine,
        reasons=tuple(reasons),
    )


def _usable(options: Sequence[ComparedStrategy]) -> list[ComparedStrategy]:
    """Return the options that can be used; raises ConfigError if there is none."""
    if usable := [option for option in options if option.predictions]:
        return usable
    names = " or ".join(option.name for option in options)
    raise ConfigError(
        f"{names} cannot be used with any number of workers that the cluster has room for; "
        "explain(df) says why; set numWorkers and syncStrategy to values of your own"
    )


def _first_cheap(usable: Sequence[ComparedStrategy]) -> tuple[ComparedStrategy, list[str]]:
    """The first that spends little on agreeing with all workers, else the last; why not others."""
    widest = max(usable[0].predictions, key=lambda p: p.workers).workers
    reasons: list[str] = []
    for option in usable:
        wide = option.at(widest) or option.best
        if wide.workers == 1 or wide.exchange_share <= LARGE_SHARE:
            return option, reasons
        reasons.append(
            f"{option.name} would spend {wide.exchange_share:.0%} of the time on agreeing "
            f"with {workers_text(wide)}"
        )
    return usable[-1], reasons


def _why_one(option: ComparedStrategy, best: Prediction) -> str:
    more = [p for p in option.predictions if p.workers > best.workers]
    others = min(more, key=lambda p: p.total_seconds)
    cores = "and all its cores" if best.workers == 1 else "on one machine"
    lost = (
        f"spend {others.exchange_share:.0%} of a step on agreeing and "
        f"{others.waiting_share:.0%} on waiting"
    )
    return (
        f"one machine is faster, or as fast: {seconds_text(best.total_seconds)} with "
        f"{workers_text(best)} {cores}, {seconds_text(others.total_seconds)} with "
        f"{workers_text(others)}, which {lost}"
    )


def workers_text(prediction: Prediction) -> str:
    """So many workers, as people say it."""
    return f"{prediction.workers} worker" + "s" * (prediction.workers > 1)
