"""What a rank measures for the cost model: some real steps and some real exchanges.

Runs in a gang like training, with the user's module, loss and optimizer, on a sample of the rows,
through the same loop and the same communicator. Nothing of it is kept.
"""

from __future__ import annotations

import contextlib
import copy
import json
import math
import resource
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import cloudpickle

from sparkdl.comm.worker_environment import WorkerEnvironment
from sparkdl.config import CheckpointConfig, TrainConfig
from sparkdl.data.plan import Shard, TrainPlan, make_plan
from sparkdl.data.source import ShardSource
from sparkdl.data.spool.mapped import MappedRows
from sparkdl.data.spool.spool_source import SpoolSource
from sparkdl.train.callbacks import NullObserver
from sparkdl.worker.lifecycle import GangOrder, Member, Results, live

if TYPE_CHECKING:
    import torch
    from torch import nn

    from sparkdl.comm.communicator import Communicator
    from sparkdl.comm.compression.compression import Compression
    from sparkdl.comm.topology.topology import Topology

_MOST_STEPS, _FEWEST_STEPS = 60, 3
_STEPS_OF_AN_EPOCH = 3
"""At least: the first one of an epoch is not timed."""
_MOST_REPEATS = 64
"""How often a rank reads its shards in an epoch, where they hold few rows."""
_FOREVER = 1 << 40
"""Epochs of a plan whose number of steps is what ends it."""
_SMALL_BYTES = (8, 64 << 10, 1 << 20)
"""Sums that are timed besides that of all gradients."""
_LARGEST_BYTES = 64 << 20
"""A larger sum is not timed: its time follows from this one's."""
_MOST_SUMS = 200


@dataclass(frozen=True)
class LevelOrder:
    """Steps to measure with ``ranks_per_node`` ranks of each machine at work at the same time."""

    ranks_per_node: int
    threads: int
    batch_sizes: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class MeasureOrder(GangOrder):
    """What the driver asks of every rank."""

    plan: TrainPlan
    """Of the sample."""
    payload: bytes
    """cloudpickle of ``(TrainConfig, structure of the module)``."""
    weights: bytes | None
    """As in `worker.WorkOrder`."""
    levels: tuple[LevelOrder, ...]
    compressions: tuple[Compression, ...]
    shapes: tuple[tuple[int, ...], ...]
    """Of the trained parameters."""
    gradient_bytes: int
    seconds: float
    """About how long one measurement may take."""
    source: ShardSource = field(default_factory=SpoolSource)


def run(environment: WorkerEnvironment, order: MeasureOrder) -> Iterator[tuple[str, bytes]]:
    """Measure on one rank.

    Yields:
        ``("error", JSON)`` alone, or ``("result", JSON)``.
    """
    yield from live(environment, order, partial(_measure, order))


def _measure(order: MeasureOrder, member: Member) -> Results:
    from sparkdl.worker.training import initial_module

    began = time.perf_counter()
    config, structure = cloudpickle.loads(order.payload)
    comm = member.comm
    member.reporter.phase("setup")
    module = initial_module(order.weights, structure, member.files, comm)
    steps = StepTimer(
        module, for_measuring(config), order.plan, order.plan.shards_of(comm.rank), order.source,
        member.device, order.seconds,
    )  # fmt: skip
    report: dict[str, Any] = {
        "node": member.nodes[comm.rank],
        "device": member.device.type,
        "levels": [_level(level, steps, order, member) for level in order.levels],
        "state": steps.state_bytes,
        "peak_bytes": peak_bytes(member.device),
    }
    if comm.world_size > 1:
        report.update(_exchanges(order, comm, member.device))
    size = min(_LARGEST_BYTES, max(1 << 20, order.gradient_bytes))
    report["copy"] = copy_seconds(size, member.device)
    report["seconds"] = time.perf_counter() - began
    return [("result", json.dumps(report).encode())]


def for_measuring(config: TrainConfig) -> TrainConfig:
    """The user's configuration without what watches, stops or keeps training."""
    return replace(
        config,
        callbacks=(),
        metrics={},
        early_stopping=None,
        sync_strategy=None,
        sync_batch_norm=False,
        divergence_factor=None,
        checkpoint=CheckpointConfig(interval=-1),
    )


