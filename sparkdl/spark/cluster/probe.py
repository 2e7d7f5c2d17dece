"""A small job that asks the executors, before they read data, for what a run needs of them."""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import logging
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import pyarrow as pa
from pyspark.errors import PythonException
from pyspark.sql import Row, SparkSession

from sparkdl.comm.access import Address
from sparkdl.comm.channel import ChannelClient
from sparkdl.errors import (
    ClusterError,
    CommunicationError,
    SparkDLError,
    StorageError,
)
from sparkdl.runtime.versions import difference, versions
from sparkdl.serialization.program.imported_values import ProgramValues, values_to_send
from sparkdl.serialization.program.named_code import Place
from sparkdl.serialization.travel.operators import Operators
from sparkdl.spark.daemon import preload
from sparkdl.spark.session.background_job import BackgroundJob
from sparkdl.spark.session.compat import workers_python
from sparkdl.spark.session.failures import (
    has_crashed,
    loss_reason,
    python_cause,
    raise_unless_loss,
    spark_message,
)
from sparkdl.spark.session.settings import Settings
from sparkdl.storage.retried import Retried
from sparkdl.storage.storage import Storage, open_storage, without_password
from sparkdl.worker.watcher import ended_when_hung

if TYPE_CHECKING:
    from pyspark.resource import ResourceProfile

logger = logging.getLogger(__name__)

_PYTHON_REMEDY = (
    "executors need the Python that PYSPARK_PYTHON or spark.pyspark.python names, at that path: "
    "install it there, or ship one with --archives env.tar.gz#env and "
    "PYSPARK_PYTHON=./env/bin/python; where they were lost, their logs say why"
)
"""Remedy for executors that cannot start a Python worker."""
_DAEMON_REMEDY = (
    "spark.python.daemon.module=sparkdl.spark.daemon has executors import sparkdl before files of "
    "--py-files are there: send it with --archives packages.tar.gz#packages and "
    "spark.executorEnv.PYTHONPATH=packages, install it there, or leave that entry out"
)
"""Remedy for executors on which the daemon of our own cannot be imported."""
_SCHEMA = pa.schema([("answer", pa.string())])
_NO_DAEMON = re.compile(r"No module named '?sparkdl\b|sparkdl\.spark\.daemon")
_CONNECT_SECONDS = 5.0
"""Longest wait for one answer of the driver's channel, and for all where it is not needed."""
_OUTAGE_SECONDS = 30.0
"""Longest wait for it where it is needed: networks are away for a while."""
_PAUSE_SECONDS = 0.5


@dataclass(frozen=True, kw_only=True)
class Needs:
    """The needs of a run that not all executors meet."""

    names: frozenset[tuple[str, str]] = frozenset()
    """Modules of Python, and the qualified names of what is taken of each; empty: all of it."""
    values: Mapping[Place, str] = field(default_factory=dict)
    """Digests of what the driver has in its modules, see `imported_values`."""
    code: ProgramValues = field(default_factory=ProgramValues)
    """Code that executors have before they are asked: see `program_code`."""
    operators: Operators = field(default_factory=Operators)
    """Operators of torch, of which a program may have made some for itself."""
    cuda: bool = False
    """True if there must be a GPU."""

    def __bool__(self) -> bool:
        return bool(self.names or self.operators.names) or self.cuda

    def missing(self) -> str | None:
        """Return what this process lacks of them, and what to do; None: nothing."""
        for module, name in sorted(self.names):
            try:
                path = name.split(".") if name else []
                functools.reduce(getattr, path, importlib.import_module(module))
            except Exception as error:  # whatever a module raises when it is imported
                whole = ".".join(filter(None, (module, name)))
                what = f"cannot import {whole} ({type(error).__name__}: {error})"
                if not isinstance(error, ImportError | AttributeError):
                    return (
                        f"{what}; workers import this file too: put what only the program shall "
                        "do, such as starting Spark, below if __name__ == '__main__', or into "
                        "another file"
                    )
                return (
                    f"{what}; send your own modules with --py-files (spark.submit.pyFiles), "
                    "sparkContext.addPyFile(path) or spark.addArtifacts(path, pyfile=True), and "
                    "install packages there"
                )
        operator = self.operators.missing()
        if operator is not None:
            return (
                f"torch has no operator {operator} there; make it in a file of its own that the "
                "code which calls it imports, and send that with --py-files"
            )
        if self.cuda:
            from sparkdl.runtime.hardware import require_cuda

            try:
                require_cuda()
            except ClusterError as error:
                return str(error)
        return None


