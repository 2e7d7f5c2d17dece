"""Measurements of a rank for the cost model: some real steps and some real exchanges.

Runs in a gang like training, with the user's objects, on a sample of the rows; nothing is kept.
"""

from __future__ import annotations

import contextlib
import json
import math
import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import cloudpickle
import numpy as np

from sparkdl.comm.worker_environment import WorkerEnvironment
from sparkdl.config import CheckpointConfig, TrainConfig
from sparkdl.data.gather import Buffer, gather_column
from sparkdl.data.plan import Column, Shard, TrainPlan, make_plan
from sparkdl.data.source import EpochRows, ShardRows, ShardSource
from sparkdl.data.spool.spool_source import SpoolSource
from sparkdl.train.callbacks import NullObserver
from sparkdl.worker.lifecycle import GangOrder, Member, Results, live

if TYPE_CHECKING:
    import torch
    from torch import nn

    from sparkdl.comm.communicator import Communicator
    from sparkdl.comm.compression.compression import Compression
    from sparkdl.data.collate import Rows

_MOST_STEPS, _FEWEST_STEPS = 60, 3
_STEPS_OF_AN_EPOCH = 3
"""At least: the first one of an epoch is not timed."""
_MOST_REPEATS = 64
"""Most times that a rank reads its shards in an epoch, where they hold few rows."""
_FOREVER = 1 << 40
"""Epochs of a plan whose number of steps is what ends it."""
_SMALL_BYTES = (8, 64 << 10, 1 << 20)
"""Sums that are timed besides that of all gradients."""
_LARGEST_BYTES = 64 << 20
"""A larger sum is not timed: its time follows from this one's."""
_MOST_SUMS = 200
_COPIED_BYTES = 16 << 20


@dataclass(frozen=True, kw_only=True)
class SampleOrder(GangOrder):
    """The driver's order to ranks that train on a sample, and keep nothing."""

    plan: TrainPlan
    """Plan of the sample."""
    payload: bytes
    """cloudpickle of ``(TrainConfig, structure of the module)``; see `for_measuring`."""
    weights: bytes | None
    """As in `worker.WorkOrder`."""
    seconds: float
    """About how long one measurement may take."""
    task: Callable[[StepTimer, Member], dict[str, Any]]
    """Work to do; a function of a module, with some arguments. It returns values of JSON."""
    source: ShardSource = field(default_factory=SpoolSource)


def run(environment: WorkerEnvironment, order: SampleOrder) -> Iterator[tuple[str, bytes]]:
    """Do the task of one rank; its one row is ``result`` (JSON, with ``seconds``) or ``error``."""
    yield from live(environment, order, partial(_done, order))


def _done(order: SampleOrder, member: Member) -> Results:
    from sparkdl.serialization.travel.packed_module import as_on_driver
    from sparkdl.worker.training import initial_module

    began = time.perf_counter()
    _, config, structure = cloudpickle.loads(order.payload)
    member.reporter.phase("setup")
    with as_on_driver(structure):
        module = initial_module(order.weights, structure, member.files, member.comm)
        steps = StepTimer(
            module, config, order.plan, order.plan.shards_of(member.comm.rank), order.source,
            member.device, order.seconds,
        )  # fmt: skip
        report = order.task(steps, member)
    report["seconds"] = time.perf_counter() - began
    return [("result", json.dumps(report).encode())]


def measure_costs(
    steps: StepTimer,
    member: Member,
    *,
    places: Sequence[tuple[int, int]],
    compressions: Sequence[Compression],
) -> dict[str, Any]:
    """Measure on one rank what the cost model needs; all ranks take part.

    ``places`` says how many ranks of each machine are at work at a time, and with how many threads.
    """
    comm = member.comm
    report: dict[str, Any] = {
        "node": comm.nodes[comm.rank],
        "device": member.device.type,
        "levels": _levels(steps, places, member),
        "optimizer_bytes": steps.optimizer_bytes,
        "peak_bytes": peak_bytes(member.device),
        "copy": copy_seconds(member.device),
    }
    if comm.world_size > 1:
        shapes = [tuple(p.shape) for p in steps.module.parameters() if p.requires_grad]
        exchanges = ExchangeTimer(comm, member.device, shapes, steps.seconds)
        report.update(exchanges.measure(compressions))
    return report


