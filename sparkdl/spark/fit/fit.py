"""How does a DataFrame become a trained module? The whole of ``fit``, in order.

Checks that need no job come first, then those that need a small one, then the spool, then what
only the data can tell, then training, in a gang or in rounds. Whatever happens, nothing is left
behind.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from pyspark.sql import DataFrame, SparkSession

from sparkdl.data.column_stats import skipped_rows
from sparkdl.data.plan import Column, TrainPlan, make_plan
from sparkdl.data.source import Source
from sparkdl.report.live.choose_view import choose_view, shows_lines
from sparkdl.report.live.progress import EpochCallback, SharedView, View
from sparkdl.report.recorder import Recorder
from sparkdl.serialization.packed_module import pack
from sparkdl.spark.cluster.cluster_info import inspect_cluster
from sparkdl.spark.cluster.link import open_link
from sparkdl.spark.cluster.slots import Slots, wait_again
from sparkdl.spark.cluster.supervisor import persistently
from sparkdl.spark.fit.checks import check_labels, shaped
from sparkdl.spark.fit.dry_run import check_empty_batches, watched_run
from sparkdl.spark.fit.gang_fit import train_in_gang
from sparkdl.spark.fit.intake import check_plan_memory, take_in
from sparkdl.spark.frames.choose_windows import as_begun, with_windows
from sparkdl.spark.frames.shard_table import ShardTable, SpooledShard, content_of
from sparkdl.spark.frames.shared_spools import SpoolColumnKey, SpoolKey, Spools
from sparkdl.spark.frames.source_table import SourceTable, active_session
from sparkdl.spark.rounds.averaging_rounds import train_in_rounds
from sparkdl.spark.rounds.populations import train_population
from sparkdl.spark.run.run import FitRequest, FitResult, Run, Trained
from sparkdl.spark.run.run_facts import Clock, facts, recorded
from sparkdl.spark.run.run_key import run_key
from sparkdl.spark.session.compat import conf, shares_console
from sparkdl.spark.session.interrupts import Cleanup, interruptible
from sparkdl.sync.averaging.averaging import AveragingStrategy
from sparkdl.sync.frozen_layers import thaw
from sparkdl.sync.population.population import PopulationStrategy
from sparkdl.sync.strategy import SyncStrategy
from sparkdl.train.callbacks import make_stopper

if TYPE_CHECKING:
    from pyspark.sql import Column as SparkColumn

    from sparkdl.spark.frames.columns import Prepared

__all__ = ["FitRequest", "FitResult", "fit"]

logger = logging.getLogger(__name__)

_SKEW = 1.5
"""A worker's rows over those that it should have, from which on the user is told."""


def fit(data: DataFrame | Source, request: FitRequest, spools: Spools | None = None) -> FitResult:
    """Train on all workers of the cluster.

    Args:
        data: the rows, or a source that workers read by themselves.
        request: what the estimator asks for.
        spools: those of other fits on the same DataFrame, which may be used, and are left there;
            the fit waits until those leave it slots. None: the fit has its own.

    Raises:
        ConfigError: a parameter is wrong, or the module cannot take the features.
        DataError: the DataFrame cannot be trained on.
        ClusterError: the cluster cannot run the gang.
        StorageError: checkpoints cannot be kept.
        WorkerError: the user's code failed on a worker.
        TrainingFailed: workers were lost more than ``max_restarts`` times.
        KeyboardInterrupt: the user has interrupted; nothing is left behind.
    """
    # DataFrames first: they have an attribute for each column, whatever its name.
    spark = data.sparkSession if isinstance(data, DataFrame) else active_session()
    run_id = uuid.uuid4().hex[:12]
    directory = request.config.checkpoint.directory
    with interruptible(spark, directory), recorded(spark, request, run_id) as recorder:
        result = _fit(data, run_id, request, spools, recorder)
        recorder.trained(result.module)
        recorder.end(None, result.summary.history)
    summary = replace(result.summary, record=recorder.record(), report_path=recorder.page_path)
    return replace(result, summary=summary)


