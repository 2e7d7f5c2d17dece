"""Measures the numbers of the cost model on a cluster, with a small gang and some rounds.

Spools a repeated sample, has a gang of the real executors measure steps and exchanges on it
(`measure_worker`), and runs some rounds on plain Spark stages. All of it takes seconds, whatever
the size of the data.
"""

from __future__ import annotations

import contextlib
import json
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import cloudpickle

from sparkdl.data.plan import Column, TrainPlan, make_plan
from sparkdl.errors import ClusterError
from sparkdl.explain import measure_worker
from sparkdl.explain.calibrate import GangFound, found_by
from sparkdl.explain.cost_model import Calibration, Compute, Fixed, Level
from sparkdl.report.live.progress import SilentView
from sparkdl.serialization.packed_module import PackedModule, pack
from sparkdl.spark.cluster.cluster_info import ClusterInfo, require_gang_support
from sparkdl.spark.cluster.launch import Launch
from sparkdl.spark.cluster.link import Link, open_link
from sparkdl.spark.cluster.slots import Slots, threads_per_worker
from sparkdl.spark.cluster.supervisor import supervise
from sparkdl.spark.explain.measure_rounds import RoundsFound, RoundsToMeasure, measure_rounds
from sparkdl.spark.fit.check_request import CheckedRequest
from sparkdl.spark.frames.frame_sample import Sample
from sparkdl.spark.frames.row_table import RowTable, SpooledShard, TableSpec
from sparkdl.spark.frames.shard_table import ShardTable
from sparkdl.spark.run.run import FitRequest
from sparkdl.spark.session.compat import conf
from sparkdl.worker import training

if TYPE_CHECKING:
    from torch import nn

    from sparkdl.comm.compression.compression import Compression


