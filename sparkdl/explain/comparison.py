"""Tables of predictions: other numbers of workers, and other strategies."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sparkdl.config import TrainConfig
from sparkdl.errors import ConfigError
from sparkdl.explain.cost_model import Calibration, Layout
from sparkdl.explain.explanation import ScalingRow, StrategyRow
from sparkdl.explain.predict_times import Prediction, Steps, Workload, predict
from sparkdl.explain.recommend import SMALL_SHARE, Option
from sparkdl.sync import known_strategies
from sparkdl.sync.averaging.local_sgd import LocalSGD
from sparkdl.sync.averaging.parameter_averaging import ParameterAveraging
from sparkdl.sync.exchange_pattern import ModelSize
from sparkdl.sync.gradients.allreduce import AllReduce
from sparkdl.sync.strategy import SyncStrategy
from sparkdl.train.modules.sync_batch_norm import check_strategy


@dataclass(frozen=True, kw_only=True)
class Places:
    """Where workers may be."""

    num_nodes: int
    slots: int | None
    """Of all machines; None: not known."""

    def layout(self, world_size: int) -> Layout:
        """As Spark spreads them; beyond the slots, on more machines like these."""
        nodes = self.num_nodes
        if self.slots is not None:
            nodes = max(nodes, math.ceil(world_size / max(1, self.slots // self.num_nodes)))
        return Layout(world_size=world_size, num_nodes=min(nodes, world_size))


@dataclass(frozen=True, kw_only=True)
class Predictor:
    """All that predictions need."""

    calibration: Calibration
    workload: Workload
    size: ModelSize
    places: Places
    config: TrainConfig
    can_gang: bool
    """Whether a gang was measured; else nothing can be said of what needs one."""
    has_dataframe: bool

    def prediction(
        self,
        strategy: SyncStrategy,
        world_size: int,
        *,
        in_rounds: bool,
        batch_size: int | None = None,
    ) -> Prediction:
        """One fit."""
        return predict(
            self.calibration,
            self.workload,
            strategy.stages_pattern(self.size)
            if in_rounds
            else strategy.pattern(self.size, world_size),
            self.places.layout(world_size),
            num_slots=self.places.slots if in_rounds else None,
            batch_size=batch_size,
        )

    def why_not(self, strategy: SyncStrategy, world_size: int, *, in_rounds: bool) -> str | None:
        """Why a fit with the strategy would be refused; None if it would not."""
        try:
            strategy.check(self.config, world_size)
            if self.config.sync_batch_norm:
                check_strategy(strategy, world_size)
        except ConfigError as error:
            return str(error)
        if in_rounds:
            if not self.has_dataframe and strategy.why_not_gang() is not None:
                return "it sets rows aside, which needs a DataFrame"
            return strategy.why_not_rounds()
        if not self.can_gang:
            return "no gang was measured, see the notes"
        if self.calibration.network is None and world_size > 1:
            return "exchanges were measured on one worker only, which has none"
        return strategy.why_not_gang()

    def can(self, strategy: SyncStrategy, world_size: int, *, in_rounds: bool) -> bool:
        """Whether a fit with so many workers is possible, slots apart."""
        return self.why_not(strategy, world_size, in_rounds=in_rounds) is None

    def option(
        self, strategy: SyncStrategy, world_sizes: Iterable[int], *, in_rounds: bool
    ) -> Option:
        """The strategy with each number of workers that it can have."""
        return Option(
            name=strategy_text(strategy),
            in_rounds=in_rounds,
            predictions=tuple(
                self.prediction(strategy, world_size, in_rounds=in_rounds)
                for world_size in world_sizes
                if self.can(strategy, world_size, in_rounds=in_rounds)
            ),
        )

    def ladder(self, world_sizes: Sequence[int]) -> list[Option]:
        """Strategies from the one that changes training least to the one that agrees least."""
        gang = [AllReduce(), AllReduce(compression="bf16"), self._local_sgd(max(world_sizes))]
        found = [self.option(strategy, world_sizes, in_rounds=False) for strategy in gang]
        stages = ParameterAveraging(averaging_period="auto", target_share=SMALL_SHARE)
        return [*found, self.option(stages, world_sizes, in_rounds=True)]

    def _local_sgd(self, world_size: int) -> LocalSGD:
        """With as long a round as holds agreeing at a small share of the time."""
        if not self.can(LocalSGD(), world_size, in_rounds=False) or world_size == 1:
            return LocalSGD()
        pattern = LocalSGD().pattern(self.size, world_size)
        steps = Steps(
            calibration=self.calibration,
            pattern=dataclasses.replace(pattern, target_share=SMALL_SHARE),
            layout=self.places.layout(world_size),
            rows=self.workload.rows_per_step(world_size, self.workload.batch_size),
        )
        return LocalSGD(averaging_period=max(2, round(steps.settled().pattern.period)))

    def scaling(
        self, strategy: SyncStrategy, world_sizes: Iterable[int], *, in_rounds: bool, planned: int
    ) -> tuple[ScalingRow, ...]:
        """The strategy with each number of workers."""
        predictions = self.option(strategy, world_sizes, in_rounds=in_rounds).predictions
        if not predictions:
            return ()
        one = self.prediction(strategy, 1, in_rounds=in_rounds)
        global_batch = planned * self.workload.batch_size
        rows = []
        for found in predictions:
            step, same = found.step, None
            if (batch_size := global_batch // found.world_size) >= 1:
                same = self.prediction(
                    strategy, found.world_size, in_rounds=in_rounds, batch_size=batch_size
                ).epoch_seconds
            rows.append(
                ScalingRow(
                    workers=found.world_size,
                    nodes=found.layout.num_nodes,
                    steps_per_epoch=found.steps_per_epoch,
                    step_seconds=step.seconds,
                    exchange_share=step.exchange_share,
                    waiting_share=step.waiting_seconds / step.seconds if step.seconds > 0 else 0.0,
                    epoch_seconds=found.epoch_seconds,
                    speedup=one.epoch_seconds / found.epoch_seconds,
                    same_global_batch_seconds=same,
                    total_seconds=found.total_seconds,
                )
            )
        return tuple(rows)

    def strategies(
        self, own: SyncStrategy, world_size: int, *, in_rounds: bool
    ) -> tuple[StrategyRow, ...]:
        """The strategy that was asked for, then the others, with the same number of workers."""
        forms = [(own, in_rounds)]
        for kind in known_strategies():
            forms += [(one, one.prefers_rounds) for one in kind.examples()]
        return tuple(
            self._strategy_row(one, world_size, in_rounds=mode)
            for place, (one, mode) in enumerate(forms)
            if place == 0 or (one, mode) != forms[0]
        )

    def _strategy_row(
        self, strategy: SyncStrategy, world_size: int, *, in_rounds: bool
    ) -> StrategyRow:
        mode = "rounds" if in_rounds else "gang"
        why_not = self.why_not(strategy, world_size, in_rounds=in_rounds)
        if why_not is not None:
            return StrategyRow(strategy=strategy_text(strategy), mode=mode, why_not=why_not)
        found = self.prediction(strategy, world_size, in_rounds=in_rounds)
        return StrategyRow(
            strategy=strategy_text(strategy),
            mode=mode,
            period=found.period,
            step_seconds=found.step.seconds,
            exchange_share=found.step.exchange_share,
            sent_bytes_per_step=found.sent_bytes,
            epoch_seconds=found.epoch_seconds,
            total_seconds=found.total_seconds,
        )


def world_sizes(slots: int | None, ranks: int, planned: int, wanted: Iterable[int]) -> list[int]:
    """The numbers of workers that are looked at: powers of two up to the slots, and others."""
    most = slots or ranks
    powers = {2**i for i in range(most.bit_length()) if 2**i <= most}
    return sorted({1, *powers, most, planned, *wanted})


def strategy_text(strategy: SyncStrategy) -> str:
    """The strategy as a user writes it, without what is the default."""
    given = [
        f"{field.name}={getattr(strategy, field.name)!r}"
        for field in dataclasses.fields(strategy)
        if field.init and getattr(strategy, field.name) != field.default
    ]
    return f"{type(strategy).__name__}({', '.join(given)})"
