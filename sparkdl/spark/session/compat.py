"""Functions that serve classic Spark and Spark Connect, and hide what these do differently."""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from urllib.parse import urlsplit

from py4j.protocol import Py4JError
from pyspark.resource import ResourceProfile
from pyspark.sql import SparkSession

from sparkdl.errors import ClusterError


def is_connect(spark: SparkSession) -> bool:
    """True if the session is a Spark Connect client."""
    return type(spark).__module__.startswith("pyspark.sql.connect")


def has_ended(spark: SparkSession) -> bool:
    """True if the session can run nothing any more: it was stopped, or its JVM is gone."""
    if is_connect(spark):
        client: Any = spark.client
        return bool(client.is_closed)
    context: Any = spark.sparkContext
    if context._jsc is None:  # stopped from Python
        return True
    try:
        return context._jsc.sc().isStopped() is True
    except (Py4JError, OSError):
        return True


def conf(spark: SparkSession, key: str) -> str | None:
    """A configuration entry of session or application, or None."""
    return spark.conf.get(key, None)


def shares_console(spark: SparkSession) -> bool:
    """True if workers print where the driver does: in local mode."""
    master = conf(spark, "spark.master") or ""
    return not is_connect(spark) and master.startswith("local") and "cluster" not in master


def run_workers_here(spark: SparkSession) -> None:
    """In local mode, let Spark's workers run this program's Python if nobody has chosen one.

    Spark takes the first ``python3`` of the PATH, which seldom has the packages. Raises
    ClusterError if one was chosen that is not there or has not the packages: Spark would write a
    hundred lines of stacks to the console.
    """
    if not shares_console(spark):
        return
    if not os.environ.get("PYSPARK_PYTHON"):
        spark.sparkContext.pythonExec = sys.executable
    if spark.sparkContext.pythonExec != sys.executable:
        _check_python(spark.sparkContext.pythonExec)


_NEEDED = ("torch", "pyarrow", "numpy")
_TELL = (
    "import sys, importlib.util as util; print('%d.%d' % sys.version_info[:2], "
    "*(name for name in sys.argv[1:] if util.find_spec(name) is None))"
)
"""Prints the version of a Python and which of the packages it has not; imports none of them."""
_TELL_SECONDS = 20.0


@functools.cache  # what is right stays so; an error is raised each time
def _check_python(program: str) -> None:
    try:
        command = [program, "-c", _TELL, *_NEEDED]
        told = subprocess.run(
            command, capture_output=True, text=True, timeout=_TELL_SECONDS, check=True
        ).stdout.split()
        ours = ".".join(map(str, sys.version_info[:2]))
        problem = f"has no {', '.join(told[1:])}" if told[1:] else ""
        if told[:1] != [ours]:
            problem = f"is Python {told[0]}, while this program runs {ours}"
    except (OSError, subprocess.SubprocessError) as error:
        problem = f"cannot be started ({error})"
    if problem:
        raise ClusterError(
            f"PYSPARK_PYTHON names {program} for Spark's workers, which {problem}; unset it, so "
            f"that they run the Python of this program, or set PYSPARK_PYTHON={sys.executable} "
            "before the session starts"
        )


def workers_python(spark: SparkSession) -> str:
    """Describe which Python Spark's workers run, as far as the driver knows, and what names it."""
    if is_connect(spark):
        return "the Python that PYSPARK_PYTHON named where the Spark Connect server was started"
    if os.environ.get("PYSPARK_PYTHON"):
        return f"{spark.sparkContext.pythonExec}, which PYSPARK_PYTHON names"
    return f"{spark.sparkContext.pythonExec} of the executors, since PYSPARK_PYTHON is not set"


def is_case_sensitive(spark: SparkSession) -> bool:
    """True if Spark takes names that differ in case only for two columns."""
    return conf(spark, "spark.sql.caseSensitive") == "true"


def scala_context(spark: SparkSession) -> Any:
    """The SparkContext of the JVM; there is none on Spark Connect."""
    context: Any = spark.sparkContext
    return context._jsc.sc()