@dataclass(frozen=True)
class RepeatedRows:
    """A shard whose rows come several times in an epoch; see `source.ShardRows`."""

    rows: ShardRows
    plan: TrainPlan
    times: int

    @property
    def num_rows(self) -> int:
        return self.times * self.rows.num_rows

    def epoch(self, seed: int, epoch: int, *, num_together: int | None = None) -> RepeatedEpoch:
        first = epoch * self.times
        return RepeatedEpoch(
            self.plan.columns,
            [
                self.rows.epoch(seed, first + number, num_together=num_together)
                for number in range(self.times)
            ],
            self.rows.num_rows,
        )

    def in_order(self, batch_size: int) -> Iterator[Mapping[str, Rows]]:
        for _ in range(self.times):
            yield from self.rows.in_order(batch_size)


@dataclass(frozen=True)
class RepeatedEpoch:
    """Epochs of a shard as one; see `source.EpochRows`."""

    columns: Sequence[Column]
    epochs: Sequence[EpochRows]
    num_rows: int
    """Rows of each epoch."""

    @property
    def row_bytes(self) -> int:
        return self.epochs[0].row_bytes

    def read(self, start: int, stop: int, buffer: Buffer) -> Mapping[str, Rows]:
        """The rows of each epoch that has some of them, one after the other."""
        first, last = start // self.num_rows, max(start, stop - 1) // self.num_rows
        if first == last:
            own = start - first * self.num_rows
            return self.epochs[first].read(own, own + stop - start, buffer)
        parts = []
        for number in range(first, last + 1):
            begin = number * self.num_rows
            low, high = max(start - begin, 0), min(stop - begin, self.num_rows)
            parts.append(self.epochs[number].read(low, high, Buffer(high - low)))
        order = np.arange(stop - start)
        return {
            column.key: gather_column(column, [part[column.key] for part in parts], order, buffer)
            for column in self.columns
        }

    def close(self) -> None:
        for epoch in self.epochs:
            epoch.close()


def for_measuring(config: TrainConfig) -> TrainConfig:
    """The user's configuration without what watches, stops or keeps training."""
    return replace(
        config,
        callbacks=(),
        metrics={},
        early_stopping=None,
        sync_strategy=None,
        sync_batch_norm=False,
        elasticity="rounding",
        divergence_factor=None,
        checkpoint=CheckpointConfig(interval=-1),
    )


def at_work(plan: TrainPlan, nodes: Sequence[int], rank: int, ranks_per_node: int) -> bool:
    """Return True if ``rank`` is among the first ranks of its node that have rows."""
    with_rows = [
        peer for peer, node in enumerate(nodes) if node == nodes[rank] and plan.rows_of(peer) > 0
    ]
    return rank in with_rows[:ranks_per_node]


