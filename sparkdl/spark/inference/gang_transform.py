"""``transform`` in a gang: the workers of a barrier stage divide a model that is too large for one.

The stage stands between two shuffles. The first deals the rows to the workers. The second is there
because Spark refuses barrier stages that ``show``, ``limit``, ``coalesce`` and the like reach into,
or fails at them, and because it runs a barrier stage before a shuffle again when a worker is lost.
"""

from __future__ import annotations

import contextlib
import logging
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import pyarrow as pa
from pyspark import BarrierTaskContext
from pyspark.sql import Column as SparkColumn
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql import types as T

from sparkdl.errors import ClusterError, ConfigError
from sparkdl.inference.predict import PredictTask
from sparkdl.mesh import Mesh
from sparkdl.report.page.formats import size
from sparkdl.runtime.versions import versions
from sparkdl.serialization.stored_module import StoredModule
from sparkdl.spark.cluster.cluster_info import inspect_cluster, is_encrypted, parse_bytes
from sparkdl.spark.cluster.gang import barrier_environment
from sparkdl.spark.cluster.slots import await_executors
from sparkdl.spark.frames.user_data import refuse_stream
from sparkdl.spark.inference.arrow_udf import WithColumn
from sparkdl.spark.inference.output_columns import OutputPlan
from sparkdl.spark.session.compat import conf, run_workers_here
from sparkdl.spark.session.settings import session_settings
from sparkdl.worker import predicting
from sparkdl.worker.lifecycle import GangOrder
from sparkdl.worker.watcher import ended_when_hung

logger = logging.getLogger(__name__)


def chosen_mesh(spark: SparkSession, module: StoredModule) -> Mesh | None:
    """The mesh of training if a Python worker has no room for the weights; None: it may have.

    Spark divides ``spark.executor.pyspark.memory`` among the cores of an executor. Where that is
    not set, or is no limit, as in local mode, nothing is known.
    """
    granted = conf(spark, "spark.executor.pyspark.memory")
    if module.mesh is None or not granted or inspect_cluster(spark).is_local:
        return None
    limit = parse_bytes(granted, unit=2**20) // int(conf(spark, "spark.executor.cores") or 1)
    if not limit or module.weights.num_bytes <= limit:
        return None
    logger.info(
        "the weights take %s, and Spark grants a Python worker %s: transform divides the model "
        "along Mesh(%s)",
        *(size(module.weights.num_bytes), size(limit), module.mesh),
    )
    return module.mesh


def check_mesh(spark: SparkSession, module: StoredModule, mesh: Mesh, task: PredictTask) -> None:
    """Refuse, before any job, what no gang of this mesh can do.

    Raises:
        ClusterError: the cluster cannot run it.
        StorageError: the weights are not there any more.
        ConfigError: the module cannot be divided so, or outputs of its layers are wanted that no
            worker has.
    """
    settings, what = session_settings(spark), f"transform along Mesh({mesh})"
    info = await_executors(spark, settings)
    slots = info.num_slots
    if info.dynamic_allocation:
        raise ClusterError(
            f"{what} is a barrier stage, which Spark refuses under dynamic allocation; set "
            "spark.dynamicAllocation.enabled=false, or setParallelism(None) if an executor has "
            "room for the model"
        )
    if slots and slots < mesh.size:
        raise ClusterError(
            f"{what} needs {mesh.size} workers at a time, and the cluster has {slots} slot(s); "
            "give Spark more executors or cores, or choose a smaller mesh with setParallelism"
        )
    encrypting = is_encrypted(partial(conf, spark))
    if encrypting and not settings.allow_unencrypted:
        raise ClusterError(
            f"{encrypting} asks for encrypted traffic, but the workers of {what} exchange weights "
            "and rows as plain TCP; set spark.sparkdl.allowUnencrypted=true if that network is "
            "trusted, or setParallelism(None)"
        )
    # Here, and not above: it imports torch's compiler, which takes seconds.
    from sparkdl.sync.divided.layout import divided_layers

    module.check()  # an error of the gang's shows only after Spark has tried it again and again
    blank = module.blank
    divided_layers(mesh, blank)
    mesh = mesh.for_inference
    scalars = [name for name, parameter in blank.named_parameters() if parameter.dim() == 0]
    if scalars and mesh.num_shards > 1:
        raise ConfigError(
            f"{what}: the parameter {scalars[0]!r} is a single number without a dimension, which "
            "cannot be divided; setParallelism(None)"
        )
    if task.forward.layers and mesh.tensor > 1:
        raise ConfigError(
            f"{what}: no worker may have all of what the layer {task.forward.layers[0]!r} returns; "
            "use a mesh without the axis tensor, or setParallelism(None)"
        )


def transform(
    dataset: DataFrame,
    prefix: str,
    inputs: Sequence[SparkColumn],
    task: PredictTask,
    mesh: Mesh,
    plan: OutputPlan,
) -> DataFrame:
    """The rows, in another order, with the columns of ``plan``; see `arrow_udf.with_columns`."""
    refuse_stream(dataset, "transform along a Mesh")
    spark, settings = dataset.sparkSession, session_settings(dataset.sparkSession)
    run_workers_here(spark)
    order = GangOrder(
        run_id=uuid.uuid4().hex[:12],
        run_key="predict",
        attempt=0,
        device=task.device,
        payload=b"",
        storage_url=None,
        relays=False,
        driver_hosts_channel=False,
        resume_path=None,
        threads=inspect_cluster(spark).task_threads,
        versions=versions(),
        start_timeout_seconds=settings.start_timeout_seconds,
        collective_timeout_seconds=settings.collective_timeout_seconds,
        heartbeat_timeout_seconds=settings.heartbeat_timeout_seconds,
    )
    mesh = mesh.for_inference
    given, packed = f"{prefix}_inputs", f"{prefix}_output"
    parts = [column.alias(f"_{number}") for number, column in enumerate(inputs)]
    dealt = dataset.withColumn(given, F.struct(*parts)).repartition(mesh.size)
    gives = T.StructType([*plan.spark_type.fields, T.StructField(predicting.ERROR, T.StringType())])
    schema = T.StructType([*dataset.schema.fields, T.StructField(packed, gives)])
    work = PredictInGang(task=task, order=order, mesh=mesh, name=packed, inputs=given)
    computed = dealt.mapInArrow(work, schema, barrier=True).repartition(mesh.size)
    error = F.col(packed)[predicting.ERROR]
    made = {
        name: F.when(error.isNotNull(), F.raise_error(error)).otherwise(make(F.col(packed)))
        for name, make in plan.columns.items()
    }
    return computed.withColumns(made).drop(packed)


@dataclass(frozen=True, kw_only=True)
class PredictInGang:
    """The work of a task of the barrier stage. Runs on executors."""

    task: PredictTask
    order: GangOrder
    mesh: Mesh
    name: str
    """The column to add; see `WithColumn`."""
    inputs: str

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Predict the rows of a partition, in step with the other tasks."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(ended_when_hung(self.order.heartbeat_timeout_seconds))
            environment = barrier_environment(BarrierTaskContext.get(), stack)
            predict = partial(predicting.predict, environment, self.order, self.task, self.mesh)
            yield from WithColumn(function=predict, name=self.name, inputs=self.inputs)(batches)
