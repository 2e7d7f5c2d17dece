"""The whole of ``fit``: a chain of values, each made once.

`_fit` tells it from top to bottom: the checked request, for which no job is needed; the link to the
executors and the table of rows (`Opened`); what the rows have shown (`MadeRows`); the run with its
plan; then training, in a gang or in rounds; the result. Whatever happens, nothing is left behind.
"""

from __future__ import annotations

import logging
import math
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

from torch import nn

from sparkdl.config import EarlyStopping
from sparkdl.data.column_stats import SpooledShard
from sparkdl.data.plan import TrainPlan
from sparkdl.errors import DataError
from sparkdl.report.listeners.listener import wanted_looks
from sparkdl.report.live.progress import EpochCallback
from sparkdl.report.live.views import shows_lines
from sparkdl.report.recorder import Recorder
from sparkdl.report.summary import WeightsOf
from sparkdl.runtime.activity import doing
from sparkdl.serialization.program.package_patches import describe_patches
from sparkdl.serialization.stored_module import StoredModule
from sparkdl.serialization.travel.packed_module import pack
from sparkdl.spark.cluster.link import Link, num_asked, open_link
from sparkdl.spark.cluster.slots import Slots, wait_again
from sparkdl.spark.cluster.supervisor import persistently
from sparkdl.spark.fit import check_rows
from sparkdl.spark.fit.check_request import CheckedRequest, check_request
from sparkdl.spark.fit.gang_fit import train_in_gang
from sparkdl.spark.frames.example_rows import showing_filter
from sparkdl.spark.frames.first_rows import FirstLook
from sparkdl.spark.frames.row_table import RowTable, SourceTable, content_of
from sparkdl.spark.frames.shared_spools import Spools
from sparkdl.spark.frames.user_data import Data, UserData, user_data
from sparkdl.spark.rounds.averaging_rounds import train_in_rounds
from sparkdl.spark.rounds.populations import train_population
from sparkdl.spark.run.resume import run_key, table_to_go_on, windows_to_go_on
from sparkdl.spark.run.run import FitRequest, FitResult, Run, Trained
from sparkdl.spark.run.run_facts import facts, record_run
from sparkdl.spark.session.compat import conf, shares_console
from sparkdl.spark.session.interrupts import Cleanup, interruptible
from sparkdl.storage.hadoop_storage import open_on_driver
from sparkdl.sync.averaging.averaging import AveragingStrategy
from sparkdl.sync.frozen_layers import evaluating, thaw
from sparkdl.sync.population.population import PopulationStrategy
from sparkdl.train.state import record_of_weights
from sparkdl.train.training_state import TrainingState, leave_training

logger = logging.getLogger(__name__)

_SKEW = 1.5
"""A worker's rows over those that it should have, from which on the user gets a warning."""


Choose = Callable[[UserData, FitRequest, Spools | None], FitRequest]
"""Gives a request with values in place of every ``"auto"``."""


def fit(
    data: Data, request: FitRequest, spools: Spools | None = None, choose: Choose | None = None
) -> FitResult:
    """Train on all workers of the cluster.

    Args:
        data: the rows, or a source that workers read by themselves.
        request: what the estimator asks for.
        spools: those of other fits on the same DataFrame, which may be used, and are left there;
            the fit waits until those leave it slots. None: the fit has its own.
        choose: called if a Param is ``"auto"``; None: none is.

    Raises:
        ConfigError: a parameter is wrong, or the module cannot take the features.
        DataError: the DataFrame cannot be trained on.
        ClusterError: the cluster cannot run the gang.
        StorageError: checkpoints cannot be kept.
        WorkerError: the user's code failed on a worker.
        TrainingFailed: workers were lost more than ``max_restarts`` times.
        KeyboardInterrupt: the user has interrupted; nothing is left behind.
    """
    began = time.perf_counter()
    given = user_data(data)
    run_id = uuid.uuid4().hex[:12]
    directory = request.config.checkpoint.directory
    with (
        interruptible(given.spark, directory),
        record_run(given.spark, run_id, request) as recorder,
    ):
        if request.automatic:
            assert choose is not None
            recorder.phase("choose")
            request = choose(given, request, spools)
            recorder.phase("preflight")
        with showing_filter(given.frame):
            result = _fit(given, run_id, request, spools, recorder)
        made = result.summary
        module = result.module
        if isinstance(module, StoredModule) and request.listeners:  # who get it whole
            module = module.module
        whole = module if isinstance(module, nn.Module) else None
        recorder.succeeded(made.history, whole, made.weights_of)
    seconds = time.perf_counter() - began
    other = {"fit: other": seconds - made.seconds}  # what is before and after the phases
    summary = replace(
        made,
        seconds=seconds,
        phase_seconds={**made.phase_seconds, **other},
        record=recorder.record(),
        report_path=recorder.page_path,
    )
    return replace(result, summary=summary)


