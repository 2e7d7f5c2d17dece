"""Explains a fit before it runs: the whole of ``explain``, in order.

The checks of ``fit`` come first, with its errors; then a sample and a count in place of the spool;
then the plan; then, unless nothing shall be measured, a few measured steps and the predictions.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING

from pyspark.sql import DataFrame

from sparkdl.comm import compression
from sparkdl.data.source import Source
from sparkdl.errors import ConfigError
from sparkdl.explain.comparison import Places, Predictor, strategy_text, world_sizes
from sparkdl.explain.explanation import Explanation, PlanFacts, bytes_text
from sparkdl.explain.predict_times import Workload
from sparkdl.explain.recommend import recommend, seconds_text
from sparkdl.spark.cluster.cluster_info import INTERPRETER_BYTES, ClusterInfo
from sparkdl.spark.cluster.slots import Slots, plan_slots
from sparkdl.spark.explain.estimate import ExplainOptions, Found, from_sample, from_source
from sparkdl.spark.explain.measure_gang import Measured, Setup, measure, num_ranks, why_no_gang
from sparkdl.spark.fit.check_request import CheckedRequest, check_request
from sparkdl.spark.fit.check_rows import check_plan, replica_bytes
from sparkdl.spark.frames.user_data import UserData, user_data
from sparkdl.spark.run.run import FitRequest
from sparkdl.spark.session.interrupts import Cleanup, interruptible
from sparkdl.sync.collective import CollectiveStrategy
from sparkdl.sync.exchange_pattern import ModelSize
from sparkdl.sync.frozen_layers import moving_buffers

if TYPE_CHECKING:
    from torch import nn

    from sparkdl.comm.compression.compression import Compression

logger = logging.getLogger(__name__)

_COMPARED = ("bf16", "powersgd")
"""Compressions that are timed besides the strategy's own."""


def explain(data: DataFrame | Source, request: FitRequest, options: ExplainOptions) -> Explanation:
    """The plan of a fit, what it would take, and what would be better.

    Args:
        data: the rows, or a source that workers read by themselves.
        request: what the estimator asks for.
        options: how much is measured.

    Raises:
        ConfigError: as in `fit.fit`.
        DataError: as in `fit.fit`, as far as a sample tells; or counting took too long.
        ClusterError: as in `fit.fit`.
        StorageError: as in `fit.fit`.
        WorkerError: the user's code failed on a worker that measured it.
        KeyboardInterrupt: the user has interrupted; nothing is left behind.
    """
    rows = user_data(data)
    with interruptible(rows.spark), Cleanup() as stack:
        return _explain(rows, request, options, stack)


def _explain(
    rows: UserData, request: FitRequest, options: ExplainOptions, stack: ExitStack
) -> Explanation:
    """See `explain`. ``stack`` removes what is left on the cluster."""
    began = time.perf_counter()
    checked = check_request(rows, request)
    request = checked.request
    found = from_sample(checked, options, stack) if rows.source is None else from_source(checked)
    # Now that jobs have run, executors are there whose number was not known before.
    checked = replace(checked, slots=checked.slots.asked_again(checked.spark))
    info = checked.slots.cluster
    check_plan(checked, found.plan, has_validation=found.may_validate)
    measured = None
    if options.calibrate:
        measured = _measure(checked, request, found, info, options, stack)
    facts = _facts(checked, request, found, info, measured)
    seconds = time.perf_counter() - began
    if measured is None:
        note = (
            "nothing was measured, so there are no times, and the optimizer's state is taken to be "
            "Adam's; leave calibrate=False out for them"
        )
        return Explanation(plan=facts, notes=(*found.notes, note), explain_seconds=seconds)
    return _with_times(checked, request, found, facts, measured, info, options, seconds)


# --- the times ----------------------------------------------------------------------------------


def _measure(
    checked: CheckedRequest,
    request: FitRequest,
    found: Found,
    info: ClusterInfo,
    options: ExplainOptions,
    stack: ExitStack,
) -> Measured:
    """Measure with as many ranks as there are slots, up to a limit."""
    ranks = num_ranks(checked.slots, in_rounds=checked.in_rounds)
    no_gang = why_no_gang(checked, info)
    slots = replace(checked.slots, num_workers=ranks)
    if no_gang is None:
        slots = plan_slots(
            checked.spark, checked.settings, num_workers=ranks,
            cpus_per_worker=request.cpus_per_worker, gpus_per_worker=request.gpus_per_worker,
        )  # fmt: skip
    setup = Setup(
        checked=checked,
        request=request,
        info=info,
        module=checked.module,
        columns=found.columns,
        slots=slots,
        seconds=options.measure_seconds,
        no_gang=no_gang,
    )
    return measure(setup, found.sample, _compressions(checked, request, ranks), stack)


