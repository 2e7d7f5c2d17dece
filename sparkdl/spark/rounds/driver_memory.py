"""Refuses rounds whose states, which come through its JVM, cannot fit into the driver."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from sparkdl.config import TrainConfig
from sparkdl.errors import ClusterError
from sparkdl.spark.cluster.cluster_info import mib, parse_bytes
from sparkdl.spark.rounds.round_stages import tree_levels
from sparkdl.sync.averaging.averaging import AveragingStrategy
from sparkdl.sync.frozen_layers import moving_buffers
from sparkdl.train.optimizers.optimizers import resolve_optimizer

_SAMPLE = (8, 8)
"""Shape of the parameter that shows how much state an optimizer keeps."""


def check_driver_memory(
    get: Callable[[str], str | None],
    *,
    state_bytes: int,
    num_shards: int,
    strategy: AveragingStrategy,
    heap_bytes: int | None,
    is_local: bool,
) -> None:
    """Refuse what the driver's JVM cannot hold in any case; raises ClusterError.

    That is each state that comes back, one twice while it is unpacked, and one that goes out; in
    local mode the tasks too. ``heap_bytes`` is None where it is not known.
    """
    merged = (tree_levels(num_shards, strategy.merge_depth) or [num_shards])[-1]
    what = f"{merged} states of {mib(state_bytes)} MiB (weights and optimizer) at a time"
    remedy = (
        "or use fewer shards (numWorkers), ParameterAveraging(aggregation_depth=2), which merges "
        "on executors where shards are many, or executionMode='gang'"
    )
    limit = parse_bytes(get("spark.driver.maxResultSize") or "1g", unit=1)
    if limit and merged * state_bytes > limit:
        raise ClusterError(
            f"in rounds the driver would get {what}, more than spark.driver.maxResultSize allows "
            f"({mib(limit)} MiB); raise it, and spark.driver.memory with it, {remedy}"
        )
    needed = ((2 * merged if is_local else merged) + 2) * state_bytes
    if heap_bytes is not None and needed > heap_bytes:
        raise ClusterError(
            f"in rounds the driver would get {what}, for which its JVM needs at least "
            f"{mib(needed)} MiB; it may use {mib(heap_bytes)} MiB; raise spark.driver.memory, "
            f"{remedy}"
        )


def round_state_bytes(module: nn.Module, config: TrainConfig, strategy: AveragingStrategy) -> int:
    """Bytes that a replica sends back, at least: what it trains, and its optimizer's state."""
    parameters = list(module.parameters())
    if any(nn.parameter.is_lazy(parameter) for parameter in parameters):
        return 0  # their sizes are not known yet
    trained = sum(p.nbytes for p in parameters if p.requires_grad)
    kept = _numbers_per_parameter(config) if strategy.optimizer_state == "average" else 0.0
    return int(trained * (1 + kept)) + sum(buffer.nbytes for buffer in moving_buffers(module))


def _numbers_per_parameter(config: TrainConfig) -> float:
    """What the optimizer keeps for each number that it trains, seen at its first step.

    One that a callable of the user's makes is not tried: it may want the module's own parameters.
    """
    if not isinstance(config.optimizer, str | type):
        return 0.0
    parameter = nn.Parameter(torch.zeros(_SAMPLE))
    parameter.grad = torch.zeros(_SAMPLE)
    optimizer = resolve_optimizer(config)([parameter])
    optimizer.step(lambda: 0.0)
    tensors = [t for t in optimizer.state[parameter].values() if isinstance(t, torch.Tensor)]
    return sum(tensor.numel() for tensor in tensors if tensor.ndim) / parameter.numel()
