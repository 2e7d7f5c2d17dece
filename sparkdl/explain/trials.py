"""What one worker tries out before a fit: sizes of batches, and learning rates.

Runs like `measure_worker` on a sample of the rows, with the user's module, loss and optimizer. The
initial weights are not changed by it.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import json
import math
from collections.abc import Generator, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from sparkdl.comm.worker_environment import WorkerEnvironment
from sparkdl.explain import measure_worker
from sparkdl.explain.choose import (
    LOWEST_RATE,
    NUM_RATES,
    BatchSizes,
    BatchTrial,
    TriedBatch,
    choose_rate,
    rate_at,
)
from sparkdl.explain.measure_worker import SampleOrder, StepTimer, step_timer
from sparkdl.runtime.process import free_memory_bytes
from sparkdl.worker.lifecycle import Member, Results, live

if TYPE_CHECKING:
    import torch

_FREE_SHARE = 0.5
"""Part of the free memory that trials may take."""
_DIVERGED = 4.0
"""How many times the lowest loss a loss ends the trial of rates."""
_SMOOTH = 0.9
_UNKNOWN_BYTES = 2 << 30
"""Taken to be free where that is not known, as on macOS."""
_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")
"""Where Linux tells a process's memory, and forgets its peak when 5 is written; see proc(5)."""


@dataclass(frozen=True, kw_only=True)
class TrialOrder(SampleOrder):
    """What the driver asks of the one worker."""

    sizes: BatchSizes | None
    """Sizes of batches to try; None: none, the plan's holds."""
    workers_per_machine: int
    """Among whom the memory will be divided."""
    tries_rates: bool


def run(environment: WorkerEnvironment, order: TrialOrder) -> Iterator[tuple[str, bytes]]:
    """Try on one rank.

    Yields:
        ``("error", JSON)`` alone, or ``("result", JSON)``: a list of `Choice`.
    """
    yield from live(environment, order, partial(_try, order))


def _try(order: TrialOrder, member: Member) -> Results:
    steps, batch_size = step_timer(order, member), order.plan.batch_size
    choices = []
    if order.sizes is not None:
        choices.append(try_batches(steps, order.sizes, order.workers_per_machine).choice())
        batch_size = choices[0].value
    if order.tries_rates:
        choices.append(choose_rate(try_rates(steps, batch_size)))
    return [("result", json.dumps([asdict(choice) for choice in choices]).encode())]


def try_batches(steps: StepTimer, sizes: BatchSizes, workers_per_machine: int) -> BatchTrial:
    """Train on ever larger batches, until memory, rows or speed give no reason to go on.

    The next size is not begun if it would take more than half of the worker's part of the memory
    that is free.

    Args:
        steps: takes the steps.
        sizes: those to try.
        workers_per_machine: among whom the free memory is divided.
    """
    import torch

    limit = int(_FREE_SHARE * free_bytes(steps.device) / workers_per_machine)
    trial = BatchTrial(sizes=sizes, limit_bytes=limit)
    before = used_bytes(steps.device)
    while (rows := trial.next_rows) is not None:
        forget_peak(steps.device)
        try:
            measured = steps.measure(rows, steps.warm_up(rows))
        except torch.OutOfMemoryError as error:  # of a GPU, which goes on after it
            if not trial.tried:
                raise
            return replace(trial, refused=str(error).split(". ")[0])
        taken = max(0, peak_bytes(steps.device) - before)
        # The quickest step: sizes are compared, and other programs only ever slow a step down.
        speed = measured["rows"] / min(measured["seconds"])
        trial = trial.with_size(TriedBatch(rows=rows, rows_per_second=speed, num_bytes=taken))
    return trial


