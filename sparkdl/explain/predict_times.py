"""Predicted times of steps, epochs and whole fits, for any number of workers and any strategy."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from sparkdl.comm.topology import choose
from sparkdl.config import TrainConfig
from sparkdl.data.plan import TrainPlan, assign_shards, steps_per_epoch
from sparkdl.errors import ConfigError
from sparkdl.explain.cost_model import Calibration, Compute, Layout
from sparkdl.sync.averaging.period import steps_for_share
from sparkdl.sync.exchange_pattern import ModelSize, Pattern
from sparkdl.sync.gradients.shard_tree import tree_pattern
from sparkdl.sync.strategy import SyncStrategy

_BACKWARD_SHARE = 0.6
"""Part of a step in which gradients come; of forward, backward and update backward is the most."""
_EVALUATED_SHARE = 0.4
"""Seconds per row of an evaluation over those of training: a forward pass of the two."""


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """A fit as it would go with one strategy and one number of workers."""

    workers: int
    nodes: int
    period: float
    """Steps of a round."""
    steps_per_epoch: int
    step_seconds: float
    """On the average over a round."""
    exchange_share: float
    """Part of the step that agreeing takes."""
    waiting_share: float
    """Part of the step in which a typical worker waits for slower ones."""
    epoch_seconds: float
    """Without validation."""
    total_seconds: float
    sent_bytes_per_step: float | None
    """Bytes that each worker sends in a step; None: it depends on the data."""


@dataclass(frozen=True, kw_only=True)
class Steps:
    """Steps of a worker on ``rows`` samples, with one strategy on one layout of workers."""

    calibration: Calibration
    pattern: Pattern
    layout: Layout
    rows: float
    passes: int = 1
    """Micro-batches, one after the other, each with the fixed costs of a step."""

    @property
    def compute(self) -> Compute:
        """The cost of a worker's own part of a step."""
        found = self.calibration.compute(self.layout, in_rounds=self.pattern.kind == "stages")
        return replace(found, fixed_seconds=self.passes * found.fixed_seconds)

    def settled(self, most: float = math.inf) -> Steps:
        """The same with a fixed period of at most ``most`` steps; see `steps_for_share`."""
        period, share = self.pattern.period, self.pattern.target_share
        if share is not None:
            alone = sum(replace(self, pattern=replace(self.pattern, period=math.inf)).own_seconds())
            period = max(1, round(steps_for_share(self.exchange_seconds(), alone, share)))
        pattern = replace(self.pattern, period=min(period, most), target_share=None)
        return replace(self, pattern=pattern)

    def seconds(self) -> float:
        """One step, on the average over a round."""
        return sum(self.own_seconds()) + self.exchange_seconds() / self.pattern.period

    def own_seconds(self) -> tuple[float, float]:
        """A typical worker's own part of a step, and its wait for slower workers."""
        pattern, compute, world_size = self.pattern, self.compute, self.layout.world_size
        mean = slowest = compute.mean_seconds(self.rows)
        if pattern.in_pairs and world_size > 1:  # who meets nobody does not wait
            slower = compute.slowest_seconds(self.rows, waited_for=2, world_size=2)
            slowest += (slower - mean) / max(1.0, pattern.period)
        elif world_size > 1 and not math.isinf(pattern.lead):
            slowest = compute.slowest_seconds(
                self.rows,
                waited_for=world_size - pattern.num_backup_workers,
                world_size=world_size,
                steps=round(min(pattern.waits_every, 1e9)),
            )
        return self.layout.num_waves * min(mean, slowest), max(0.0, slowest - mean)

    def exchange_seconds(self) -> float:
        """One exchange, as far as it is not hidden behind the backward pass."""
        pattern, layout, calibration = self.pattern, self.layout, self.calibration
        if pattern.kind == "stages":
            stages = calibration.stages
            assert stages is not None, "no rounds were measured"
            carried = layout.world_size * pattern.num_bytes
            return stages.fixed_seconds + carried * stages.byte_seconds
        if pattern.between_nodes:
            layout = Layout(world_size=layout.num_nodes, num_nodes=layout.num_nodes)
        if layout.world_size == 1:
            return 0.0
        gang = calibration.gang
        assert gang is not None, "no gang was measured"
        assert gang.network is not None, "exchanges were not measured"
        copied = pattern.copies * pattern.num_bytes * gang.copy_byte_seconds
        computed = copied + gang.codec_seconds.get(pattern.codec or "", 0.0)
        if pattern.kind == "messages":
            link = gang.network.messages
            return computed + link.seconds(pattern.exchanged_bytes, pattern.latency_rounds)
        nodes = [rank % layout.num_nodes for rank in range(layout.world_size)]
        topology = choose(pattern.topology, nodes, gang.device)
        if topology != "tree" and gang.network.shared is None:
            topology = "ring"
        ratio = 1.0 if pattern.wire_ratio is None else pattern.wire_ratio
        num_bytes = pattern.num_bytes * ratio / pattern.num_messages
        summed = pattern.num_messages * gang.network.sum_seconds(num_bytes, layout, topology)
        if topology == "ring":
            room = _BACKWARD_SHARE * self.compute.median_seconds(self.rows)
            summed -= min(pattern.hidden_share * summed, room)
        elif topology != "tree" and not pattern.in_place:  # there and back
            computed += 2 * pattern.num_bytes * ratio * gang.copy_byte_seconds
        return computed + summed


