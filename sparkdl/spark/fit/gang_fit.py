"""Training in a gang: one long barrier stage under the supervisor."""

from __future__ import annotations

import json
import logging
import pickle
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from sparkdl.comm.file_chunks import JobResults, gathered
from sparkdl.data.column_stats import SpooledShard
from sparkdl.data.plan import assign_near, assign_shards
from sparkdl.errors import StorageError
from sparkdl.report.summary import TrainingSummary
from sparkdl.serialization.recorded.recipe import give_memory
from sparkdl.serialization.stored_module import can_be_stored
from sparkdl.serialization.travel.attributes import come_back
from sparkdl.serialization.travel.packed_module import PackedModule
from sparkdl.serialization.travel.pickling import dumps
from sparkdl.spark.cluster.attempt import Attempt
from sparkdl.spark.cluster.resize import Resize
from sparkdl.spark.cluster.supervisor import GangResult, supervise
from sparkdl.spark.run.placement import Placement, choose_placement
from sparkdl.spark.run.resume import Attempts, by_host, find_checkpoint, gang_attempts
from sparkdl.spark.run.run import Run, Trained
from sparkdl.storage.checkpoint_format import decode, encode
from sparkdl.storage.tensor_tree import Snapshot, num_bytes, pack
from sparkdl.sync.module_tensors import give_tensors
from sparkdl.sync.strategy import SyncStrategy
from sparkdl.worker import training
from sparkdl.worker.held_shards import differing

logger = logging.getLogger(__name__)

_WEIGHTS = "weights"
"""Folder of the storage of checkpoints that has a folder of weights for each fit that left some."""
_WORTH = 2.0
"""A gang starts again, to be faster, if that saves so many times what it costs."""


def train_in_gang(run: Run) -> Trained:
    """Train, and give the weights to the run's module; raises what `supervise` raises."""
    payload = dumps((run.link.values, run.config, run.packed.skeleton, run.shared))
    _warn_of_space(run)
    state = None  # safetensors of what an earlier fit has left, if training goes on from there
    if run.begins_from is not None:
        state = gathered(encode(Snapshot(*pack(run.begins_from.shared()))))
    place = _WEIGHTS if _stores_weights(run) else None
    stored_at = None
    placement = choose_placement(run.table, run.slots, run.plan.world_size)
    with gang_attempts(run, run.run_key, placement.after_loss) as attempts:
        submit = partial(_submit, run, placement, attempts, payload, state, place)
        changes = Redeal(run, attempts), Resize(run, partial(_pays, run), attempts.take_at_most)
        try:
            result = supervise(run, submit, heal=attempts.heal, changes=changes)
            stored = [payload for _, kind, payload in result.rows if kind == "stored"]
            stored_at = stored[0].decode() if stored else None
        finally:
            if place is not None:
                _remove_others(run, stored_at)
    packed: PackedModule = pickle.loads(_data(run, result, "attributes", training.ATTRIBUTES))
    module = come_back(run.module, packed)
    if stored_at is None and module is run.module:
        if any(parameter.is_meta for parameter in run.module.parameters()):
            give_memory(run.module, torch.device("cpu"))
        give_tensors(run.module, _sent(run, result, "weights", training.FINAL))
    left = _sent(run, result, "left", training.LEFT) if run.keeps_state else None
    reports = {rank: json.loads(payload) for rank, kind, payload in result.rows if kind == "result"}
    return Trained(
        summary=_summary(result, reports),
        was_stopped=reports[0]["was_stopped"],
        left=left,
        stored_at=stored_at,
        module=module,
    )


def _stores_weights(run: Run) -> bool:
    """True if ranks write the weights to the storage of checkpoints, and nobody sends them.

    That is so where a model is divided, executors open the storage by themselves, and files of
    weights can hold all that the model's state dict has.
    """
    mesh, link = run.config.parallelism, run.link
    is_divided = mesh is not None and mesh.divides_model
    return is_divided and link.url is not None and not link.relays and can_be_stored(run.module)