def try_rates(steps: StepTimer, batch_size: int) -> list[float]:
    """Train a copy while the rate grows from step to step, by the range test of Smith (2015).

    The rate grows exponentially, and the test ends early once the loss has run away, as fastai and
    Lightning do it. The schedule is left out, and groups of parameters with a rate of their own
    keep it. Equal arguments give equal losses.

    Source: L. N. Smith, "Cyclical Learning Rates for Training Neural Networks", section 3.3
    (arXiv:1506.01186).

    Args:
        steps: has the module, the configuration and the rows.
        batch_size: rows of a batch.

    Returns:
        The finite loss of each step, before its update.
    """
    losses: list[float] = []
    smooth, lowest = 0.0, math.inf
    with contextlib.closing(_losses(steps, batch_size)) as found:
        for number, loss in enumerate(found):
            losses.append(loss)
            smooth = _SMOOTH * smooth + (1 - _SMOOTH) * loss
            mean = smooth / (1 - _SMOOTH ** (number + 1))
            lowest = min(lowest, mean)
            if mean > lowest + (_DIVERGED - 1) * abs(lowest):
                break
    return losses


def _losses(steps: StepTimer, batch_size: int) -> Generator[float, None, None]:
    """The loss of each step, each with a rate of its own, as long as they are finite."""
    from sparkdl.comm.communicator import LocalCommunicator
    from sparkdl.errors import TrainingDiverged
    from sparkdl.sync.frozen_layers import training_mode
    from sparkdl.sync.gradients.allreduce import AllReduce
    from sparkdl.train.modules.memory_format import in_memory_format
    from sparkdl.train.random_state import deterministic_algorithms, seed_everything
    from sparkdl.train.replica import make_replica
    from sparkdl.train.step import TrainStep
    from sparkdl.train.time_spent import Clock

    module, comm = copy.deepcopy(steps.module), LocalCommunicator()
    plan, shards = steps.sampled(batch_size, NUM_RATES)
    config = steps.with_batches(plan.batch_size)
    config = replace(config, learning_rate=LOWEST_RATE, scheduler=None)
    with contextlib.ExitStack() as stack:
        stack.enter_context(deterministic_algorithms(config.deterministic))
        stack.enter_context(in_memory_format(module, config.memory_format))
        replica = make_replica(
            module, config, plan, steps.device,
            lambda model, make: AllReduce().setup(model, make, comm),
        )  # fmt: skip
        stack.enter_context(contextlib.closing(replica.synchronizer))
        training_mode(module, config.frozen_layers)
        seed_everything(config.seed, 0)
        groups = replica.synchronizer.optimizer.param_groups
        groups = [group for group in groups if group["lr"] == LOWEST_RATE]
        step = TrainStep(replica, clock=Clock(comm))
        batches = (
            batch
            for epoch in itertools.count()
            for batch in replica.batches(shards, 0, epoch=epoch, first_step=0)
        )
        for number, batch in zip(range(NUM_RATES), batches, strict=False):
            for group in groups:
                group["lr"] = rate_at(number)
            try:
                sums = step(replica.on_device(batch), batch.num_rows, number)
            except TrainingDiverged:
                return
            loss, weight = sums.shared.tolist()
            if weight == 0 or not math.isfinite(loss):
                return
            yield loss / weight


def free_bytes(device: torch.device) -> int:
    """Memory that a process can still take, of the GPU or of the machine or container."""
    if device.type == "cuda":
        import torch

        return int(torch.cuda.mem_get_info(device)[0])
    free = free_memory_bytes()
    return _UNKNOWN_BYTES if free is None else free


def used_bytes(device: torch.device) -> int:
    """What this process holds now, of the GPU or of memory."""
    if device.type == "cuda":
        import torch

        return int(torch.cuda.memory_allocated(device))
    return _status_bytes("VmRSS") or measure_worker.peak_bytes(device)


def peak_bytes(device: torch.device) -> int:
    """The most that this process held since `forget_peak`; where that is not known, ever."""
    in_memory = None if device.type == "cuda" else _status_bytes("VmHWM")
    return in_memory or measure_worker.peak_bytes(device)


def forget_peak(device: torch.device) -> None:
    """Have `peak_bytes` tell of what comes from now on, where the system can."""
    if device.type == "cuda":
        import torch

        torch.cuda.reset_peak_memory_stats(device)
        return
    with contextlib.suppress(OSError):
        _RESET.write_text("5", encoding="utf-8")


def _status_bytes(name: str) -> int | None:
    """A size that Linux tells of this process; None: it is another system."""
    with contextlib.suppress(OSError):
        for line in _STATUS.read_text(encoding="utf-8").splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) << 10
    return None
