"""Trials of one worker before a fit: size of a batch, learning rate; see docs/explain.md."""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
import math
import statistics
from collections.abc import Generator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from sparkdl.explain import measure_worker
from sparkdl.explain.comparison import Choice
from sparkdl.explain.measure_worker import StepTimer
from sparkdl.report.page.formats import size
from sparkdl.runtime.process import free_memory_bytes, give_back_memory

if TYPE_CHECKING:
    import torch

    from sparkdl.worker.lifecycle import Member

_FASTER = 1.1
"""Factor by which twice the batch must make a worker faster."""
_STEPS = 32
"""That an epoch shall keep at least: from few steps nothing is learnt."""
_LEAST_BATCH, _MOST_BATCH = 32, 4096
"""The smallest size that is chosen for speed, and the largest."""
_FIRST_BATCH = 8
"""The first size that is tried, so that memory is taken in small steps."""
_FREE_SHARE = 0.5
"""Part of the free memory that trials may take."""
_UNKNOWN_BYTES = 2 << 30
"""Taken to be free where that is not known, as on macOS."""
_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")
"""Linux files of a process's memory, and to forget its peak by writing 5; see proc(5)."""

NUM_RATES = 100
LOWEST_RATE, HIGHEST_RATE = 1e-7, 10.0
"""Learning rates that are tried, as by fastai's ``lr_find``."""
_DIVERGED = 4.0
"""Multiple of the lowest loss at which a loss ends the trial of rates."""
_SMOOTH = 0.9
_AROUND = 5
"""Losses on each side of one over which the mean is taken."""
_ERRORS = 4
"""Standard errors by which the lowest mean must be below the first: lower ones come by chance."""
_BELOW = 10
"""Factor by which the chosen rate is below that of the lowest loss."""


def try_out(
    steps: StepTimer,
    member: Member,
    *,
    sizes: BatchSizes | None,
    workers_per_machine: int,
    tries_rates: bool,
) -> dict[str, Any]:
    """Try sizes of batches, then learning rates; returns the fields of the `Choice`s."""
    batch_size, choices = steps.plan.batch_size, []
    if sizes is not None:
        choices.append(try_batches(steps, sizes, workers_per_machine).choice())
        batch_size = choices[0].value
    if tries_rates:
        choices.append(choose_rate(try_rates(steps, batch_size)))
    return {"choices": [asdict(choice) for choice in choices]}


# --- the size of a batch -------------------------------------------------------------------------


class BatchSizes(NamedTuple):
    """The sizes that are tried: powers of two from ``first`` to ``most``."""

    first: int
    least: int
    """The smallest one that is chosen if it fits into memory."""
    most: int


