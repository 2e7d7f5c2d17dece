"""How does a function run on all workers of a cluster? The whole of ``TorchRunner.run``, in order.

Checks first, then the spools of its data sets, then the gang under the supervisor. Whatever
happens, nothing is left behind.
"""

from __future__ import annotations

import contextlib
import logging
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import cloudpickle
from pyspark.sql import DataFrame, SparkSession

from sparkdl import functionworker
from sparkdl.checkpoint.format import folders, latest
from sparkdl.checkpoint.storage import Storage
from sparkdl.data.source import Source, SpoolSource
from sparkdl.environment import versions
from sparkdl.errors import ConfigError, ShardLost
from sparkdl.inputs import Specification, Tensor, named
from sparkdl.loader import DataSet
from sparkdl.progress import ReportView, SilentView, View
from sparkdl.spark.columns import Prepared
from sparkdl.spark.datasets import DatasetTable
from sparkdl.spark.gang import launch
from sparkdl.spark.link import Link, open_link
from sparkdl.spark.preflight import inspect_cluster, require_plain_files
from sparkdl.spark.session import conf, is_case_sensitive
from sparkdl.spark.settings import Settings, read_settings
from sparkdl.spark.shards import SpooledShard, columns_of
from sparkdl.spark.slots import Slots, plan_gang, wait_again
from sparkdl.spark.sourcetable import SourceTable, empty_frame
from sparkdl.spark.specified import prepare_named
from sparkdl.spark.supervise import Attempt, GangResult, Limits, Rows, persistently, supervise
from sparkdl.spark.windows import with_windows

if TYPE_CHECKING:
    from sparkdl.checkpoint.format import CheckpointInfo

logger = logging.getLogger(__name__)

RUN_KEY = "function"
"""Folder of a function's checkpoints in the place that the user names."""

Data = DataFrame | Source


@dataclass(frozen=True, kw_only=True)
class FunctionRequest:
    """What a `TorchRunner` asks for."""

    function: Callable[[], Any]
    data: Mapping[str, Data]
    inputs: Mapping[str, Specification] | None
    """Columns of a batch by name; None: all columns of each data set."""
    num_workers: int | None
    device: str
    max_restarts: int
    checkpoint_dir: str | None
    resume: bool
    keep_checkpoints: int
    results: Literal["first", "all"]
    cpus_per_worker: int | None
    gpus_per_worker: float | None
    verbose: int


@dataclass(frozen=True, kw_only=True)
class FunctionResult:
    """What came of it."""

    values: list[Any]
    """What the function returned: on rank 0, or on all ranks."""
    history: list[dict[str, float]]
    restarts: int


def run_function(spark: SparkSession, request: FunctionRequest) -> FunctionResult:
    """Run a function on all workers.

    Raises:
        ConfigError: an option is wrong.
        DataError: a data set cannot be used.
        ClusterError: the cluster cannot run the gang.
        StorageError: checkpoints cannot be kept.
        WorkerError: the function failed on a worker.
        TrainingFailed: workers were lost more than ``max_restarts`` times.
    """
    run_id = uuid.uuid4().hex[:12]
    settings = read_settings(partial(conf, spark))
    payload = cloudpickle.dumps(request.function)
    frames = {name: df for name, df in request.data.items() if isinstance(df, DataFrame)}
    if frames:
        require_plain_files(partial(conf, spark), settings)
    prepared = {name: prepare_data(spark, data, request) for name, data in request.data.items()}
    slots = plan_gang(
        spark,
        settings,
        num_workers=request.num_workers,
        cpus_per_worker=request.cpus_per_worker,
        gpus_per_worker=request.gpus_per_worker,
    )
    with contextlib.ExitStack() as stack:
        link = open_link(
            spark,
            checkpoint_dir=request.checkpoint_dir,
            num_workers=slots.num_workers,
            profile=slots.profile,
            settings=settings,
            run_id=run_id,
            stack=stack,
        )
        check_folder(link.checkpoints, request)
        sets = DataSets(spark, request.data, prepared, run_id, slots)
        stack.callback(sets.close)
        persistently(
            sets.collect,
            max_restarts=request.max_restarts,
            prepare=partial(wait_again, spark, slots, settings, in_rounds=False),
        )
        view: View = SilentView()
        if request.verbose:
            view = ReportView(shows_logs=request.verbose > 1)
        stack.callback(view.close)
        job = FunctionJob(
            spark=spark,
            run_id=run_id,
            request=request,
            payload=payload,
            sets=sets,
            slots=slots,
            link=link,
            settings=settings,
            view=view,
        )
        return job.run()


