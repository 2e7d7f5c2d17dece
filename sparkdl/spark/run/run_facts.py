"""The facts of a run that the driver writes into its record."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from pyspark.ml.param import Params
from pyspark.sql import SparkSession

from sparkdl.report.live.views import choose_view
from sparkdl.report.recorder import Recorder, recording
from sparkdl.runtime.hardware import hardware
from sparkdl.runtime.versions import versions
from sparkdl.spark.session.background_job import jobs_named_after
from sparkdl.spark.session.compat import conf, is_connect, jobs_of_run
from sparkdl.spark.session.interrupts import Cleanup, is_interrupted
from sparkdl.spark.session.stage_progress import StageProgress
from sparkdl.storage.hadoop_storage import open_on_driver
from sparkdl.storage.storage import Storage, open_storage, without_password

if TYPE_CHECKING:
    from sparkdl.spark.run.run import Request, Run

logger = logging.getLogger(__name__)

_LONGEST_VALUE = 500
"""Characters of a Param's value that are kept."""


@contextmanager
def record_run(spark: SparkSession | None, run_id: str, request: Request) -> Iterator[Recorder]:
    """Record a run, which may have no session, within `interruptible` if it has; see `recording`.

    The record is written while nothing is interrupted. What the user has interrupted says so,
    whatever the cancelled jobs have raised.
    """
    storage: Storage | None = None
    if place := request.report_dir:
        storage = open_storage(place) if spark is None else open_on_driver(spark, place)
    recorded = recording(
        run_id=run_id,
        name=request.name,
        run_name=request.run_name,
        params=request.params,
        storage=storage,
        listeners=request.listeners,
        is_interrupted=is_interrupted,
        ask_tasks=None if spark is None or not request.verbose else StageProgress(spark, run_id),
        versions=versions(),
        spark={} if spark is None else _spark_facts(spark),
        driver=hardware(),
    )
    marked = nullcontext() if spark is None else jobs_of_run(spark, run_id)
    with marked, jobs_named_after(request.run_name), Cleanup() as stack:
        recorder = stack.enter_context(recorded)
        called = f" ({request.run_name})" if request.run_name else ""
        logger.info("run %s of %s%s begins", run_id, request.name, called)
        name = request.run_name or ""
        recorder.show(lambda: choose_view(request.kind, request.verbose, run_id=run_id, name=name))
        recorder.phase("preflight")
        yield recorder


def shown_params(params: Params) -> tuple[Mapping[str, Any], ...]:
    """Params by name, as text; those without a value are left out."""
    return tuple(
        {
            "name": param.name,
            "value": shown(params.getOrDefault(param)),
            "is_set": params.isSet(param),
        }
        for param in params.params
        if params.isDefined(param)
    )


def shown(value: Any) -> str:
    """A value as people read it, without passwords."""
    if callable(value) and hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    text = without_password(value if isinstance(value, str) else repr(value))
    return text if len(text) <= _LONGEST_VALUE else text[: _LONGEST_VALUE - 1] + "…"


def facts(run: Run) -> dict[str, Any]:
    """Return what is known before training begins, for `Recorder.facts`."""
    plan, module = run.plan, run.module
    parameters = list(module.parameters())
    mesh = run.config.parallelism
    return {
        "world_size": plan.world_size,
        "mode": "gang" if run.slots.is_gang else "rounds",
        "strategy": shown(run.config.sync_strategy),
        "mesh": None if mesh is None else str(mesh),
        "shards": _shards_text(run),
        "rows": plan.num_rows,
        "validation_rows": plan.num_validation_rows,
        "epochs": plan.epochs,
        "first_epoch": plan.first_epoch,
        "steps_per_epoch": plan.steps_per_epoch,
        "first_step": plan.first_step,
        "steps": plan.total_steps,
        "batch_size": plan.batch_size,
        "parameters": sum(p.numel() for p in parameters),
        "trained_parameters": sum(p.numel() for p in parameters if p.requires_grad),
        "parameter_bytes": sum(p.numel() * p.element_size() for p in parameters),
        "rows_by_rank": [plan.rows_of(rank) for rank in range(plan.world_size)],
        "module": type(module).__qualname__,
        "slots": run.slots.total,
    }


def _shards_text(run: Run) -> str:
    """See `TrainingSummary.shards`."""
    number, table = len(run.plan.shards), run.table
    text = f"{number:,} shard{'s' * (number != 1)}"
    return f"{text} ({', '.join(table.notes)})" if table.notes else text


def _spark_facts(spark: SparkSession) -> dict[str, Any]:
    found: dict[str, Any] = {"version": spark.version}
    if is_connect(spark):
        return {**found, "session": "Spark Connect"}
    context = spark.sparkContext
    return {
        **found,
        "master": context.master,
        "application": context.applicationId,
        "name": conf(spark, "spark.app.name"),
        "ui": context.uiWebUrl,
    }
