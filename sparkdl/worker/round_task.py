"""A task of one round on plain Spark stages: trains or evaluates one shard, and yields the results.

The task raises only if the shard's files are not on this host, so that Spark runs it elsewhere. A
copy of a task, from speculation, whose original still works where the files are waits until Spark
ends it. The process keeps module and memory for the next round. This file knows nothing of Spark.
"""

from __future__ import annotations

import contextlib
import json
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import cloudpickle

from sparkdl.comm.access import Address
from sparkdl.comm.channel import ChannelClient
from sparkdl.comm.file_chunks import gathered
from sparkdl.comm.worker_environment import SparkTask
from sparkdl.config import Looks
from sparkdl.data.plan import RoundPart, Shard, Split, TrainPlan
from sparkdl.data.source import ShardSource
from sparkdl.data.spool.spool_source import SpoolSource
from sparkdl.errors import DataError, ShardLost, TrainingDiverged
from sparkdl.runtime.hardware import hardware
from sparkdl.runtime.process import (
    kept_generators,
    spared_collector,
    torch_threads,
    tuned_allocator,
)
from sparkdl.serialization.program.process_settings import present_settings, set_settings
from sparkdl.worker.kept import KEPT
from sparkdl.worker.lifecycle import Results, reported, require_same_versions
from sparkdl.worker.reporter import Reporter
from sparkdl.worker.watcher import ended_when_hung

if TYPE_CHECKING:
    from sparkdl.data.source import ShardRows
    from sparkdl.sync.averaging.state_pieces import Pieces
    from sparkdl.train.round_replica import RoundOutcome, RoundReplica

ATTRIBUTES = "attributes"
"""Kind of the row that has what a module holds besides tensors and is not as it came."""
_SILENT_SECONDS = 5.0
"""A task that works says so several times a second."""

RoundWork = Callable[["Warm", Shard, RoundPart | None, bytes, Reporter], Results]
"""``(warm, shard, part, state, reporter)`` -> what a shard's part of a job gives. ``part`` are the
steps to train; None: measure. A function of a module, or a partial of one, so that it can be
pickled by its name."""


@dataclass(frozen=True, kw_only=True)
class RoundOrder:
    """The driver's order to every task of one job. Picklable and small."""

    run_id: str
    attempt: int
    """Number of the job in the run."""
    plan: TrainPlan
    """Each shard is a rank of its own."""
    payload: bytes
    """Bytes that `pack_payload` gave."""
    part: RoundPart | None
    """The steps to train; None: evaluate."""
    threads: int
    versions: Mapping[str, str]
    """The driver's, which every process compares with its own."""
    work: RoundWork
    """Work to do with the state; `train_or_evaluate` unless members of a population train."""
    heartbeat_timeout_seconds: float = 60.0
    """Silence after which a task counts as hung."""
    source: ShardSource = field(default_factory=SpoolSource)
    """Opens the shards."""
    looks: Looks | None = None
    """Options of the looks at layers for reports; None: no looks."""


@dataclass(frozen=True, kw_only=True)
class RoundPlace:
    """The place of a task in a round."""

    shard: Shard
    """The shard as the shard table has it: its files are on this host."""
    gpu_addresses: tuple[str, ...]
    channel: Address | None
    task: SparkTask | None = None
    """As in `WorkerEnvironment`."""


def pack_payload(
    config: Any,
    skeleton: bytes,
    blank_tensors: bytes,
    values: Any = None,
    shared: Sequence[Any] = (),
) -> bytes:
    """Pack what stays the same in all rounds; zeros, which the tensors mostly are, take no room.

    ``values`` are the program's, which whoever unpickles the rest must have; ``shared`` is what
    module and ``config`` share, see `shared_values`.
    """
    from sparkdl.serialization.travel.pickling import dumps

    return zlib.compress(dumps((values, config, skeleton, blank_tensors, shared)), 1)