def _remove_others(run: Run, kept: str | None) -> None:
    """Remove what attempts of this run have left that are not the one that ended well."""
    storage = run.link.checkpoints
    assert storage is not None
    try:
        for name in storage.list(_WEIGHTS):
            path = f"{_WEIGHTS}/{name}"
            if name.startswith(f"{run.run_id}-") and path != kept:
                storage.remove(path)
    except StorageError as error:
        logger.warning("weights that nobody needs stay in %s/%s: %s", storage, _WEIGHTS, error)


def _submit(
    run: Run,
    placement: Placement[Sequence[SpooledShard]],
    attempts: Attempts,
    payload: bytes,
    state: bytes | None,
    weights_in: str | None,
    attempt: Attempt,
) -> Callable[[], JobResults]:
    """Prepare a submission: the newest checkpoint is found, and shards that were lost are there."""
    find = partial(find_checkpoint, run, passed_over=attempts.passed_over, lease=attempts.lease)
    path = attempts.begin(attempt, find, run.plan.first_step)
    world_size, mesh = attempt.world_size, run.config.parallelism
    found, df = placement.start(attempt.number, world_size)
    plan = run.plan.for_shards([part.shard for part in found])
    strategy: SyncStrategy = run.config.sync_strategy
    readers = world_size if mesh is None else mesh.num_readers
    attempt.held = assign_shards(len(plan.shards), readers)
    has_speeds = len(plan.shards) > readers and (attempts.speeds or strategy.work_shares)
    send = partial(run.link.send, remedy="submit the job inside the cluster's network")
    tensors, what = run.packed.tensors, "the module's weights have"
    order = run.gang_order(
        training.WorkOrder,
        attempt=attempt.number,
        run_key=run.run_key,
        device=run.config.device,
        plan=plan.held_by(attempt.held),
        payload=payload,
        weights=send(training.INITIAL, tensors, what=what, pieces=run.packed.pieces),
        recipe=run.packed.recipe,
        begins_from_state=run.begins_from is not None,
        state=state and send(training.STATE, state, what="the training state has"),
        keeps_state=run.keeps_state,
        resume_path=path,
        source=run.table.reader,
        speeds=attempts.speeds,
        holding="near" if has_speeds else placement.holding,
        looks=run.looks,
        spares_memory=mesh is not None and mesh.is_divided,
        stored_at=weights_in and f"{weights_in}/{run.run_id}-{attempt.number}",
    )
    return run.gang_job(df, training.run, order, num_workers=world_size)


class Redeal:
    """Decides if a gang shall start again with shards dealt by the speeds that were measured in it.

    It does so only if some host's speed was not known when it began, so never twice for the same
    hosts, and not where the user wants equal bits, which depend on who holds what unless they are
    by shard.
    """

    def __init__(self, run: Run, attempts: Attempts) -> None:
        self._run = run
        self._attempts = attempts
        self._seen: tuple[Any, float] = (None, 0.0)
        """The assignment that would be better, and since when."""

    def __call__(self, attempt: Attempt) -> str | None:
        """Why to start again; None: go on."""
        found = self._better(attempt)
        now = time.monotonic()
        if found is None or found[0] != self._seen[0]:
            self._seen = (found and found[0], now)
        if found is None or now < self._seen[1] + self._run.settings.elastic_wait_seconds:
            return None
        return f"its workers differ in speed: the gang {found[1]}"

    def end(self) -> None:
        """See `supervisor.Change`."""
        self._seen = (None, 0.0)

    def _better(self, attempt: Attempt) -> tuple[Any, str] | None:
        """The assignment by the speeds as they are, and what it is worth; None: no better one."""
        plan, config = self._run.plan, self._run.config
        if config.parallelism is not None:  # its ranks read the same rows, or wait for each other
            return None
        known, measured = self._attempts.speeds, by_host(attempt)
        hosts = [attempt.hosts.get(rank, "") for rank in range(attempt.world_size)]
        if len(plan.shards) <= len(hosts) or known.keys() >= set(hosts):
            return None
        if config.deterministic and config.elasticity != "bits":
            return None
        speeds = [measured.get(host) or known.get(host, 0.0) for host in hosts]
        if not all(speeds):
            return None
        rows = [shard.num_rows for shard in plan.shards]

        def seconds(held: Sequence[Sequence[int]]) -> float:
            """Return the seconds of an epoch for the slowest rank."""
            ranks = zip(held, speeds, strict=True)
            return max(sum(rows[number] for number in own) / speed for own, speed in ranks)

        held = [set(own) for own in attempt.held]
        better = assign_near(rows, held, differing(speeds, [1.0] * len(speeds)))
        saved = (seconds(attempt.held) - seconds(better)) / plan.steps_per_epoch
        worth = _worth(self._run, attempt, lambda _: saved)
        return None if worth is None else (better, worth)


