"""The workers that a run gets: how many, with how many threads, and on which cluster."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from pyspark.resource import ResourceProfile, ResourceProfileBuilder, TaskResourceRequests
from pyspark.sql import SparkSession

from sparkdl.errors import ClusterError, ConfigError
from sparkdl.mesh import Mesh
from sparkdl.runtime.activity import doing
from sparkdl.spark.cluster.cluster_info import (
    ClusterInfo,
    choose_num_workers,
    from_conf,
    inspect_cluster,
    registered_executors,
    require_gang_support,
    total_slots,
    wait_for_slots,
)
from sparkdl.spark.session.compat import conf, is_connect, num_slots
from sparkdl.spark.session.failures import raise_if_ended
from sparkdl.spark.session.interrupts import raise_if_asked
from sparkdl.spark.session.settings import Settings

logger = logging.getLogger(__name__)

_STILL_SECONDS = 3.0
"""Seconds without a new executor after which they are taken to be all there."""
_STARTING_SECONDS = 30.0
"""Age of an application from which on its executors are there; also Spark's own patience."""


def await_executors(spark: SparkSession, settings: Settings) -> ClusterInfo:
    """The cluster when its executors have registered, for a number of workers made from theirs.

    Returns at once where the configuration gives their number, where it comes and goes with the
    jobs, and where the application is not new.
    """
    configured = from_conf(partial(conf, spark))
    if is_connect(spark) or configured.num_executors or configured.dynamic_allocation:
        return inspect_cluster(spark)
    doing("waiting for executors")
    age_seconds = time.time() - spark.sparkContext.startTime / 1000
    settle(
        partial(registered_executors, spark),
        still_seconds=_STILL_SECONDS if age_seconds < _STARTING_SECONDS else 0.0,
        timeout_seconds=settings.start_timeout_seconds,
    )
    return inspect_cluster(spark)


