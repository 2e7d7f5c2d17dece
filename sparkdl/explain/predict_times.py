"""How long will steps, epochs and the whole fit take, for any number of workers and any strategy?

Pure: numbers in, numbers out. `cost` has the formulae of single parts, `pattern` what a strategy
does.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from sparkdl.comm.topology import choose
from sparkdl.data.plan import steps_per_epoch
from sparkdl.explain.cost_model import (
    Calibration,
    Fixed,
    Layout,
    Network,
    period_for_share,
    ring_seconds,
    server_seconds,
)
from sparkdl.explain.traffic import Pattern

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
        num_slots: workers that run at a time; fewer than workers only on plain stages. None: all.
        batch_size: rows of a worker's batch; None: the workload's.
    """
    world_size = layout.world_size
    batch_size = batch_size or workload.batch_size
    num_steps = workload.steps_per_epoch(world_size, batch_size)
    rows = workload.rows_per_step(world_size, batch_size)
    pattern = with_period(calibration, pattern, layout, rows, num_slots=num_slots)
    assert pattern.period is not None
    period = min(pattern.period, num_steps)
    pattern = replace(pattern, period=period)
    step = step_time(calibration, pattern, layout, rows, num_slots=num_slots)
    # Epochs close the round that is under way: a short one costs as much agreement.
    rounds = math.ceil(num_steps / period) if period >= 1 else num_steps / period
    exchanges = step.exchange_seconds * period
    steps = num_steps * (step.compute_seconds + step.waiting_seconds)
    epoch_seconds = steps + rounds * exchanges
    spool = spool_seconds(calibration.fixed, workload, min(world_size, num_slots or world_size))
    return Prediction(
        world_size=world_size,
        layout=layout,
        batch_size=batch_size,
        period=period,
        steps_per_epoch=num_steps,
        step=step,
        epoch_seconds=epoch_seconds,
        spool_seconds=spool,
        total_seconds=spool
        + start_seconds(calibration.fixed, pattern)
        + run_seconds(
            calibration,
            workload,
            num_steps,
            epoch_seconds
            + evaluation_seconds(calibration, workload, pattern, layout, num_slots=num_slots),
        ),
        sent_bytes=sent_bytes(pattern, world_size),
    )


def spool_seconds(fixed: Fixed, workload: Workload, num_slots: int) -> float:
    """Writing all rows to the workers' disks."""
    rows = workload.num_rows + workload.num_validation_rows
    return fixed.spool_seconds + fixed.spool_row_seconds * rows / num_slots


def start_seconds(fixed: Fixed, pattern: Pattern) -> float:
    """Checks, the start of the workers, and the end."""
    return fixed.stage_start_seconds if pattern.kind == "stages" else fixed.start_seconds


def run_seconds(
    calibration: Calibration, workload: Workload, num_steps: int, epoch_seconds: float
) -> float:
    """All epochs, with checkpoints; ``epoch_seconds`` are those of steps and evaluation."""
    epochs = float(workload.epochs)
    if workload.max_steps >= 0:
        epochs = min(epochs, workload.max_steps / num_steps)
    saved = 0.0
    if workload.checkpoint_interval > 0:
        each = workload.checkpoint_bytes * calibration.copy_byte_seconds
        saved = each * num_steps / workload.checkpoint_interval
    return epochs * (epoch_seconds + saved)


def evaluation_seconds(
    calibration: Calibration,
    workload: Workload,
    pattern: Pattern,
    layout: Layout,
    *,
    num_slots: int | None = None,
) -> float:
    """One pass over the validation rows, of which each worker has its part."""
    compute = calibration.compute(layout, pattern.kind, num_slots)
    each = workload.num_validation_rows / layout.world_size * compute.row_seconds
    return _EVALUATED_SHARE * num_waves(layout, num_slots) * each


def num_waves(layout: Layout, num_slots: int | None) -> int:
    """How often tasks follow each other in a slot, where there are fewer slots than workers."""
    return math.ceil(layout.world_size / num_slots) if num_slots else 1


def with_period(
    calibration: Calibration,
    pattern: Pattern,
    layout: Layout,
    rows: float,
    *,
    num_slots: int | None = None,
) -> Pattern:
    """The pattern with a number of steps in place of "as many as hold a share of the time"."""
    if pattern.period is not None:
        return pattern
    merge = exchange_seconds(calibration, pattern, layout, rows, num_slots=num_slots)
    alone = step_time(
        calibration, replace(pattern, period=math.inf), layout, rows, num_slots=num_slots
    )
    return replace(pattern, period=period_for_share(merge, alone.seconds, pattern.target_share))


