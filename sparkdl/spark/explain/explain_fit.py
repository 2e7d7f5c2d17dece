"""Explains a fit before it runs: the whole of ``explain``, in order.

The checks of ``fit`` come first, with its errors; then a sample and a count in place of the spool;
then the plan; then, unless nothing shall be measured, a few measured steps and the predictions.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from sparkdl.comm import compression
from sparkdl.config import ExplainOptions
from sparkdl.data.plan import TrainPlan
from sparkdl.errors import ConfigError
from sparkdl.explain import comparison
from sparkdl.explain.cost_model import Calibration, Gang
from sparkdl.explain.explanation import Explanation, PlanFacts, seconds_text
from sparkdl.explain.predict_times import Predictor
from sparkdl.report.page.html import size
from sparkdl.spark.cluster.cluster_info import INTERPRETER_BYTES
from sparkdl.spark.explain.estimate import Found, estimate
from sparkdl.spark.explain.measure_gang import measure, num_ranks, why_no_gang
from sparkdl.spark.fit.check_request import (
    CheckedRequest,
    check_request,
    check_sync_batch_norm,
)
from sparkdl.spark.fit.check_rows import check_plan, replica_bytes
from sparkdl.spark.frames.user_data import Data, UserData, user_data
from sparkdl.spark.run.run import FitRequest
from sparkdl.spark.session.interrupts import Cleanup, interruptible
from sparkdl.sync.collective import CollectiveStrategy
from sparkdl.sync.exchange_pattern import ModelSize
from sparkdl.sync.frozen_layers import moving_buffers
from sparkdl.sync.strategy import SyncStrategy

if TYPE_CHECKING:
    from torch import nn

    from sparkdl.comm.compression.compression import Compression

logger = logging.getLogger(__name__)

_COMPARED = ("bf16", "powersgd")
"""Compressions that are timed besides the strategy's own."""


def explain(data: Data, request: FitRequest, options: ExplainOptions) -> Explanation:
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
    sample = rows.sample(checked.table_spec, options.count_seconds)
    # Now that jobs have run, executors are there whose number was not known before.
    checked = replace(checked, slots=checked.slots.asked_again(checked.spark))
    found = estimate(checked, sample, options, stack)
    check_plan(checked, found.plan, has_validation=found.may_validate)
    if not options.calibrate:
        note = (
            "nothing was measured, so there are no times, and the optimizer's state is taken to be "
            "Adam's; leave calibrate=False out for them"
        )
        return Explanation(
            plan=_facts(checked, found.plan, _model_size(checked.module, None), None),
            notes=(*found.notes, note),
            explain_seconds=time.perf_counter() - began,
        )
    calibration = measure(checked, found, _compressions(checked), options.measure_seconds, stack)
    return replace(
        _with_times(checked, found, calibration, options.num_workers),
        explain_seconds=time.perf_counter() - began,
    )


def _compressions(checked: CheckedRequest) -> list[Compression]:
    """Those whose time is wanted and that fit the configuration."""
    named = [compression.resolve(name) for name in _COMPARED]
    if isinstance(checked.strategy, CollectiveStrategy):
        named.append(checked.strategy.resolved_compression())
    found: dict[str, Compression] = {}
    for one in named:
        if one is None or checked.config.device == "cuda":
            continue
        try:
            one.check(checked.config, num_ranks(checked))
        except ConfigError as error:
            logger.debug("not timed: %s", error)
            continue
        found[type(one).__name__] = one
    return list(found.values())


def _with_times(
    checked: CheckedRequest, found: Found, calibration: Calibration, wanted: Iterable[int]
) -> Explanation:
    """The plan with tables, recommendation and notes; ``wanted`` are more numbers of workers."""
    slots, strategy, in_rounds = checked.slots, checked.strategy, checked.in_rounds
    model_size = _model_size(checked.module, calibration.gang)
    predictor = Predictor(
        calibration=calibration,
        plan=found.plan,
        config=checked.config,
        size=model_size,
        num_nodes=_num_nodes(checked, calibration),
        slots=slots.total,
        largest_rows=found.largest_rows,
        check=partial(_check, checked, found.plan),
    )
    sizes = comparison.world_sizes(slots.total, num_ranks(checked), slots.num_workers, wanted)
    available = [one for one in sizes if slots.total is None or one <= slots.total]
    planned = predictor.predict(strategy, slots.num_workers, in_rounds=in_rounds)
    facts = _facts(checked, found.plan, model_size, calibration.gang)
    return Explanation(
        plan=replace(facts, sent_bytes_per_step=planned.sent_bytes_per_step),
        scaling=comparison.scaling(predictor, strategy, sizes, in_rounds=in_rounds),
        strategies=comparison.strategies(
            predictor, strategy, slots.num_workers, in_rounds=in_rounds
        ),
        recommendation=comparison.recommend(
            comparison.ladder(predictor, available),
            comparison.option(predictor, strategy, available, in_rounds=in_rounds),
            slots.num_workers,
        ),
        notes=(*found.notes, *_caveats(checked, found, calibration, sizes)),
        measured=tuple(_measured(calibration)),
    )


def _num_nodes(checked: CheckedRequest, calibration: Calibration) -> int:
    """Machines: those that the gang has met, or as many more as there are executors unmet."""
    executors = max(1, checked.slots.cluster.num_executors or 1)
    if calibration.gang is None:
        return executors
    met = min(executors, num_ranks(checked))
    return max(1, round(calibration.gang.num_nodes * executors / met))