def at_work(plan: TrainPlan, nodes: Sequence[int], rank: int, ranks_per_node: int) -> bool:
    """Whether ``rank`` is among the first ranks of its node that have rows."""
    with_rows = [
        peer for peer, node in enumerate(nodes) if node == nodes[rank] and plan.rows_of(peer) > 0
    ]
    return rank in with_rows[:ranks_per_node]


def _level(
    level: LevelOrder, steps: StepTimer, order: MeasureOrder, member: Member
) -> dict[str, Any]:
    """Seconds of steps by size of the batch; empty on ranks that rest, or have no rows."""
    from sparkdl.runtime.process import torch_threads

    comm = member.comm
    works = at_work(order.plan, member.nodes, comm.rank, level.ranks_per_node)
    found = {}
    for batch_size in level.batch_sizes:
        with torch_threads(level.threads):
            if works:
                steps.warm_up(batch_size)
            comm.barrier()
            if works:
                found[batch_size] = steps.measure(batch_size)
        comm.barrier()
    return {
        "ranks_per_node": level.ranks_per_node, "threads": level.threads,
        "steps": list(found.values()),
    }  # fmt: skip


@dataclass
class StepTimer:
    """Times steps of the training loop on one rank's rows, alone."""

    module: nn.Module
    config: TrainConfig
    plan: TrainPlan
    shards: Sequence[Shard]
    source: ShardSource
    device: torch.device
    seconds: float
    """About how long one measurement may take."""
    state_bytes: dict[str, int] = field(default_factory=dict)
    """Bytes of each part of a checkpoint."""
    step_seconds: dict[int, float] = field(default_factory=dict)
    """About how long a step takes, by size of the batch."""

    def __post_init__(self) -> None:
        self.shards = [replace(one, num_validation_rows=0) for one in self.shards if one.num_rows]

    def warm_up(self, batch_size: int) -> None:
        """Two steps, of which the second one tells about how long one takes."""
        self.step_seconds[batch_size] = self._train(batch_size, 2)[-1]["seconds"]

    def measure(self, batch_size: int) -> dict[str, Any]:
        """The median of the rows of a batch, and the seconds of each step."""
        expected = max(1e-6, self.step_seconds[batch_size])
        num_steps = min(_MOST_STEPS, max(_FEWEST_STEPS, math.ceil(self.seconds / expected)))
        steps = self._train(batch_size, num_steps + 1)
        return {
            "rows": sum(step["rows"] for step in steps) / len(steps),
            "seconds": [step["seconds"] for step in steps],
        }

    def _repeated(self, batch_size: int) -> tuple[list[Shard], int]:
        """The shards as often as an epoch of some steps needs them, and the batch it then has."""
        wanted = _STEPS_OF_AN_EPOCH * batch_size
        num_rows = sum(shard.num_rows for shard in self.shards)
        times = min(_MOST_REPEATS, -(-wanted // num_rows))
        rows = times * num_rows
        return times * list(self.shards), max(1, min(batch_size, rows // _STEPS_OF_AN_EPOCH))

    def _train(self, batch_size: int, num_steps: int) -> list[dict[str, float]]:
        """Rows and seconds of steps, but the first one, which is not timed."""
        from sparkdl.comm.communicator import LocalCommunicator
        from sparkdl.train.loop import train

        shards, batch_size = self._repeated(batch_size)
        plan = make_plan(
            columns=self.plan.columns,
            # Numbers of their own for the plan; a source goes by those that it has given.
            shards=[replace(shard, shard_id=number) for number, shard in enumerate(shards)],
            world_size=1,
            batch_size=batch_size,
            epochs=_FOREVER,
            max_steps=num_steps,
            windows=self.plan.windows,
        )
        clock = _StepTimes(self.device)
        outcome = train(
            module=copy.deepcopy(self.module),
            config=replace(
                self.config,
                batch_size=batch_size,
                gradient_accumulation_steps=min(
                    self.config.gradient_accumulation_steps, batch_size
                ),
            ),
            plan=plan,
            shards=self.source.open(plan, shards, "train"),
            validation=MappedRows([], plan),
            comm=LocalCommunicator(),
            device=self.device,
            checkpoints=None,
            resume=None,
            observer=clock,
        )
        if not self.state_bytes:
            self.state_bytes = _state_bytes(outcome.final.shared)
        return clock.steps


def _state_bytes(shared: dict[str, Any]) -> dict[str, int]:
    from sparkdl.storage.tensor_tree import pack

    return {
        name: sum(tensor.nbytes for tensor in pack(shared[name])[1].values())
        for name in ("model", "optimizer")
    }


class _StepTimes(NullObserver):
    """An observer that notes when steps end, once the device is done with them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._last: float | None = None
        self.steps: list[dict[str, float]] = []

    def step(self, *, epoch: int, step: int, loss: float, rows: int) -> None:
        if self._device.type == "cuda":
            import torch

            torch.cuda.synchronize(self._device)
        now = time.perf_counter()
        if self._last is not None:
            self.steps.append({"rows": rows, "seconds": now - self._last})
        self._last = now

    def epoch(self, record: Any) -> None:
        """See `Observer.epoch`; what an epoch's end takes is no step's time."""
        self._last = None


def _exchanges(order: MeasureOrder, comm: Communicator, device: torch.device) -> dict[str, Any]:
    """Seconds of sums by their bytes, along a ring and as the topology ``auto`` forms them."""
    import torch

    from sparkdl.comm.topology import arrange, choose

    sizes = sorted({*_SMALL_BYTES, min(_LARGEST_BYTES, max(1, order.gradient_bytes))})
    found: dict[str, Any] = {"topology": choose("auto", comm.nodes, device.type)}
    with contextlib.closing(arrange(comm, "ring", device=device)) as ring:
        found["ring"] = [
            [size, _sum_seconds(ring, torch.zeros(-(-size // 4), device=device), order.seconds)]
            for size in sizes
        ]
    with contextlib.closing(arrange(comm, "auto", device=device)) as topology:
        for name, make in (("in_place", topology.allocate), ("staged", _plain)):
            found[name] = [
                [size, _sum_seconds(topology, make(-(-size // 4), torch.float32, device),
                                    order.seconds)]
                for size in sizes
            ]  # fmt: skip
        found["codecs"] = {
            type(one).__name__: _codec_seconds(one, order, topology, device)
            for one in order.compressions
        }
    return found


def _plain(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    import torch

    return torch.zeros(numel, dtype=dtype, device=device)


def _sum_seconds(comm: Topology, tensor: torch.Tensor, seconds: float) -> float:
    return _exchange_seconds(comm, lambda: comm.all_reduce(tensor), tensor.device, seconds)


def _codec_seconds(
    compression: Compression, order: MeasureOrder, comm: Topology, device: torch.device
) -> float:
    """One compressed exchange of all gradients, transfer included."""
    import torch

    flat = torch.randn(sum(map(math.prod, order.shapes)), device=device) * 1e-3
    views, at = [], 0
    for shape in order.shapes:
        size = math.prod(shape)
        views.append(flat[at : at + size].view(shape))
        at += size
    if hasattr(compression, "warmup_steps"):  # in which nothing is compressed yet
        compression = replace(compression, warmup_steps=0)  # type: ignore[call-arg]
    compressor = compression.make(views, comm)
    return _exchange_seconds(comm, lambda: compressor.start(flat).wait(), device, order.seconds)


def _exchange_seconds(
    comm: Communicator, exchange: Callable[[], None], device: torch.device, seconds: float
) -> float:
    """Mean of equally many calls on all ranks, that fill the time that one may take."""
    exchange()
    once = timed(exchange, device)
    slowest = max(float(data) for data in comm.all_gather_bytes(str(once).encode()))
    count = int(min(_MOST_SUMS, max(_FEWEST_STEPS, seconds / 4 / max(slowest, 1e-6))))
    comm.barrier()

    def repeat() -> None:
        for _ in range(count):
            exchange()

    return timed(repeat, device) / count


def copy_seconds(num_bytes: int, device: torch.device) -> float:
    """Seconds per byte of a copy."""
    import torch

    source = torch.zeros(-(-num_bytes // 4), device=device)
    target = torch.empty_like(source)
    best = min(timed(lambda: target.copy_(source), device) for _ in range(5))
    return best / source.nbytes


def timed(work: Callable[[], object], device: torch.device) -> float:
    """Seconds of one call, until the device is done."""
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)
    began = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began


def peak_bytes(device: torch.device) -> int:
    """The most memory that this process, or its part of the device, has taken so far."""
    if device.type == "cuda":
        import torch

        return int(torch.cuda.max_memory_allocated(device))
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