_STEPS_OF_A_RANK = 6
"""Batches that each rank shall have in the repeated sample."""
_MOST_ROWS, _MOST_BYTES = 400_000, 128 << 20
"""Of the repeated sample."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Where measurements are made."""

    checked: CheckedRequest
    request: FitRequest
    info: ClusterInfo
    module: nn.Module
    """As the driver has tried it: lazy parameters have shapes."""
    columns: Sequence[Column]
    slots: Slots
    """Of the gang that measures."""
    seconds: float
    no_gang: str | None
    """Why no gang is measured, as a sentence; None: one is."""

    @property
    def num_executors(self) -> int:
        """Executors that ranks are on."""
        return min(self.slots.num_workers, max(1, self.info.num_executors or 1))

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """Three sizes of batches, the one that was asked for first."""
        size = self.request.config.batch_size
        return tuple(dict.fromkeys((size, max(1, size // 2), max(1, size // 4))))


def table_of(
    setup: Setup, sample: Sample | None, num_shards: int, run_id: str, stack: contextlib.ExitStack
) -> tuple[RowTable, Fixed]:
    """So many shards with rows for the steps of a rank, and what a spool and its rows take."""
    if sample is None:
        spec = replace(setup.checked.table_spec, num_shards=num_shards, shares=None)
        return setup.checked.data.table(spec, run_id), Fixed()
    most = min(_MOST_ROWS, int(_MOST_BYTES / max(1.0, sample.row_bytes)))
    wanted = num_shards * _STEPS_OF_A_RANK * setup.request.config.batch_size
    is_timed = num_shards == setup.slots.num_workers
    if is_timed:  # by the difference to the sample alone, for which there must be one
        wanted = max(wanted, most // 2)
    times = max(1, -(-min(wanted, most) // sample.num_rows))
    few_seconds = 0.0
    if is_timed:
        _, few_seconds = _spool(setup, sample, 1, num_shards, f"{run_id}-1", stack)
    table, seconds = _spool(setup, sample, times, num_shards, f"{run_id}-2", stack)
    rows = (times - 1) * sample.num_rows
    slot_seconds = max(0.0, seconds - few_seconds) * num_shards / rows if rows else 0.0
    return table, Fixed(
        spool_seconds=few_seconds, spool_row_seconds=slot_seconds + sample.read_row_seconds
    )


def _spool(
    setup: Setup,
    sample: Sample,
    times: int,
    num_shards: int,
    run_id: str,
    stack: contextlib.ExitStack,
) -> tuple[ShardTable, float]:
    """The sample's rows, so many times over, in shards; and the seconds that it took."""
    spec = TableSpec(
        columns=sample.prepared,
        num_shards=num_shards,
        profile=setup.slots.profile,
        is_gang=setup.no_gang is None,
    )
    table = ShardTable(sample.repeated(times), spec, run_id=run_id)
    stack.callback(table.close)
    began = time.perf_counter()
    table.collect()
    return table, time.perf_counter() - began


def plan_of(setup: Setup, shards: Sequence[SpooledShard]) -> TrainPlan:
    """The plan of what is measured on; validation rows are left aside."""
    return make_plan(
        columns=setup.columns,
        shards=[replace(part.shard, num_validation_rows=0) for part in shards],
        world_size=len(shards),
        batch_size=setup.request.config.batch_size,
        epochs=1,
    )


MOST_RANKS = 16
"""Of the gang that measures."""
_RANKS_IN_THE_DARK = 2
"""Of rounds that are measured where the number of slots is not known."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What was measured on the cluster."""

    gang: GangFound | None
    """None: the cluster cannot run a gang, and why is in ``no_gang``."""
    no_gang: str | None
    calibration: Calibration
    ranks: int


def num_ranks(slots: Slots, *, in_rounds: bool) -> int:
    """Ranks that measure: as many as there are slots, up to a limit."""
    if slots.total is not None:
        return min(MOST_RANKS, slots.total)
    return min(_RANKS_IN_THE_DARK if in_rounds else MOST_RANKS, slots.num_workers)


def why_no_gang(checked: CheckedRequest, info: ClusterInfo) -> str | None:
    """Why no gang can be measured, as a sentence; None if one can."""
    try:
        require_gang_support(info, partial(conf, checked.spark), checked.settings)
    except ClusterError as error:
        return f"this cluster runs no gang: {error}"
    if checked.in_rounds and checked.slots.total is None:
        return (
            "the cluster does not tell how many slots it has, so only rounds were measured, with "
            f"{num_ranks(checked.slots, in_rounds=True)} task(s) at a time; for gangs as well set "
            "spark.executor.instances and spark.executor.cores"
        )
    return None


def measure(
    setup: Setup,
    sample: Sample | None,
    compressions: Sequence[Compression],
    stack: contextlib.ExitStack,
) -> Measured:
    """Measure.

    Args:
        setup: what to measure.
        sample: rows of the DataFrame; None: those of the source are used.
        compressions: what is timed besides plain sums.
        stack: removes everything in the end.

    Raises:
        WorkerError: the user's code failed on a worker.
        SparkDLError: as in a fit.
    """
    checked, run_id = setup.checked, uuid.uuid4().hex[:12]
    no_gang = setup.no_gang
    began = time.perf_counter()
    link = open_link(
        checked.spark,
        replace(setup.slots, is_gang=no_gang is None),
        checked.settings,
        checkpoint_dir=setup.request.config.checkpoint.directory,
        run_id=run_id,
        stack=stack,
    )
    link_seconds = time.perf_counter() - began
    ranks = setup.slots.num_workers
    table, fixed = table_of(setup, sample, ranks, run_id, stack)
    plan, packed = plan_of(setup, table.collect()), pack(setup.module)
    gang, launch_seconds = None, 0.0
    if no_gang is None:
        gang, launch_seconds = _measure_gang(setup, link, table, plan, packed, compressions, run_id)
    rounds = {ranks: _measure_rounds(setup, link, table, plan, packed, run_id)}
    if ranks > 1:  # the first are with all tasks, as they start Spark's workers
        run_id = f"{run_id}-alone"
        alone, _ = table_of(setup, sample, 1, run_id, stack)
        plan = plan_of(setup, alone.collect())
        rounds[1] = _measure_rounds(setup, link, alone, plan, packed, run_id)
    calibration = Calibration(
        levels=(),
        stage_levels=_stage_levels(setup, gang, rounds),
        network=None,
        stages={tasks: found.stages for tasks, found in sorted(rounds.items())},
        fixed=replace(
            fixed,
            start_seconds=link_seconds + launch_seconds,
            stage_start_seconds=link_seconds + rounds[ranks].first_seconds,
        ),
    )
    if gang is not None:
        calibration = replace(
            calibration,
            levels=_those(gang.levels, gang_places(setup)),
            network=gang.network,
            device=gang.device,
            copy_byte_seconds=gang.copy_byte_seconds,
            codec_seconds=gang.codec_seconds,
        )
    return Measured(gang=gang, no_gang=no_gang, calibration=calibration, ranks=ranks)


def _measure_rounds(
    setup: Setup,
    link: Link,
    table: RowTable,
    plan: TrainPlan,
    packed: PackedModule,
    run_id: str,
) -> RoundsFound:
    """Rounds with a task for every shard of the table."""
    return measure_rounds(
        RoundsToMeasure(
            table=table,
            plan=plan,
            config=setup.request.config,
            module=setup.module,
            packed=packed,
            link=link,
            slots=setup.slots,
            threads=task_threads(setup),
            run_id=run_id,
        )
    )


# --- a gang -------------------------------------------------------------------------------------


def _measure_gang(
    setup: Setup,
    link: Link,
    table: RowTable,
    plan: TrainPlan,
    packed: PackedModule,
    compressions: Sequence[Compression],
    run_id: str,
) -> tuple[GangFound, float]:
    """What the ranks have found, and what their launch and end took besides."""
    run = Launch(
        spark=setup.checked.spark,
        run_id=run_id,
        slots=setup.slots,
        link=link,
        settings=setup.checked.settings,
        view=SilentView(),
        max_restarts=setup.request.max_restarts,
    )
    trained = [p for p in setup.module.parameters() if p.requires_grad]
    gradient_bytes = sum(p.numel() * p.element_size() for p in trained)
    order = run.gang_order(
        measure_worker.MeasureOrder,
        attempt=0,
        run_key=run_id,
        device=setup.request.config.device,
        plan=plan,
        payload=cloudpickle.dumps((setup.request.config, packed.skeleton)),
        weights=link.send(
            training.INITIAL,
            packed.tensors,
            what="the module's weights have",
            remedy="call explain(df, calibrate=False), or submit the job inside the cluster's "
            "network",
        ),
        levels=tuple(_levels(setup)),
        compressions=tuple(compressions),
        shapes=tuple(tuple(p.shape) for p in trained),
        gradient_bytes=gradient_bytes,
        seconds=setup.seconds,
        source=table.reader,
        resume_path=None,
    )
    ends: list[float] = []

    def submit(attempt: int) -> Any:
        ends.append(time.perf_counter())
        return run.gang_job(table.df, measure_worker.run, replace(order, attempt=attempt))

    result = supervise(run, submit)
    seconds = time.perf_counter() - ends[-1]
    reports = {rank: json.loads(data) for rank, kind, data in result.rows if kind == "result"}
    found = found_by([reports[rank] for rank in sorted(reports)], gradient_bytes)
    return found, max(0.0, seconds - found.worker_seconds)


def _levels(setup: Setup) -> list[measure_worker.LevelOrder]:
    """Who works at the same time, with which threads; of one level batches of several sizes."""
    sizes = setup.batch_sizes
    places = [*gang_places(setup), *task_places(setup)]
    return [
        measure_worker.LevelOrder(*place, sizes if number == 0 else sizes[:1])
        for number, place in enumerate(dict.fromkeys(places))
    ]


def gang_places(setup: Setup) -> list[tuple[int, int]]:
    """Workers on a machine and their threads: with all ranks, and with one on each machine."""
    ranks, executors = setup.slots.num_workers, setup.num_executors
    cpus = setup.request.cpus_per_worker
    return [
        (-(-workers // executors), threads_per_worker(setup.info, workers, cpus))
        for workers in dict.fromkeys((ranks, executors))
    ]


def task_places(setup: Setup) -> list[tuple[int, int]]:
    """The same of tasks of rounds, whose threads do not depend on how many there are."""
    per_node = -(-setup.slots.num_workers // setup.num_executors)
    return [(1, task_threads(setup)), (per_node, task_threads(setup))]


def task_threads(setup: Setup) -> int:
    """Threads of a task of a round; see `slots.plan_slots`."""
    return setup.request.cpus_per_worker or setup.info.task_threads


def _stage_levels(
    setup: Setup, gang: GangFound | None, rounds: Mapping[int, RoundsFound]
) -> tuple[Level, ...]:
    """Levels of tasks; without a gang the steps of the rounds are all that is known."""
    if gang is not None:
        return _those(gang.levels, task_places(setup))
    rows, executors = setup.request.config.batch_size, max(1, setup.info.num_executors or 1)
    return tuple(
        Level(
            ranks_per_node=-(-tasks // min(tasks, executors)),
            threads=task_threads(setup),
            compute=Compute(fixed_seconds=0.0, row_seconds=found.step_seconds / rows),
        )
        for tasks, found in sorted(rounds.items())
    )


def _those(levels: Sequence[Level], places: Sequence[tuple[int, int]]) -> tuple[Level, ...]:
    """The levels of ``places``; all, if none of these could be measured."""
    found = tuple(one for one in levels if (one.ranks_per_node, one.threads) in places)
    return found or tuple(levels)