def prepare_data(spark: SparkSession, data: Data, request: FunctionRequest) -> tuple[Prepared, ...]:
    """The columns of a data set, with the names that they have in a batch.

    Raises:
        DataError: no tensor can be made of one.
    """
    frame = data if isinstance(data, DataFrame) else empty_frame(spark, data)
    wanted = request.inputs
    if wanted is None:
        wanted = {name: Tensor(name) for name in frame.columns}
    sensitive = is_case_sensitive(spark)
    return tuple(
        prepare_named(
            frame.schema, entry, "feature", float_dtype="float32", is_case_sensitive=sensitive
        )
        for entry in named(wanted)
    )


def source_table(
    spark: SparkSession, source: Source, prepared: Sequence[Prepared], num_shards: int
) -> SourceTable:
    """The shards of a data set that workers read by themselves."""
    return SourceTable(spark, source, prepared, None, num_shards=num_shards, shares=None)


class DataSets:
    """The run's data sets, in shards that lie where their worker will be."""

    def __init__(
        self,
        spark: SparkSession,
        data: Mapping[str, Data],
        prepared: Mapping[str, tuple[Prepared, ...]],
        run_id: str,
        slots: Slots,
    ) -> None:
        """Describe them; nothing is read yet."""
        self._spark = spark
        self._prepared = prepared
        self._num_workers = slots.num_workers
        frames = {name: df for name, df in data.items() if isinstance(df, DataFrame)}
        self._table: DatasetTable | None = None
        if frames:
            self._table = DatasetTable(
                frames,
                prepared,
                num_shards=slots.num_workers,
                run_id=run_id,
                profile=slots.profile,
            )
        self._sources = {
            name: source_table(spark, source, prepared[name], slots.num_workers)
            for name, source in data.items()
            if not isinstance(source, DataFrame)
        }

    @property
    def df(self) -> DataFrame:
        """One row per worker, where its shards lie."""
        if self._table is not None:
            return self._table.df
        return self._spark.range(0, self._num_workers, 1, self._num_workers)

    def collect(self) -> dict[str, DataSet]:
        """Spool what is not there, and list it.

        Raises:
            DataError: rows cannot be used, or have changed since the first call.
        """
        found = {}
        if self._table is not None:
            for name, shards in self._table.collect().items():
                columns = columns_of(self._prepared[name], shards)
                data = DataSet(
                    columns=columns,
                    shards=tuple(part.shard for part in shards),
                    source=SpoolSource(),
                )
                found[name] = self._with_windows(data, shards)
        for name, table in self._sources.items():
            shards = table.collect()
            found[name] = DataSet(
                columns=table.columns(shards),
                shards=tuple(part.shard for part in shards),
                source=table.reader,
            )
        return found

    def _with_windows(self, data: DataSet, shards: tuple[SpooledShard, ...]) -> DataSet:
        plan = data.plan(self._num_workers, batch_size=1)
        info, entry = inspect_cluster(self._spark), partial(conf, self._spark)
        return replace(data, windows=with_windows(plan, shards, info, entry, None).windows)

    def rebuild(self) -> None:
        """Forget all spools, so that they are written anew."""
        if self._table is not None:
            self._table.rebuild()

    def close(self) -> None:
        """Remove all spools."""
        if self._table is not None:
            self._table.close()


