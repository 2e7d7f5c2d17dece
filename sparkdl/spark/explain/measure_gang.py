"""Measures the numbers of the cost model on a cluster, with a small gang and some rounds.

All of it takes seconds, whatever the size of the data: the rows are a repeated sample.
"""

from __future__ import annotations

import contextlib
import json
import logging
import statistics
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pyarrow as pa
from pyspark.sql import SparkSession
from torch import nn

from sparkdl.comm import compression
from sparkdl.comm.compression.compression import Compression
from sparkdl.comm.file_chunks import JobResults
from sparkdl.data.plan import RoundPart, make_plan
from sparkdl.errors import ClusterError, ConfigError
from sparkdl.explain import measure_worker, trials
from sparkdl.explain.calibrate import found_by
from sparkdl.explain.comparison import Choice
from sparkdl.explain.cost_model import Calibration, Compute, Gang, StageCosts
from sparkdl.explain.predict_times import Predictor
from sparkdl.explain.trials import BatchSizes
from sparkdl.report.live.progress import SilentView
from sparkdl.runtime.activity import doing
from sparkdl.serialization.travel.packed_module import pack
from sparkdl.serialization.travel.pickling import dumps
from sparkdl.spark.cluster.attempt import Attempt
from sparkdl.spark.cluster.cluster_info import ClusterInfo, require_gang_support
from sparkdl.spark.cluster.link import Link, open_link
from sparkdl.spark.cluster.slots import Slots, plan_slots, threads_per_worker, wait_again
from sparkdl.spark.cluster.supervisor import persistently, supervise
from sparkdl.spark.explain.estimate import Found
from sparkdl.spark.fit.check_request import CheckedRequest, check_elasticity, check_shards
from sparkdl.spark.fit.check_rows import replica_bytes
from sparkdl.spark.fit.check_training import check_sync_batch_norm
from sparkdl.spark.frames.frame_sample import Sample
from sparkdl.spark.frames.row_table import RowTable
from sparkdl.spark.frames.shard_table import ShardTable
from sparkdl.spark.rounds.averaging_rounds import Averaged
from sparkdl.spark.rounds.round_jobs import RoundJobs
from sparkdl.spark.run.run import Run
from sparkdl.spark.session.background_job import BackgroundJob
from sparkdl.spark.session.compat import conf
from sparkdl.spark.session.settings import read_settings
from sparkdl.storage.tensor_tree import num_bytes
from sparkdl.sync.averaging.parameter_averaging import ParameterAveraging
from sparkdl.sync.collective import CollectiveStrategy
from sparkdl.sync.exchange_pattern import ModelSize
from sparkdl.sync.frozen_layers import moving_buffers
from sparkdl.sync.strategy import SyncStrategy
from sparkdl.train.state import EpochBook
from sparkdl.worker import training
from sparkdl.worker.lifecycle import Member

logger = logging.getLogger(__name__)

_STEPS = 6
"""Batches that each rank shall have in the repeated sample."""
_MOST_ROWS, _MOST_BYTES = 400_000, 128 << 20
"""Largest numbers of rows and bytes of the repeated sample."""
_MOST_RANKS = 16
"""Largest number of ranks of the gang that measures."""
_RANKS_IN_THE_DARK = 2
"""Tasks at a time, where the cluster does not tell how many it has room for."""
_CHOSEN, _COMPARED = ("bf16",), ("bf16", "powersgd")
"""Compressions of strategies that are chosen, and of those that are shown."""

_ROUNDS = (1, 1, 1, 1, 5, 5)
"""Steps of the rounds that are timed; the very first starts processes."""
_JOBS = 3

Place = tuple[int, int]
"""Workers of a machine that are at work at the same time, and the threads of each."""


def num_ranks(checked: CheckedRequest) -> int:
    """Ranks that measure: as many as there are slots, up to a limit."""
    slots = checked.slots
    if slots.total is not None:
        return min(_MOST_RANKS, slots.total)
    return min(_RANKS_IN_THE_DARK if checked.in_rounds else _MOST_RANKS, slots.num_workers)