def _fit(
    data: UserData,
    run_id: str,
    request: FitRequest,
    spools: Spools | None,
    recorder: Recorder,
) -> FitResult:
    """See `fit`."""
    checked = check_request(data, request)
    with Cleanup() as stack:
        if spools is not None:
            recorder.phase("wait")
            slots = checked.slots
            stack.enter_context(spools.queue.slots(slots.num_workers, slots.total))
            recorder.phase("preflight")
        opened = _open(checked, run_id, spools, recorder, stack)
        rows = _make_rows(checked, opened, recorder)
        run = _make_run(rows, opened, run_id, recorder)
        known = facts(run)
        if request.chosen:
            known["chosen"] = request.chosen
        recorder.facts(**known)
        recorder.phase("train")
        trained = _training(rows.checked)(run)
        _require_counted(trained, run.plan)
        weights_of = _weights_of(trained, run.plan, run.config.early_stopping)
        is_short = weights_of is not None and weights_of.stopped_early
        recorder.done(trained.summary.steps, stopped_early=is_short)
        recorder.phase("clean up")
    return _result(rows, run, trained, weights_of, known, recorder.end_phase())


@dataclass(frozen=True)
class Opened:
    """The executors are there, and Spark makes the rows' table."""

    link: Link
    table: RowTable
    seen: list[check_rows.CheckedRows | None]
    """What rows have shown so far; the last counts."""


def _open(
    checked: CheckedRequest,
    run_id: str,
    spools: Spools | None,
    recorder: Recorder,
    stack: ExitStack,
) -> Opened:
    """Reach the executors; beside that see the first rows, if the plan gives them before others."""
    look = cache(partial(_first_look, checked, run_id, spools, stack))
    table_of = cache(partial(_table, checked, run_id, spools, stack))
    check = partial(check_rows.check_rows, checked, sink=recorder.graph)
    seen: list[check_rows.CheckedRows | None] = []
    has_room = (checked.slots.total or 0) > num_asked(checked.spark, checked.slots)

    def look_first() -> None:
        recorder.phase("first rows")
        look()

    def while_python_begins() -> None:
        look_first()
        first = look()
        rows = None if first is None else first.rows()
        seen.append(None if rows is None else check(rows, rows.known))
        recorder.phase("executors")
        table_of().begin()

    link = open_link(
        checked.spark,
        checked.slots,
        checked.settings,
        checkpoint_dir=checked.config.checkpoint.directory,
        run_id=run_id,
        stack=stack,
        needs=checked.needs,
        preloads=conf(checked.spark, "spark.python.worker.reuse") != "false",
        before_jobs=None if has_room else look_first,
        once_submitted=while_python_begins,
    )
    recorder.phase("spool")
    table = table_of()
    if seen[0] is None and spools is None:
        table.on_first(lambda rows, some: seen.append(check(rows, some)))
    return Opened(link, table, seen)


@dataclass(frozen=True)
class MadeRows:
    """The rows are in shards, and what they have shown is checked."""

    checked: CheckedRequest
    """With the metrics that names stand for, and the slots that are there now."""
    table: RowTable
    shards: Sequence[SpooledShard]
    found: check_rows.CheckedRows
    num_skipped: int


def _make_rows(checked: CheckedRequest, opened: Opened, recorder: Recorder) -> MadeRows:
    """Have all shards made; check what they show."""
    table = opened.table
    shards = persistently(
        table.collect,
        max_restarts=checked.request.max_restarts,
        prepare=partial(wait_again, checked.spark, checked.slots, checked.settings),
    )
    checked = replace(checked, slots=checked.slots.asked_again(checked.spark))
    doing("checking the rows")
    found = check_rows.check_rows(checked, table, shards, recorder.graph, opened.seen[-1])
    check_rows.warn_of_labels(checked, found, shards)
    config = replace(checked.config, metrics=found.trial.metrics)
    checked = replace(checked, request=replace(checked.request, config=config))
    num_skipped, causes = table.skipped(shards)
    if num_skipped:
        logger.warning("training goes on without %d row(s): %s", num_skipped, causes)
    return MadeRows(checked, table, shards, found, num_skipped)


