"""What does a task do in one round on plain Spark stages?

It trains or evaluates one shard, from the state that it is given, and yields what came of it. It
never raises for what the user's code does; it raises if the shard's files are not on this host,
so that Spark runs it elsewhere, unless it is a copy of a task that is at work where they are, as
speculation starts them: then it waits to be told that it is not needed. The process keeps module
and memory for the next round. Like `worker`, this knows nothing of Spark.
"""

from __future__ import annotations

import contextlib
import json
import time
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import cloudpickle

from sparkdl.comm.channel import Address, ChannelClient
from sparkdl.data.plan import RoundPart, Shard, Split, TrainPlan
from sparkdl.data.source import ShardSource
from sparkdl.data.spool.spool_source import SpoolSource
from sparkdl.errors import ClusterError, DataError, ShardLost
from sparkdl.runtime.hardware import hardware
from sparkdl.runtime.process import torch_threads, tuned_allocator
from sparkdl.runtime.versions import difference, versions
from sparkdl.worker.lifecycle import describe_failure
from sparkdl.worker.reporter import Reporter, captured_output

if TYPE_CHECKING:
    from sparkdl.data.source import ShardRows
    from sparkdl.storage.tensor_tree import Snapshot
    from sparkdl.train.round_replica import RoundReplica

_SILENT_SECONDS = 5.0
"""A task that works says so several times a second."""


@dataclass(frozen=True, kw_only=True)
class RoundOrder:
    """What the driver asks of every task of one job. Picklable and small."""

    run_id: str
    attempt: int
    """Number of the job in the run."""
    plan: TrainPlan
    """Each shard is a rank of its own."""
    payload: bytes
    """What `pack_payload` gave."""
    part: RoundPart | None
    """The steps to train; None: evaluate."""
    threads: int
    versions: Mapping[str, str]
    """The driver's, which every process compares with its own."""
    is_population: bool = False
    """Whether the state is what `memberworker` takes, and the work is its."""
    source: ShardSource = field(default_factory=SpoolSource)
    """Opens the shards."""


@dataclass(frozen=True, kw_only=True)
class RoundPlace:
    """Where a task finds itself."""

    shard: Shard
    """The shard as the shard table has it: its files are on this host."""
    gpu_addresses: tuple[str, ...]
    channel: Address | None


def pack_payload(config: Any, skeleton: bytes, blank_tensors: bytes) -> bytes:
    """What stays the same in all rounds; zeros, which the tensors mostly are, take no room."""
    return zlib.compress(cloudpickle.dumps((config, skeleton, blank_tensors)), 1)


def run(place: RoundPlace, order: RoundOrder, state: bytes) -> Iterator[tuple[str, bytes]]:
    """Do one shard's part of a round.

    Args:
        place: where this is.
        order: what to do.
        state: the round's state, as `checkpoint.format.encode` wrote it.

    Yields:
        ``("error", JSON)`` alone, or ``("result", JSON)`` and, after training on samples,
        ``("state", encoded {"weight", "state"})``; after an evaluation ``("metrics", bytes)``.

    Raises:
        ShardLost: the shard's files are not on this host.
    """
    shard = place.shard
    with contextlib.ExitStack() as stack:
        client = None
        if place.channel is not None:
            client = ChannelClient(place.channel, scope=f"{order.run_id}/{order.attempt}/")
            stack.enter_context(contextlib.closing(client))
        if not order.source.is_here(shard):
            _wait_for_the_other(client, order.attempt, shard.shard_id)
            raise ShardLost(f"shard {shard.shard_id} is not at {shard.path}")
        reporter = Reporter(client, attempt=order.attempt, rank=shard.shard_id)
        stack.enter_context(reporter)
        stack.enter_context(captured_output(reporter))
        try:
            results = _work(place, order, state, reporter)
            reporter.send({"kind": "done"})
        except BaseException as error:  # also SystemExit of the user's code; all of it is reported
            failure = describe_failure(error, shard.shard_id)
            reporter.send({"kind": "error", "failure": failure})
            results = [("error", json.dumps(failure).encode())]
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


def _work(
    place: RoundPlace, order: RoundOrder, state: bytes, reporter: Reporter
) -> list[tuple[str, bytes]]:
    warm = _warmed_up(place, order)
    from sparkdl.storage.checkpoint_format import decode

    reporter.rows = warm.rows.get(place.shard.shard_id, 0)
    if place.shard.shard_id not in warm.seen:
        warm.seen.add(place.shard.shard_id)
        reporter.send({"kind": "hardware", "hardware": warm.hardware})
    if order.is_population:
        from sparkdl.worker import population_member

        with torch_threads(order.threads):
            return population_member.work(warm, place.shard, order.part, state, reporter)
    tree = decode(state, "the round's state")
    with torch_threads(order.threads):
        if order.part is None:
            return _evaluate(warm, place, tree, reporter)
        return _train(warm, place, order.part, tree, reporter)