def check_folder(storage: Storage | None, request: FunctionRequest) -> None:
    """Refuse to mix the checkpoints of two runs.

    Raises:
        ConfigError: there are some of an earlier one.
    """
    if request.checkpoint_dir is None or request.resume:
        return
    assert storage is not None
    if folders(storage, RUN_KEY):
        raise ConfigError(
            f"{request.checkpoint_dir} holds checkpoints of an earlier run; pass resume=True to go "
            "on from the newest of them, or another checkpoint_dir to begin anew"
        )


@dataclass(frozen=True, kw_only=True)
class FunctionJob:
    """A run's fixed values, once its data is there."""

    spark: SparkSession
    run_id: str
    request: FunctionRequest
    payload: bytes
    sets: DataSets
    slots: Slots
    link: Link
    settings: Settings
    view: View

    def run(self) -> FunctionResult:
        """Run the gang to its end, however many submissions that takes."""
        settings = self.settings
        result = supervise(
            self.spark,
            self._submit,
            world_size=self.slots.num_workers,
            hub=self.link.hub,
            limits=Limits(
                max_restarts=self.request.max_restarts,
                heartbeat_timeout_seconds=settings.heartbeat_timeout_seconds,
                start_timeout_seconds=settings.start_timeout_seconds,
                queue_timeout_seconds=settings.queue_timeout_seconds,
            ),
            view=self.view,
            run_id=self.run_id,
            is_watched=self.link.channel is not None,
            heal=self._heal,
        )
        return self._result(result)

    def _heal(self, failed: Attempt) -> None:
        if failed.has_reported(ShardLost):
            self.sets.rebuild()

    def _submit(self, attempt: int) -> Callable[[], Rows]:
        link, slots, settings = self.link, self.slots, self.settings
        if attempt > 0:
            link.hub.clear(f"{self.run_id}/{attempt - 1}/")
            wait_again(self.spark, slots, settings, in_rounds=False)
        found = self._newest()
        self.view.attempt(attempt, 0 if found is None else found.step)
        order = functionworker.FunctionOrder(
            run_id=self.run_id,
            run_key=RUN_KEY,
            attempt=attempt,
            device=self.request.device,
            payload=self.payload,
            sets=self.sets.collect(),
            results=self.request.results,
            keep=self.request.keep_checkpoints,
            storage_url=link.url,
            relays=link.relays,
            driver_hosts_channel=link.channel is not None,
            resume_path=None if found is None else found.path,
            threads=slots.threads,
            versions=versions(),
            start_timeout_seconds=settings.start_timeout_seconds,
            collective_timeout_seconds=settings.collective_timeout_seconds,
        )
        return partial(
            launch,
            self.sets.df,
            functionworker.run,
            order,
            channel=link.channel,
            profile=slots.profile,
            keeps_process=False,
        )

    def _newest(self) -> CheckpointInfo | None:
        if self.link.checkpoints is None:
            return None
        found = latest(self.link.checkpoints, RUN_KEY, lambda _: True)
        if found is not None:
            logger.info("going on from checkpoint %d (%s)", found.step, found.path)
        return found

    def _result(self, result: GangResult) -> FunctionResult:
        values: dict[int, Any] = {}
        ranks = range(self.slots.num_workers if self.request.results == "all" else 1)
        if self.link.channel is not None:
            for rank in ranks:
                data = self.link.files.read(functionworker.VALUE.format(rank))
                values[rank] = functionworker.unpickled(data)
        else:
            for rank, kind, data in result.rows:
                if kind == "value":
                    values[rank] = functionworker.unpickled(data)
        return FunctionResult(
            values=[values[rank]["value"] for rank in ranks],
            history=values[0]["history"],
            restarts=result.restarts,
        )
