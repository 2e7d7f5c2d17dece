"""Refuses rounds whose states, which come through its JVM, cannot fit into the driver."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn

from sparkdl.config import TrainConfig
from sparkdl.errors import ClusterError
from sparkdl.spark.cluster.cluster_info import mib, parse_bytes
from sparkdl.storage.tensor_tree import num_bytes
from sparkdl.sync.frozen_layers import moving_buffers
from sparkdl.sync.sparse_gradients import sparse_parameters
from sparkdl.train.optimizers.optimizers import resolve_optimizer

_SAMPLE = (8, 8)
"""Shape of the parameter that shows how much state an optimizer keeps."""


def check_driver_memory(
    get: Callable[[str], str | None],
    *,
    state_bytes: int,
    num_members: int = 1,
    heap_bytes: int | None,
    is_local: bool,
) -> None:
    """Refuse what the driver's JVM cannot hold in any case; raises ClusterError.

    However many shards there are, that is the state that goes out, and the mean that comes back,
    twice while it is unpacked; in local mode the tasks too. Of a population all members come back.
    ``heap_bytes`` is None where it is not known.
    """
    what, fewer = f"a state of {mib(state_bytes)} MiB (weights and optimizer)", "frozenLayers"
    if num_members > 1:
        what = f"{num_members} members of {mib(state_bytes)} MiB each (weights and optimizer)"
        fewer = "fewer members (numWorkers)"
    remedy = f"or use an optimizer that keeps less, {fewer}, or another strategy in a gang"
    limit = parse_bytes(get("spark.driver.maxResultSize") or "1g", unit=1)
    if limit and num_members * state_bytes > limit:
        raise ClusterError(
            f"in rounds the driver would get {what}, more than spark.driver.maxResultSize allows "
            f"({mib(limit)} MiB); raise it, and spark.driver.memory with it, {remedy}"
        )
    needed = (num_members * (2 if is_local else 1) + 2) * state_bytes
    if heap_bytes is not None and needed > heap_bytes:
        raise ClusterError(
            f"in rounds the driver would send and get {what}, for which its JVM needs at least "
            f"{mib(needed)} MiB; it may use {mib(heap_bytes)} MiB; raise spark.driver.memory, "
            f"{remedy}"
        )


def round_state_bytes(module: nn.Module, config: TrainConfig, *, keeps_optimizer: bool) -> int:
    """Bytes that a replica sends back, at least: what it trains, and its optimizer's state."""
    parameters = list(module.parameters())
    if any(nn.parameter.is_lazy(parameter) for parameter in parameters):
        return 0  # their sizes are not known yet
    trained = sum(p.nbytes for p in parameters if p.requires_grad)
    kept = _numbers_per_parameter(config, module) if keeps_optimizer else 0.0
    return int(trained * (1 + kept)) + num_bytes(moving_buffers(module))


def _numbers_per_parameter(config: TrainConfig, module: nn.Module) -> float:
    """Return how many numbers the optimizer keeps for each that it trains, seen at its first step.

    Those of the user's own are not tried: they may want the module's own parameters, or several.
    """
    kind = config.optimizer
    is_class = isinstance(kind, type) and kind.__module__.startswith(("torch.", "sparkdl."))
    if not isinstance(kind, str) and not is_class:
        return 0.0
    zeros = torch.zeros(_SAMPLE)
    sample = nn.Embedding(*_SAMPLE, _weight=zeros, sparse=bool(sparse_parameters(module)))
    parameter: nn.Parameter = sample.weight  # type: ignore[assignment]
    parameter.grad = zeros.to_sparse(1) if sample.sparse else zeros.clone()
    optimizer = resolve_optimizer(replace(config, parameter_groups={}), sample)([parameter])
    optimizer.step(lambda: 0.0)
    tensors = [t for t in optimizer.state[parameter].values() if isinstance(t, torch.Tensor)]
    return sum(tensor.numel() for tensor in tensors if tensor.ndim) / parameter.numel()
