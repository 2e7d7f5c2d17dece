"""Predicted times of steps, epochs and whole fits, for any number of workers and any strategy.

Pure: numbers in, numbers out. `cost_model` has the formulae of single parts; what a strategy
exchanges is its own `Pattern`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from sparkdl.comm.topology import choose
from sparkdl.data.plan import steps_per_epoch
from sparkdl.explain.cost_model import Calibration, Compute, Layout, Network
from sparkdl.sync.averaging.period import steps_for_share
from sparkdl.sync.exchange_pattern import Pattern

_BACKWARD_SHARE = 0.6
"""Part of a step in which gradients come; of forward, backward and update backward is the most."""
_EVALUATED_SHARE = 0.4
"""Seconds per row of an evaluation over those of training: a forward pass of the two."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What there is to do, whoever does it."""

    num_rows: int
    num_validation_rows: int
    batch_size: int
    epochs: int
    max_steps: int
    largest_rows: Callable[[int], int]
    """Training rows of the fullest of so many workers."""
    checkpoint_interval: int
    checkpoint_bytes: int

    def steps_per_epoch(self, world_size: int, batch_size: int) -> int:
        """See `plan.steps_per_epoch`."""
        return steps_per_epoch([self.largest_rows(world_size)], batch_size)

    def rows_per_step(self, world_size: int, batch_size: int) -> float:
        """Samples of the fullest worker in a step, for which the others wait."""
        num_steps = self.steps_per_epoch(world_size, batch_size)
        return self.largest_rows(world_size) / num_steps


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of one step, on the average over a round."""

    compute_seconds: float
    """A typical worker's own part."""
    waiting_seconds: float
    """For slower workers."""
    exchange_seconds: float
    """Agreeing: what travels, and what is computed for it."""

    @property
    def seconds(self) -> float:
        """All together."""
        return self.compute_seconds + self.waiting_seconds + self.exchange_seconds

    @property
    def exchange_share(self) -> float:
        """Part of the time that agreeing takes."""
        return self.exchange_seconds / self.seconds if self.seconds > 0 else 0.0


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """A fit as it would go with one strategy and one number of workers."""

    world_size: int
    layout: Layout
    batch_size: int
    period: float
    """Steps of a round."""
    steps_per_epoch: int
    step: StepTime
    epoch_seconds: float
    """Without validation."""
    spool_seconds: float
    total_seconds: float
    sent_bytes: float | None
    """Per rank and step; None: it depends on the data."""


@dataclass(frozen=True, kw_only=True)
class Steps:
    """Steps of a worker on ``rows`` samples, with one strategy on one layout of workers."""

    calibration: Calibration
    pattern: Pattern
    layout: Layout
    rows: float
    num_slots: int | None = None
    """Workers that run at a time; fewer than workers only on plain stages. None: all."""

    @property
    def compute(self) -> Compute:
        """What a worker's own part of a step takes."""
        return self.calibration.compute(self.layout, self.pattern.kind, self.num_slots)

    @property
    def num_waves(self) -> int:
        """How often tasks follow each other in a slot, where there are fewer than workers."""
        return math.ceil(self.layout.world_size / self.num_slots) if self.num_slots else 1

    def settled(self) -> Steps:
        """The same with a fixed period in place of one that holds a share of the time."""
        share = self.pattern.target_share
        if share is None:
            return self
        alone = replace(self, pattern=replace(self.pattern, period=math.inf))
        period = steps_for_share(self.exchange_seconds(), alone.time().seconds, share)
        pattern = replace(self.pattern, period=max(1, round(period)), target_share=None)
        return replace(self, pattern=pattern)

    def time(self) -> StepTime:
        """One step, on the average over a round."""
        pattern, compute = self.pattern, self.compute
        mean = compute.mean_seconds(self.rows)
        slowest = self._slowest_seconds(compute, mean)
        return StepTime(
            compute_seconds=self.num_waves * min(mean, slowest),
            waiting_seconds=max(0.0, slowest - mean),
            exchange_seconds=self.exchange_seconds() / pattern.period,
        )

    def _slowest_seconds(self, compute: Compute, mean: float) -> float:
        """A step of those that a worker waits for."""
        pattern, world_size = self.pattern, self.layout.world_size
        if world_size == 1 or math.isinf(pattern.lead):
            return mean
        if pattern.in_pairs:  # who meets nobody does not wait
            slower = compute.slowest_seconds(self.rows, waited_for=2, world_size=2)
            return mean + (slower - mean) / max(1.0, pattern.period)
        return compute.slowest_seconds(
            self.rows,
            waited_for=world_size - pattern.num_backup_workers,
            world_size=world_size,
            steps=round(min(pattern.waits_every, 1e9)),
        )

    def exchange_seconds(self) -> float:
        """One exchange, as far as it is not hidden behind the backward pass."""
        pattern, layout = self.pattern, self.layout
        if pattern.kind == "stages":
            assert self.calibration.stages, "rounds on Spark's stages were not measured"
            return self.calibration.round_seconds(pattern.num_bytes, layout, self.num_slots)
        if layout.world_size == 1 or (pattern.between_nodes and layout.num_nodes == 1):
            return 0.0
        network = self.calibration.network
        assert network is not None, "exchanges were not measured"
        computed = pattern.copies * pattern.num_bytes * self.calibration.copy_byte_seconds
        if pattern.codec is not None:
            computed += self.calibration.codec_seconds.get(pattern.codec, 0.0)
        if pattern.kind == "messages":
            link = network.messages
            latency = pattern.latency_rounds * link.latency_seconds
            return computed + latency + pattern.exchanged_bytes * link.byte_seconds
        return computed + self._sum_seconds(network)

    def _sum_seconds(self, network: Network) -> float:
        """A sum over all ranks, cut into messages, less what the backward pass hides of it."""
        pattern, layout = self.pattern, self.layout
        if pattern.between_nodes:
            layout = Layout(world_size=layout.num_nodes, num_nodes=layout.num_nodes)
        topology = topology_of(pattern.topology, layout, self.calibration.device, network)
        ratio = 1.0 if pattern.wire_ratio is None else pattern.wire_ratio
        num_bytes = pattern.num_bytes * ratio / pattern.num_messages
        one = network.sum_seconds(num_bytes, layout, topology, in_place=pattern.in_place)
        whole = pattern.num_messages * one
        if topology != "ring":  # the others sum while they are waited for
            return whole
        room = _BACKWARD_SHARE * self.compute.median_seconds(self.rows)
        return max(0.0, whole - min(pattern.hidden_share * whole, room))


