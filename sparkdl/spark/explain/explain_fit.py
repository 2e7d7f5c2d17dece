"""Explains a fit before it runs: the whole of ``explain``, in order."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

from sparkdl.config import ExplainOptions
from sparkdl.explain import comparison
from sparkdl.explain.cost_model import Calibration, Gang
from sparkdl.explain.explanation import Explanation, PlanFacts, seconds_text
from sparkdl.report.page.formats import size
from sparkdl.spark.cluster.cluster_info import INTERPRETER_BYTES, worker_memory
from sparkdl.spark.explain.choose_values import chosen_values, start_of, with_choices
from sparkdl.spark.explain.estimate import Found, look
from sparkdl.spark.explain.measure_gang import (
    measure,
    model_size,
    num_ranks,
    predictor_of,
    why_no_gang,
)
from sparkdl.spark.fit.check_mesh import table_of
from sparkdl.spark.fit.check_request import CheckedRequest
from sparkdl.spark.fit.check_rows import check_plan
from sparkdl.spark.frames.shard_table import find_kept
from sparkdl.spark.frames.user_data import Data, UserData, user_data
from sparkdl.spark.run.run import FitRequest
from sparkdl.spark.session.compat import conf
from sparkdl.spark.session.interrupts import Cleanup, interruptible
from sparkdl.spark.session.stage_progress import working
from sparkdl.sync.exchange_pattern import ModelSize
from sparkdl.sync.gradients.allreduce import AllReduce
from sparkdl.sync.gradients.shard_tree import tree_pattern


def explain(
    data: Data,
    request: FitRequest,
    options: ExplainOptions,
    estimator_with: Callable[[Mapping[str, Any]], Any] | None = None,
) -> Explanation:
    """The plan of a fit, what it would take, and what would be better, with the errors of a fit.

    ``estimator_with`` makes an estimator like the one that asks, with some Params changed.
    """
    rows = user_data(data)
    began = time.perf_counter()
    with interruptible(rows.spark), Cleanup() as stack:
        if request.verbose:
            stack.enter_context(working(rows.spark, "checking what is asked for"))
        found = _explain(rows, request, options, stack)
    if estimator_with is not None and found.recommendation is not None:
        best = found.recommendation
        changed = {
            **{name: choice["value"] for name, choice in found.chosen.items()},
            "numWorkers": best.num_workers,
            "syncStrategy": best.sync_strategy,
            "executionMode": "auto",
        }
        found = replace(found, recommended=estimator_with(changed))
    return replace(found, explain_seconds=time.perf_counter() - began)


def _explain(
    rows: UserData, request: FitRequest, options: ExplainOptions, stack: ExitStack
) -> Explanation:
    """See `explain`. ``stack`` removes what is left on the cluster."""
    request = start_of(rows, request)
    found, calibration = look(rows, request, options, stack), None
    if request.automatic and options.calibrate:
        choices, calibration = chosen_values(found, options, stack)
        request = with_choices(request, choices)
        found = look(rows, request, options, stack, found)
    check_plan(found.checked, found.plan, has_validation=found.may_validate)
    if found.checked.config.parallelism is not None:
        return _along_meshes(found)
    if not options.calibrate:
        notes = [
            "nothing was measured, so there are no times, and the optimizer's state is taken to be "
            "Adam's; leave calibrate=False out for them"
        ]
        if request.automatic:
            names = ", ".join(request.automatic)
            notes.append(f"nothing was chosen for {names}; the plan has what choosing begins with")
        return Explanation(
            plan=_facts(found, model_size(found.checked.module, None), None),
            chosen=request.chosen,
            notes=(*found.notes, *notes),
        )
    if calibration is None:
        calibration = measure(found, options.measure_seconds, stack)
    return _with_times(found, calibration, options.num_workers)


def _along_meshes(found: Found) -> Explanation:
    """The plan with what workers hold along meshes; nothing is measured."""
    checked = found.checked
    mesh, slots = checked.config.parallelism, checked.slots
    limit = worker_memory(slots.cluster, partial(conf, checked.spark), slots.num_workers)
    has_limit = limit is not None and checked.config.device != "cuda"
    most = max(slots.total or 0, slots.num_workers)
    rows = table_of(checked.module, checked.config, most, limit if has_limit else None)
    own = next(row for row in rows if row.mesh == str(mesh))
    facts = _facts(found, model_size(checked.module, None), None)
    is_known = not own.sends_activations and checked.strategy == AllReduce()
    sent = own.data_bytes + own.shard_bytes if is_known else None
    facts = replace(
        facts,
        optimizer_bytes=own.optimizer_bytes,
        worker_bytes=own.total_bytes,
        process_bytes=INTERPRETER_BYTES + own.total_bytes,
        sent_bytes_per_step=sent,
    )
    return Explanation(plan=facts, meshes=rows, chosen=checked.request.chosen, notes=found.notes)


def _with_times(found: Found, calibration: Calibration, wanted: Iterable[int]) -> Explanation:
    """The plan with tables, recommendation and notes; ``wanted`` are more numbers of workers."""
    checked = found.checked
    slots, strategy, in_rounds = checked.slots, checked.strategy, checked.in_rounds
    predictor = predictor_of(found, calibration)
    if slots.min_workers is not None and slots.max_workers is not None:
        wanted = (*wanted, slots.min_workers, slots.max_workers)
    sizes = comparison.world_sizes(slots.total, num_ranks(checked), slots.num_workers, wanted)
    most = checked.fixed_shards
    sizes = [one for one in sizes if most is None or one <= most]
    available = [one for one in sizes if slots.total is None or one <= slots.total]
    planned = predictor.predict(strategy, slots.num_workers, in_rounds=in_rounds)
    facts = _facts(found, predictor.size, calibration.gang)
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
        chosen=checked.request.chosen,
        notes=(*found.notes, *_caveats(found, calibration, sizes)),
        measured=tuple(_measured(calibration)),
    )


# --- what is told -------------------------------------------------------------------------------


def _facts(found: Found, model: ModelSize, gang: Gang | None) -> PlanFacts:
    checked, plan = found.checked, found.plan
    slots, config, strategy = checked.slots, checked.config, checked.strategy
    if config.elasticity == "bits":
        pattern = tree_pattern(model, plan.shards_by_rank)
    elif checked.in_rounds:
        pattern = strategy.stages_pattern(model)
    else:
        pattern = strategy.pattern(model, plan.world_size)
    return PlanFacts(
        master=slots.cluster.master,
        slots=slots.total,
        num_workers=slots.num_workers,
        threads=slots.threads,
        mode="rounds" if checked.in_rounds else "gang",
        device=config.device if gang is None else gang.device,
        strategy=comparison.strategy_text(strategy),
        rows=plan.num_rows,
        validation_rows=plan.num_validation_rows,
        rows_by_shard=tuple(shard.num_rows for shard in plan.shards),
        shard_choice=str(checked.shard_choice),
        kept=_kept(checked),
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
        spool_bytes=plan.largest_spool_bytes,
        sent_bytes_per_step=pattern.sent_bytes_per_step(plan.world_size),
        checkpoint_bytes=model.checkpoint_bytes,
        checkpoint_interval=config.checkpoint.interval,
    )


def _kept(checked: CheckedRequest) -> str:
    """Describe whether the spool of the fit is there already; empty if nobody wants to keep it."""
    choice, spec = checked.keep_choice, checked.fit_spec
    if choice is None or choice.keep is None:
        return "" if choice is None else str(choice)
    num_found = len(find_kept(checked.spark, spec, choice.keep))
    if not num_found:
        return f"will be written, and {choice}"
    return f"{choice}: {num_found} of {spec.num_shards} shards are there"


def _caveats(found: Found, calibration: Calibration, sizes: Iterable[int]) -> Iterator[str]:
    checked = found.checked
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
    for title, levels in (("gang", calibration.levels), ("rounds", calibration.task_levels)):
        for ranks_per_node, compute in levels.items():
            yield (
                f"step, {title}, {ranks_per_node} per machine",
                f"{seconds_text(compute.fixed_seconds)} + {seconds_text(compute.row_seconds)} "
                f"per row with {compute.threads} thread{'s' * (compute.threads != 1)}, spread "
                f"{compute.step_spread:.0%}",
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
    assert stages is not None
    yield (
        "round on stages",
        f"{seconds_text(stages.fixed_seconds)} and {1e6 * stages.byte_seconds:.2g} s per MB of "
        "each task's state",
    )
    gang = calibration.gang
    num_ranks = 1 if gang is None else gang.num_ranks
    start_seconds = calibration.start_seconds(in_rounds=False, world_size=num_ranks)
    yield "start and end", seconds_text(start_seconds)
    spool, row = calibration.spool_seconds, calibration.spool_row_seconds
    yield "spool", f"{seconds_text(spool)} + {seconds_text(row)} per row and slot"