def run(place: RoundPlace, order: RoundOrder, state: bytes) -> Iterator[tuple[str, bytes]]:
    """Do one shard's part of a round, which begins from ``state``.

    Yields:
        ``("error", JSON)`` alone, or what the work gave.

    Raises:
        ShardLost: the shard's files are not on this host.
    """
    shard = place.shard
    with contextlib.ExitStack() as stack:
        client = None
        if place.channel is not None:
            client = ChannelClient(place.channel)
            stack.enter_context(contextlib.closing(client))
        else:  # no driver would notice that it hangs
            stack.enter_context(ended_when_hung(order.heartbeat_timeout_seconds))
        if not order.source.is_here(shard):
            _wait_for_the_other(client, order.attempt, shard.shard_id)
            raise ShardLost(f"shard {shard.shard_id} is not at {shard.path}")
        reporter = Reporter(
            client,
            attempt=order.attempt,
            rank=shard.shard_id,
            task=place.task,
            heartbeat_timeout_seconds=order.heartbeat_timeout_seconds,
        )
        results = reported(reporter, shard.shard_id, lambda: _work(place, order, state, reporter))
    yield from results


def _wait_for_the_other(client: ChannelClient | None, attempt: int, shard_id: int) -> None:
    """Return when no other task works on the shard; Spark ends this one if another succeeds.

    To raise at once would count as a failure of the task, of which a job stands few.
    """
    while client is not None:
        silence = client.seconds_since_report(attempt=attempt, rank=shard_id)
        if silence is None or silence > _SILENT_SECONDS:
            return
        time.sleep(0.5)


def _work(place: RoundPlace, order: RoundOrder, state: bytes, reporter: Reporter) -> Results:
    from sparkdl.train.optimizers.without_compiler import without_compiler

    with without_compiler(in_steps=True):
        warm = _warmed_up(place, order)
        reporter.rows = warm.rows.get(place.shard.shard_id, 0)
        if place.shard.shard_id not in warm.seen:
            warm.seen.add(place.shard.shard_id)
            reporter.send({"kind": "hardware", "hardware": warm.hardware})
        set_settings(warm.settings)  # which the process has lost since the task before
        kept = kept_generators(), torch_threads(order.threads), warm.as_on_driver()
        with spared_collector(), kept[0], kept[1], kept[2]:
            results = order.work(warm, place.shard, order.part, state, reporter)
            warm.settings = present_settings()
            return results


def train_or_evaluate(
    warm: Warm,
    shard: Shard,
    part: RoundPart | None,
    state: bytes,
    reporter: Reporter,
    *,
    pieces: Pieces | None = None,
) -> Results:
    """Train or measure the one state that all shards share, as `checkpoint_format.encode` wrote it.

    ``pieces`` says how to cut what comes of it; measuring needs none.

    Returns:
        ``("result", JSON)`` and, after training on samples, the pieces of the state, see
        `state_pieces`, and what the module holds besides tensors; after measuring
        ``("metrics", bytes)``.
    """
    from sparkdl.storage.checkpoint_format import decode, encode
    from sparkdl.storage.tensor_tree import snapshot
    from sparkdl.train.objective.not_finite import with_columns

    tree = decode(state, "the round's state")
    if part is None:
        reporter.phase("evaluate")
        report, metrics = warm.measure(shard, tree)
        return [("result", json.dumps(report).encode()), ("metrics", metrics)]
    reporter.phase("train")
    try:
        outcome, report = warm.train(shard, tree, part, reporter)
    except TrainingDiverged as error:
        rows = [warm.open(shard, "train")]
        raise with_columns(error, warm.plan.columns, rows, None) from error
    sent: Results = []
    if outcome.weight > 0:
        assert pieces is not None
        moving = warm.replica.moving(outcome.state, compressed=pieces.compression is not None)
        report |= warm.replica.odd(moving)
        sent = list(pieces.cut(moving, outcome.weight))
        sent.append((ATTRIBUTES, gathered(encode(snapshot(outcome.state["attributes"])))))
    report["bytes_sent"] = sum(len(data) for _, data in sent)
    return [("result", json.dumps(report).encode()), *sent]


