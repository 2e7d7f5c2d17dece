"""The whole of ``TorchRunner.run``: a function on all workers of a cluster, or in the driver.

Whatever happens, nothing is left behind. In the driver's own process, for debugging, it runs as
rank 0 of one: what it raises comes out as it is, and breakpoints work.
"""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

from pyspark.sql import SparkSession

from sparkdl.comm.channel import Hub
from sparkdl.comm.file_chunks import JobResults
from sparkdl.errors import ConfigError
from sparkdl.inputs import Specification
from sparkdl.mesh import Mesh
from sparkdl.report.live.views import shows_lines
from sparkdl.report.recorder import Recorder
from sparkdl.runtime.activity import doing
from sparkdl.runtime.hardware import choose_device, hardware
from sparkdl.serialization.travel.pickling import dumps
from sparkdl.spark.cluster.attempt import Attempt
from sparkdl.spark.cluster.launch import Launch
from sparkdl.spark.cluster.link import open_link
from sparkdl.spark.cluster.resize import Resize
from sparkdl.spark.cluster.slots import plan_slots, wait_again
from sparkdl.spark.cluster.supervisor import GangResult, persistently, supervise
from sparkdl.spark.frames.user_data import Data, user_data
from sparkdl.spark.functions.function_data import DataSets, local_data_sets, prepare_sets
from sparkdl.spark.run.placement import Placement, choose_placement
from sparkdl.spark.run.resume import Attempts, gang_attempts, newest, patiently
from sparkdl.spark.run.run import Request
from sparkdl.spark.run.run_facts import record_run
from sparkdl.spark.session.compat import is_connect, run_workers_here, shares_console
from sparkdl.spark.session.interrupts import Cleanup
from sparkdl.spark.session.settings import session_settings
from sparkdl.spark.session.termination import removed_at_termination
from sparkdl.storage.checkpoint_format import (
    CheckpointInfo,
    StepFolder,
    Writer,
    folders,
    load_shared,
)
from sparkdl.storage.hadoop_storage import open_on_driver
from sparkdl.storage.lease import Lease, read_leases
from sparkdl.storage.retried import Retried
from sparkdl.storage.storage import Storage, check_writable, open_storage
from sparkdl.worker import function_rank
from sparkdl.worker.context import Context, entered
from sparkdl.worker.function_loader import DataSet
from sparkdl.worker.function_mesh import device_mesh
from sparkdl.worker.function_rank import (
    called,
    checkpoints,
    default_group,
    environment_variables,
    in_turn,
    load_part,
)

logger = logging.getLogger(__name__)

RUN_KEY = "function"
"""Folder of a function's checkpoints in the place that the user names."""


@dataclass(frozen=True, kw_only=True)
class FunctionRequest(Request):
    """The request of a `TorchRunner`."""

    function: Callable[[], Any]
    data: Mapping[str, Data]
    inputs: Mapping[str, Specification] | None
    """Columns of a batch by name; None: all columns of each data set."""
    device: str
    checkpoint_dir: str | None
    resume: bool
    min_workers: int | None = None
    """Fewest workers that run it; None: as many as `num_workers`."""
    parallelism: Mesh | None = None
    """Mesh that the workers form; `num_workers` is its size, or 0."""
    num_shards: int | None = None
    """Fixed parts of the rows; None: one for each worker."""
    grow_after_seconds: float = 60.0
    """Least time that fewer workers than could be had go on."""
    keep_checkpoints: int
    results: Literal["first", "all"]
    kind = "run"
    name: str = "TorchRunner"


@dataclass(frozen=True, kw_only=True)
class FunctionResult:
    """The results of a run of a function."""

    values: list[Any]
    """Values that the function returned: on rank 0, or on all ranks."""
    history: list[dict[str, float]]


Run = Callable[[SparkSession, str, FunctionRequest, Recorder], FunctionResult]
"""Runs a function under an id, within a record; the session may be None in the driver itself."""