def _make_run(rows: MadeRows, opened: Opened, run_id: str, recorder: Recorder) -> Run:
    """Plan the run, or find the plan of the one that it goes on with; tell the record."""
    checked, request, link = rows.checked, rows.checked.request, opened.link
    mode = "" if checked.slots.is_gang else "-rounds"  # has checkpoints of its own
    patches = describe_patches(link.values.code.patches)
    content = content_of(rows.shards) + mode + checked.begins_from_text + patches
    key = run_key(checked.module, rows.found.columns, checked.config, content, checked.weights)
    if isinstance(rows.table, SourceTable):
        table = table_to_go_on(link.checkpoints, key, rows.table)
        rows = replace(rows, table=table, shards=table.known)
    plan = plan_run(rows, link, key)
    recorder.planned(plan)
    if request.on_epoch is not None:
        recorder.show(partial(EpochCallback, request.on_epoch))
    link.hub.shows_lines = shows_lines(request.verbose) and shares_console(checked.spark)
    return Run(
        begins_from=checked.begins_from,
        keeps_state=request.keep_training_state,
        spark=checked.spark,
        run_id=run_id,
        run_key=key,
        plan=plan,
        config=checked.config,
        module=checked.module,
        objective=checked.objective,
        packed=pack(checked.module, checked.weights),
        shared=checked.shared,
        table=rows.table,
        slots=checked.slots,
        link=link,
        settings=checked.settings,
        view=recorder,
        max_restarts=request.max_restarts,
        looks=wanted_looks(request.listeners),
    )


def _training(checked: CheckedRequest) -> Callable[[Run], Trained]:
    """Return the function that trains."""
    if checked.slots.is_gang:
        return train_in_gang
    strategy = checked.strategy
    if isinstance(strategy, PopulationStrategy):
        return partial(train_population, strategy=strategy)
    assert isinstance(strategy, AveragingStrategy)
    return partial(train_in_rounds, strategy=strategy)


def _result(
    rows: MadeRows,
    run: Run,
    trained: Trained,
    weights_of: WeightsOf | None,
    known: Mapping[str, Any],
    laps: Mapping[str, float],
) -> FitResult:
    """Put together what the estimator makes a model of.

    ``known``: `facts` of the run before training; ``laps``: phase -> seconds.
    """
    checked, plan = rows.checked, run.plan
    fitted = checked.module if trained.module is None else trained.module
    thaw(fitted, checked.frozen)  # a choice of this training, not of the module
    phases = {f"fit: {name}": seconds for name, seconds in laps.items()}
    summary = replace(
        trained.summary,
        phase_seconds={**phases, **trained.summary.phase_seconds},
        rows=plan.num_rows,
        validation_rows=plan.num_validation_rows,
        skipped_rows=rows.num_skipped,
        shards=known["shards"],
        mesh=known["mesh"] or "",
        run_name=checked.request.run_name,
        world_size=trained.summary.world_size if run.slots.is_gang else plan.world_size,
        seconds=sum(laps.values()),
        weights_of=weights_of,
        chosen={name: dict(choice) for name, choice in checked.request.chosen.items()},
    )
    state = None
    if trained.left is not None:
        assert checked.method is not None
        own = leave_training(fitted)
        state = TrainingState(**trained.left, method=checked.method, weights=own)
    module: nn.Module | StoredModule = evaluating(fitted)
    if trained.stored_at is not None:
        assert run.link.url is not None
        module = StoredModule.of(
            fitted,
            open_on_driver(run.spark, run.link.url),
            trained.stored_at,
            mesh=run.config.parallelism,
            is_reached=True,
        )
    return FitResult(
        module=module,
        columns=tuple(column for column in rows.found.columns if column.role == "feature"),
        num_classes=rows.found.trial.num_classes,
        prediction_key=rows.found.trial.prediction_key,
        summary=summary,
        training_state=state,
    )


def _first_look(
    checked: CheckedRequest, run_id: str, spools: Spools | None, stack: ExitStack
) -> FirstLook | None:
    """A look at the first rows, which the stack ends; None where all may be known already."""
    if checked.fit_spec.keep is not None:
        return None
    is_frame = checked.data.source is None
    if is_frame and spools is not None and spools.has(checked.fit_spec, checked.slots):
        return None
    look = checked.data.first_look(checked.table_spec, run_id)
    if look is not None:
        stack.callback(look.end)
        look.begin()
    return look