NO_NEEDS = Needs()


@dataclass(frozen=True, kw_only=True)
class ProbeTask:
    """Asks one executor. Runs there."""

    channel: Address | None
    connect_seconds: float
    """For how long it tries to reach the channel."""
    storage_url: str | None
    marker: str | None
    """File in the storage that the driver has written."""
    needs: Needs = NO_NEEDS
    preloads: bool = False
    """True if it imports what training needs, which the next tasks of its process have then."""
    heartbeat_timeout_seconds: float = 60.0
    """Time after which the task's process is ended if it neither runs Python nor uses the CPU."""

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield one JSON answer."""
        import socket

        with ended_when_hung(self.heartbeat_timeout_seconds):
            for _ in batches:
                pass
            answer = {
                "host": socket.gethostname(),
                "versions": versions(),
                "missing": self.needs.missing(),
                "differing": self._differing(),
                "reaches_driver": self._reaches_driver(),
                **self._storage(),
            }
            if self.preloads and answer["missing"] is None:
                preload()
        yield pa.RecordBatch.from_pydict({"answer": [json.dumps(answer)]}, schema=_SCHEMA)

    def _differing(self) -> list[tuple[Place, str]]:
        if not self.needs.values:
            return []
        from sparkdl.serialization.program.imported_values import differing

        return list(differing(self.needs.values).items())

    def _reaches_driver(self) -> bool:
        if self.channel is None:
            return False
        deadline = time.monotonic() + self.connect_seconds
        client = ChannelClient(self.channel, timeout_seconds=_CONNECT_SECONDS)
        with contextlib.closing(client):
            while True:
                try:
                    client.get("probe")
                    return True
                except CommunicationError:
                    if time.monotonic() > deadline:
                        return False
                time.sleep(_PAUSE_SECONDS)

    def _storage(self) -> dict[str, object]:
        """Why the storage cannot be opened here, if so; whether the driver's file is there."""
        if self.storage_url is None or self.marker is None:
            return {"storage_failure": None, "sees_marker": True}
        try:
            found = Retried(open_storage(self.storage_url)).exists(self.marker)
        except SparkDLError as error:
            return {"storage_failure": str(error), "sees_marker": False}
        return {"storage_failure": None, "sees_marker": found}


@dataclass(frozen=True, kw_only=True)
class ProbeFindings:
    """The abilities of the executors; those that the run needs have been checked."""

    reaches_driver: bool
    """True if every executor asked reaches the driver's channel."""
    storage_failure: str | None
    """Why an executor cannot open the storage; None: all can."""
    values: ProgramValues
    """Values that the program has changed in modules that executors import from files."""