def batch_sizes(rows_per_worker: int, num_parts: int) -> BatchSizes:
    """Sizes of which an epoch keeps some steps, up to one from which on nothing is gained."""
    whole = _power_of_two(max(1, rows_per_worker))
    most = min(whole, _MOST_BATCH, max(_LEAST_BATCH, _power_of_two(rows_per_worker // _STEPS)))
    parts = 1 << (num_parts - 1).bit_length()
    most = max(most, parts)
    least = max(min(_LEAST_BATCH, most), parts)
    return BatchSizes(first=max(min(_FIRST_BATCH, most), parts), least=least, most=most)


def _power_of_two(number: int) -> int:
    """The largest one that is not more than ``number``; 1 at least."""
    return 1 << max(0, number.bit_length() - 1)


class TriedBatch(NamedTuple):
    """The measurements of a worker with one size of batches."""

    rows: int
    rows_per_second: float
    num_bytes: int
    """That the steps took, beyond what the process held before."""


@dataclass(kw_only=True)
class BatchTrial:
    """Sizes of batches that were tried, each twice the one before it."""

    sizes: BatchSizes
    limit_bytes: int
    """That a step may take: half of a worker's part of what is free."""
    tried: list[TriedBatch] = field(default_factory=list)
    refused: str = ""
    """Error of the device at the size after them; empty: none."""

    @property
    def next_rows(self) -> int | None:
        """The size to try next; None if there is no reason to."""
        if not self.tried:
            return self.sizes.first
        rows = 2 * self.tried[-1].rows
        return None if self._why_no_more(rows) else rows

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

    def _expected_bytes(self, rows: int) -> float:
        """Estimate what so many rows take, by the steepest line through the last size and another.

        Memory that is freed and not given back yet adds some tens of MiB to any size, so two sizes
        alone may seem to take the same.
        """
        *before, last = self.tried
        if not before:
            return 2 * last.num_bytes
        row_bytes = max((last.num_bytes - one.num_bytes) / (last.rows - one.rows) for one in before)
        return last.num_bytes + max(0.0, row_bytes) * (rows - last.rows)

    def _why_no_more(self, rows: int) -> str:
        """Why so many rows, twice the last, are not tried; empty if they are."""
        if self.refused:
            return f"{rows} did not fit: {self.refused}"
        expected = self._expected_bytes(rows)
        if expected > self.limit_bytes:
            return f"{rows} would take about {size(expected)}"
        if self._is_no_faster:
            return f"{rows // 2} is faster by less than {_FASTER - 1:.0%}"
        if rows > self.sizes.most:
            return f"with {rows} an epoch would have fewer than {_STEPS} steps" if (
                rows <= _MOST_BATCH
            ) else "more is not tried"  # fmt: skip
        return ""


def try_batches(steps: StepTimer, sizes: BatchSizes, workers_per_machine: int) -> BatchTrial:
    """Train on ever larger batches, until memory, rows or speed give no reason to go on."""
    import torch

    limit = int(_FREE_SHARE * free_bytes(steps.device) / workers_per_machine)
    trial = BatchTrial(sizes=sizes, limit_bytes=limit)
    steps.warm_up(sizes.first)  # what torch loads once is no batch's
    gc.collect()  # garbage that goes later would hide what batches take
    forget_peak(steps.device)
    before = used_bytes(steps.device)
    while (rows := trial.next_rows) is not None:
        forget_peak(steps.device)
        try:
            measured = steps.measure(rows, steps.warm_up(rows))
        except torch.OutOfMemoryError as error:  # of a GPU, which goes on after it
            if not trial.tried:
                raise
            trial.refused = str(error).split(". ")[0]
            return trial
        taken = max(0, peak_bytes(steps.device) - before)
        # The quickest step: sizes are compared, and other programs only ever slow a step down.
        speed = measured["rows"] / min(measured["seconds"])
        trial.tried.append(TriedBatch(rows=rows, rows_per_second=speed, num_bytes=taken))
    return trial


def free_bytes(device: torch.device) -> int:
    """Memory that a process can still take, of the GPU or of the machine or container."""
    if device.type == "cuda":
        import torch

        return int(torch.cuda.mem_get_info(device)[0])
    free = free_memory_bytes()
    return _UNKNOWN_BYTES if free is None else free


def used_bytes(device: torch.device) -> int:
    """Return the bytes that this process holds now, of the GPU or of memory."""
    if device.type == "cuda":
        import torch

        return int(torch.cuda.memory_allocated(device))
    return _status_bytes("VmRSS") or measure_worker.peak_bytes(device)


def peak_bytes(device: torch.device) -> int:
    """The most that this process held since `forget_peak`; where that is not known, ever."""
    in_memory = None if device.type == "cuda" else _status_bytes("VmHWM")
    return in_memory or measure_worker.peak_bytes(device)


def forget_peak(device: torch.device) -> None:
    """Have `peak_bytes` tell of what comes from now on, where the system can.

    A process keeps memory that was freed. That is given back first: batches that are made in it
    would seem to take none, so that larger ones are expected to take too little.
    """
    if device.type == "cuda":
        import torch

        torch.cuda.reset_peak_memory_stats(device)
        return
    give_back_memory()
    with contextlib.suppress(OSError):
        _RESET.write_text("5", encoding="utf-8")


def _status_bytes(name: str) -> int | None:
    """A size that Linux tells of this process; None: it is another system."""
    with contextlib.suppress(OSError):
        for line in _STATUS.read_text(encoding="utf-8").splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) << 10
    return None


# --- the learning rate ---------------------------------------------------------------------------


def try_rates(steps: StepTimer, batch_size: int) -> list[float]:
    """Train a copy while the rate grows from step to step, by the range test of Smith (2015).

    The rate grows exponentially, and the test ends early once the loss has run away, as fastai and
    Lightning do it. The schedule is left out, and groups of parameters with a rate of their own
    keep it. Equal arguments give equal losses.

    Source: L. N. Smith, "Cyclical Learning Rates for Training Neural Networks", section 3.3
    (arXiv:1506.01186).

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
    from sparkdl.serialization.travel.packed_module import travelled
    from sparkdl.sync.frozen_layers import training_mode
    from sparkdl.sync.gradients.allreduce import AllReduce
    from sparkdl.train.modules.memory_format import in_memory_format
    from sparkdl.train.random_state import deterministic_algorithms, seed_everything
    from sparkdl.train.replica import make_replica
    from sparkdl.train.step import TrainStep
    from sparkdl.train.time_spent import Clock

    module, comm = travelled(steps.module, copies=True), LocalCommunicator()
    plan, shards = steps.sampled(batch_size, NUM_RATES)
    config = steps.with_batches(plan.batch_size)
    loss = copy.deepcopy(config.loss)  # it may keep something from call to call
    config = replace(config, loss=loss, learning_rate=LOWEST_RATE, scheduler=None)
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


def rate_at(number: int) -> float:
    """The learning rate of a step of the range test, from 0."""
    return float(LOWEST_RATE * (HIGHEST_RATE / LOWEST_RATE) ** (number / (NUM_RATES - 1)))


def choose_rate(losses: Sequence[float]) -> Choice:
    """A tenth of the rate at which the mean of neighbouring losses is lowest, or the default."""
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
