"""The whole of ``TorchRunner.run``: a function on all workers of a cluster.

Checks first, then the spools of its data sets, then the gang under the supervisor. Whatever
happens, nothing is left behind.
"""

from __future__ import annotations

import contextlib
import logging
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from pyspark.sql import SparkSession

from sparkdl.errors import CheckpointLost, ConfigError, ShardLost
from sparkdl.inputs import Specification
from sparkdl.report.live.views import shows_lines
from sparkdl.report.recorder import Recorder
from sparkdl.spark.cluster.attempt import Attempt, Rows
from sparkdl.spark.cluster.launch import Launch
from sparkdl.spark.cluster.link import open_link
from sparkdl.spark.cluster.slots import plan_slots, wait_again
from sparkdl.spark.cluster.supervisor import GangResult, persistently, supervise
from sparkdl.spark.fit.check_request import travelling
from sparkdl.spark.frames.user_data import Data, user_data
from sparkdl.spark.functions.function_data import DataSets, prepare_sets
from sparkdl.spark.run.resume import newest, patiently
from sparkdl.spark.run.run import Request
from sparkdl.spark.run.run_facts import record_run
from sparkdl.spark.session.compat import conf, run_workers_here, shares_console
from sparkdl.spark.session.interrupts import Cleanup
from sparkdl.spark.session.settings import read_settings
from sparkdl.storage.checkpoint_format import StepFolder, folders
from sparkdl.storage.lease import Lease, Note, read_leases
from sparkdl.storage.storage import Storage
from sparkdl.worker import function_rank

if TYPE_CHECKING:
    from sparkdl.storage.checkpoint_format import CheckpointInfo

logger = logging.getLogger(__name__)

RUN_KEY = "function"
"""Folder of a function's checkpoints in the place that the user names."""


@dataclass(frozen=True, kw_only=True)
class FunctionRequest(Request):
    """What a `TorchRunner` asks for."""

    function: Callable[[], Any]
    data: Mapping[str, Data]
    inputs: Mapping[str, Specification] | None
    """Columns of a batch by name; None: all columns of each data set."""
    device: str
    checkpoint_dir: str | None
    resume: bool
    keep_checkpoints: int
    results: Literal["first", "all"]
    kind = "run"
    name: str = "TorchRunner"


@dataclass(frozen=True, kw_only=True)
class FunctionResult:
    """What came of it."""

    values: list[Any]
    """What the function returned: on rank 0, or on all ranks."""
    history: list[dict[str, float]]
    restarts: int


def run_function(spark: SparkSession, request: FunctionRequest) -> FunctionResult:
    """Run a function on all workers; within `interruptible`.

    Raises:
        ConfigError: an option is wrong.
        DataError: a data set cannot be used.
        ClusterError: the cluster cannot run the gang.
        StorageError: checkpoints cannot be kept.
        WorkerError: the function failed on a worker.
        TrainingFailed: workers were lost more than ``max_restarts`` times.
    """
    run_id = uuid.uuid4().hex[:12]
    with record_run(spark, run_id, request) as recorder:
        result = _run(spark, run_id, request, recorder)
        recorder.succeeded(result.history)
    return result


def _run(
    spark: SparkSession, run_id: str, request: FunctionRequest, recorder: Recorder
) -> FunctionResult:
    """See `run_function`."""
    run_workers_here(spark)
    settings = read_settings(partial(conf, spark))
    payload = _pickled(request.function)
    data = {name: user_data(one) for name, one in request.data.items()}
    for rows in data.values():
        rows.check_files(settings)
    prepared = prepare_sets(data, request.inputs)
    slots = plan_slots(
        spark,
        settings,
        num_workers=request.num_workers,
        cpus_per_worker=request.cpus_per_worker,
        gpus_per_worker=request.gpus_per_worker,
    )
    with Cleanup() as stack:
        link = open_link(
            spark,
            slots,
            settings,
            checkpoint_dir=request.checkpoint_dir,
            run_id=run_id,
            stack=stack,
        )
        check_folder(link.checkpoints, request)
        recorder.phase("spool")
        sets = DataSets(spark, data, prepared, run_id, slots)
        stack.callback(sets.close)
        persistently(
            sets.collect,
            max_restarts=request.max_restarts,
            prepare=partial(wait_again, spark, slots, settings),
        )
        link.hub.shows_lines = shows_lines(request.verbose) and shares_console(spark)
        job = FunctionJob(
            spark=spark,
            run_id=run_id,
            slots=slots,
            link=link,
            settings=settings,
            view=recorder,
            max_restarts=request.max_restarts,
            request=request,
            payload=payload,
            sets=sets,
        )
        recorder.facts(world_size=slots.num_workers, mode="gang", slots=slots.total)
        recorder.phase("train")
        result = job.run()
        recorder.phase("clean up")
    return result


