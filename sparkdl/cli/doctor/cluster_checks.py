"""Checks of a cluster: what `fit` asks Spark before it trains, and a gang that is tried."""

from __future__ import annotations

import contextlib
import re
import time
import uuid
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from pyspark import SparkConf, SparkContext
from pyspark.sql import SparkSession

from sparkdl.cli.doctor import trial_gang
from sparkdl.cli.doctor.finding import Finding, Order, bounded, checked, left_out, note, ok, wrong
from sparkdl.cli.job_files.job_file import SparkSection
from sparkdl.cli.job_files.spark_session import addresses, make_session, silence
from sparkdl.errors import ClusterError, SparkDLError
from sparkdl.runtime.activity import doing
from sparkdl.runtime.versions import installed, versions
from sparkdl.spark.cluster import cluster_info
from sparkdl.spark.cluster.cluster_info import ClusterInfo
from sparkdl.spark.cluster.probe import python_remedy
from sparkdl.spark.cluster.slots import Slots, await_executors
from sparkdl.spark.session.compat import conf
from sparkdl.spark.session.failures import is_spark_error, spark_message
from sparkdl.spark.session.settings import Settings, read_settings

_STOP_SECONDS = 30.0
_GIVES_UP = "spark.storage.blockManagerHeartbeatTimeoutMs"
"""Silence after which Spark takes an executor for lost, if set; else ``spark.network.timeout``."""
_INTERVALS = {"spark.network.timeoutInterval": "60s", "spark.executor.heartbeatInterval": "10s"}
"""Entries that must not be longer, and their defaults."""
_UNITS = {
    "us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0,
}  # fmt: skip
_ENTRIES = ("startTimeout", "queueTimeout", "collectiveTimeout")
"""Entries of ``spark.sparkdl`` that bound the waits of a gang."""


def examine_cluster(order: Order) -> Iterator[Finding]:
    """Start a session, ask it, try a gang, and stop it again."""
    yield from _reachable(order.master)
    try:
        began = time.perf_counter()
        spark = start_session(order)
    except Exception as error:  # pyspark's, py4j's and gRPC's have no base class in common
        text = str(error)
        if not isinstance(error, SparkDLError):
            first = text.strip().partition("\n")[0]
            text = f"Spark does not start: {type(error).__name__}: {first}"
        yield wrong("session", text)
        # What spark-submit and spark-defaults.conf set, as far as a JVM has read them.
        context: Any = SparkContext
        known = {} if context._jvm is None else dict(SparkConf().getAll())
        yield from refused_time_outs({**known, **order.conf})
        return
    try:
        seconds = time.perf_counter() - began
        yield ok(
            "session",
            f"Spark {spark.version} on {conf(spark, 'spark.master')} after {seconds:.1f} s",
        )
        yield from _examine(spark, order)
    except Exception as error:  # of Spark's, where nothing below expects one
        yield wrong("session", _in_session(error))
    finally:
        doing("stopping Spark")
        with contextlib.suppress(SparkDLError):  # the process ends anyway
            bounded(spark.stop, _STOP_SECONDS, "the end of the session")


def start_session(order: Order) -> SparkSession:
    """Start Spark as the command was told, in bounded time."""
    waits = {f"spark.sparkdl.{name}": f"{order.timeout_seconds:g}" for name in _ENTRIES}
    conf = {"spark.log.level": "ERROR", **waits, **order.conf}
    section = SparkSection(master=order.master, conf=conf)
    doing("starting Spark")
    return bounded(
        lambda: make_session(section, "sparkdl doctor"),
        order.timeout_seconds,
        f"a Spark session of {order.master or 'the default master'}; see that the cluster runs, "
        "that it has resources left for an application, and that it can connect back to this host",
    )


def refused_time_outs(conf: Mapping[str, str]) -> Iterator[Finding]:
    """Time-outs that Spark refuses; what it says of that does not name the one that was set."""
    name = _GIVES_UP if _GIVES_UP in conf else "spark.network.timeout"
    limit = _seconds(conf.get(name, "120s"), default_unit="ms" if name == _GIVES_UP else "s")
    for interval, default in _INTERVALS.items():
        seconds = _seconds(conf.get(interval, default), default_unit="ms")
        if seconds > limit:
            yield wrong(
                "time-outs",
                f"{name} ({limit:g} s) is shorter than {interval} ({seconds:g} s), which Spark "
                f"refuses; raise {name}, or lower {interval}",
            )


def _seconds(duration: str, *, default_unit: str) -> float:
    """A duration as Spark writes it, such as ``30s``; 0 if it is none, which Spark says itself."""
    match = re.fullmatch(r"(\d+)\s*([a-z]*)", duration.strip().lower())
    return int(match[1]) * _UNITS.get(match[2] or default_unit, 0.0) if match else 0.0


def _reachable(master: str | None) -> Iterator[Finding]:
    """Check that each address of the master's URL answers; Spark would try for minutes."""
    for host, port in addresses(master or ""):
        if told := silence(host, port):
            yield wrong(
                "master",
                f"{told}; check the URL {master}, that the master runs, and that this host may "
                "connect to it",
            )
        else:
            yield ok("master", f"{host}:{port} answers")