def obstacle_to_gangs(spark: SparkSession, cluster: ClusterInfo) -> str | None:
    """Return why `require_gang_support` refuses the cluster; None: it does not."""
    get = partial(conf, spark)
    try:
        require_gang_support(cluster, get, read_settings(get))
    except ClusterError as error:
        return str(error)
    return None


def why_no_gang(checked: CheckedRequest) -> str | None:
    """Why no gang can be measured, as a sentence; None if one can."""
    obstacle = obstacle_to_gangs(checked.spark, checked.slots.cluster)
    if obstacle is not None:
        return f"this cluster runs no gang: {obstacle}"
    if checked.in_rounds and checked.slots.total is None:
        return (
            "the cluster does not tell how many slots it has, so only rounds were measured, with "
            f"{num_ranks(checked)} task(s) at a time; for gangs as well set "
            "spark.executor.instances and spark.executor.cores"
        )
    return None


def measure(
    found: Found, seconds: float, stack: contextlib.ExitStack, *, only_choices: bool = False
) -> Calibration:
    """Measure with as many ranks as there are slots, up to a limit; raises as a fit does.

    ``seconds`` is about how long one measurement may take; ``stack`` removes everything in the end.
    ``only_choices`` leaves out what no strategy needs that is chosen for a fit: rounds where gangs
    can run, and compressions but bf16.
    """
    checked, ranks = found.checked, num_ranks(found.checked)
    tasks = replace(
        checked.slots,
        num_workers=ranks,
        threads=checked.request.cpus_per_worker or checked.slots.cluster.task_threads,
        is_gang=False,
    )
    is_gang = why_no_gang(checked) is None
    with_rounds = checked.in_rounds or not only_choices
    place = _Place.open(found, _gang_slots(checked, ranks) if is_gang else tasks, stack)
    (run, few_seconds), row_seconds = place.run(1), 0.0
    if found.sample is not None:  # timed by the difference to the sample alone
        times = _repeats(found.sample, ranks * checked.config.batch_size)
        run, seconds_of_all = place.run(times)
        more_rows = (times - 1) * found.sample.num_rows
        row_seconds = max(0.0, seconds_of_all - few_seconds) * ranks / more_rows
        row_seconds += found.sample.read_row_seconds
    gang, levels, task_levels, stages = None, {}, {}, None
    next_attempt = 0
    if is_gang:
        of_gang, of_tasks = _places(tasks, by_shard=checked.config.elasticity == "bits")
        places = list(dict.fromkeys([*of_gang, *(of_tasks if with_rounds else ())]))
        timed = _compressions(checked, _CHOSEN if only_choices else _COMPARED)
        task = partial(measure_worker.measure_costs, places=places, compressions=timed)
        reports, next_attempt, taken = _asked(run, task, seconds)
        gang = found_by(reports, places, taken)
        levels = {place[0]: gang.levels[place] for place in of_gang}
        task_levels = {place[0]: gang.levels[place] for place in of_tasks if with_rounds}
    if with_rounds:
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
        link_seconds=place.link_seconds,
        spool_seconds=few_seconds,
        spool_row_seconds=row_seconds,
    )


def try_out(
    found: Found,
    sizes: BatchSizes | None,
    seconds: float,
    stack: contextlib.ExitStack,
    **wanted: Any,
) -> list[Choice]:
    """Have one worker try sizes of batches, then learning rates, as `trials.try_out` says."""
    checked = found.checked
    # With the threads that workers will have in the fit.
    slots = replace(_gang_slots(checked, 1), threads=checked.slots.threads)
    place = _Place.open(found, slots, stack)
    batch_size = checked.config.batch_size if sizes is None else sizes.most
    run, _ = place.run(1 if found.sample is None else _repeats(found.sample, batch_size))
    (report,), *_ = _asked(run, partial(trials.try_out, sizes=sizes, **wanted), seconds)
    return [Choice(**choice) for choice in report["choices"]]


