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
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import cloudpickle

from sparkdl.data.plan import TrainPlan, make_plan
from sparkdl.errors import ClusterError
from sparkdl.explain import measure_worker, trials
from sparkdl.explain.calibrate import found_by
from sparkdl.explain.choose import BatchSizes, Choice
from sparkdl.explain.cost_model import Calibration, Compute, Gang
from sparkdl.explain.measure_worker import SampleOrder
from sparkdl.report.live.progress import SilentView
from sparkdl.runtime.activity import doing
from sparkdl.serialization.packed_module import pack
from sparkdl.spark.cluster.attempt import Attempt, Rows
from sparkdl.spark.cluster.cluster_info import require_gang_support
from sparkdl.spark.cluster.gang import Work
from sparkdl.spark.cluster.link import Link, open_link
from sparkdl.spark.cluster.slots import Slots, plan_slots, threads_per_worker, wait_again
from sparkdl.spark.cluster.supervisor import persistently, supervise
from sparkdl.spark.explain.estimate import Found
from sparkdl.spark.explain.measure_rounds import measure_rounds
from sparkdl.spark.fit.check_request import CheckedRequest
from sparkdl.spark.frames.frame_sample import Sample
from sparkdl.spark.frames.row_table import RowTable
from sparkdl.spark.frames.shard_table import ShardTable
from sparkdl.spark.run.run import Run
from sparkdl.spark.session.compat import conf
from sparkdl.worker import training

if TYPE_CHECKING:
    from sparkdl.comm.compression.compression import Compression

_STEPS = 6
"""Batches that each rank shall have in the repeated sample."""
_MOST_ROWS, _MOST_BYTES = 400_000, 128 << 20
"""Of the repeated sample."""
_MOST_RANKS = 16
"""Of the gang that measures."""
_RANKS_IN_THE_DARK = 2
"""Tasks at a time, where the cluster does not tell how many it has room for."""

Place = tuple[int, int]
"""Workers of a machine that are at work at the same time, and the threads of each."""


def num_ranks(checked: CheckedRequest) -> int:
    """Ranks that measure: as many as there are slots, up to a limit."""
    slots = checked.slots
    if slots.total is not None:
        return min(_MOST_RANKS, slots.total)
    return min(_RANKS_IN_THE_DARK if checked.in_rounds else _MOST_RANKS, slots.num_workers)


def why_no_gang(checked: CheckedRequest) -> str | None:
    """Why no gang can be measured, as a sentence; None if one can."""
    try:
        require_gang_support(checked.slots.cluster, partial(conf, checked.spark), checked.settings)
    except ClusterError as error:
        return f"this cluster runs no gang: {error}"
    if checked.in_rounds and checked.slots.total is None:
        return (
            "the cluster does not tell how many slots it has, so only rounds were measured, with "
            f"{num_ranks(checked)} task(s) at a time; for gangs as well set "
            "spark.executor.instances and spark.executor.cores"
        )
    return None


