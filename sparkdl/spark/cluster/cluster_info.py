"""The facts about a cluster that are known before any job, and what it can run.

`ClusterInfo` is a value; what is decided from it is pure and can be tested without a cluster.
"""

from __future__ import annotations

import logging
import math
import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from pyspark.resource import ResourceProfile
from pyspark.sql import SparkSession

from sparkdl.errors import ClusterError
from sparkdl.mesh import Mesh
from sparkdl.runtime.activity import doing
from sparkdl.spark.session.compat import conf, is_connect, num_slots, scala_context
from sparkdl.spark.session.failures import raise_if_ended
from sparkdl.spark.session.interrupts import raise_if_asked
from sparkdl.spark.session.settings import Settings

logger = logging.getLogger(__name__)

_SAY_SECONDS = 60.0
"""Seconds between two messages about a wait for slots."""

Get = Callable[[str], str | None]


@dataclass(frozen=True, kw_only=True)
class ClusterInfo:
    """The facts about the cluster."""

    master: str
    num_executors: int | None
    """Executors there are or that were asked for; None: not known (Spark Connect)."""
    cores_per_executor: int | None
    task_cpus: float = 1
    """Cores of a task; Spark 4.3 allows parts of one."""
    gpus_per_executor: int = 0
    gpus_per_task: float = 0.0
    dynamic_allocation: bool = False
    is_complete: bool = True
    """True if ``num_executors`` is final; else more may still register."""

    @property
    def is_local(self) -> bool:
        """True if driver and executor are one process, or run on one machine for tests."""
        return self.master.startswith("local")

    @property
    def is_one_process(self) -> bool:
        """True if tasks run in the driver's JVM."""
        return self.master == "local" or self.master.startswith("local[")

    @property
    def task_threads(self) -> int:
        """Threads of a task that takes no more than its cores, by Spark's own rule too."""
        return math.ceil(self.task_cpus)

    @property
    def num_slots(self) -> int | None:
        """Tasks of the default profile that can run at a time, or None if not known."""
        return total_slots(self, None, None)


def inspect_cluster(spark: SparkSession) -> ClusterInfo:
    """Return what the session knows of its cluster; starts no job."""

    def get(key: str) -> str | None:
        return conf(spark, key)

    info = from_conf(get)
    if is_connect(spark) or re.match(r"local(\[|$)", info.master):
        if "*" in info.master and not is_connect(spark):  # the JVM may count fewer cores than we
            return replace(info, cores_per_executor=cores_of(num_slots(spark), info.task_cpus))
        return info
    executors = registered_executors(spark)
    expected = info.num_executors
    if expected is not None and executors < expected:
        return info
    cores = info.cores_per_executor or _cores_of_an_executor(spark, executors)
    return replace(info, num_executors=executors, cores_per_executor=cores)


def from_conf(get: Get) -> ClusterInfo:
    """Return what the configuration alone says of the cluster."""
    master = get("spark.master") or "unknown"
    executors, cores = _shape(master, get)
    return ClusterInfo(
        master=master,
        num_executors=executors,
        cores_per_executor=cores,
        task_cpus=float(get("spark.task.cpus") or 1),
        gpus_per_executor=int(float(get("spark.executor.resource.gpu.amount") or 0)),
        gpus_per_task=float(get("spark.task.resource.gpu.amount") or 0),
        dynamic_allocation=(get("spark.dynamicAllocation.enabled") or "false").lower() == "true",
        is_complete=master.startswith("local"),
    )


def _shape(master: str, get: Get) -> tuple[int | None, int | None]:
    cluster = re.fullmatch(r"local-cluster\[\s*(\d+)\s*,\s*(\d+)\s*,.*\]", master)
    if cluster:
        return int(cluster[1]), int(cluster[2])
    threads = re.fullmatch(r"local(?:\[\s*(\d+|\*)\s*(?:,\s*\d+\s*)?\])?", master)
    if threads:
        return 1, (os.cpu_count() or 1) if threads[1] == "*" else int(threads[1] or 1)
    executors, cores = get("spark.executor.instances"), get("spark.executor.cores")
    # Without dynamic allocation YARN and Kubernetes start two executors of one core by default;
    # standalone starts one on each of its workers, with all cores.
    defaults = (2, 1) if master.startswith(("yarn", "k8s")) else (None, None)
    return int(executors) if executors else defaults[0], int(cores) if cores else defaults[1]


