"""Training in a gang: one long barrier stage under the supervisor."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import cloudpickle

from sparkdl.comm.file_chunks import gathered
from sparkdl.errors import CheckpointLost, ShardLost
from sparkdl.report.summary import TrainingSummary
from sparkdl.spark.cluster.attempt import Attempt, Rows
from sparkdl.spark.cluster.slots import wait_again
from sparkdl.spark.cluster.supervisor import GangResult, supervise
from sparkdl.spark.run.resume import find_checkpoint
from sparkdl.spark.run.run import Run, Trained
from sparkdl.storage.checkpoint_format import decode, encode
from sparkdl.storage.lease import Lease
from sparkdl.storage.tensor_tree import Snapshot, pack
from sparkdl.worker import training


def train_in_gang(run: Run) -> Trained:
    """Train, and give the weights to the run's module.

    Raises:
        WorkerError: the user's code failed on a worker.
        TrainingFailed: workers were lost more than ``max_restarts`` times.
        SparkDLError: what a worker raised on purpose.
    """
    payload = cloudpickle.dumps((run.config, run.packed.skeleton))
    _warn_of_space(run)
    with ExitStack() as stack:
        checkpoints, lease = run.link.checkpoints, None
        if checkpoints is not None:
            lease = stack.enter_context(Lease(checkpoints, run.run_key, run.run_id))
        attempts = Attempts(run, payload, lease, _encoded_state(run))
        result = supervise(run, attempts.submit, heal=attempts.heal)
    run.module.load_state_dict(_sent(run, result, "weights", training.FINAL))
    left = _sent(run, result, "left", training.LEFT) if run.keeps_state else None
    return Trained(summary=_trained(result), left=left)


@dataclass
class Attempts:
    """The submissions of a gang: what one of them leaves for the next to know."""

    run: Run
    payload: bytes
    lease: Lease | None
    """None: there is no place for checkpoints."""
    state: bytes | None = None
    """safetensors of what an earlier fit has left, if training goes on from there."""
    begun_from: str | None = None
    """The checkpoint of the newest submission."""
    passed_over: set[str] = field(default_factory=set)
    """Checkpoints that workers could not read."""

    def _send_state(self) -> bytes | None:
        assert self.state is not None
        return self.run.link.send(
            training.STATE,
            self.state,
            what="the training state has",
            remedy="submit the job inside the cluster's network",
        )

    def heal(self, failed: Attempt) -> None:
        """Mend what would make the next submission fail too."""
        if failed.has_reported(ShardLost):  # the file is gone, although Spark still holds its row
            self.run.table.rebuild()
        if failed.has_reported(CheckpointLost) and self.begun_from is not None:
            self.passed_over.add(self.begun_from)

    def submit(self, attempt: Attempt) -> Callable[[], Rows]:
        """Prepare a submission: lost shards are rebuilt, the newest checkpoint is found."""
        run, link, number = self.run, self.run.link, attempt.number
        shards = run.plan.shards
        if number > 0:
            run.view.begun_again(number, None)
            wait_again(run.spark, run.slots, run.settings, attempt.restarts_left)
            shards = tuple(part.shard for part in run.table.collect())
        found = None
        if link.checkpoints is not None:
            found = find_checkpoint(run, link.checkpoints, self.passed_over, self.lease)
        self.begun_from = None if found is None else found.path
        if self.lease is not None:
            self.lease.begin(number, self.begun_from)
        attempt.start = run.plan.first_step if found is None else found.step
        run.view.attempt(number, attempt.start)
        order = run.gang_order(
            training.WorkOrder,
            attempt=number,
            run_key=run.run_key,
            device=run.config.device,
            plan=replace(run.plan, shards=shards),
            payload=self.payload,
            weights=link.send(
                training.INITIAL,
                run.packed.tensors,
                what="the module's weights have",
                remedy="submit the job inside the cluster's network",
            ),
            begins_from_state=run.begins_from is not None,
            state=None if self.state is None else self._send_state(),
            keeps_state=run.keeps_state,
            resume_path=self.begun_from,
            source=run.table.reader,
            looks=run.looks,
        )
        return run.gang_job(run.table.df, training.run, order)


def _encoded_state(run: Run) -> bytes | None:
    if run.begins_from is None:
        return None
    return gathered(encode(Snapshot(*pack(run.begins_from.shared()))))


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
        phase_seconds={f"rank 0: {name}": spent for name, spent in first["seconds"].items()},
        throughput_by_rank=[reports[rank]["rows_per_second"] for rank in sorted(reports)],
        bytes_sent_by_rank=[reports[rank]["bytes_sent"] for rank in sorted(reports)],
    )