def _gang_slots(checked: CheckedRequest, num_workers: int) -> Slots:
    request = checked.request
    return plan_slots(
        checked.spark,
        checked.settings,
        num_workers=num_workers,
        cpus_per_worker=request.cpus_per_worker,
        gpus_per_worker=request.gpus_per_worker,
    )


def _compressions(checked: CheckedRequest, names: Sequence[str]) -> list[Compression]:
    """Return the named compressions and the strategy's, as far as they fit the configuration."""
    named = [compression.resolve(name) for name in names]
    if isinstance(checked.strategy, CollectiveStrategy):
        named.append(checked.strategy.resolved_compression())
    found: dict[str, Compression] = {}
    for one in named:
        if one is None or checked.config.device == "cuda":
            continue
        try:
            one.check(checked.config, num_ranks(checked))
        except ConfigError as error:
            logger.debug("not timed: %s", error)
            continue
        found[type(one).__name__] = one
    return list(found.values())


@dataclass(frozen=True, kw_only=True)
class _Place:
    """Workers that can be reached, and rows for them."""

    found: Found
    slots: Slots
    link: Link
    link_seconds: float
    run_id: str
    stack: contextlib.ExitStack

    @classmethod
    def open(cls, found: Found, slots: Slots, stack: contextlib.ExitStack) -> _Place:
        checked, run_id, began = found.checked, uuid.uuid4().hex[:12], time.perf_counter()
        link = open_link(
            checked.spark,
            slots,
            checked.settings,
            checkpoint_dir=checked.config.checkpoint.directory,
            run_id=run_id,
            stack=stack,
            preloads=True,
        )
        taken = time.perf_counter() - began
        return cls(
            found=found, slots=slots, link=link, link_seconds=taken, run_id=run_id, stack=stack
        )

    def run(self, times: int) -> tuple[Run, float]:
        """Return a run on ``times`` the sample, or the source's rows, and the spool's seconds."""
        checked, sample, slots = self.found.checked, self.found.sample, self.slots
        spec = replace(
            checked.table_spec, num_shards=slots.num_workers, num_places=slots.num_workers,
            at_once=slots.is_barrier, profile=slots.profile,
        )  # fmt: skip
        table: RowTable
        if sample is None:
            table = checked.data.table(spec, f"{self.run_id}-{times}")
        else:
            spec = replace(spec, columns=sample.prepared, validation=None)
            table = ShardTable(sample.repeated(times), spec, run_id=f"{self.run_id}-{times}")
        self.stack.callback(table.close)
        doing("writing a sample of the rows for the workers")
        began = time.perf_counter()
        spooled = persistently(
            table.collect,
            max_restarts=checked.request.max_restarts,
            prepare=partial(wait_again, checked.spark, slots, checked.settings),
        )
        seconds = time.perf_counter() - began
        run = Run(
            spark=checked.spark,
            run_id=self.run_id,
            run_key=self.run_id,
            plan=make_plan(
                columns=self.found.columns,
                shards=[replace(part.shard, num_validation_rows=0) for part in spooled],
                world_size=len(spooled),
                batch_size=checked.config.batch_size * checked.shards_per_worker,
                epochs=1,
            ),
            config=measure_worker.for_measuring(checked.config),
            module=checked.module,
            packed=pack(checked.module),
            objective=checked.objective,
            table=table,
            slots=slots,
            link=self.link,
            settings=checked.settings,
            view=SilentView(),
            max_restarts=checked.request.max_restarts,
        )
        return run, seconds