def _train(
    warm: Warm,
    place: RoundPlace,
    part: RoundPart,
    tree: dict[str, Any],
    reporter: Reporter,
) -> list[tuple[str, bytes]]:
    from sparkdl.storage.checkpoint_format import encode
    from sparkdl.storage.tensor_tree import snapshot

    reporter.phase("train")
    shard = place.shard
    outcome = warm.replica.train(tree, shard.shard_id, warm.open(shard, "train"), part, reporter)
    warm.rows[shard.shard_id] = reporter.rows
    report = {
        "loss_sum": outcome.loss_sum,
        "weight": outcome.weight,
        "rows": outcome.rows,
        "seconds": outcome.seconds,
        "spent": outcome.spent,
        "label_sums": outcome.label_sums,
    }
    results = [("result", json.dumps(report).encode())]
    if outcome.weight > 0:
        sent = {"weight": outcome.weight, "state": warm.replica.moving(outcome.state)}
        warm.sent = snapshot(sent, warm.sent)
        results.append(("state", b"".join(encode(warm.sent))))
    return results


def _evaluate(
    warm: Warm,
    place: RoundPlace,
    tree: dict[str, Any],
    reporter: Reporter,
) -> list[tuple[str, bytes]]:
    reporter.phase("evaluate")
    (loss_sum, weight, *label_sums), metrics = warm.replica.evaluate(
        tree, warm.open(place.shard, "validation")
    )
    report = {"loss_sum": loss_sum, "weight": weight, "label_sums": label_sums}
    return [("result", json.dumps(report).encode()), ("metrics", metrics)]


class Warm:
    """What a process keeps between the rounds of a run."""

    def __init__(self, place: RoundPlace, order: RoundOrder) -> None:
        import os

        from sparkdl.runtime.hardware import choose_device
        from sparkdl.serialization.packed_module import PackedModule, unpack
        from sparkdl.train.round_replica import RoundReplica

        problem = difference(order.versions, versions(), f"shard {place.shard.shard_id}'s worker")
        if problem is not None:
            raise ClusterError(problem)
        config, skeleton, tensors = cloudpickle.loads(zlib.decompress(order.payload))
        device = choose_device(config.device, place.gpu_addresses, 0, os.environ)
        module = unpack(PackedModule(digest="", skeleton=skeleton, tensors=tensors))
        self.hardware = hardware(device, order.threads)
        self.run_id = order.run_id
        self.gpu_addresses = place.gpu_addresses
        self.plan = order.plan
        self.source = order.source
        self.replica: RoundReplica = RoundReplica(module, config, order.plan, device)
        self.sent: Snapshot | None = None
        """What was sent last: its memory is used again."""
        self.rows: dict[int, int] = {}
        """Samples that this process has trained on, by shard; for the progress bar only."""
        self.seen: set[int] = set()
        """Shards that this process has worked on."""
        self._open: dict[tuple[int, str, str], ShardRows] = {}

    def open(self, shard: Shard, split: Split) -> ShardRows:
        """Open a shard, or find it open.

        Raises:
            DataError: the shard holds other rows than when the run began.
        """
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

    def _rows(self, shard: Shard, planned: Shard, split: Split) -> ShardRows:
        """The shard's rows of one kind; what the plan sets aside are validation rows."""
        if planned.num_rows == shard.num_rows:
            return self.source.open(self.plan, [shard], split)
        from sparkdl.data.spool.mapped import MappedRows

        whole = self.source.open(self.plan, [shard], "train")
        assert isinstance(whole, MappedRows), "fit has refused to set rows of other sources aside"
        first = planned.num_rows
        own = (0, first) if split == "train" else (first, shard.num_rows)
        return whole.part(*own).begin()


_warm: list[Warm] = []
"""The newest run's; at most one, so that a run's memory goes when the next one begins."""
_tuned = contextlib.ExitStack()
"""Keeps the allocator tuned while a run is warm: memory that was given back must be mapped anew."""


def _warmed_up(place: RoundPlace, order: RoundOrder) -> Warm:
    if not (
        _warm and _warm[0].run_id == order.run_id and _warm[0].gpu_addresses == place.gpu_addresses
    ):
        cool_down()  # before another is built, so that memory holds one only
        _tuned.enter_context(tuned_allocator())  # before torch allocates
        _warm.append(Warm(place, order))
    return _warm[0]


def cool_down() -> None:
    """Give back what this process keeps for the next round."""
    _warm.clear()
    _tuned.close()