@dataclass(frozen=True, kw_only=True)
class Predictor:
    """Predicts a fit with other strategies and other numbers of workers."""

    calibration: Calibration
    plan: TrainPlan
    """Plan of the fit that was asked for."""
    config: TrainConfig
    size: ModelSize
    num_nodes: int
    slots: int | None
    """Slots of all machines; None: not known."""
    largest_rows: Callable[[int], int]
    """Training rows of the fullest of so many workers."""
    check: Callable[[SyncStrategy, int], None]
    """Raises ConfigError where fit refuses a strategy with so many workers."""
    num_shards: int | None = None
    """Fixed parts of the rows; None: one for each worker."""

    def shards_per_worker(self, world_size: int) -> int:
        """Shards that each of so many workers has, at most."""
        return 1 if self.num_shards is None else -(-self.num_shards // world_size)

    def batch_size(self, world_size: int) -> int:
        """Rows that each of so many workers uses in a step, by the plan, at most."""
        return self.plan.batch_size * self.shards_per_worker(world_size)

    def pattern(self, strategy: SyncStrategy, world_size: int, *, in_rounds: bool) -> Pattern:
        """Return the pattern in which ``world_size`` workers exchange."""
        if in_rounds:
            return strategy.stages_pattern(self.size)
        if self.config.elasticity == "bits":
            shards = self.num_shards or world_size
            return tree_pattern(self.size, assign_shards(shards, world_size))
        pattern = strategy.pattern(self.size, world_size)
        if self.config.compile and pattern.hidden_share < 1:  # 1: hidden behind the next step
            return replace(pattern, hidden_share=0.0)
        return pattern

    def layout(self, world_size: int, *, in_rounds: bool) -> Layout:
        """As Spark spreads workers; where slots are few, a gang has more machines like these."""
        nodes = self.num_nodes
        if self.slots is not None and not in_rounds:
            nodes = max(nodes, math.ceil(world_size / max(1, self.slots // nodes)))
        return Layout(
            world_size=world_size,
            num_nodes=min(nodes, world_size),
            num_slots=self.slots if in_rounds else None,
        )

    def why_not(self, strategy: SyncStrategy, world_size: int, *, in_rounds: bool) -> str | None:
        """Why a fit with so many workers is not possible, slots apart; None if it is."""
        try:
            self.check(strategy, world_size)
        except ConfigError as error:
            return str(error)
        if in_rounds:
            is_measured = self.calibration.stages is not None
            return strategy.why_not_rounds() if is_measured else "no rounds were measured"
        gang = self.calibration.gang
        if gang is None:
            return "no gang was measured, see the notes"
        if gang.network is None and world_size > 1:
            return "exchanges were measured on one worker only, which has none"
        return strategy.why_not_gang()

    def steps(self, pattern: Pattern, world_size: int, batch_size: int) -> Steps:
        """Steps with batches of up to so many rows."""
        largest = self.largest_rows(world_size)
        return Steps(
            calibration=self.calibration,
            pattern=pattern,
            layout=self.layout(world_size, in_rounds=pattern.kind == "stages"),
            rows=largest / steps_per_epoch([largest], batch_size),
            passes=self.shards_per_worker(world_size) if self.config.elasticity == "bits" else 1,
        )

    def predict(
        self,
        strategy: SyncStrategy,
        world_size: int,
        *,
        in_rounds: bool,
        batch_size: int | None = None,
    ) -> Prediction:
        """One fit with a strategy that can be used; without ``batch_size`` with the plan's."""
        plan, found = self.plan, self.calibration
        pattern = self.pattern(strategy, world_size, in_rounds=in_rounds)
        batch_size = batch_size or self.batch_size(world_size)
        num_steps = steps_per_epoch([self.largest_rows(world_size)], batch_size)
        steps = self.steps(pattern, world_size, batch_size).settled(most=num_steps)
        layout, period = steps.layout, steps.pattern.period
        (own, waiting), exchange = steps.own_seconds(), steps.exchange_seconds()
        step_seconds = own + waiting + exchange / period
        # Epochs close the round that is under way: a short one costs as much agreement.
        rounds = math.ceil(num_steps / period) if period >= 1 else num_steps / period
        epoch_seconds = num_steps * (own + waiting) + rounds * exchange
        validated = layout.num_waves * plan.num_validation_rows / world_size
        evaluation_seconds = _EVALUATED_SHARE * validated * steps.compute.row_seconds
        saved_seconds, interval = 0.0, self.config.checkpoint.interval
        if interval > 0 and found.gang is not None:
            copied_seconds = self.size.checkpoint_bytes * found.gang.copy_byte_seconds
            saved_seconds = copied_seconds * num_steps / interval
        epochs = float(plan.epochs)
        if plan.max_steps >= 0:
            epochs = min(epochs, plan.max_steps / num_steps)
        all_rows = plan.num_rows + plan.num_validation_rows
        spool_seconds = found.spool_seconds + found.spool_row_seconds * all_rows / layout.at_once
        run_seconds = epochs * (epoch_seconds + evaluation_seconds + saved_seconds)
        start_seconds = found.start_seconds(in_rounds=in_rounds, world_size=world_size)
        return Prediction(
            workers=world_size,
            nodes=layout.num_nodes,
            period=period,
            steps_per_epoch=num_steps,
            step_seconds=step_seconds,
            exchange_share=exchange / period / step_seconds,
            waiting_share=waiting / step_seconds,
            epoch_seconds=epoch_seconds,
            total_seconds=start_seconds + spool_seconds + run_seconds,
            sent_bytes_per_step=steps.pattern.sent_bytes_per_step(world_size),
        )