def _compressions(checked: CheckedRequest, request: FitRequest, ranks: int) -> list[Compression]:
    """Those whose time is wanted and that fit the configuration."""
    named = [compression.resolve(name) for name in _COMPARED]
    if isinstance(checked.strategy, CollectiveStrategy):
        named.append(checked.strategy.resolved_compression())
    found: dict[str, Compression] = {}
    for one in named:
        if one is None or request.config.device == "cuda":
            continue
        try:
            one.check(request.config, ranks)
        except ConfigError as error:
            logger.debug("not timed: %s", error)
            continue
        found[type(one).__name__] = one
    return list(found.values())


def _with_times(
    checked: CheckedRequest,
    request: FitRequest,
    found: Found,
    facts: PlanFacts,
    measured: Measured,
    info: ClusterInfo,
    options: ExplainOptions,
    seconds: float,
) -> Explanation:
    """The plan with tables, recommendation and notes."""
    slots = checked.slots
    predictor = Predictor(
        calibration=measured.calibration,
        workload=_workload(request, found, facts),
        size=model_size(checked.module, measured),
        places=_places(slots, info, measured),
        config=request.config,
        can_gang=measured.gang is not None,
        has_dataframe=found.sample is not None,
    )
    sizes = world_sizes(slots.total, measured.ranks, slots.num_workers, options.num_workers)
    planned = predictor.prediction(checked.strategy, slots.num_workers, in_rounds=checked.in_rounds)
    available = [size for size in sizes if slots.total is None or size <= slots.total]
    return Explanation(
        plan=replace(facts, sent_bytes_per_step=planned.sent_bytes),
        scaling=predictor.scaling(
            checked.strategy, sizes, in_rounds=checked.in_rounds, planned=slots.num_workers
        ),
        strategies=predictor.strategies(
            checked.strategy, slots.num_workers, in_rounds=checked.in_rounds
        ),
        recommendation=recommend(
            predictor.ladder(available),
            predictor.option(checked.strategy, available, in_rounds=checked.in_rounds),
            slots.num_workers,
        ),
        notes=(*found.notes, *_caveats(found, measured, predictor, sizes)),
        measured=_measured(measured),
        explain_seconds=seconds,
    )


def _workload(request: FitRequest, found: Found, facts: PlanFacts) -> Workload:
    plan, config = found.plan, request.config

    def largest_rows(world_size: int) -> int:
        if world_size == plan.world_size:
            return max(plan.rows_of(rank) for rank in range(world_size))
        return found.largest_rows(world_size)

    return Workload(
        num_rows=plan.num_rows,
        num_validation_rows=plan.num_validation_rows,
        batch_size=plan.batch_size,
        epochs=plan.epochs,
        max_steps=plan.max_steps,
        largest_rows=largest_rows,
        checkpoint_interval=config.checkpoint.interval,
        checkpoint_bytes=facts.checkpoint_bytes,
    )


def _places(slots: Slots, info: ClusterInfo, measured: Measured) -> Places:
    """Machines: those that the gang has met, or as many more as there are executors unmet."""
    executors = max(1, info.num_executors or 1)
    if measured.gang is None:
        return Places(num_nodes=executors, slots=slots.total)
    met = min(executors, measured.ranks)
    nodes = max(1, round(measured.gang.num_nodes * executors / met))
    return Places(num_nodes=nodes, slots=slots.total)


# --- what is told -------------------------------------------------------------------------------


def model_size(module: nn.Module, measured: Measured | None) -> ModelSize:
    """Sizes of tensors; of the optimizer's state the measured one, else that of Adam."""
    trained = [p for p in module.parameters() if p.requires_grad]
    trained_bytes = sum(p.numel() * p.element_size() for p in trained)
    gang = measured.gang if measured is not None else None
    return ModelSize(
        shapes=tuple(tuple(p.shape) for p in trained),
        element_size=max((p.element_size() for p in trained), default=4),
        replica_bytes=replica_bytes(module),
        buffer_bytes=sum(
            b.numel() * b.element_size() for b in moving_buffers(module) if b.is_floating_point()
        ),
        optimizer_bytes=2 * trained_bytes if gang is None else gang.optimizer_bytes,
    )


