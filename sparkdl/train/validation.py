"""Measures the model on the validation rows; ranks exchange sums, never averages."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from sparkdl.comm.communicator import Communicator
from sparkdl.data.batches import Batch, cut
from sparkdl.data.collate import no_rows
from sparkdl.data.plan import TrainPlan
from sparkdl.sync.frozen_layers import evaluation_mode
from sparkdl.sync.strategy import Pipelined
from sparkdl.train.objective.label_losses import loss_record, no_sums, sums_of
from sparkdl.train.objective.training_step import output_of, run, taken
from sparkdl.train.replica import Replica


def evaluate(replica: Replica, batches: Iterable[Batch], comm: Communicator) -> dict[str, float]:
    """One pass in evaluation mode. Collective; equal results on all ranks.

    Returns:
        ``val_loss`` and ``val_<name>`` for each metric, over the rows of all ranks.
    """
    lightning, pipeline = replica.lightning, replica.synchronizer.pipeline
    if pipeline is not None:
        sums = measure_by_stages(replica, batches, pipeline)
        told: dict[str, Any] | None = None
        if pipeline.is_last:
            comm.all_reduce(sums)
            told = {
                "record": record(sums, replica.metrics.compute(comm), replica.labels),
                "confusion": replica.metrics.confusion,
            }
        told = pipeline.from_last(told)
        replica.metrics.confusion = told["confusion"]
        found: dict[str, float] = told["record"]
        return found
    with contextlib.nullcontext() if lightning is None else lightning.validation() as logs:
        sums = measure(replica, batches)
    comm.all_reduce(sums)
    found = record(sums, replica.metrics.compute(comm), replica.labels)
    if lightning is not None and logs is not None:
        lightning.validated(found, logs, comm)
    return found


def in_step(batches: Iterable[Batch], plan: TrainPlan) -> Iterator[Batch]:
    """The batches of one rank, with empty ones at the end so that all ranks have equally many.

    For modules whose forward passes wait for those of other ranks.
    """
    left = max(validation_batches(plan))
    for batch in batches:
        yield batch
        left -= 1
    for _ in range(left):
        yield from cut(plan, {column.key: no_rows(column) for column in plan.columns}, [0])


def validation_batches(plan: TrainPlan) -> list[int]:
    """Return how many batches each rank has for validation, see `sequential_batches`."""
    return [
        sum(-(-shard.num_validation_rows // plan.batch_size) for shard in plan.shards_of(rank))
        for rank in range(plan.world_size)
    ]


def measure(replica: Replica, batches: Iterable[Batch]) -> torch.Tensor:
    """One rank's part of an evaluation; the replica's metrics have then seen its rows.

    Where the module is a LightningModule, inside its stand-in's `validation`.

    Returns:
        Sum of weighted losses, sum of weights, and the losses of each label where there are
        several, float64.
    """
    module, loss, metrics = replica.module, replica.loss, replica.metrics
    metrics.reset()
    sums = no_sums(loss, replica.device)
    with torch.no_grad(), evaluation_mode(module):
        for batch in batches:
            moved = batch.map(lambda value: value.to(replica.device))
            with replica.number_format.autocast():
                seen = run(loss, module, moved)
            if not moved.num_rows:  # it has run for other ranks; a mean of no losses is no number
                continue
            loss_sum, weight_sum, parts = sums_of(loss, seen, moved.target, moved.weight)
            for place, value in enumerate((loss_sum, weight_sum, *parts)):
                sums[place] += value
            if metrics:
                with replica.number_format.autocast():
                    output = output_of(loss, module, moved, seen)
                metrics.update(output, moved.target, moved.weight)
    return sums


def measure_by_stages(
    replica: Replica, batches: Iterable[Batch], pipeline: Pipelined
) -> torch.Tensor:
    """As `measure`, along a pipeline: the rank with the last stage has seen the rows."""
    module, loss, metrics = replica.module, replica.loss, replica.metrics
    metrics.reset()
    sums = no_sums(loss, replica.device)

    def see(output: Any, rows: Batch) -> None:
        if not rows.num_rows:
            return
        output = taken(loss, output)
        loss_sum, weight_sum, parts = sums_of(loss, output, rows.target, rows.weight)
        for place, value in enumerate((loss_sum, weight_sum, *parts)):
            sums[place] += value
        if metrics:
            metrics.update(output, rows.target, rows.weight)

    with torch.no_grad(), evaluation_mode(module):
        for batch in batches:
            moved = batch.map(lambda value: value.to(replica.device))
            pipeline.look(moved, see, replica.number_format.autocast)
    return sums


def record(
    sums: torch.Tensor, values: dict[str, float], labels: tuple[str, ...] = ()
) -> dict[str, float]:
    """The history's entries of an evaluation, given the sums over all ranks."""
    return {
        **loss_record(sums.tolist(), labels, "val_"),
        **{f"val_{name}": value for name, value in values.items()},
    }