def _check(
    checked: CheckedRequest, plan: TrainPlan, strategy: SyncStrategy, world_size: int
) -> None:
    """Refuse a strategy as a fit with so many workers would; raises ConfigError."""
    config = replace(checked.config, sync_strategy=strategy)
    checked.data.check_training(config, checked.request.validation_col)
    checked.data.check_plan(plan, strategy)
    strategy.check(config, world_size)
    check_sync_batch_norm(checked.module, config, world_size)


# --- what is told -------------------------------------------------------------------------------


def _model_size(module: nn.Module, gang: Gang | None) -> ModelSize:
    """Sizes of tensors; of the optimizer's state the measured one, else that of Adam."""
    trained = [p for p in module.parameters() if p.requires_grad]
    buffers = [b for b in moving_buffers(module) if b.is_floating_point()]
    return ModelSize(
        shapes=tuple(tuple(p.shape) for p in trained),
        element_size=max((p.element_size() for p in trained), default=4),
        replica_bytes=replica_bytes(module),
        buffer_bytes=sum(buffer.nbytes for buffer in buffers),
        optimizer_bytes=(
            2 * sum(p.nbytes for p in trained) if gang is None else gang.optimizer_bytes
        ),
    )


def _facts(
    checked: CheckedRequest, plan: TrainPlan, model: ModelSize, gang: Gang | None
) -> PlanFacts:
    slots, config = checked.slots, checked.config
    return PlanFacts(
        master=slots.cluster.master,
        slots=slots.total,
        num_workers=slots.num_workers,
        threads=slots.threads,
        mode="rounds" if checked.in_rounds else "gang",
        device=config.device if gang is None else gang.device,
        strategy=comparison.strategy_text(checked.strategy),
        rows=plan.num_rows,
        validation_rows=plan.num_validation_rows,
        rows_by_shard=tuple(shard.num_rows for shard in plan.shards),
        batch_size=plan.batch_size,
        epochs=plan.epochs,
        steps_per_epoch=plan.steps_per_epoch,
        total_steps=plan.total_steps,
        parameters=sum(p.numel() for p in checked.module.parameters()),
        replica_bytes=model.replica_bytes,
        optimizer_bytes=model.optimizer_bytes,
        worker_bytes=model.worker_bytes,
        process_bytes=INTERPRETER_BYTES + model.worker_bytes,
        peak_bytes=None if gang is None else gang.peak_bytes,
        spool_bytes=max(shard.num_bytes for shard in plan.shards),
        sent_bytes_per_step=checked.strategy.bytes_per_step(
            model.shapes, model.element_size, plan.world_size
        ),
        checkpoint_bytes=model.checkpoint_bytes,
        checkpoint_interval=config.checkpoint.interval,
    )


def _caveats(
    checked: CheckedRequest, found: Found, calibration: Calibration, sizes: Iterable[int]
) -> Iterator[str]:
    """What the numbers do not hold for."""
    yield (
        "times are of the machines as they were while explain measured; they say nothing of how "
        "many epochs a strategy needs"
    )
    if (no_gang := why_no_gang(checked)) is not None:
        yield no_gang
    most = checked.slots.total or num_ranks(checked)
    beyond = ", ".join(str(one) for one in sizes if one > most)
    if beyond:
        yield (
            f"for {beyond} workers, more than were measured, the machines and links are taken to "
            "be like those that are there"
        )
    if beyond and calibration.gang is not None and calibration.gang.num_nodes == 1:
        yield (
            "all workers that measured were on one machine: a network between machines is slower "
            "than the messages inside it that were timed"
        )
    if checked.config.sync_batch_norm:
        yield "the messages of syncBatchNorm are not counted"
    if found.plan.num_validation_rows:
        yield "evaluation is taken to cost 0.4 of training per row"


def _measured(calibration: Calibration) -> Iterator[tuple[str, str]]:
    """What was measured, for people."""
    for title, levels in (("gang", calibration.levels), ("rounds", calibration.task_levels)):
        for ranks_per_node, compute in levels.items():
            yield (
                f"step, {title}, {ranks_per_node} per machine",
                f"{seconds_text(compute.fixed_seconds)} + {seconds_text(compute.row_seconds)} "
                f"per row with {compute.threads} thread(s), spread {compute.step_spread:.0%}",
            )
    network = None if calibration.gang is None else calibration.gang.network
    if network is not None:
        for name, link in (
            ("message", network.messages),
            ("sum in shared memory", network.shared),
        ):
            if link is not None:
                rate = "no limit seen" if not link.byte_seconds else (
                    f"{size(1 / link.byte_seconds)}/s"
                )  # fmt: skip
                yield name, f"{seconds_text(link.latency_seconds)}, {rate}"
    stages = calibration.stages
    yield (
        "round on stages",
        f"{seconds_text(stages.fixed_seconds)} and {1e6 * stages.byte_seconds:.2g} s per MB of "
        "each task's state",
    )
    yield "start and end", seconds_text(calibration.start_seconds(in_rounds=False))
    spool, row = calibration.spool_seconds, calibration.spool_row_seconds
    yield "spool", f"{seconds_text(spool)} + {seconds_text(row)} per row and slot"