def step_time(
    calibration: Calibration,
    pattern: Pattern,
    layout: Layout,
    rows: float,
    *,
    num_slots: int | None = None,
) -> StepTime:
    """One step of a worker on ``rows`` samples, on the average over a round."""
    world_size = layout.world_size
    compute = calibration.compute(layout, pattern.kind, num_slots)
    mean = compute.mean_seconds(rows)
    slowest = mean
    if world_size > 1 and not math.isinf(pattern.lead):
        slowest = compute.slowest_seconds(
            rows,
            waited_for=_waited_for(pattern, world_size),
            world_size=2 if pattern.kind == "pairs" else world_size,
            steps=_steps_together(pattern),
        )
    if pattern.kind == "pairs":  # who meets nobody does not wait
        slowest = mean + (slowest - mean) / max(1.0, pattern.period or 1)
    assert pattern.period is not None
    exchange = 0.0
    if world_size > 1 or pattern.kind == "stages":
        whole = exchange_seconds(calibration, pattern, layout, rows, num_slots=num_slots)
        exchange = whole / pattern.period
    return StepTime(
        compute_seconds=num_waves(layout, num_slots) * min(mean, slowest),
        waiting_seconds=max(0.0, slowest - mean),
        exchange_seconds=exchange,
    )


def _waited_for(pattern: Pattern, world_size: int) -> int:
    return 2 if pattern.kind == "pairs" else world_size - pattern.num_backup_workers


def _steps_together(pattern: Pattern) -> int:
    return 1 if pattern.kind == "pairs" else round(min(pattern.waits_every, 1e9))


def exchange_seconds(
    calibration: Calibration,
    pattern: Pattern,
    layout: Layout,
    rows: float,
    *,
    num_slots: int | None = None,
) -> float:
    """One exchange, as far as it is not hidden behind the backward pass."""
    world_size = layout.world_size
    if pattern.kind == "stages":
        assert calibration.stages, "rounds on Spark's stages were not measured"
        return calibration.round_seconds(pattern.num_bytes, layout, num_slots)
    if world_size == 1:
        return 0.0
    network = calibration.network
    assert network is not None, "exchanges were not measured"
    computed = pattern.copies * pattern.num_bytes * calibration.copy_byte_seconds
    if pattern.codec is not None:
        computed += calibration.codec_seconds.get(pattern.codec, 0.0)
    if pattern.kind == "server":
        link = network.messages
        moved = server_seconds(link, pattern.num_bytes, world_size, pattern.pull_period)
        return computed + moved
    if pattern.kind == "pairs":
        return computed + network.messages.seconds(pattern.num_bytes)
    if pattern.kind == "nodes":
        if layout.num_nodes == 1:
            return 0.0
        return computed + ring_seconds(network.messages, pattern.num_bytes, layout.num_nodes)
    return computed + _sum_seconds(calibration, network, pattern, layout, rows)


def _sum_seconds(
    calibration: Calibration, network: Network, pattern: Pattern, layout: Layout, rows: float
) -> float:
    """A sum over all ranks, cut into messages, less what the backward pass hides of it."""
    topology = topology_of(pattern.topology, layout, calibration.device, network)
    ratio = 1.0 if pattern.wire_ratio is None else pattern.wire_ratio
    in_place = pattern.in_place
    num_bytes = pattern.num_bytes * ratio / pattern.num_messages
    one = network.sum_seconds(num_bytes, layout, topology, in_place=in_place)
    whole = pattern.num_messages * one
    if topology != "ring":  # the others sum while they are waited for
        return whole
    compute = calibration.compute(layout, pattern.kind)
    room = _BACKWARD_SHARE * compute.median_seconds(rows)
    return max(0.0, whole - min(pattern.hidden_share * whole, room))


def topology_of(topology: str, layout: Layout, device: str, network: Network) -> str:
    """What workers make of the option; see `topology.choose`."""
    nodes = [rank % layout.num_nodes for rank in range(layout.world_size)]
    chosen = choose(topology, nodes, device)
    has_shared = network.shared is not None
    return chosen if has_shared or chosen in ("ring", "tree") else "ring"


def sent_bytes(pattern: Pattern, world_size: int) -> float | None:
    """What a rank sends per step; of stages a task's states, back and forth."""
    if pattern.wire_ratio is None or pattern.period is None:
        return None
    share = (world_size - 1) / world_size
    each = {
        "sum": 2 * share * pattern.num_bytes * pattern.wire_ratio,
        "server": (1 + 1 / pattern.pull_period) * share * pattern.num_bytes,
        "pairs": (2 * (world_size // 2) / world_size) * pattern.num_bytes,
        "stages": 2 * pattern.num_bytes,
        "nodes": 2 * share * pattern.num_bytes,
    }[pattern.kind]
    return each / pattern.period