def _fit(
    data: DataFrame | Source,
    run_id: str,
    request: FitRequest,
    spools: Spools | None,
    recorder: Recorder,
) -> FitResult:
    """See `fit`."""
    clock = Clock(recorder)
    intake = take_in(data, request)
    spark, settings, source, slots = intake.spark, intake.settings, intake.source, intake.slots
    strategy, in_rounds, module = intake.strategy, intake.in_rounds, intake.module
    df, prepared, validation = intake.df, intake.prepared, intake.validation
    with Cleanup() as stack:
        if spools is not None:
            clock.lap("preflight")
            stack.enter_context(spools.turns.slots(slots.num_workers, slots.total))
            clock.lap("wait")
        link = open_link(
            spark,
            checkpoint_dir=request.config.checkpoint.directory,
            num_workers=slots.num_workers,
            profile=slots.profile,
            settings=settings,
            run_id=run_id,
            stack=stack,
            in_rounds=in_rounds,
        )
        clock.lap("preflight")
        recorder.phase("spool")
        make_table = partial(
            _make_table, df, prepared, validation, run_id, slots, strategy, in_rounds=in_rounds
        )
        table: ShardTable | SourceTable
        if source is not None:
            table = _source_table(spark, source, prepared, request, slots, strategy)
        elif spools is not None:
            key = _spool_key(prepared, validation, slots, request, strategy, in_rounds=in_rounds)
            table = spools.take(key, make_table)
        else:
            table = make_table()
            stack.callback(table.close)
        spooled = persistently(
            table.collect,
            max_restarts=request.max_restarts,
            prepare=partial(wait_again, spark, slots, settings, in_rounds=in_rounds),
        )
        clock.lap("spool")
        columns = shaped(table, spooled, request)
        num_skipped = _warn_of_skipped(columns, spooled) if source is None else 0
        shown = watched_run(module, columns, request, recorder.graph)
        num_classes = shown.num_classes
        if num_classes is not None and request.label_col is not None:
            index = request.num_inputs
            if isinstance(table, SourceTable):
                table.check_labels(request.label_col, num_classes, index)
            else:
                check_labels(df, request.label_col, num_classes, index, spooled)
        plan = _make_plan(columns, spooled, slots, request, strategy)
        make_stopper(request.config, has_validation=plan.num_validation_rows > 0)
        if source is None:  # others have windows of their own
            info, entry = inspect_cluster(spark), partial(conf, spark)
            window_bytes = request.config.shuffle_window_bytes
            plan = with_windows(plan, spooled, info, entry, window_bytes)
        check_empty_batches(module, plan, request.config)
        check_plan_memory(spark, module, plan, slots)
        view = SharedView(_view(plan, request), recorder)
        link.hub.shows_lines = shows_lines(request.verbose) and shares_console(spark)
        stack.callback(view.close)
        run = Run(
            spark=spark,
            run_id=run_id,
            run_key=run_key(
                module, plan, request.config, f"{content_of(spooled)}{'-rounds' * in_rounds}"
            ),
            plan=plan,
            config=request.config,
            module=module,
            packed=pack(module),
            table=table,
            slots=slots,
            link=link,
            settings=settings,
            view=view,
            max_restarts=request.max_restarts,
            recorder=recorder,
        )
        recorder.facts(**facts(run, strategy, in_rounds=in_rounds))
        recorder.phase("train")
        trained = _train(as_begun(run), strategy, in_rounds=in_rounds)
        clock.lap("train")
        recorder.phase("clean up")
        view.done(trained.steps)
    thaw(module, intake.frozen)  # a choice of this training, not of the module
    clock.lap("clean up")
    return FitResult(
        module=module.eval(),
        columns=tuple(column for column in columns if column.role == "feature"),
        num_classes=num_classes,
        prediction_key=shown.prediction_key,
        summary=replace(
            trained.to_summary(plan, clock.laps, clock.total()), skipped_rows=num_skipped
        ),
    )


def _make_table(
    df: DataFrame,
    prepared: Sequence[Prepared],
    validation: SparkColumn | None,
    run_id: str,
    slots: Slots,
    strategy: SyncStrategy,
    *,
    in_rounds: bool,
) -> ShardTable:
    """Where the shards of a DataFrame will be listed; nothing is read yet."""
    return ShardTable(
        df,
        prepared,
        validation,
        num_shards=slots.num_workers,
        run_id=run_id,
        profile=slots.profile,
        barrier=not in_rounds,
        shares=strategy.row_shares(slots.num_workers),
    )