def probe(
    spark: SparkSession,
    *,
    num_tasks: int,
    profile: ResourceProfile | None,
    channel: Address | None,
    needs_channel: bool,
    storage_url: str | None,
    checkpoints: Storage | None,
    run_id: str,
    settings: Settings,
    needs: Needs = NO_NEEDS,
    preloads: bool = False,
    once_submitted: Callable[[], None] | None = None,
) -> ProbeFindings:
    """Compare versions and reach the storage on the executors.

    The driver writes a file to ``checkpoints``, which executors must find under ``storage_url``;
    None: they need not. Where training ``needs_channel``, they try longer to reach it.
    ``once_submitted`` is called when they are asked: answers take seconds where Python begins, and
    with ``preloads`` imports what training needs.

    Raises:
        ClusterError: an executor has no Python or no sparkdl, runs other versions than the driver,
            lacks what the run needs, or does not answer.
        StorageError: an executor opens the storage, but finds another one than the driver's.
    """
    marker = None
    with contextlib.ExitStack() as stack:
        if checkpoints is not None:
            marker = f"sparkdl-marker-{run_id}"
            checkpoints.write(marker, b"")
            stack.callback(checkpoints.remove, marker)
        most = min(_OUTAGE_SECONDS, settings.start_timeout_seconds / 2)  # its own answer in time
        task = ProbeTask(
            channel=channel,
            connect_seconds=most if needs_channel else _CONNECT_SECONDS,
            storage_url=storage_url,
            marker=marker,
            needs=needs,
            preloads=preloads,
            heartbeat_timeout_seconds=settings.heartbeat_timeout_seconds,
        )
        if once_submitted is not None:
            once_submitted = functools.cache(once_submitted)
        ask = partial(_ask, spark, task, num_tasks, profile, settings, once_submitted)
        tag = f"sparkdl-{run_id}-probe"
        name = f"sparkdl {run_id}: check the executors"
        try:
            try:
                rows = ask(tag, name)
            except Exception as error:
                if not has_crashed(error):
                    raise
                # Spark itself runs no task of local[N] again.
                logger.warning("%s; the executors are asked again", loss_reason(error))
                rows = ask(f"{tag}-2", name)
        except PythonException as error:
            # The task itself raises nothing, so its executor could not even begin it.
            raise ClusterError(
                f"sparkdl cannot run on an executor: {python_cause(error)}; Spark's workers run "
                f"{workers_python(spark)}; set PYSPARK_PYTHON to a Python that has the packages, "
                "install them there as on the driver, or send them with --archives or --py-files"
            ) from error
        except Exception as error:
            raise_unless_loss(error)
            said = spark_message(error)
            raise ClusterError(
                f"no task could run on the executors ({said}); {python_remedy(error)}"
            ) from error
    answers = [json.loads(row["answer"]) for row in rows]
    for answer in answers:
        _check(answer, storage_url)
    there: dict[Place, str] = {}
    for answer in answers:
        there |= {(module, name): digest for (module, name), digest in answer["differing"]}
    failures = [f"{a['storage_failure']} (on {a['host']})" for a in answers if a["storage_failure"]]
    return ProbeFindings(
        reaches_driver=all(answer["reaches_driver"] for answer in answers),
        storage_failure=failures[0] if failures else None,
        values=values_to_send(needs.values, there, needs.code.code),
    )


def _ask(
    spark: SparkSession,
    task: ProbeTask,
    num_tasks: int,
    profile: ResourceProfile | None,
    settings: Settings,
    once_submitted: Callable[[], None] | None,
    tag: str,
    name: str,
) -> list[Row]:
    """Run the job once."""
    asked = spark.range(0, num_tasks, 1, num_tasks)
    collect = asked.mapInArrow(task, "answer string", profile=profile).collect
    return BackgroundJob(spark, collect, tag=tag, name=name).watched(
        settings.start_timeout_seconds,
        queue_seconds=settings.queue_timeout_seconds,
        once_submitted=once_submitted,
    )


def python_remedy(error: Exception) -> str:
    """Return the remedy, by Spark's error, for executors that cannot start a Python worker."""
    return _DAEMON_REMEDY if _NO_DAEMON.search(str(error)) else _PYTHON_REMEDY


def _check(answer: Mapping[str, object], storage_url: str | None) -> None:
    found = answer["versions"]
    assert isinstance(found, dict)
    problem = difference(versions(), found, f"the executor on {answer['host']}")
    if problem is not None:
        raise ClusterError(problem)
    if answer["missing"] is not None:
        raise ClusterError(f"the executor on {answer['host']} lacks something: {answer['missing']}")
    if not answer["sees_marker"] and not answer["storage_failure"]:
        raise StorageError(
            f"checkpointDir {without_password(storage_url or '')} cannot be used from the executor "
            f"on {answer['host']}: what the driver wrote there is not visible here; choose a "
            "directory that driver and all executors share, such as hdfs://, s3:// or a network "
            "mount, or leave checkpointDir unset"
        )