def run_recorded(run: Run, spark: Any, request: FunctionRequest) -> FunctionResult:
    """Run a function by `on_workers` or `in_driver`, and leave a record of that."""
    run_id = uuid.uuid4().hex[:12]
    with record_run(spark, run_id, request) as recorder:
        result = run(spark, run_id, request, recorder)
        recorder.succeeded(result.history)
    return result


def on_workers(
    spark: SparkSession, run_id: str, request: FunctionRequest, recorder: Recorder
) -> FunctionResult:
    """Run a function on all workers, within `interruptible`; raises what `TorchRunner.run` says."""
    run_workers_here(spark)
    if request.min_workers is not None and is_connect(spark):
        raise ConfigError(
            "a range of workers needs classic Spark: Spark Connect does not tell how many slots "
            f"there are; pass num_workers={request.num_workers}"
        )
    settings = session_settings(spark)
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
        most_workers=request.num_shards,
        min_workers=request.min_workers,
        mesh=request.parallelism,
    )
    with Cleanup() as stack:
        mesh = request.parallelism
        readers = None if mesh is None else mesh.num_readers
        sets = DataSets(spark, data, prepared, run_id, slots, request.num_shards, readers)
        stack.callback(sets.close)
        link = open_link(
            spark,
            slots,
            settings,
            checkpoint_dir=request.checkpoint_dir,
            run_id=run_id,
            stack=stack,
            once_submitted=sets.begin,
        )
        check_folder(link.checkpoints, request)
        recorder.phase("spool")
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
        return dumps(function)
    except Exception as error:  # whatever the user's classes raise when they are pickled
        raise ConfigError(
            "the function, or what it is called with or refers to, cannot be sent to the workers: "
            f"{error}; make such things in the function, and pass DataFrames by "
            "TorchRunner(data=...)"
        ) from error


def check_folder(storage: Storage | None, request: FunctionRequest) -> None:
    """Refuse to mix two runs' checkpoints (ConfigError); warn of a run that may be alive."""
    if request.checkpoint_dir is None:
        return
    assert storage is not None
    if request.resume:
        leases = patiently(lambda: read_leases(storage, RUN_KEY, storage.list(RUN_KEY)))
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


@dataclass(frozen=True, kw_only=True)
class FunctionJob(Launch):
    """A run's fixed values, once its data is there."""

    request: FunctionRequest
    payload: bytes
    sets: DataSets
    sizes: list[int] = field(default_factory=list)
    """Workers of each submission."""

    def run(self) -> FunctionResult:
        """Run the gang to its end, however many submissions that takes."""
        placement = choose_placement(self.sets, self.slots, self.sets.num_places)
        with gang_attempts(self, RUN_KEY, placement.after_loss) as attempts:
            result = supervise(
                self,
                partial(self._submit, placement, attempts),
                heal=attempts.heal,
                changes=[Resize(self, self._pays, attempts.take_at_most)],
                what="run a function",
                once_there="",
            )
            return self._result(result)

    def _submit(
        self, placement: Placement[dict[str, DataSet]], attempts: Attempts, attempt: Attempt
    ) -> Callable[[], JobResults]:
        path = attempts.begin(attempt, partial(self._newest, attempts))
        request, world_size = self.request, attempt.world_size
        self.sizes.append(world_size)
        sets, df = placement.start(attempt.number, world_size)
        in_task = self.link.send(
            function_rank.FUNCTION,
            self.payload,
            what="the function and its arguments have",
            remedy="pass rows by TorchRunner(data=...), and let the function read the rest",
            in_task=True,
        )
        order = self.gang_order(
            function_rank.FunctionOrder,
            attempt=attempt.number,
            run_key=RUN_KEY,
            device=request.device,
            payload=in_task or b"",
            sets=sets,
            holding=placement.holding,
            mesh=request.parallelism,
            results=request.results,
            keep=request.keep_checkpoints,
            resume_path=path,
        )
        return self.gang_job(
            df, function_rank.run, order, num_workers=world_size, keeps_process=False
        )

    def _pays(self, attempt: Attempt, _workers: int, since: float) -> str | None:
        """Why to begin again with more workers, see `resize.Pays`.

        How long the function goes on is not known. So its workers train for a while, and it begins
        again when a checkpoint has just been written, so that no step is lost.
        """
        due = max(since, attempt.first_event + self.request.grow_after_seconds)
        if attempt.saved is None or attempt.saved[1] < due:
            return None
        number = attempt.saved[0]
        return f"the function of {attempt.world_size} begins again from checkpoint {number}"

    def _newest(self, attempts: Attempts, storage: Storage) -> CheckpointInfo | None:
        """The newest checkpoint of this run, at first of any run if the user resumes it."""
        begun_from = attempts.begun_from

        def is_own(folder: StepFolder) -> bool:
            is_asked = self.request.resume and not begun_from
            return is_asked or folder.writer.run_id == self.run_id or folder.path in begun_from

        found = newest(
            storage,
            RUN_KEY,
            is_wanted=is_own,
            passed_over=attempts.passed_over,
            lease=attempts.lease,
        )
        if found is not None:
            logger.info("going on from checkpoint %d (%s)", found.step, found.path)
        return found

    def _result(self, result: GangResult) -> FunctionResult:
        in_rows = {rank: data for rank, kind, data in result.rows if kind == "value"}
        found = []
        for rank in range(self.sizes[-1] if self.request.results == "all" else 1):
            data = in_rows.get(rank)
            if data is None:
                data = self.link.files.read(function_rank.VALUE.format(rank))
            found.append(function_rank.unpickled(data))
        return FunctionResult(values=[one["value"] for one in found], history=found[0]["history"])