def settle(
    count: Callable[[], int],
    *,
    still_seconds: float,
    timeout_seconds: float,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Return when ``count`` has been the same for a while and not 0, or when time is up."""
    began = since = clock()
    found = count()
    while clock() - began < timeout_seconds and (found == 0 or clock() - since < still_seconds):
        sleep(0.1)
        before, found = found, count()
        if found != before:
            since = clock()


@dataclass(frozen=True, kw_only=True)
class Slots:
    """The workers of a run, and the cluster as it was when they were chosen."""

    num_workers: int
    """Workers of a gang as it begins, or shards that are trained in rounds."""
    threads: int
    """Threads of torch in each worker."""
    cluster: ClusterInfo
    profile: ResourceProfile | None = None
    cpus_per_worker: int | None = None
    gpus_per_worker: float | None = None
    is_gang: bool = True
    """True if all workers run at the same time; False if their tasks wait for each other's slots,
    as in rounds."""
    min_workers: int | None = None
    """Fewest workers with which a gang may go on; None: all of them."""
    max_workers: int | None = None
    """Most workers, if a gang may have fewer."""
    on_connect: bool = False
    """True if Spark does not tell its slots."""

    @property
    def is_barrier(self) -> bool:
        """True if a gang is a barrier stage, not a plain one, whose tasks wait for each other.

        Spark refuses barrier stages where executors come and go, and the tasks of one are too many
        or too few where nobody knows for how many there are slots.
        """
        is_unknown = self.on_connect and self.max_workers is not None
        return self.is_gang and not self.cluster.dynamic_allocation and not is_unknown

    @property
    def may_move(self) -> bool:
        """True if a gang that starts again must look for its shards, wherever they are."""
        return self.is_gang and (self.max_workers is not None or not self.is_barrier)

    @property
    def total(self) -> int | None:
        """Workers of this kind that the cluster has room for; None: not known yet."""
        return total_slots(self.cluster, self.cpus_per_worker, self.gpus_per_worker) or None

    def asked_again(self, spark: SparkSession) -> Slots:
        """The same workers on the cluster as it is now.

        Once jobs have run, executors are there that had not registered before.
        """
        now = inspect_cluster(spark)
        return replace(self, cluster=now) if now.num_executors != 0 else self


def plan_slots(
    spark: SparkSession,
    settings: Settings,
    *,
    num_workers: int | None,
    cpus_per_worker: int | None,
    gpus_per_worker: float | None,
    is_gang: bool = True,
    most_workers: int | None = None,
    min_workers: int | None = None,
    mesh: Mesh | None = None,
) -> Slots:
    """Decide for a gang, and wait until all its slots are free; or for rounds.

    If the user leaves the number of workers open, it is at most ``most_workers``. A gang may begin
    with fewer workers than it should have, if there are ``min_workers``. The shards of rounds need
    no slots of their own, so none are waited for. If ``mesh`` asks for ``num_workers``, errors name
    it. Raises ClusterError, or ConfigError if ``min_workers`` is more than an open number comes to.
    """
    info = await_executors(spark, settings) if num_workers is None else inspect_cluster(spark)
    is_plain = False
    if is_gang:
        is_plain = info.dynamic_allocation or (is_connect(spark) and min_workers is not None)
        require_gang_support(info, partial(conf, spark), settings, is_plain=is_plain)
    profile = make_profile(info, cpus_per_worker, gpus_per_worker)
    is_open = num_workers is None
    if num_workers is None or (is_gang and min_workers is None):
        num_workers = choose_num_workers(
            info,
            num_workers,
            cpus_per_worker=cpus_per_worker,
            gpus_per_worker=gpus_per_worker,
            mesh=mesh,
        )
    if is_open and most_workers is not None:
        num_workers = min(num_workers, most_workers)
    if is_gang and num_workers < (min_workers or 0):
        raise ConfigError(
            f"minWorkers={min_workers} is more than the {num_workers} worker(s) that "
            "numWorkers=None stands for here: one for each executor or GPU, and no more than "
            "numShards; set numWorkers, or lower minWorkers"
        )
    max_workers = None
    if is_gang and is_plain:  # as many begin as have come when they wait for each other
        max_workers = None if min_workers is None else num_workers
    elif is_gang and min_workers is not None:
        max_workers = num_workers
        num_workers = wait_for_workers(spark, num_workers, min_workers, profile, settings)
        info = inspect_cluster(spark)
    # In rounds fixed by the task's own cores, so that it gives the same bits wherever it runs.
    threads = cpus_per_worker or info.task_threads
    slots = Slots(
        num_workers=num_workers,
        threads=threads_per_worker(info, num_workers, cpus_per_worker) if is_gang else threads,
        cluster=info,
        profile=profile,
        cpus_per_worker=cpus_per_worker,
        gpus_per_worker=gpus_per_worker,
        is_gang=is_gang,
        min_workers=min_workers,
        max_workers=max_workers,
        on_connect=is_connect(spark),
    )
    has_waited = slots.is_barrier and wait_for_slots(spark, num_workers, profile, settings)
    return slots.asked_again(spark) if has_waited else slots


def wait_again(
    spark: SparkSession, slots: Slots, settings: Settings, restarts_left: int = 0
) -> int:
    """Wait for a gang's executors before a job is submitted again; in rounds Spark itself waits.

    Returns:
        With how many workers to go on.
    """
    if slots.is_gang and not slots.is_barrier:
        return slots.num_workers
    if slots.min_workers is not None and slots.max_workers is not None:
        return wait_for_workers(
            spark, slots.max_workers, slots.min_workers, slots.profile, settings, restarts_left
        )
    if slots.is_gang:
        wait_for_slots(spark, slots.num_workers, slots.profile, settings, restarts_left)
    return slots.num_workers


def wait_for_workers(
    spark: SparkSession,
    most: int,
    fewest: int,
    profile: ResourceProfile | None,
    settings: Settings,
    restarts_left: int | None = None,
) -> int:
    """Wait for the slots of a gang: shortly for those of all, then for those of the fewest.

    Returns:
        How many workers it can have now.

    Raises:
        ClusterError: there are not even slots for ``fewest``.
    """
    deadline = time.monotonic() + settings.elastic_wait_seconds
    while (there := num_slots(spark, profile)) < most and time.monotonic() < deadline:
        raise_if_ended(spark)
        raise_if_asked()
        doing("waiting for slots", f"{there} of {most} are there, at least {fewest} needed")
        time.sleep(0.1)
    if there < most:
        wait_for_slots(spark, fewest, profile, settings, restarts_left, param="minWorkers")
        there = min(most, max(fewest, num_slots(spark, profile)))
        logger.warning(
            "the gang has %d of %d workers (at least %d); it starts again with more when there "
            "are slots",
            *(there, most, fewest),
        )
    return min(there, most)


def make_profile(
    info: ClusterInfo, cpus_per_worker: int | None, gpus_per_worker: float | None
) -> ResourceProfile | None:
    """Resources of a worker; None when none were asked for. Raises ClusterError."""
    if cpus_per_worker is None and gpus_per_worker is None:
        return None
    if re.match(r"local(\[|$)", info.master):
        raise ClusterError(
            f"cpusPerWorker and gpusPerWorker need stage-level scheduling, which {info.master} "
            "does not have; leave them unset, or use standalone, YARN, Kubernetes or local-cluster"
        )
    cpus = cpus_per_worker or info.task_threads  # a profile has no parts of cores
    if info.cores_per_executor is not None and cpus > info.cores_per_executor:
        raise ClusterError(
            f"cpusPerWorker={cpus} exceeds the {info.cores_per_executor} cores of an executor; "
            "lower it or raise spark.executor.cores"
        )
    if gpus_per_worker is not None and gpus_per_worker > info.gpus_per_executor:
        raise ClusterError(
            f"gpusPerWorker={gpus_per_worker:g} exceeds the {info.gpus_per_executor} gpus of an "
            "executor; lower it or set spark.executor.resource.gpu.amount"
        )
    requests = TaskResourceRequests().cpus(cpus)
    gpus = gpus_per_worker if gpus_per_worker is not None else info.gpus_per_task
    if gpus:
        requests = requests.resource("gpu", gpus)
    return ResourceProfileBuilder().require(requests).build


def threads_per_worker(info: ClusterInfo, num_workers: int, cpus_per_worker: int | None) -> int:
    """Threads of torch per worker: the cores of an executor, shared by the workers in it."""
    if info.num_executors is None or info.cores_per_executor is None:
        return cpus_per_worker or info.task_threads
    workers_per_executor = -(-num_workers // max(1, info.num_executors))
    share = info.cores_per_executor // workers_per_executor
    return max(1, share, cpus_per_worker or 1)