def registered_executors(spark: SparkSession) -> int:
    """Executors of the application that are there now (classic Spark)."""
    return len(scala_context(spark).statusTracker().getExecutorInfos()) - 1  # less the driver


def _cores_of_an_executor(spark: SparkSession, executors: int) -> int | None:
    """Standalone without spark.executor.cores: an executor takes all cores of its worker."""
    if executors < 1:
        return None
    cpus = float(spark.sparkContext.getConf().get("spark.task.cpus", "1"))
    slots = num_slots(spark)
    if slots % executors:  # they differ: their mean, rounded down
        return max(1, int(round(slots * cpus, 6) // executors))
    return cores_of(slots // executors, cpus)


def cores_of(slots: int, cpus: float) -> int:
    """Cores of an executor that has so many slots: what parts of a core leave over counts."""
    return math.ceil(round(max(1, slots) * cpus, 6))


def slots_per_executor(
    info: ClusterInfo, cpus_per_worker: int | None, gpus_per_worker: float | None
) -> int:
    """Workers that fit into one executor at a time."""
    assert info.cores_per_executor is not None
    slots = int(round(info.cores_per_executor / (cpus_per_worker or info.task_cpus), 6))
    gpus = gpus_per_worker if gpus_per_worker is not None else info.gpus_per_task
    if gpus:
        # Several tasks may share a GPU, or one may have several; none has parts of two.
        by_gpu = (
            info.gpus_per_executor * int(1 / gpus)
            if gpus <= 1
            else (info.gpus_per_executor // int(gpus))
        )
        slots = min(slots, by_gpu)
    return slots


def total_slots(
    info: ClusterInfo, cpus_per_worker: int | None, gpus_per_worker: float | None
) -> int | None:
    """Workers that the cluster has room for at a time, or None if that is not known."""
    if info.num_executors is None or info.cores_per_executor is None:
        return None
    return info.num_executors * slots_per_executor(info, cpus_per_worker, gpus_per_worker)


def choose_num_workers(
    info: ClusterInfo,
    requested: int | None,
    *,
    cpus_per_worker: int | None = None,
    gpus_per_worker: float | None = None,
    mesh: Mesh | None = None,
) -> int:
    """Workers as requested, else one per GPU or per executor; raises ClusterError.

    The error names ``mesh`` in place of numWorkers if the request comes from it.
    """
    if info.num_executors is None or info.cores_per_executor is None or info.dynamic_allocation:
        if requested is None and info.dynamic_allocation:
            raise ClusterError(
                "under dynamic allocation executors come when workers ask for them; set numWorkers"
            )
        if requested is None:
            raise ClusterError(
                f"the number of executors of {info.master} cannot be read from this session; "
                "set numWorkers"
            )
        return requested
    fitting = slots_per_executor(info, cpus_per_worker, gpus_per_worker)
    slots = info.num_executors * fitting
    if requested is None:
        if not (info.gpus_per_executor and (gpus_per_worker or info.gpus_per_task)):
            return max(1, info.num_executors)
        return max(1, min(slots, info.num_executors * info.gpus_per_executor))
    if requested > slots and info.is_complete:
        raise ClusterError(_too_few(requested, slots, info, cpus_per_worker, gpus_per_worker, mesh))
    return requested


def _too_few(
    workers: int, slots: int, info: ClusterInfo, cpus: int | None, gpus: float | None,
    mesh: Mesh | None,
) -> str:  # fmt: skip
    needs = f"{cpus or info.task_cpus:g} cpu"
    task_gpus = gpus if gpus is not None else info.gpus_per_task
    if task_gpus:
        needs += f" and {task_gpus:g} gpu"
    executors = "executor" if info.num_executors == 1 else "executors"
    asked, remedy = f"numWorkers={workers}", f"set numWorkers to at most {slots}"
    if mesh is not None:
        asked = f"parallelism=Mesh({mesh})"
        remedy = f"choose axes whose product is at most {slots}"
    return (
        f"{asked} needs {workers} free slots of {needs} at the same time, but "
        f"{info.master} has {slots} ({info.num_executors} {executors} with "
        f"{info.cores_per_executor} cores and {info.gpus_per_executor} gpus each); "
        f"{remedy} or give Spark more executors or cores"
    )


def require_gang_support(
    info: ClusterInfo, get: Get, settings: Settings, *, is_plain: bool = False
) -> None:
    """Refuse a second copy of a worker, and gradients in clear; raises ClusterError.

    Under dynamic allocation, or if ``is_plain``, a gang is a plain stage, of which Spark may run
    tasks twice.
    """
    if (info.dynamic_allocation or is_plain) and _is_set(get, "spark.speculation"):
        raise ClusterError(
            "under dynamic allocation, and with minWorkers on Spark Connect, Spark would run "
            "workers of a gang a second time with spark.speculation; set it to false, or use a "
            "strategy that runs in rounds, such as ParameterAveraging"
        )
    encrypting = is_encrypted(get)
    if settings.allow_unencrypted:
        return
    if encrypting:
        raise ClusterError(
            f"{encrypting} asks for encrypted traffic, but gradients travel between workers "
            "as plain TCP; set spark.sparkdl.allowUnencrypted=true if that network is trusted, or "
            "use a strategy that runs in rounds, such as ParameterAveraging"
        )
    if _is_set(get, "spark.authenticate"):
        logger.warning(
            "spark.authenticate is set, but workers exchange gradients as plain TCP, without any "
            "password; set spark.sparkdl.allowUnencrypted=true if that network is trusted, or use "
            "a strategy that runs in rounds, such as ParameterAveraging"
        )


def require_plain_files(get: Get, settings: Settings) -> None:
    """Refuse to spool in clear where Spark encrypts its local files; raises ClusterError."""
    key = "spark.io.encryption.enabled"
    if _is_set(get, key) and not settings.allow_unencrypted:
        raise ClusterError(
            f"{key} asks for encrypted files, but the spool lies in clear in Spark's local "
            "directories while training runs; set spark.sparkdl.allowUnencrypted=true if those "
            "disks are trusted, or encrypted themselves"
        )


def is_encrypted(get: Get) -> str | None:
    """The first entry by which Spark encrypts its own traffic, or None."""
    for key in ("spark.network.crypto.enabled", "spark.ssl.enabled", "spark.ssl.rpc.enabled"):
        if _is_set(get, key):
            return key
    sasl = "spark.authenticate.enableSaslEncryption"  # Spark ignores it without authentication
    return sasl if _is_set(get, sasl) and _is_set(get, "spark.authenticate") else None


def _is_set(get: Get, key: str) -> bool:
    return (get(key) or "false").strip().lower() == "true"


def wait_for_slots(
    spark: SparkSession,
    workers: int,
    profile: ResourceProfile | None,
    settings: Settings,
    restarts_left: int | None = None,
    *,
    param: str = "numWorkers",
) -> bool:
    """Return when executors with enough slots have registered; classic Spark only knows that.

    After a loss (``restarts_left`` is not None) the cluster manager may take long to find another
    node, so that wait is as long as the one for slots that others hold. ``param`` asks for them.

    Returns:
        True if they had not been there from the beginning.

    Raises:
        ClusterError: they have not in time, or the session has ended.
    """
    if is_connect(spark):
        return False
    raise_if_ended(spark)
    entry, seconds = "spark.sparkdl.startTimeout", settings.start_timeout_seconds
    if restarts_left is not None:
        entry, seconds = "spark.sparkdl.queueTimeout", settings.queue_timeout_seconds
    began = time.monotonic()
    times_said = 0
    while (slots := num_slots(spark, profile)) < workers:
        raise_if_asked()
        raise_if_ended(spark)
        waited = time.monotonic() - began
        if waited > seconds:
            since = "" if restarts_left is None else " of a loss"
            raise ClusterError(
                f"only {slots} of the {workers} slots that {param}={workers} needs came up "
                f"within {seconds:g} s{since}; lower {param}, give Spark more executors, or "
                f"raise {entry}"
            )
        doing("waiting for slots", f"{slots} of {workers} are there")
        if waited >= times_said * _SAY_SECONDS:
            times_said += 1
            if restarts_left is None:
                logger.info("waiting for executors: %d of %d slots are there", slots, workers)
            else:
                logger.warning(
                    "waiting for executors after a loss: %d of %d slots are there; %.0f of at most "
                    "%.0f s (spark.sparkdl.queueTimeout) have passed; restarts left after this "
                    "one: %d",
                    *(slots, workers, waited, seconds, restarts_left),
                )
        time.sleep(0.1)
    return times_said > 0


def check_memory(
    info: ClusterInfo,
    get: Get,
    *,
    replica_bytes: int,
    state_bytes: int,
    spool_bytes: int,
    num_workers: int,
) -> None:
    """Refuse a gang whose replicas cannot fit into the executors' containers; raises ClusterError.

    Python workers live outside the JVM heap, in ``spark.executor.memoryOverhead`` (or
    ``spark.executor.pyspark.memory``); YARN and Kubernetes kill the container that exceeds it.
    The mapped spool is page cache, which the kernel can reclaim: it is named, not counted.
    """
    if not info.master.startswith(("yarn", "k8s")):
        return
    per_executor = -(-num_workers // max(1, info.num_executors or num_workers))
    needed = per_executor * (INTERPRETER_BYTES + replica_bytes + state_bytes)
    granted = overhead_bytes(get)
    if needed > granted:
        raise ClusterError(
            f"{per_executor} worker(s) per executor need about {mib(needed)} MiB outside the JVM "
            f"({mib(replica_bytes)} MiB replica, {mib(state_bytes)} MiB gradients, optimizer "
            f"state and checkpoint copies, {mib(INTERPRETER_BYTES)} MiB Python and torch; the "
            f"spool of {mib(spool_bytes)} MiB is page cache on top), but executors grant "
            f"{mib(granted)} MiB; set spark.executor.memoryOverhead to at least "
            f"{mib(needed)}m"
        )


INTERPRETER_BYTES = 350 * 2**20
"""Resident memory of a Python worker with torch loaded, measured with torch 2.13 on Linux."""


def worker_memory(info: ClusterInfo, get: Get, num_workers: int) -> int | None:
    """Bytes for a worker's tensors on CPUs; None: no entry of Spark limits them.

    Containers of YARN and Kubernetes are limited, see `check_memory`; elsewhere executors are by
    ``spark.executor.pyspark.memory``, if that is set.
    """
    own = get("spark.executor.pyspark.memory")
    if info.master.startswith(("yarn", "k8s")):
        granted = overhead_bytes(get)
    elif own and not info.is_one_process:
        granted = parse_bytes(own, unit=2**20)
    else:
        return None
    per_executor = -(-num_workers // max(1, info.num_executors or num_workers))
    return max(0, granted // per_executor - INTERPRETER_BYTES)


def overhead_bytes(get: Get) -> int:
    """Memory that an executor's container grants outside the JVM heap, by Spark's rules."""
    own = get("spark.executor.pyspark.memory")
    overhead = get("spark.executor.memoryOverhead")
    if overhead is None:
        heap = parse_bytes(get("spark.executor.memory") or "1g", unit=2**20)
        factor = get("spark.executor.memoryOverheadFactor")
        if factor is None and (get("spark.master") or "").startswith("k8s"):
            factor = get("spark.kubernetes.memoryOverheadFactor")  # an entry of Kubernetes' own
        granted = max(int(float(factor or 0.1) * heap), 384 * 2**20)
    else:
        granted = parse_bytes(overhead, unit=2**20)
    return granted + (parse_bytes(own, unit=2**20) if own else 0)


def parse_bytes(text: str, *, unit: int) -> int:
    """Bytes of a Spark size such as ``512m``; a bare number counts in ``unit``."""
    match = re.fullmatch(r"\s*(\d+)\s*([kmgtp])?(b)?\s*", text.lower())
    if match is None:
        raise ClusterError(f"cannot read the size {text!r}; write it like 512m or 4g")
    exponent = {"k": 1, "m": 2, "g": 3, "t": 4, "p": 5}
    if match[2]:
        return int(match[1]) << 10 * exponent[match[2]]
    return int(match[1]) * (1 if match[3] else unit)


def mib(size: int) -> int:
    """Bytes as mebibytes, rounded up."""
    return -(-size // 2**20)