def measure(
    checked: CheckedRequest,
    found: Found,
    compressions: Sequence[Compression],
    seconds: float,
    stack: contextlib.ExitStack,
) -> Calibration:
    """Measure with as many ranks as there are slots, up to a limit.

    Args:
        checked: the request.
        found: the sample and its columns; without a sample the source's rows are used.
        compressions: what is timed besides plain sums.
        seconds: about how long one measurement may take.
        stack: removes everything in the end.

    Raises:
        WorkerError: the user's code failed on a worker.
        SparkDLError: as in a fit.
    """
    ranks, run_id = num_ranks(checked), uuid.uuid4().hex[:12]
    request = checked.request
    tasks = replace(
        checked.slots,
        num_workers=ranks,
        threads=request.cpus_per_worker or checked.slots.cluster.task_threads,
        is_gang=False,
    )
    is_gang = why_no_gang(checked) is None
    slots = tasks
    if is_gang:
        slots = plan_slots(
            checked.spark, checked.settings, num_workers=ranks,
            cpus_per_worker=request.cpus_per_worker, gpus_per_worker=request.gpus_per_worker,
        )  # fmt: skip
    began = time.perf_counter()
    link = _link(checked, slots, run_id, stack)
    link_seconds = time.perf_counter() - began
    spool = _spool(checked, found, slots, f"{run_id}-1", 1, stack)
    few_seconds, row_seconds = spool.seconds, 0.0
    if found.sample is not None:  # timed by the difference to the sample alone
        times = _repeats(found.sample, ranks * checked.config.batch_size)
        spool = _spool(checked, found, slots, f"{run_id}-2", times, stack)
        more_rows = (times - 1) * found.sample.num_rows
        row_seconds = max(0.0, spool.seconds - few_seconds) * ranks / more_rows
        row_seconds += found.sample.read_row_seconds
    run = _run(checked, spool, slots, link, run_id)
    gang, levels, task_levels = None, {}, {}
    next_attempt = 0
    if is_gang:
        of_gang, of_tasks = _places(tasks)
        places = tuple(dict.fromkeys([*of_gang, *of_tasks]))
        gang, next_attempt = _measure_gang(run, places, compressions, seconds)
        levels = {place[0]: gang.levels[place] for place in of_gang}
        task_levels = {place[0]: gang.levels[place] for place in of_tasks}
    doing("measuring rounds of averaging")
    stages = measure_rounds(replace(run, slots=tasks), next_attempt)
    if gang is None:
        row = stages.step_seconds / checked.config.batch_size
        task_levels[1] = Compute(threads=tasks.threads, fixed_seconds=0.0, row_seconds=row)
    return Calibration(
        gang=gang,
        levels=levels,
        task_levels=task_levels,
        stages=stages,
        link_seconds=link_seconds,
        spool_seconds=few_seconds,
        spool_row_seconds=row_seconds,
    )


def try_out(
    checked: CheckedRequest,
    found: Found,
    sizes: BatchSizes | None,
    *,
    tries_rates: bool,
    workers_per_machine: int,
    seconds: float,
    stack: contextlib.ExitStack,
) -> list[Choice]:
    """Have one worker try sizes of batches, then learning rates; see `trials`.

    Args:
        checked: the request.
        found: the sample and its columns; without a sample the source's rows are used.
        sizes: the sizes; None: that of the request holds.
        tries_rates: whether rates are tried.
        workers_per_machine: among whom the memory will be divided.
        seconds: about how long one measurement may take.
        stack: removes everything in the end.

    Raises:
        WorkerError: the user's code failed on the worker.
        SparkDLError: as in a fit.
    """
    request, run_id = checked.request, uuid.uuid4().hex[:12]
    slots = plan_slots(
        checked.spark, checked.settings, num_workers=1,
        cpus_per_worker=request.cpus_per_worker, gpus_per_worker=request.gpus_per_worker,
    )  # fmt: skip
    slots = replace(slots, threads=checked.slots.threads)  # those that it will have in the fit
    link = _link(checked, slots, run_id, stack)
    batch_size = checked.config.batch_size if sizes is None else sizes.most
    times = 1 if found.sample is None else _repeats(found.sample, batch_size)
    spool = _spool(checked, found, slots, run_id, times, stack)
    answers = _asked(
        _run(checked, spool, slots, link, run_id), trials.run, trials.TrialOrder,
        sizes=sizes, workers_per_machine=workers_per_machine, tries_rates=tries_rates,
        seconds=seconds,
    )  # fmt: skip
    return [Choice(**choice) for choice in answers.reports[0]]


def _link(checked: CheckedRequest, slots: Slots, run_id: str, stack: contextlib.ExitStack) -> Link:
    return open_link(
        checked.spark,
        slots,
        checked.settings,
        checkpoint_dir=checked.config.checkpoint.directory,
        run_id=run_id,
        stack=stack,
    )


def _run(checked: CheckedRequest, spool: _Spool, slots: Slots, link: Link, run_id: str) -> Run:
    return Run(
        spark=checked.spark,
        run_id=run_id,
        run_key=run_id,
        plan=spool.plan,
        config=measure_worker.for_measuring(checked.config),
        module=checked.module,
        packed=pack(checked.module),
        objective=checked.objective,
        table=spool.table,
        slots=slots,
        link=link,
        settings=checked.settings,
        view=SilentView(),
        max_restarts=checked.request.max_restarts,
    )


class _Spool(NamedTuple):
    """Rows to measure on."""

    table: RowTable
    plan: TrainPlan
    seconds: float
    """What it took."""


