"""How many workers does a run get, with how many threads, and when are there slots for them?"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from pyspark.sql import SparkSession

from sparkdl.spark.arrival import await_executors
from sparkdl.spark.preflight import (
    ClusterInfo,
    choose_num_workers,
    inspect_cluster,
    make_profile,
    require_gang_support,
    threads_per_worker,
    total_slots,
    wait_for_slots,
)
from sparkdl.spark.session import conf
from sparkdl.spark.settings import Settings

if TYPE_CHECKING:
    from pyspark.resource import ResourceProfile


@dataclass(frozen=True, kw_only=True)
class Slots:
    """What the cluster part of the preflight decided."""

    num_workers: int
    """Workers of a gang, or shards that are trained in rounds."""
    threads: int
    profile: ResourceProfile | None
    total: int | None = None
    """Workers of this kind that the cluster has room for; None: not known."""


def plan_gang(
    spark: SparkSession,
    settings: Settings,
    *,
    num_workers: int | None,
    cpus_per_worker: int | None,
    gpus_per_worker: float | None,
) -> Slots:
    """Decide for a gang, and wait until all its slots are free.

    Raises:
        ClusterError: the cluster cannot run it.
    """
    info = _inspect(spark, num_workers, settings)
    require_gang_support(info, partial(conf, spark), settings)
    profile = make_profile(info, cpus_per_worker, gpus_per_worker)
    number = choose_num_workers(
        info, num_workers, cpus_per_worker=cpus_per_worker, gpus_per_worker=gpus_per_worker
    )
    wait_for_slots(spark, number, profile, settings)
    threads = threads_per_worker(info, number, cpus_per_worker)
    total = total_slots(inspect_cluster(spark), cpus_per_worker, gpus_per_worker)
    return Slots(num_workers=number, threads=threads, profile=profile, total=total)


def plan_rounds(
    spark: SparkSession,
    settings: Settings,
    *,
    num_workers: int | None,
    cpus_per_worker: int | None,
    gpus_per_worker: float | None,
) -> Slots:
    """Decide for rounds. Shards need no slots of their own, so none are waited for.

    Raises:
        ClusterError: the number of shards cannot be known.
    """
    info = _inspect(spark, num_workers, settings)
    if num_workers is None:
        num_workers = choose_num_workers(
            info, None, cpus_per_worker=cpus_per_worker, gpus_per_worker=gpus_per_worker
        )
    return Slots(
        num_workers=num_workers,
        # Fixed by the task's own cores, so that a task gives the same bits wherever it runs.
        threads=cpus_per_worker or info.task_cpus,
        profile=make_profile(info, cpus_per_worker, gpus_per_worker),
        total=total_slots(info, cpus_per_worker, gpus_per_worker),
    )


def wait_again(spark: SparkSession, slots: Slots, settings: Settings, *, in_rounds: bool) -> None:
    """Wait for executors before a job is submitted again; in rounds Spark itself does."""
    if not in_rounds:
        wait_for_slots(spark, slots.num_workers, slots.profile, settings)


def _inspect(spark: SparkSession, num_workers: int | None, settings: Settings) -> ClusterInfo:
    """The cluster as it is, or, if the number of workers follows from it, when it is all there."""
    if num_workers is not None:
        return inspect_cluster(spark)
    return await_executors(spark, settings)