_SECONDS = 600.0
"""Longest wait for a checkpoint to be written."""


def in_driver(
    spark: SparkSession | None, run_id: str, request: FunctionRequest, recorder: Recorder
) -> FunctionResult:
    """Run a function in this process; what concerns several workers has no effect."""
    with tempfile.TemporaryDirectory(prefix="sparkdl-") as folder, contextlib.ExitStack() as stack:
        stack.enter_context(removed_at_termination(folder))
        storage = _storage(spark, request, folder)
        check_folder(storage, request)
        data = {name: user_data(one) for name, one in request.data.items()}
        sets = local_data_sets(data, request.inputs, Path(folder))
        device = choose_device(request.device, (), 0, os.environ)
        stack.enter_context(default_group(device, _SECONDS))
        found = newest(storage, RUN_KEY) if request.resume else None
        lease = stack.enter_context(Lease(storage, RUN_KEY, run_id))
        lease.begin(0, None if found is None else found.path)
        manager = stack.enter_context(
            checkpoints(
                storage,
                request.keep_checkpoints,
                Writer(run_key=RUN_KEY, run_id=run_id, attempt=0),
                Hub(),
                _SECONDS,
                is_required=request.checkpoint_dir is not None,
            )
        )
        place = Context(
            rank=0,
            nodes=(0,),
            device=device,
            num_restarts=0,
            sets=sets,
            resumed=None if found is None else patiently(partial(load_shared, found)),
            save=lambda number, shared, part: manager.save(number, shared, part or {}),
            show=recorder.epoch,
            parts=None if found is None else partial(_parts, found),
            # All axes are of size 1, as there is but one rank.
            mesh=None if request.parallelism is None else device_mesh(Mesh(), device, _SECONDS),
        )
        recorder.facts(world_size=1, mode="the driver's own process")
        recorder.fact(0, {"kind": "hardware", "hardware": hardware(device)})
        recorder.phase("train")
        doing("")
        with environment_variables(place), entered(place):
            value = called(request.function)
        return FunctionResult(values=[value], history=place.history)


def _parts(info: CheckpointInfo) -> Iterator[Any]:
    return (patiently(partial(load_part, info, rank)) for rank in in_turn(info, 0))


def _storage(spark: SparkSession | None, request: FunctionRequest, folder: str) -> Storage:
    place = request.checkpoint_dir
    if place is None:
        return open_storage(str(Path(folder) / "checkpoints"))
    storage = Retried(open_storage(place) if spark is None else open_on_driver(spark, place))
    check_writable(storage)
    return storage