def num_slots(spark: SparkSession, profile: ResourceProfile | None = None) -> int:
    """Tasks of a profile, or the default one, that can run at a time now; 0: Spark does not say."""
    if is_connect(spark):
        return 0
    scala = scala_context(spark)
    manager = scala.resourceProfileManager()
    if profile is None:
        java_profile: Any = manager.defaultResourceProfile()
    else:
        java_profile = profile._java_resource_profile
        manager.addResourceProfile(java_profile)  # else Spark knows it only from its first job on
    slots = int(scala.maxNumConcurrentTasks(java_profile))
    excluded, executors = _excluded_executors(scala)
    return slots - -(-slots * excluded // executors) if excluded else slots


def _excluded_executors(scala: Any) -> tuple[int, int]:
    """Executors on which Spark runs nothing more after failures, though it counts their slots.

    The second number is that of all.
    """
    entries = scala.getConf()
    names = ("spark.excludeOnFailure.enabled", "spark.excludeOnFailure.application.enabled")
    if not any(entries.get(name, "false").lower() == "true" for name in names):
        return 0, 0
    known = scala.statusStore().executorList(True)
    found = [known.apply(index) for index in range(known.size())]
    executors = [one for one in found if one.id() != "driver"]
    return sum(bool(one.isExcluded()) for one in executors), len(executors)


def driver_heap_bytes(spark: SparkSession) -> int | None:
    """Memory that the driver's JVM may use; None: it is elsewhere (Spark Connect)."""
    if is_connect(spark):
        return None
    context: Any = spark.sparkContext
    return int(context._jvm.java.lang.Runtime.getRuntime().maxMemory())


def driver_address(spark: SparkSession) -> tuple[str, str]:
    """Address to bind a server of the driver to, and the one that executors shall call.

    They are Spark's own choice, or the interface that talks to the Spark Connect server.
    """
    if is_connect(spark):
        client: Any = spark.client
        target = urlsplit(f"sc://{client.host.split('://')[-1]}")
        endpoint = target.hostname or "127.0.0.1", target.port or 15002
        family = socket.getaddrinfo(*endpoint, type=socket.SOCK_DGRAM)[0][0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(endpoint)  # which sends nothing
            address = str(probe.getsockname()[0])
        return address, address
    context: Any = spark.sparkContext
    entries = context.getConf()  # copies all entries, one call to the JVM for each
    announce = entries.get("spark.driver.host", "127.0.0.1")
    bind = entries.get("spark.driver.bindAddress", announce)
    return unbracketed(bind), unbracketed(announce)


def unbracketed(host: str) -> str:
    """A host of Spark's: it writes IPv6 addresses in brackets, which sockets do not take."""
    return host.removeprefix("[").removesuffix("]")


@contextlib.contextmanager
def described(spark: SparkSession, text: str) -> Iterator[None]:
    """Name the jobs and stages that this thread submits in the block, in Spark's own UI.

    On Spark Connect, which has no descriptions, by a tag.
    """
    if is_connect(spark):
        tag = text.replace(",", ";")
        is_new = tag not in spark.getTags()
        spark.addTag(tag)
        try:
            yield
        finally:
            if is_new:
                spark.removeTag(tag)
        return
    with _local_property(spark, _DESCRIPTION, text):
        yield


@contextlib.contextmanager
def jobs_of_run(spark: SparkSession, run_id: str) -> Iterator[None]:
    """Mark the jobs of the block with a run by `RUN`; threads that take `thread_properties`, too.

    Spark Connect has no such properties.
    """
    with contextlib.nullcontext() if is_connect(spark) else _local_property(spark, RUN, run_id):
        yield


@contextlib.contextmanager
def _local_property(spark: SparkSession, name: str, value: str) -> Iterator[None]:
    """Give the jobs of the block a property of this thread; afterwards it is what it was."""
    context = spark.sparkContext
    before = context.getLocalProperty(name)
    context.setLocalProperty(name, value)
    try:
        yield
    finally:
        if not has_ended(spark):
            context.setLocalProperty(name, before)  # type: ignore[arg-type]


RUN = "spark.sparkdl.run"
"""Local property with the run that a job belongs to."""
_DESCRIPTION = "spark.job.description"
"""Local property that Spark's UI shows as the description of jobs and of their stages."""


def tag_jobs(spark: SparkSession, tag: str) -> None:
    """Mark the jobs that this thread submits from now on, for `cancel_jobs`."""
    if is_connect(spark):
        spark.addTag(tag)
    else:
        # The session's own tags do not reach the jobs of a collect() on classic Spark 4.3.
        spark.sparkContext.addJobTag(tag)


def thread_properties(spark: SparkSession) -> Callable[[], None]:
    """Return a function that gives another thread what Spark knows of the calling thread.

    Without job group, pool and tags, ``cancelJobGroup`` would not end jobs of another thread, as
    notebook servers do. Tags of sparkdl's own are left out: each work has its own.
    """
    if is_connect(spark):
        own = _of_others(spark.getTags())

        def take_tags() -> None:
            for tag in own:
                spark.addTag(tag)

        return take_tags
    scala = scala_context(spark)
    properties = scala.getLocalProperties().clone()
    tags = _of_others(str(properties.getProperty(_TAGS) or "").split(","))
    if tags:
        properties.setProperty(_TAGS, ",".join(tags))
    else:
        properties.remove(_TAGS)

    def take_properties() -> None:
        scala.setLocalProperties(properties)

    return take_properties


_TAGS = "spark.job.tags"
"""Local property in which Spark keeps the tags of a thread's jobs, with commas between."""


def _of_others(tags: Iterable[str]) -> list[str]:
    return sorted(tag for tag in tags if tag and not tag.startswith("sparkdl"))


def untag_jobs(spark: SparkSession, tag: str) -> None:
    """Undo `tag_jobs`."""
    if is_connect(spark):
        spark.removeTag(tag)
    else:
        spark.sparkContext.removeJobTag(tag)


def cancel_jobs(spark: SparkSession, tag: str) -> None:
    """Cancel the jobs marked with ``tag``; called from any thread."""
    if is_connect(spark):
        spark.interruptTag(tag)
    else:
        spark.sparkContext.cancelJobsWithTag(tag)