def predict(
    calibration: Calibration,
    workload: Workload,
    pattern: Pattern,
    layout: Layout,
    *,
    num_slots: int | None = None,
    batch_size: int | None = None,
) -> Prediction:
    """What a fit takes.

    Args:
        calibration: the measured numbers.
        workload: what there is to do.
        pattern: of the strategy among ``layout.world_size`` workers.
        layout: where the workers are.
        num_slots: see `Steps.num_slots`.
        batch_size: rows of a worker's batch; None: the workload's.
    """
    world_size, fixed = layout.world_size, calibration.fixed
    batch_size = batch_size or workload.batch_size
    num_steps = workload.steps_per_epoch(world_size, batch_size)
    steps = Steps(
        calibration=calibration,
        pattern=pattern,
        layout=layout,
        rows=workload.rows_per_step(world_size, batch_size),
        num_slots=num_slots,
    ).settled()
    period = min(steps.pattern.period, num_steps)
    steps = replace(steps, pattern=replace(steps.pattern, period=period))
    step = steps.time()
    # Epochs close the round that is under way: a short one costs as much agreement.
    rounds = math.ceil(num_steps / period) if period >= 1 else num_steps / period
    own_seconds = num_steps * (step.compute_seconds + step.waiting_seconds)
    epoch_seconds = own_seconds + rounds * (step.exchange_seconds * period)

    all_rows = workload.num_rows + workload.num_validation_rows
    slots = min(world_size, num_slots or world_size)
    spool_seconds = fixed.spool_seconds + fixed.spool_row_seconds * all_rows / slots
    is_gang = pattern.kind != "stages"
    start_seconds = fixed.start_seconds if is_gang else fixed.stage_start_seconds
    validated = workload.num_validation_rows / world_size * steps.compute.row_seconds
    evaluation_seconds = _EVALUATED_SHARE * steps.num_waves * validated
    saved_seconds = 0.0
    if workload.checkpoint_interval > 0:
        each = workload.checkpoint_bytes * calibration.copy_byte_seconds
        saved_seconds = each * num_steps / workload.checkpoint_interval
    epochs = float(workload.epochs)
    if workload.max_steps >= 0:
        epochs = min(epochs, workload.max_steps / num_steps)
    run_seconds = epochs * (epoch_seconds + evaluation_seconds + saved_seconds)
    return Prediction(
        world_size=world_size,
        layout=layout,
        batch_size=batch_size,
        period=period,
        steps_per_epoch=num_steps,
        step=step,
        epoch_seconds=epoch_seconds,
        spool_seconds=spool_seconds,
        total_seconds=spool_seconds + start_seconds + run_seconds,
        sent_bytes=steps.pattern.sent_bytes_per_step(world_size),
    )


def topology_of(topology: str, layout: Layout, device: str, network: Network) -> str:
    """What workers make of the option; see `topology.choose`."""
    nodes = [rank % layout.num_nodes for rank in range(layout.world_size)]
    chosen = choose(topology, nodes, device)
    has_shared = network.shared is not None
    return chosen if has_shared or chosen in ("ring", "tree") else "ring"