def _levels(
    steps: StepTimer, places: Sequence[tuple[int, int]], member: Member
) -> list[list[dict[str, Any]]]:
    """Return the steps by size of the batch for each place, three sizes in the first.

    There are none on ranks that rest.
    """
    from sparkdl.runtime.process import torch_threads

    comm, size = member.comm, steps.plan.batch_size
    sizes = tuple(dict.fromkeys((size, max(1, size // 2), max(1, size // 4))))
    found: list[list[dict[str, Any]]] = []
    for number, (ranks_per_node, threads) in enumerate(places):
        works = at_work(steps.plan, comm.nodes, comm.rank, ranks_per_node)
        found.append([])
        for batch_size in sizes if number == 0 else sizes[:1]:
            with torch_threads(threads):
                expected = steps.warm_up(batch_size) if works else 0.0
                comm.barrier()
                if works:
                    found[-1].append(steps.measure(batch_size, expected))
            comm.barrier()
    return found


@dataclass
class StepTimer:
    """Times steps of the training loop on one rank's rows, alone."""

    module: nn.Module
    config: TrainConfig
    plan: TrainPlan
    shards: Sequence[Shard]
    """Shards of the rank."""
    source: ShardSource
    device: torch.device
    seconds: float
    """About how long one measurement may take."""
    optimizer_bytes: int = 0
    """Bytes of the optimizer's state; known after the first step."""

    def warm_up(self, batch_size: int) -> float:
        """Two steps, of which the second one tells about how many seconds one takes."""
        return self._train(batch_size, 2)[-1]["seconds"]

    def measure(self, batch_size: int, expected_seconds: float) -> dict[str, Any]:
        """The mean of the rows of a batch, and the seconds of each step."""
        wanted = math.ceil(self.seconds / max(1e-6, expected_seconds))
        num_steps = min(_MOST_STEPS, max(_FEWEST_STEPS, wanted))
        steps = self._train(batch_size, num_steps + 1)
        return {
            "rows": sum(step["rows"] for step in steps) / len(steps),
            "seconds": [step["seconds"] for step in steps],
        }

    def sampled(self, batch_size: int, num_steps: int) -> tuple[TrainPlan, list[ShardRows]]:
        """A plan of so many steps on the rank's rows, and the rows of each shard.

        The shards are read as often as an epoch of some steps needs them. If that is not often
        enough, batches are smaller.
        """
        fewest = min(shard.num_rows for shard in self.shards)
        times = min(_MOST_REPEATS, -(-_STEPS_OF_AN_EPOCH * batch_size // fewest))
        plan = make_plan(
            columns=self.plan.columns,
            # Numbers of their own for the plan; a source goes by those that it has given.
            shards=[
                replace(shard, shard_id=number, num_rows=times * shard.num_rows)
                for number, shard in enumerate(self.shards)
            ],
            world_size=1,
            batch_size=max(1, min(batch_size, times * fewest // _STEPS_OF_AN_EPOCH)),
            epochs=_FOREVER,
            max_steps=num_steps,
            windows=self.plan.windows,
        )
        opened = [self.source.open(plan, shard, "train") for shard in self.shards]
        return plan, [RepeatedRows(rows, plan, times) for rows in opened]

    def with_batches(self, batch_size: int) -> TrainConfig:
        """The configuration for batches of so many rows."""
        num_parts = min(self.config.gradient_accumulation_steps, batch_size)
        return replace(self.config, batch_size=batch_size, gradient_accumulation_steps=num_parts)

    def _train(self, batch_size: int, num_steps: int) -> list[dict[str, float]]:
        """Rows and seconds of steps, but the first one, which is not timed."""
        from sparkdl.comm.communicator import LocalCommunicator
        from sparkdl.serialization.travel.packed_module import travelled
        from sparkdl.storage.tensor_tree import pack
        from sparkdl.train.loop import train

        plan, shards = self.sampled(batch_size, num_steps)
        clock = _StepTimes(self.device)
        outcome = train(
            module=travelled(self.module, copies=True),
            config=self.with_batches(plan.batch_size),
            plan=plan,
            shards=shards,
            validation=[],
            comm=LocalCommunicator(),
            device=self.device,
            checkpoints=None,
            resume=None,
            observer=clock,
        )
        tensors = pack(outcome.final.shared["optimizer"])[1].values()
        self.optimizer_bytes = sum(tensor.nbytes for tensor in tensors)
        return clock.steps


class _StepTimes(NullObserver):
    """An observer that notes when steps end, once the device is done with them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._last: float | None = None
        self.steps: list[dict[str, float]] = []

    def step(self, *, epoch: int, step: int, loss: float, rows: int) -> None:
        _finish(self._device)
        now = time.perf_counter()
        if self._last is not None:
            self.steps.append({"rows": rows, "seconds": now - self._last})
        self._last = now

    def epoch(self, record: Any) -> None:
        """See `Observer.epoch`; what an epoch's end takes is no step's time."""
        self._last = None


@dataclass(frozen=True)
class ExchangeTimer:
    """Times exchanges of a module's gradients; all ranks take part."""

    comm: Communicator
    device: torch.device
    shapes: Sequence[tuple[int, ...]]
    """Shapes of the gradients."""
    seconds: float
    """About how long four measurements may take."""

    def measure(self, compressions: Sequence[Compression]) -> dict[str, Any]:
        """Seconds of sums by their bytes, along a ring and as ``auto`` forms them; of codecs."""
        from sparkdl.comm.topology import arrange, choose

        with contextlib.closing(arrange(self.comm, "ring", device=self.device)) as ring:
            by_messages = self._sums(ring)
        with contextlib.closing(arrange(self.comm, "auto", device=self.device)) as topology:
            return {
                "topology": choose("auto", self.comm.nodes, self.device.type),
                "ring": by_messages,
                "shared": self._sums(topology),
                "codecs": {
                    type(one).__name__: self._compressed(one, topology) for one in compressions
                },
            }

    def _sums(self, topology: Communicator) -> list[list[float]]:
        import torch

        num_bytes = 4 * sum(map(math.prod, self.shapes))
        found = []
        for size in sorted({*_SMALL_BYTES, min(_LARGEST_BYTES, num_bytes)}):
            tensor = topology.allocate(-(-size // 4), torch.float32, self.device)
            found.append([size, self._repeated(topology, partial(topology.all_reduce, tensor))])
        return found

    def _compressed(self, compression: Compression, topology: Communicator) -> float:
        """One compressed exchange of all gradients, transfer included."""
        import torch

        sizes = [math.prod(shape) for shape in self.shapes]
        flat = torch.randn(sum(sizes), device=self.device) * 1e-3
        parts = zip(torch.split(flat, sizes), self.shapes, strict=True)
        if hasattr(compression, "warmup_steps"):  # in which nothing is compressed yet
            compression = replace(compression, warmup_steps=0)  # type: ignore[call-arg]
        compressor = compression.make([part.view(shape) for part, shape in parts], topology)
        return self._repeated(topology, lambda: compressor.start(flat).wait())

    def _repeated(self, comm: Communicator, exchange: Callable[[], None]) -> float:
        """Mean of equally many calls on all ranks, that fill the time that one may take."""
        exchange()
        once = timed(exchange, self.device)
        slowest = max(float(data) for data in comm.all_gather_bytes(str(once).encode()))
        count = int(min(_MOST_SUMS, max(_FEWEST_STEPS, self.seconds / 4 / max(slowest, 1e-6))))
        comm.barrier()

        def repeat() -> None:
            for _ in range(count):
                exchange()

        return timed(repeat, self.device) / count


def copy_seconds(device: torch.device) -> float:
    """Seconds per byte of a copy."""
    import torch

    source = torch.zeros(_COPIED_BYTES // 4, device=device)
    target = torch.empty_like(source)
    return min(timed(lambda: target.copy_(source), device) for _ in range(5)) / _COPIED_BYTES


def timed(work: Callable[[], object], device: torch.device) -> float:
    """Seconds of one call, until the device is done."""
    _finish(device)
    began = time.perf_counter()
    work()
    _finish(device)
    return time.perf_counter() - began


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        import torch

        torch.cuda.synchronize(device)


def peak_bytes(device: torch.device) -> int:
    """The most memory that this process, or its part of the device, has taken so far."""
    if device.type == "cuda":
        import torch

        return int(torch.cuda.max_memory_allocated(device))
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