def _pickled(function: Callable[[], Any]) -> bytes:
    try:
        return travelling(function)
    except Exception as error:  # whatever the user's classes raise when they are pickled
        raise ConfigError(
            "the function, or what it is called with or refers to, cannot be sent to the workers: "
            f"{error}; make such things in the function, and pass DataFrames by "
            "TorchRunner(data=...)"
        ) from error


def check_folder(storage: Storage | None, request: FunctionRequest) -> None:
    """Refuse to mix the checkpoints of two runs; warn of a run that may still be under way.

    Raises:
        ConfigError: there are some of an earlier one.
    """
    if request.checkpoint_dir is None:
        return
    assert storage is not None
    if request.resume:
        leases = patiently(partial(_leases, storage))
        for note in leases.values():
            if note.is_alive():
                logger.warning(
                    "another run seems to be alive in %s (run %s on %s, %.0f s ago); this one goes "
                    "on from the newest checkpoint there, whoever wrote it",
                    request.checkpoint_dir,
                    note.run_id,
                    note.host,
                    note.seconds_since_renewal(),
                )
        return
    if patiently(partial(folders, storage, RUN_KEY)):
        raise ConfigError(
            f"{request.checkpoint_dir} holds checkpoints of an earlier run; pass resume=True to go "
            "on from the newest of them, or another checkpoint_dir to begin anew"
        )


def _leases(storage: Storage) -> dict[str, Note]:
    return read_leases(storage, RUN_KEY, storage.list(RUN_KEY))


@dataclass(frozen=True, kw_only=True)
class FunctionJob(Launch):
    """A run's fixed values, once its data is there."""

    request: FunctionRequest
    payload: bytes
    sets: DataSets
    begun_from: list[str | None] = field(default_factory=list)
    """The checkpoint of each submission."""
    passed_over: set[str] = field(default_factory=set)
    """Checkpoints that workers could not read."""

    def run(self) -> FunctionResult:
        """Run the gang to its end, however many submissions that takes."""
        checkpoints, lease = self.link.checkpoints, None
        with contextlib.ExitStack() as stack:
            if checkpoints is not None:
                lease = stack.enter_context(Lease(checkpoints, RUN_KEY, self.run_id))
            submit = partial(self._submit, lease)
            return self._result(
                supervise(self, submit, heal=self._heal, what="run a function", once_there="")
            )

    def _heal(self, failed: Attempt) -> None:
        if failed.has_reported(ShardLost):
            self.sets.rebuild()
        path = self.begun_from[-1] if self.begun_from else None
        if failed.has_reported(CheckpointLost) and path is not None:
            self.passed_over.add(path)

    def _submit(self, lease: Lease | None, attempt: Attempt) -> Callable[[], Rows]:
        link, request, number = self.link, self.request, attempt.number
        if number > 0:
            self.view.begun_again(number, None)
            wait_again(self.spark, self.slots, self.settings, attempt.restarts_left)
        found = self._newest(lease)
        self.begun_from.append(None if found is None else found.path)
        if lease is not None:
            lease.begin(number, self.begun_from[-1])
        attempt.start = 0 if found is None else found.step
        self.view.attempt(number, attempt.start)
        in_task = link.send(
            function_rank.FUNCTION,
            self.payload,
            what="the function and its arguments have",
            remedy="pass rows by TorchRunner(data=...), and let the function read the rest",
            in_task=True,
        )
        order = self.gang_order(
            function_rank.FunctionOrder,
            attempt=number,
            run_key=RUN_KEY,
            device=request.device,
            payload=in_task or b"",
            sets=self.sets.collect(),
            results=request.results,
            keep=request.keep_checkpoints,
            resume_path=None if found is None else found.path,
        )
        return self.gang_job(self.sets.df, function_rank.run, order, keeps_process=False)

    def _newest(self, lease: Lease | None) -> CheckpointInfo | None:
        if self.link.checkpoints is None:
            return None
        found = newest(
            self.link.checkpoints,
            RUN_KEY,
            is_wanted=self._is_own,
            passed_over=self.passed_over,
            lease=lease,
        )
        if found is not None:
            logger.info("going on from checkpoint %d (%s)", found.step, found.path)
        return found

    def _is_own(self, folder: StepFolder) -> bool:
        """True for what this run may go on from: another run has another function.

        At the beginning that is whatever is there, if the user has asked to resume it.
        """
        is_asked = self.request.resume and not self.begun_from
        is_mine = folder.writer.run_id == self.run_id or folder.path in self.begun_from
        return is_mine or is_asked

    def _result(self, result: GangResult) -> FunctionResult:
        values: dict[int, Any] = {}
        ranks = range(self.slots.num_workers if self.request.results == "all" else 1)
        in_rows = {rank: data for rank, kind, data in result.rows if kind == "value"}
        for rank in ranks:
            data = in_rows.get(rank)
            if data is None:
                data = self.link.files.read(function_rank.VALUE.format(rank))
            values[rank] = function_rank.unpickled(data)
        return FunctionResult(
            values=[values[rank]["value"] for rank in ranks],
            history=values[0]["history"],
            restarts=result.restarts,
        )