def _repeats(sample: Sample, global_batch: int) -> int:
    """Return how often to repeat the sample: for some steps, and so that spooling takes a while."""
    most = min(_MOST_ROWS, int(_MOST_BYTES / max(1.0, sample.row_bytes)))
    wanted = min(max(_STEPS * global_batch, most // 2), most)
    return max(2, -(-wanted // sample.num_rows))


def _places(tasks: Slots, *, by_shard: bool) -> tuple[list[Place], list[Place]]:
    """Return the places of gangs and of tasks of rounds: with all ranks, and one on each machine.

    The threads of a task, and of a rank that trains ``by_shard``, do not depend on how many there
    are.
    """
    cluster, cpus = tasks.cluster, tasks.cpus_per_worker
    executors = min(tasks.num_workers, max(1, cluster.num_executors or 1))
    numbers = dict.fromkeys((tasks.num_workers, executors))
    gang = [(-(-n // executors), threads_per_worker(cluster, n, cpus)) for n in numbers]
    of_tasks = [(per_machine, tasks.threads) for per_machine, _ in gang]
    return of_tasks if by_shard else gang, of_tasks


def _asked(
    run: Run, task: Callable[[measure_worker.StepTimer, Member], dict[str, Any]], seconds: float
) -> tuple[list[Any], int, float]:
    """Have a gang do a task; see `measure_worker.SampleOrder`.

    Returns what each rank reports, the number of the next attempt on the run's link, and the
    seconds of the submission that succeeded.
    """
    weights = run.link.send(
        training.INITIAL,
        run.packed.tensors,
        what="the module's weights have",
        remedy="call explain(df, calibrate=False), set Params that are 'auto' to values of your "
        "own, or submit the job inside the cluster's network",
    )
    submitted = 0.0

    def submit(attempt: Attempt) -> Callable[[], JobResults]:
        nonlocal submitted
        submitted = time.perf_counter()
        order = run.gang_order(
            measure_worker.SampleOrder,
            attempt=attempt.number,
            run_key=run.run_key,
            device=run.config.device,
            plan=run.plan,
            payload=dumps((run.link.values, run.config, run.packed.skeleton)),
            weights=weights,
            seconds=seconds,
            task=task,
            source=run.table.reader,
            resume_path=None,
        )
        workers = run.slots.num_workers
        return run.gang_job(run.table.df, measure_worker.run, order, num_workers=workers)

    result = supervise(run, submit, once_there="measuring steps and messages")
    taken = time.perf_counter() - submitted
    reports = {rank: json.loads(data) for rank, kind, data in result.rows if kind == "result"}
    return [reports[rank] for rank in sorted(reports)], result.restarts + 1, taken


@dataclass(frozen=True, kw_only=True)
class TimedRound:
    """One round."""

    num_steps: int
    seconds: float
    """With the merge on the driver."""
    step_seconds: float
    """Seconds that the slowest task's steps took."""
    num_bytes: int
    """Size of the states of all tasks."""


def measure_rounds(run: Run, first_attempt: int) -> StageCosts:
    """Run some rounds of averaging as a fit does, with its errors, and jobs that do nothing.

    No other job on the run's link may have the number ``first_attempt`` or a larger one.
    """
    run = replace(run, run_id=f"{run.run_id}-rounds")
    jobs = RoundJobs(run, EpochBook(run.config, run.plan), first_attempt=first_attempt)
    replicas = Averaged(run, ParameterAveraging(), jobs)
    timed = []
    for wanted in _ROUNDS:
        num_steps = min(wanted, run.plan.steps_per_epoch)
        began = time.perf_counter()
        done = replicas.train(RoundPart(epoch=0, step_in_epoch=0, step=0, num_steps=num_steps))
        timed.append(
            TimedRound(
                num_steps=num_steps,
                seconds=time.perf_counter() - began,
                step_seconds=done.seconds,
                num_bytes=sum(done.bytes_sent.values()),
            )
        )
    return stages_of(timed, _empty_job_seconds(run))


def stages_of(timed: Sequence[TimedRound], empty_seconds: float) -> StageCosts:
    """The costs of a round by rounds of one step and of more; the very first of them is left out.

    Of what they take beyond their steps the least counts: the driver's JVM becomes faster by the
    round, as in a fit. The longest rounds are at the end.
    """
    first, *others = timed
    by_length: dict[int, list[float]] = {}
    for one in others:
        by_length.setdefault(one.num_steps, []).append(one.step_seconds)
    (few, short), *longer = sorted((n, statistics.median(s)) for n, s in by_length.items())
    step = short / few
    for many, long in longer:
        step = (long - short) / (many - few)
    step = max(1e-9, step)
    overhead = max(0.0, min(one.seconds - one.num_steps * step for one in others))
    carried = max(0.0, overhead - empty_seconds) / max(1, others[-1].num_bytes)
    return StageCosts(
        fixed_seconds=min(overhead, empty_seconds),
        byte_seconds=carried,
        step_seconds=step,
        first_seconds=max(0.0, first.seconds - first.num_steps * step - overhead),
    )


def _empty_job_seconds(run: Run) -> float:
    """A job over the shards whose tasks do nothing; the median of some."""
    found = []
    for number in range(_JOBS):
        job = BackgroundJob(
            run.spark,
            run.table.df.mapInArrow(_count, "rows long").collect,
            tag=f"sparkdl-{run.run_id}-empty-{number}",
            name=f"sparkdl {run.run_id}: a job that does nothing",
        )
        began = time.perf_counter()
        job.watched(run.settings.start_timeout_seconds)
        found.append(time.perf_counter() - began)
    return statistics.median(found)


def _count(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    yield pa.RecordBatch.from_pydict({"rows": [sum(batch.num_rows for batch in batches)]})


def predictor_of(found: Found, calibration: Calibration) -> Predictor:
    """Return the predictor of the fit with other strategies and other numbers of workers."""
    checked = found.checked
    return Predictor(
        calibration=calibration,
        plan=found.plan,
        config=checked.config,
        size=model_size(checked.module, calibration.gang),
        num_nodes=_num_nodes(checked, calibration),
        slots=checked.slots.total,
        largest_rows=found.largest_rows,
        check=partial(_check, found),
        num_shards=checked.fixed_shards,
    )


def model_size(module: nn.Module, gang: Gang | None) -> ModelSize:
    """Sizes of tensors; of the optimizer's state the measured one, else that of Adam."""
    trained = [p for p in module.parameters() if p.requires_grad]
    buffers = [b for b in moving_buffers(module) if b.is_floating_point()]
    return ModelSize(
        shapes=tuple(tuple(p.shape) for p in trained),
        element_size=max((p.element_size() for p in trained), default=4),
        replica_bytes=replica_bytes(module),
        buffer_bytes=num_bytes(buffers),
        optimizer_bytes=(
            2 * sum(p.nbytes for p in trained) if gang is None else gang.optimizer_bytes
        ),
    )


def _num_nodes(checked: CheckedRequest, calibration: Calibration) -> int:
    """Machines: those that the gang has met, or as many more as there are executors unmet."""
    executors = max(1, checked.slots.cluster.num_executors or 1)
    if calibration.gang is None:
        return executors
    met = min(executors, num_ranks(checked))
    return max(1, round(calibration.gang.num_nodes * executors / met))


def _check(found: Found, strategy: SyncStrategy, world_size: int) -> None:
    """Refuse a strategy as a fit with so many workers would; raises ConfigError."""
    checked = found.checked
    config = replace(checked.config, sync_strategy=strategy)
    checked.data.check_training(config, checked.request.validation, has_logs=checked.has_logs)
    checked.data.check_plan(found.plan, strategy)
    strategy.check(config, world_size)
    check_elasticity(config, strategy, has_logs=checked.has_logs)
    check_shards(checked.fixed_shards, strategy, world_size)
    check_sync_batch_norm(checked.module, config, world_size, checked.mode)
