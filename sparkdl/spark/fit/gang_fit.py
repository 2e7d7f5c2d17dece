"""Training in a gang: one long barrier stage under the supervisor."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import cloudpickle

from sparkdl.comm.file_chunks import gathered
from sparkdl.data.plan import assign_shards
from sparkdl.data.spool.spool_source import SpoolSource
from sparkdl.report.summary import TrainingSummary
from sparkdl.spark.cluster.attempt import Attempt, Rows
from sparkdl.spark.cluster.resize import Resize
from sparkdl.spark.cluster.supervisor import GangResult, supervise
from sparkdl.spark.run.resume import Attempts, find_checkpoint, gang_attempts
from sparkdl.spark.run.run import Run, Trained
from sparkdl.storage.checkpoint_format import decode, encode
from sparkdl.storage.tensor_tree import Snapshot, pack
from sparkdl.worker import training

_WORTH = 2.0
"""A gang starts again with more workers if that saves so many times what it costs."""


def train_in_gang(run: Run) -> Trained:
    """Train, and give the weights to the run's module; raises what `supervise` raises."""
    payload = cloudpickle.dumps((run.config, run.packed.skeleton))
    _warn_of_space(run)
    state = None  # safetensors of what an earlier fit has left, if training goes on from there
    if run.begins_from is not None:
        state = gathered(encode(Snapshot(*pack(run.begins_from.shared()))))
    with gang_attempts(run, run.run_key, partial(_rebuild, run)) as attempts:
        submit = partial(_submit, run, attempts, payload, state)
        resize = None
        if run.slots.max_workers is not None:
            resize = Resize(run, partial(_pays, run), attempts.take_at_most)
        result = supervise(run, submit, heal=attempts.heal, resize=resize)
    run.module.load_state_dict(_sent(run, result, "weights", training.FINAL))
    left = _sent(run, result, "left", training.LEFT) if run.keeps_state else None
    return Trained(summary=_trained(result), left=left)


def _submit(
    run: Run, attempts: Attempts, payload: bytes, state: bytes | None, attempt: Attempt
) -> Callable[[], Rows]:
    """Prepare a submission: lost shards are rebuilt, the newest checkpoint is found.

    A gang that may have another size than at first, or whose shards are own partitions, finds the
    shards where they are; see `worker.held_shards`.
    """
    find = partial(find_checkpoint, run, passed_over=attempts.passed_over, lease=attempts.lease)
    path = attempts.begin(attempt, find, run.plan.first_step)
    df, plan, world_size = run.table.df, run.plan, attempt.world_size
    own, is_kept, is_again = run.table.owns_partitions, run.table.is_kept, attempt.number > 0
    if own or (is_again and run.slots.may_move) or world_size != run.slots.num_workers:
        df = run.spark.range(0, world_size, 1, world_size)
    if is_again:
        restores = run.slots.may_move or is_kept
        found = run.table.restore(world_size) if restores else run.table.collect()
        plan = plan.for_shards([part.shard for part in found])
    send = partial(run.link.send, remedy="submit the job inside the cluster's network")
    tensors, what = run.packed.tensors, "the module's weights have"
    order = run.gang_order(
        training.WorkOrder,
        attempt=attempt.number,
        run_key=run.run_key,
        device=run.config.device,
        plan=plan.held_by(assign_shards(len(plan.shards), world_size)),
        payload=payload,
        weights=send(training.INITIAL, tensors, what=what),
        begins_from_state=run.begins_from is not None,
        state=state and send(training.STATE, state, what="the training state has"),
        keeps_state=run.keeps_state,
        resume_path=path,
        source=run.table.reader,
        speeds=attempts.speeds,
        is_placed=not (run.slots.may_move or own or is_kept)
        and isinstance(run.table.reader, SpoolSource),
        is_assigned=is_kept and not (run.slots.may_move or own),
        looks=run.looks,
    )
    return run.gang_job(df, training.run, order, num_workers=world_size)


def _rebuild(run: Run, missing: Collection[int]) -> None:
    """Have lost shards written anew: with the table's own partitions, or only those that are."""
    if not (run.slots.may_move or run.table.owns_partitions or run.table.is_kept):
        run.table.rebuild()
    else:
        run.table.remake(missing or range(len(run.plan.shards)))


def _pays(run: Run, attempt: Attempt, workers: int, _since: float) -> str | None:
    """Why to start again with more workers, see `resize.Pays`.

    It pays if the time that they save is worth twice what starting again costs: as long as this
    attempt took to its first step, and the steps since its last checkpoint once more.
    """
    if attempt.saved is None or attempt.steps is None or attempt.first_step is None:
        return None
    (first, began), (step, at), (saved_step, _) = attempt.first_step, attempt.steps, attempt.saved
    if step <= first:
        return None
    step_seconds = (at - began) / (step - first)
    end = run.plan.first_step + run.plan.total_steps
    saved = (end - step) * step_seconds * (1 - attempt.world_size / workers)
    cost = began - attempt.submitted + max(0, step - saved_step) * step_seconds
    if saved < _WORTH * cost:
        return None
    return (
        f"the gang of {attempt.world_size} starts again from the checkpoint of step {saved_step}, "
        f"which saves about {saved - cost:.0f} s"
    )


def _warn_of_space(run: Run) -> None:
    """Warn if the driver's folder cannot hold the checkpoints that it is to keep."""
    link, config = run.link, run.config.checkpoint
    if link.channel is None or link.url is not None:
        return
    module = run.module
    trained = sum(p.nbytes for p in module.parameters() if p.requires_grad)
    weights = sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))
    link.files.check_space(
        weights_bytes=weights,
        checkpoint_bytes=weights + 2 * trained,  # two moments, as Adam keeps them
        num_checkpoints=0 if config.interval == -1 else config.keep + 1,
    )


def _sent(run: Run, result: GangResult, kind: str, name: str) -> Any:
    """What rank 0 has delivered as rows of this kind, or as the file of this name."""
    in_rows = [payload for _, its_kind, payload in result.rows if its_kind == kind]
    data = in_rows[0] if in_rows else run.link.files.read(name)
    return decode(data, name)


def _trained(result: GangResult) -> TrainingSummary:
    reports = {rank: json.loads(payload) for rank, kind, payload in result.rows if kind == "result"}
    first = reports[0]
    return TrainingSummary(
        history=first["history"],
        steps=first["steps"],
        restarts=result.restarts,
        world_size=result.sizes[-1][1],
        gang_sizes=[list(size) for size in result.sizes],
        phase_seconds={f"rank 0: {name}": spent for name, spent in first["seconds"].items()},
        throughput_by_rank=[reports[rank]["rows_per_second"] for rank in sorted(reports)],
        bytes_sent_by_rank=[reports[rank]["bytes_sent"] for rank in sorted(reports)],
    )
