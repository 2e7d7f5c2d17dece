"""The predictor of a checked fit: the cost model with the fit's plan, module and cluster."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from sparkdl.data.plan import TrainPlan
from sparkdl.explain.cost_model import Calibration, Gang
from sparkdl.explain.predict_times import Predictor
from sparkdl.spark.explain.estimate import Found
from sparkdl.spark.explain.measure_gang import num_ranks
from sparkdl.spark.fit.check_request import CheckedRequest, check_sync_batch_norm
from sparkdl.spark.fit.check_rows import replica_bytes
from sparkdl.sync.exchange_pattern import ModelSize
from sparkdl.sync.frozen_layers import moving_buffers
from sparkdl.sync.strategy import SyncStrategy

if TYPE_CHECKING:
    from torch import nn


def predictor_of(found: Found, calibration: Calibration) -> Predictor:
    """What predicts the fit with other strategies and other numbers of workers."""
    checked = found.checked
    return Predictor(
        calibration=calibration,
        plan=found.plan,
        config=checked.config,
        size=model_size(checked.module, calibration.gang),
        num_nodes=_num_nodes(checked, calibration),
        slots=checked.slots.total,
        largest_rows=found.largest_rows,
        check=partial(_check, checked, found.plan),
    )


def model_size(module: nn.Module, gang: Gang | None) -> ModelSize:
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
    checked.data.check_training(config, checked.request.validation, has_logs=checked.has_logs)
    checked.data.check_plan(plan, strategy)
    strategy.check(config, world_size)
    check_sync_batch_norm(checked.module, config, world_size)