def _source_table(
    spark: SparkSession,
    source: Source,
    prepared: Sequence[Prepared],
    request: FitRequest,
    slots: Slots,
    strategy: SyncStrategy,
) -> SourceTable:
    """The same for a source, which leaves nothing behind."""
    return SourceTable(
        spark,
        source,
        prepared,
        request.validation_col,
        num_shards=slots.num_workers,
        shares=strategy.row_shares(slots.num_workers),
    )


def _spool_key(
    prepared: Sequence[Prepared],
    validation: SparkColumn | None,
    slots: Slots,
    request: FitRequest,
    strategy: SyncStrategy,
    *,
    in_rounds: bool,
) -> SpoolKey:
    """Fits whose keys are equal may use the same spool."""
    shares = strategy.row_shares(slots.num_workers)
    return SpoolKey(
        columns=tuple(map(SpoolColumnKey.of, prepared)),
        validation=str(validation),
        num_shards=slots.num_workers,
        barrier=not in_rounds,
        shares=None if shares is None else tuple(shares),
        cpus_per_worker=request.cpus_per_worker,
        gpus_per_worker=request.gpus_per_worker,
    )


def _warn_of_skipped(columns: Sequence[Column], spooled: Sequence[SpooledShard]) -> int:
    """Tell the user which rows are left out, and give back how many."""
    names = [column.name for column in columns]
    num_rows, causes = skipped_rows(names, [part.summary for part in spooled])
    if num_rows:
        logger.warning("training goes on without %d row(s): %s", num_rows, causes)
    return num_rows


def _view(plan: TrainPlan, request: FitRequest) -> View:
    view = choose_view(plan, request.verbose)
    return view if request.on_epoch is None else SharedView(view, EpochCallback(request.on_epoch))


def _train(run: Run, strategy: SyncStrategy, *, in_rounds: bool) -> Trained:
    if not in_rounds:
        return train_in_gang(run)
    if isinstance(strategy, PopulationStrategy):
        return train_population(run, strategy)
    assert isinstance(strategy, AveragingStrategy)
    return train_in_rounds(run, strategy)


def _make_plan(
    columns: Sequence[Column],
    spooled: Sequence[SpooledShard],
    slots: Slots,
    request: FitRequest,
    strategy: SyncStrategy,
) -> TrainPlan:
    config = request.config
    plan = strategy.hold_out(
        make_plan(
            columns=columns,
            shards=[part.shard for part in spooled],
            world_size=slots.num_workers,
            batch_size=config.batch_size,
            epochs=config.epochs,
            max_steps=config.max_steps,
        )
    )
    logger.info(
        "%d rows for training, %d for validation; %d worker(s) of %d thread(s); batches of up to "
        "%d rows per worker, %d for all; %d steps per epoch, %d in all",
        plan.num_rows,
        plan.num_validation_rows,
        plan.world_size,
        slots.threads,
        plan.batch_size,
        -(-plan.num_rows // plan.steps_per_epoch),
        plan.steps_per_epoch,
        plan.total_steps,
    )
    _warn_of_skew(plan, strategy.row_shares(plan.world_size))
    return plan


def _warn_of_skew(plan: TrainPlan, shares: Sequence[float] | None) -> None:
    """Tell the user if a worker has many more rows than it should have."""
    shares = shares or [1 / plan.world_size] * plan.world_size
    rows = [plan.rows_of(rank) for rank in range(plan.world_size)]
    worst = max(range(plan.world_size), key=lambda rank: rows[rank] / shares[rank])
    if rows[worst] > _SKEW * shares[worst] * plan.num_rows and rows[worst] > plan.batch_size:
        logger.warning(
            "worker %d has %d of the %d rows, because equal rows stay together: the result is "
            "exact, but the other workers wait for it; use fewer workers, or fewer equal rows",
            worst,
            rows[worst],
            plan.num_rows,
        )