def _facts(
    checked: CheckedRequest,
    request: FitRequest,
    found: Found,
    info: ClusterInfo,
    measured: Measured | None,
) -> PlanFacts:
    plan, slots = found.plan, checked.slots
    size = model_size(checked.module, measured)
    gang = measured.gang if measured is not None else None
    device = gang.device if gang is not None else request.config.device
    sent = checked.strategy.bytes_per_step(size.shapes, size.element_size, plan.world_size)
    return PlanFacts(
        master=info.master,
        slots=slots.total,
        num_workers=slots.num_workers,
        threads=slots.threads,
        mode="rounds" if checked.in_rounds else "gang",
        device=device,
        strategy=strategy_text(checked.strategy),
        rows=plan.num_rows,
        validation_rows=plan.num_validation_rows,
        rows_by_shard=tuple(shard.num_rows for shard in plan.shards),
        batch_size=plan.batch_size,
        epochs=plan.epochs,
        steps_per_epoch=plan.steps_per_epoch,
        total_steps=plan.total_steps,
        parameters=sum(p.numel() for p in checked.module.parameters()),
        replica_bytes=size.replica_bytes,
        optimizer_bytes=size.optimizer_bytes,
        worker_bytes=size.worker_bytes,
        process_bytes=INTERPRETER_BYTES + size.worker_bytes,
        peak_bytes=None if gang is None else gang.peak_bytes,
        spool_bytes=max(shard.num_bytes for shard in plan.shards),
        sent_bytes_per_step=sent,
        checkpoint_bytes=size.checkpoint_bytes,
        checkpoint_interval=request.config.checkpoint.interval,
    )


def _caveats(
    found: Found, measured: Measured, predictor: Predictor, sizes: Iterable[int]
) -> tuple[str, ...]:
    """What the numbers do not hold for."""
    notes = [
        "times are of the machines as they were while explain measured; they say nothing of how "
        "many epochs a strategy needs"
    ]
    if measured.no_gang is not None:
        notes.append(measured.no_gang)
    slots = predictor.places.slots
    beyond = [size for size in sizes if size > (slots or measured.ranks)]
    if beyond:
        notes.append(
            f"for {', '.join(map(str, beyond))} workers, more than were measured, the machines and "
            "links are taken to be like those that are there"
        )
    if measured.gang is not None and measured.gang.num_nodes == 1 and beyond:
        notes.append(
            "all workers that measured were on one machine: a network between machines is slower "
            "than the messages inside it that were timed"
        )
    if predictor.config.sync_batch_norm:
        notes.append("the messages of syncBatchNorm are not counted")
    if found.plan.num_validation_rows:
        notes.append("evaluation is taken to cost 0.4 of training per row")
    return tuple(notes)


def _measured(measured: Measured) -> tuple[tuple[str, str], ...]:
    """What was measured, for people."""
    rows = []
    calibration = measured.calibration
    for title, levels in (("gang", calibration.levels), ("rounds", calibration.stage_levels)):
        for level in levels:
            compute = level.compute
            rows.append(
                (
                    f"step, {title}, {level.ranks_per_node} per machine",
                    f"{seconds_text(compute.fixed_seconds)} + {seconds_text(compute.row_seconds)} "
                    f"per row with {level.threads} thread(s), spread {compute.step_spread:.0%}",
                )
            )
    network = calibration.network
    if network is not None:
        for name, link in (
            ("message", network.messages),
            ("sum in shared memory", network.shared),
            ("sum in shared memory, copied", network.staged),
        ):
            if link is not None:
                rate = "no limit seen" if not link.byte_seconds else (
                    f"{bytes_text(1 / link.byte_seconds)}/s"
                )  # fmt: skip
                rows.append((name, f"{seconds_text(link.latency_seconds)}, {rate}"))
    for num_tasks, stages in calibration.stages.items():
        rows.append((f"round on stages, {num_tasks} at a time",
                     f"{seconds_text(stages.fixed_seconds)} and "
                     f"{1e6 * stages.byte_seconds:.2g} s per MB of each task's state"))  # fmt: skip
    fixed = calibration.fixed
    rows.append(("start and end", seconds_text(fixed.start_seconds)))
    rows.append(("spool", f"{seconds_text(fixed.spool_seconds)} + "
                          f"{seconds_text(fixed.spool_row_seconds)} per row and slot"))  # fmt: skip
    return tuple(rows)