class Warm:
    """The objects that a process keeps between the rounds of a run."""

    def __init__(self, place: RoundPlace, order: RoundOrder) -> None:
        import os

        from sparkdl.runtime.hardware import choose_device
        from sparkdl.serialization.travel.attributes import Attributes
        from sparkdl.serialization.travel.packed_module import as_on_driver, unpack
        from sparkdl.serialization.travel.pickling import shared_globals
        from sparkdl.train.round_replica import RoundReplica

        require_same_versions(order.versions, f"shard {place.shard.shard_id}'s worker")
        spaces: dict[str, dict[str, Any]] = {}
        with shared_globals(spaces):
            given = cloudpickle.loads(zlib.decompress(order.payload))
        values, config, skeleton, tensors, shared = given
        self.settings = {} if values is None else values.code.settings
        device = choose_device(config.device, place.gpu_addresses, 0, os.environ)
        self.as_on_driver = partial(as_on_driver, skeleton)
        self.hardware = hardware(device, order.threads)
        self.run_id = order.run_id
        self.gpu_addresses = place.gpu_addresses
        self.plan = order.plan
        self.source = order.source
        with self.as_on_driver():
            with shared_globals(spaces):
                module = unpack(skeleton, tensors)
            held = Attributes(module, resets=True, shared=shared)
            self.replica: RoundReplica = RoundReplica(
                module, config, order.plan, device, order.looks, held
            )
        self.rows: dict[int, int] = {}
        """Samples that this process has trained on, by shard; for the progress bar only."""
        self.seen: set[int] = set()
        """Shards that this process has worked on."""
        self._open: dict[tuple[int, str, str], ShardRows] = {}

    def open(self, shard: Shard, split: Split) -> ShardRows:
        """Open a shard, or find it open; DataError if its rows are others than at the beginning."""
        planned = next(s for s in self.plan.shards if s.shard_id == shard.shard_id)
        if planned.fingerprint != shard.fingerprint:
            raise DataError(
                f"the source of the DataFrame has changed during training: shard {shard.shard_id} "
                "holds other rows after it was rebuilt; train from a source that stays as it is, "
                "such as written Parquet, and avoid rand() and current_timestamp() without a cache"
            )
        key = (shard.shard_id, shard.path, split)
        if key not in self._open:
            self._open[key] = self._rows(shard, planned, split)
        return self._open[key]

    def train(
        self,
        shard: Shard,
        state: dict[str, Any],
        part: RoundPart,
        reporter: Reporter,
        hyperparameters: Mapping[str, float] | None = None,
    ) -> tuple[RoundOutcome, dict[str, Any]]:
        """Train a shard's steps from ``state``; what came of it, and what to report of it."""
        rows = self.open(shard, "train")
        outcome = self.replica.train(
            state, shard.shard_id, rows, part, reporter, hyperparameters=hyperparameters
        )
        self.rows[shard.shard_id] = reporter.rows
        names = ("loss_sum", "weight", "rows", "seconds", "spent", "label_sums", "logs")
        return outcome, {name: getattr(outcome, name) for name in names}

    def measure(self, shard: Shard, state: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
        """Measure ``state`` on a shard's validation rows: sums to report, and metrics' states."""
        (loss_sum, weight, *label_sums), metrics, logs = self.replica.evaluate(
            state, self.open(shard, "validation")
        )
        sums = {"loss_sum": loss_sum, "weight": weight, "label_sums": label_sums}
        return {**sums, "logs": logs}, metrics

    def record(self, shard: Shard, state: dict[str, Any]) -> dict[str, float]:
        """Return the history's record of ``state`` on a shard's validation rows alone."""
        return self.replica.record(*self.replica.evaluate(state, self.open(shard, "validation")))

    def _rows(self, shard: Shard, planned: Shard, split: Split) -> ShardRows:
        """The shard's rows of one kind; what the plan sets aside are validation rows."""
        if planned.num_rows == shard.num_rows:
            return self.source.open(self.plan, shard, split)
        from sparkdl.data.spool.mapped import MappedRows

        whole = self.source.open(self.plan, shard, "train")
        assert isinstance(whole, MappedRows), "fit has refused to set rows of other sources aside"
        first = planned.num_rows
        own = (0, first) if split == "train" else (first, shard.num_rows)
        return whole.part(*own)


def _warmed_up(place: RoundPlace, order: RoundOrder) -> Warm:
    def make(resources: contextlib.ExitStack) -> Warm:
        # Before torch allocates; memory that was given back between rounds must be mapped anew.
        resources.enter_context(tuned_allocator())
        return Warm(place, order)

    return KEPT.get((order.run_id, place.gpu_addresses), make)