def _pays(run: Run, attempt: Attempt, workers: int, _since: float) -> str | None:
    """Why to start again with more workers, see `resize.Pays`."""
    worth = _worth(run, attempt, lambda seconds: seconds * (1 - attempt.world_size / workers))
    return worth and f"the gang of {attempt.world_size} {worth}"


def _worth(run: Run, attempt: Attempt, save: Callable[[float], float]) -> str | None:
    """Return what starting again is worth, in words; None: it does not pay.

    ``save`` gives the seconds that each step saves, from those that a step takes. It pays if the
    time that it saves is worth twice what it costs: as long as this attempt took to its first step,
    and the steps since its last checkpoint once more.
    """
    if attempt.saved is None or attempt.steps is None or attempt.first_step is None:
        return None
    (first, began), (step, at), (saved_step, _) = attempt.first_step, attempt.steps, attempt.saved
    if step <= first:
        return None
    step_seconds = (at - began) / (step - first)
    end = run.plan.first_step + run.plan.total_steps
    saved = (end - step) * save(step_seconds)
    cost = began - attempt.submitted + max(0, step - saved_step) * step_seconds
    if saved < _WORTH * cost:
        return None
    return (
        f"starts again from the checkpoint of step {saved_step}, which saves about "
        f"{saved - cost:.0f} s"
    )


def _warn_of_space(run: Run) -> None:
    """Warn if the driver's folder cannot hold the checkpoints that it is to keep."""
    link, config = run.link, run.config.checkpoint
    if link.channel is None or link.url is not None:
        return
    module = run.module
    trained = sum(p.nbytes for p in module.parameters() if p.requires_grad)
    weights = num_bytes((*module.parameters(), *module.buffers()))
    link.files.check_space(
        weights_bytes=weights,
        checkpoint_bytes=weights + 2 * trained,  # two moments, as Adam keeps them
        num_checkpoints=0 if config.interval == -1 else config.keep + 1,
    )


def _sent(run: Run, result: GangResult, kind: str, name: str) -> Any:
    """The tree that rank 0 has delivered."""
    return decode(_data(run, result, kind, name), name)


def _data(run: Run, result: GangResult, kind: str, name: str) -> bytes:
    """Return what rank 0 has delivered as rows of this kind, or as the file of this name."""
    in_rows = [payload for _, its_kind, payload in result.rows if its_kind == kind]
    return in_rows[0] if in_rows else run.link.files.read(name)


def _summary(result: GangResult, reports: Mapping[int, Any]) -> TrainingSummary:
    """``reports``: rank -> what it has said of its training."""
    first = reports[0]
    return TrainingSummary(
        history=first["history"],
        steps=first["steps"],
        first_step=result.sizes[0][0],
        restarts=result.restarts,
        world_size=result.sizes[-1][1],
        gang_sizes=[list(size) for size in result.sizes],
        phase_seconds={f"rank 0: {name}": spent for name, spent in first["seconds"].items()},
        throughput_by_rank=[reports[rank]["rows_per_second"] for rank in sorted(reports)],
        bytes_sent_by_rank=[reports[rank]["bytes_sent"] for rank in sorted(reports)],
    )