def _spool(
    checked: CheckedRequest,
    found: Found,
    slots: Slots,
    run_id: str,
    times: int,
    stack: contextlib.ExitStack,
) -> _Spool:
    """A shard for each worker, of the sample so many times over, or of the source."""
    spec = replace(
        checked.table_spec, num_shards=slots.num_workers, shares=None, is_gang=slots.is_gang,
        profile=slots.profile,
    )  # fmt: skip
    table: RowTable
    if found.sample is None:
        table = checked.data.table(spec, run_id)
    else:
        spec = replace(spec, columns=found.sample.prepared, validation=None)
        table = ShardTable(found.sample.repeated(times), spec, run_id=run_id)
    stack.callback(table.close)
    doing("writing a sample of the rows for the workers")
    began = time.perf_counter()
    spooled = persistently(
        table.collect,
        max_restarts=checked.request.max_restarts,
        prepare=partial(wait_again, checked.spark, slots, checked.settings),
    )
    seconds = time.perf_counter() - began
    plan = make_plan(
        columns=found.columns,
        shards=[replace(part.shard, num_validation_rows=0) for part in spooled],
        world_size=len(spooled),
        batch_size=checked.config.batch_size,
        epochs=1,
    )
    return _Spool(table, plan, seconds)


def _repeats(sample: Sample, global_batch: int) -> int:
    """How often the sample is repeated: for some steps, and so that spooling it takes a while."""
    most = min(_MOST_ROWS, int(_MOST_BYTES / max(1.0, sample.row_bytes)))
    wanted = min(max(_STEPS * global_batch, most // 2), most)
    return max(2, -(-wanted // sample.num_rows))


def _places(tasks: Slots) -> tuple[list[Place], list[Place]]:
    """Those of gangs and of tasks of rounds: with all ranks, and with one on each machine.

    The threads of a task do not depend on how many there are.
    """
    cluster, cpus = tasks.cluster, tasks.cpus_per_worker
    executors = min(tasks.num_workers, max(1, cluster.num_executors or 1))
    numbers = dict.fromkeys((tasks.num_workers, executors))
    gang = [(-(-n // executors), threads_per_worker(cluster, n, cpus)) for n in numbers]
    return gang, [(per_machine, tasks.threads) for per_machine, _ in gang]


def _measure_gang(
    run: Run, places: tuple[Place, ...], compressions: Sequence[Compression], seconds: float
) -> tuple[Gang, int]:
    """What the gang has measured, and the number of the next attempt on the run's link."""
    answers = _asked(
        run, measure_worker.run, measure_worker.MeasureOrder,
        places=places, compressions=tuple(compressions), seconds=seconds,
    )  # fmt: skip
    return found_by(answers.reports, places, answers.seconds), answers.restarts + 1


class _Answers(NamedTuple):
    """What came of a gang."""

    reports: list[Any]
    """By rank."""
    restarts: int
    seconds: float
    """What the last submission took."""


def _asked(run: Run, work: Work, kind: type[SampleOrder], **asked: Any) -> _Answers:
    """Have a gang do ``work``; ``asked`` is what its order has besides that of all."""
    weights = run.link.send(
        training.INITIAL,
        run.packed.tensors,
        what="the module's weights have",
        remedy="call explain(df, calibrate=False), set Params that are 'auto' to values of your "
        "own, or submit the job inside the cluster's network",
    )
    submitted = 0.0

    def submit(attempt: Attempt) -> Callable[[], Rows]:
        nonlocal submitted
        submitted = time.perf_counter()
        order = run.gang_order(
            kind,
            attempt=attempt.number,
            run_key=run.run_key,
            device=run.config.device,
            plan=run.plan,
            payload=cloudpickle.dumps((run.config, run.packed.skeleton)),
            weights=weights,
            source=run.table.reader,
            resume_path=None,
            **asked,
        )
        return run.gang_job(run.table.df, work, order)

    result = supervise(run, submit, once_there="measuring steps and messages")
    taken = time.perf_counter() - submitted
    reports = {rank: json.loads(data) for rank, kind, data in result.rows if kind == "result"}
    return _Answers([reports[rank] for rank in sorted(reports)], result.restarts, taken)