def _examine(spark: SparkSession, order: Order) -> Iterator[Finding]:
    get = partial(conf, spark)
    try:
        settings = read_settings(get)
    except SparkDLError as error:
        yield wrong("session", str(error))
        return
    barrier = checked(
        "barrier",
        lambda: cluster_info.require_gang_support(cluster_info.from_conf(get), get, settings),
        "barrier stages can run: no encryption, no speculation",
    )
    yield barrier
    try:
        info = wait_for_executors(spark, settings)
    except SparkDLError as error:
        yield wrong("slots", str(error))
        return
    workers, finding = _slots(info, order.num_workers)
    yield finding
    yield checked(
        "files",
        lambda: cluster_info.require_plain_files(get, settings),
        "rows may lie in Spark's local directories while training runs",
    )
    nothing = {"replica_bytes": 0, "state_bytes": 0, "spool_bytes": 0}
    memory = checked(
        "memory",
        lambda: cluster_info.check_memory(info, get, **nothing, num_workers=workers),
        "no container limits what Python workers use",
    )
    if memory.state == "ok" and info.master.startswith(("yarn", "k8s")):
        granted = cluster_info.overhead_bytes(get) >> 20
        memory = ok("memory", f"executors grant {granted} MiB outside the JVM")
    yield memory
    if installed("torch") is None:
        yield left_out("workers", "they cannot be tried without torch on the driver")
        return
    tasks = max(workers, info.num_slots or 0)
    slots = Slots(num_workers=tasks, threads=1, cluster=info)
    for subject, url in (("channel", None), ("storage", order.checkpoint_dir)):
        if subject == "storage" and url is None:
            yield left_out("storage", "--checkpoint-dir URL tries a place for checkpoints")
            continue
        yield from _link(spark, subject, url, slots, settings, order)
    if barrier.state == "wrong":
        yield left_out("workers", "no gang can be tried, see barrier")
        return
    yield from _trial(_in_trial(workers, info, order), info)


def wait_for_executors(spark: SparkSession, settings: Settings) -> ClusterInfo:
    """Wait until the executors are there; return the cluster's facts."""
    info = cluster_info.from_conf(partial(conf, spark))
    if not info.dynamic_allocation:  # then they come with the jobs
        cluster_info.wait_for_slots(spark, 1, None, settings)
    return await_executors(spark, settings)


def _slots(info: ClusterInfo, wanted: int | None) -> tuple[int, Finding]:
    """Workers for the trial, and what is to be said of the room for them."""
    if info.dynamic_allocation:
        there = f"{info.num_executors or 0} executors are there now"
        return wanted or 1, note("slots", f"they come and go with Spark's jobs; {there}")
    unknown = f"{info.master} does not tell its executors"
    if wanted is None and info.num_slots is None:
        return 1, note("slots", f"{unknown}; --num-workers tries more than one")
    try:
        workers = cluster_info.choose_num_workers(info, wanted)
    except ClusterError as error:
        return 1, wrong("slots", str(error))
    if info.num_slots is None:
        return workers, note("slots", unknown)
    gpus = f" and {info.gpus_per_executor} GPUs" * bool(info.gpus_per_executor)
    return workers, ok(
        "slots",
        f"{info.num_slots}, of {info.num_executors} executor{'s' * (info.num_executors != 1)} with "
        f"{info.cores_per_executor} cores{gpus}; {info.task_cpus:g} per task; fit would start "
        f"{workers} worker{'s' * (workers != 1)}",
    )


def _link(
    spark: SparkSession,
    subject: str,
    url: str | None,
    slots: Slots,
    settings: Settings,
    order: Order,
) -> Iterator[Finding]:
    """Try the channel between driver and executors, and their versions, or a place of files."""
    from sparkdl.spark.cluster.link import open_link  # which needs torch

    tasks = slots.num_workers
    with contextlib.ExitStack() as stack:
        ask = partial(
            open_link,
            spark,
            slots,
            settings,
            checkpoint_dir=url,
            run_id=f"doctor-{uuid.uuid4().hex[:8]}",
            stack=stack,
        )
        doing("asking the executors" if url is None else "trying the place of checkpoints")
        try:
            link = bounded(ask, order.timeout_seconds, f"{tasks} small tasks on the executors")
        except Exception as error:
            yield wrong(subject, _in_session(error))
            return
        if url is not None:
            by = "by way of the driver" if link.relays else "by driver and executors"
            yield ok("storage", f"{link.checkpoints} can be written and read {by}")
            return
        shown = ", ".join(f"{name} {version}" for name, version in versions().items())
        yield ok("versions", f"equal on driver and executors ({tasks} tasks): {shown}")
        if link.channel is None:
            text = "executors do not reach this client: no progress and no logs while training"
            yield note("channel", text)
            return
        where = f"{link.channel.host}:{link.channel.port}"
        yield ok("channel", f"executors reach the driver at {where}")


def _in_trial(workers: int, info: ClusterInfo, order: Order) -> int:
    """Workers of the trial: two at least if there is room, to see that they reach each other."""
    if order.num_workers is not None:
        return workers
    return max(workers, min(2, info.num_slots or 1))


def _trial(workers: int, info: ClusterInfo) -> Iterator[Finding]:
    """Start a gang that does next to nothing."""
    from sparkdl.runner import TorchRunner

    runner = TorchRunner(num_workers=workers, max_restarts=0, results="all", verbose=0)
    began = time.perf_counter()
    doing("trying a gang of workers")
    try:
        seen = runner.run(trial_gang.look_around)
    except Exception as error:
        yield wrong("workers", f"no gang of {workers}: {_in_session(error)}")
        return
    yield trial_gang.workers_finding(seen, time.perf_counter() - began)
    yield trial_gang.gpus_finding(seen, info.gpus_per_executor)
    yield trial_gang.disk_finding(seen)
    yield from trial_gang.bytecode_findings(seen)


def _in_session(error: Exception) -> str:
    """An error of ours or, with what mostly helps, of Spark's; others are raised again."""
    if isinstance(error, SparkDLError):
        return str(error)
    if not is_spark_error(error):
        raise error
    try:
        said = spark_message(error)
    except Exception as another:  # the JVM that is asked may be gone
        said = f"{type(error).__name__}, then {type(another).__name__}"
    return f"Spark has failed ({said}); {python_remedy(error)}"