def _table(
    checked: CheckedRequest, run_id: str, spools: Spools | None, stack: ExitStack
) -> RowTable:
    """The table of the run's rows, which the stack closes unless other fits share it."""
    make = partial(checked.data.table, checked.fit_spec, run_id)
    if spools is not None:
        return spools.take(checked.fit_spec, checked.slots, make)
    table = make()
    stack.callback(table.close)
    return table


def _require_counted(trained: Trained, plan: TrainPlan) -> None:
    """Refuse a training in which no row has counted; say so if none for validation has.

    Raises:
        DataError: no row for training has, and no epoch was whole, which would have shown it.
    """
    history = trained.summary.history
    if history and all(math.isnan(epoch.get("loss", 0.0)) for epoch in history):
        raise DataError(
            "no row has counted in training: all weights are 0, or all labels are ignored; check "
            "weightCol and the labels"
        )
    if history and all(math.isnan(epoch.get("val_loss", 0.0)) for epoch in history):
        logger.warning(
            "val_loss of the %d rows for validation is NaN: none of them has counted (all have the "
            "weight 0, or a label that the loss ignores), or the module or the loss gives NaN for "
            "some of them: look for NaN and infinite values there",
            plan.num_validation_rows,
        )


def _weights_of(
    trained: Trained, plan: TrainPlan, stopping: EarlyStopping | None
) -> WeightsOf | None:
    """Describe which weights the module has; None where no epoch has a record."""
    history = trained.summary.history
    found = record_of_weights(history, stopping)
    if found is None:
        return None
    values, best = found
    return WeightsOf(
        values=dict(values),
        best=best,
        planned_epochs=plan.end_epoch,
        last_epoch=history[-1]["epoch"],
        stopped_early=trained.was_stopped and history[-1]["epoch"] < plan.end_epoch,
    )


def plan_run(rows: MadeRows, link: Link, key: str) -> TrainPlan:
    """The plan of the run, with the windows of an earlier one that it goes on with."""
    checked, table, shards = rows.checked, rows.table, rows.shards
    plan = checked.make_plan(rows.found.columns, [part.shard for part in shards])
    window_bytes = checked.config.shuffle_window_bytes
    choose = partial(table.windows, plan, shards, checked.slots.cluster, window_bytes)
    windows = windows_to_go_on(link.checkpoints, key, choose)
    homes = table.homes if isinstance(table, SourceTable) else None
    plan = replace(plan, windows=windows, homes=homes)
    _log_plan(plan, checked.slots)
    check_rows.check_plan(checked, plan, has_validation=plan.num_validation_rows > 0)
    if checked.request.validation is not None and not plan.num_validation_rows:
        logger.warning("%s", check_rows.none_for_validation(checked.request, plan.num_rows))
    return plan


def _log_plan(plan: TrainPlan, slots: Slots) -> None:
    """Log the plan's numbers; warn if a shard has many more rows than it should have."""
    logger.info(
        "%d rows for training, %d for validation, in %d shard(s); %d worker(s) of %d thread(s); "
        "batches of up to %d rows per %s, %d for all; %d steps per epoch, %d in all",
        plan.num_rows,
        plan.num_validation_rows,
        len(plan.shards),
        plan.world_size,
        slots.threads,
        plan.batch_size,
        "equal shard" if plan.takes_turns else "shard",
        -(-plan.num_rows // plan.steps_per_epoch),
        plan.steps_per_epoch,
        plan.total_steps,
    )
    rows = [shard.num_rows for shard in plan.shards]
    if plan.takes_turns:
        most = max(rows)
        if most * plan.world_size > _SKEW * plan.num_rows:
            logger.warning(
                "one of the DataFrame's own partitions, or a piece of it, has %d of the %d rows: "
                "the result is exact, but other workers wait for its; write more and smaller "
                "files, or use shards='rows'",
                *(most, plan.num_rows),
            )
        return
    worst = max(range(len(rows)), key=rows.__getitem__)
    if rows[worst] * len(rows) > _SKEW * plan.num_rows and rows[worst] > plan.batch_size:
        logger.warning(
            "shard %d has %d of the %d rows: their values decide, so that few rows lie unevenly, "
            "and equal ones stay together; the result is exact, but other workers wait for its; "
            "use fewer shards, or fewer equal rows",
            worst,
            rows[worst],
            plan.num_rows,
        )
