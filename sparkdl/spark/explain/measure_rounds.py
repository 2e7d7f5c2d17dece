"""Runs and times some rounds on plain Spark stages: what they cost beyond their steps."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from sparkdl.data.plan import RoundPart, TrainPlan
from sparkdl.errors import ClusterError
from sparkdl.explain.cost_model import Stages
from sparkdl.explain.measure_worker import for_measuring
from sparkdl.runtime.versions import versions
from sparkdl.spark.cluster.attempt import verdict
from sparkdl.spark.cluster.supervisor import Attempt
from sparkdl.spark.rounds.round_stages import PATH, STATE, merge_states, run_stage
from sparkdl.worker.round_task import RoundOrder, pack_payload, train_or_evaluate

if TYPE_CHECKING:
    from torch import nn

    from sparkdl.config import TrainConfig
    from sparkdl.serialization.packed_module import PackedModule
    from sparkdl.spark.cluster.link import Link
    from sparkdl.spark.cluster.slots import Slots
    from sparkdl.spark.frames.shard_table import ShardTable
    from sparkdl.spark.frames.source_table import SourceTable

_ROUNDS = {1: 4, 5: 2}
"""Steps of rounds that are timed, and how many of each; the very first starts processes."""
_JOBS = 3


@dataclass(frozen=True, kw_only=True)
class TimedRound:
    """One round."""

    seconds: float
    """With the merge on the driver."""
    step_seconds: float
    """Of the slowest task's steps."""
    num_bytes: int
    """Of the states of all tasks."""


@dataclass(frozen=True, kw_only=True)
class RoundsFound:
    """What rounds have shown."""

    stages: Stages
    step_seconds: float
    """Of a task."""
    first_seconds: float
    """What the first round takes more than others."""


@dataclass(frozen=True, kw_only=True)
class RoundsToMeasure:
    """What is run."""

    table: ShardTable | SourceTable
    plan: TrainPlan
    config: TrainConfig
    module: nn.Module
    packed: PackedModule
    link: Link
    slots: Slots
    threads: int
    run_id: str

    def run(self, number: int, num_steps: int, state: Any) -> tuple[TimedRound, Any]:
        """One round from ``state``; what it took, and the state that came of it.

        Raises:
            WorkerError: the user's code failed.
            SparkDLError: what a task raised on purpose.
        """
        from sparkdl.storage.checkpoint_format import encode
        from sparkdl.storage.tensor_tree import snapshot

        order = RoundOrder(
            run_id=f"{self.run_id}-rounds",
            attempt=number,
            plan=self.plan,
            payload=pack_payload(
                for_measuring(self.config), self.packed.skeleton, self.packed.tensors
            ),
            part=RoundPart(epoch=0, step_in_epoch=0, step=0, num_steps=num_steps),
            threads=self.threads,
            versions=versions(),
            source=self.table.reader,
            work=train_or_evaluate,
        )
        began = time.perf_counter()
        data = b"".join(encode(snapshot(state)))
        rows = run_stage(
            self.table.df,
            order,
            data,
            depth=1,
            channel=self.link.channel,
            profile=self.slots.profile,
        )
        self.table.note({payload.decode() for _, kind, payload in rows if kind == PATH})
        _raise_failures(rows)
        payloads = [payload for _, kind, payload in rows if kind == STATE]
        _, state = merge_states(payloads)
        seconds = time.perf_counter() - began
        reports = [json.loads(report) for _, kind, report in rows if kind == "result"]
        found = TimedRound(
            seconds=seconds,
            step_seconds=max(report["seconds"] for report in reports),
            num_bytes=sum(map(len, payloads)),
        )
        return found, state


def measure_rounds(rounds: RoundsToMeasure) -> RoundsFound:
    """Run some rounds, and jobs that do nothing; raises what `RoundsToMeasure.run` does."""
    state: Any = {"model": rounds.module.state_dict()}
    timed: dict[int, list[TimedRound]] = {steps: [] for steps in _ROUNDS}
    numbers = [steps for steps, count in _ROUNDS.items() for _ in range(count)]
    most = rounds.plan.steps_per_epoch
    for number, num_steps in enumerate(numbers):
        found, state = rounds.run(number, min(num_steps, most), state)
        timed[num_steps].append(found)
    return stages_of(timed, _empty_job_seconds(rounds.table), most=most)


def stages_of(
    timed: Mapping[int, Sequence[TimedRound]], empty_seconds: float, *, most: int
) -> RoundsFound:
    """The costs of a round by rounds of two lengths; the very first of them is left out.

    Of what they take beyond their steps the least counts: the driver's JVM is compiling what it
    runs, and becomes faster by the round, as in a fit.

    Args:
        timed: rounds by number of steps.
        empty_seconds: a job that does nothing.
        most: steps that an epoch has, which a round cannot exceed.
    """
    few, many = sorted(timed)
    first, *others = timed[few]
    short = statistics.median(one.step_seconds for one in others)
    long = statistics.median(one.step_seconds for one in timed[many])
    more = min(many, most) - few
    step = max(0.0, long - short) / more if more > 0 else short
    beyond = [one.seconds - few * step for one in others]
    beyond += [one.seconds - min(many, most) * step for one in timed[many]]
    overhead = max(0.0, min(beyond))
    carried = max(0.0, overhead - empty_seconds) / max(1, others[-1].num_bytes)
    return RoundsFound(
        stages=Stages(fixed_seconds=min(overhead, empty_seconds), byte_seconds=carried),
        step_seconds=step,
        first_seconds=max(0.0, first.seconds - few * step - overhead),
    )


def _raise_failures(rows: Sequence[tuple[int, str, bytes]]) -> None:
    """Raise what a task has reported, as a fit would."""
    failures = [json.loads(data) for _, kind, data in rows if kind == "error"]
    if not failures:
        return
    attempt = Attempt(number=0, world_size=len(rows), submitted=0)
    attempt.failures.extend(failures)
    reason = verdict(attempt)
    raise ClusterError(f"a round that explain measures failed: {reason}; try again")


def _empty_job_seconds(table: ShardTable | SourceTable) -> float:
    """A job over the shards whose tasks do nothing; the median of some."""
    found = []
    for _ in range(_JOBS):
        began = time.perf_counter()
        table.df.mapInArrow(_count, "rows long").collect()
        found.append(time.perf_counter() - began)
    return statistics.median(found)


def _count(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    yield pa.RecordBatch.from_pydict({"rows": [sum(batch.num_rows for batch in batches)]})
