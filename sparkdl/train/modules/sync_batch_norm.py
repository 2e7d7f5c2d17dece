"""Lets BatchNorm layers see the batches of all ranks: they exchange their statistics.

While training lasts, the ``forward`` of each BatchNorm layer is replaced, on the object. Layers,
parameters, buffers and names stay as they are, so that weights, checkpoints and the fitted module
are those of the plain layers. torch's own ``SyncBatchNorm`` asks for GPUs; its ``forward`` is
replaced, too.

Statistics are those of all rows that the ranks have at one time, however unequal their numbers:
each rank sends mean, sum of squared deviations and number of values, which add up without
cancellation (Chan, Golub, LeVeque, "Updating Formulae and a Pairwise Algorithm for Computing Sample
Variances", 1979). Backward, the two sums that the gradient of the input needs are summed likewise
(Ioffe, Szegedy, arXiv 1502.03167, section 3).

Every call waits for all ranks, so all of them must run the same layers in the same order, those
without rows too. The messages travel in a process group of their own: while they are exchanged
during backward, gradients are under way as well, and within a group the order must be the same
everywhere.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from sparkdl.comm.communicator import Communicator
from sparkdl.errors import ConfigError
from sparkdl.sync.strategy import SyncStrategy


def check_strategy(strategy: SyncStrategy, world_size: int) -> None:
    """Raise ConfigError for a strategy whose ranks do not take their steps together."""
    if strategy.trains_apart and world_size > 1:
        raise ConfigError(
            f"syncBatchNorm lets workers wait for each other in every layer, and with "
            f"{type(strategy).__name__} they train apart; unset one of the two"
        )


def batch_norms(module: nn.Module) -> list[_BatchNorm]:
    """The layers of ``module`` that can see the batches of all ranks.

    ConfigError if there is none, or one has a forward of its own, which cannot be replaced.
    """
    layers = {name: part for name, part in module.named_modules() if isinstance(part, _BatchNorm)}
    known = (_BatchNorm.forward, nn.SyncBatchNorm.forward)
    for name, layer in layers.items():
        if type(layer).forward not in known or "forward" in vars(layer):
            raise ConfigError(
                f"syncBatchNorm cannot be used with the layer '{name}', a "
                f"{type(layer).__qualname__} with a forward of its own; use torch's BatchNorm1d, "
                "BatchNorm2d or BatchNorm3d there"
            )
    if not layers:
        raise ConfigError("syncBatchNorm is set, but the module has no BatchNorm layer; unset it")
    return list(layers.values())


@contextlib.contextmanager
def synchronized(module: nn.Module, comm: Communicator) -> Iterator[None]:
    """Let the `batch_norms` of ``module`` share statistics in training mode inside. Collective."""
    layers = batch_norms(module)
    if comm.world_size == 1:
        yield
        return
    own = comm.split([range(comm.world_size)])
    for layer in layers:
        setattr(layer, "forward", _SharedForward(layer, own))  # noqa: B010  # on the object only
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


class _SharedForward:
    """A BatchNorm layer's forward; copies and pickles of the layer get the plain one."""

    def __init__(self, layer: _BatchNorm, comm: Communicator) -> None:
        self._layer = layer
        self._comm = comm

    def __reduce__(self) -> tuple[Any, ...]:
        return partial, (_BatchNorm.forward, self._layer)

    def __call__(self, values: torch.Tensor) -> torch.Tensor:
        """``values``, ``(batch, channels, ...)``, normalized; in evaluation mode as ever."""
        layer = self._layer
        if not layer.training:
            return _BatchNorm.forward(layer, values)
        layer._check_input_dim(values)  # type: ignore[no-untyped-call]
        total = _Total.of(values.detach(), self._comm)
        if total.num_values == 0:
            return values.clone()
        if total.num_values == 1:
            raise ConfigError(
                "a BatchNorm layer needs more than one value per channel while it trains, and all "
                "workers together have one; raise batchSize, or lower gradientAccumulationSteps"
            )
        _keep(layer, total)
        normalized: torch.Tensor = _Normalize.apply(  # type: ignore[no-untyped-call]
            values, layer.weight, layer.bias, total, layer.eps, self._comm
        )
        return normalized


class _Total(NamedTuple):
    """Statistics over the rows of all ranks, equal bit for bit on all of them."""

    num_values: int
    """Values per channel."""
    mean: torch.Tensor
    """float64 ``(channels,)``"""
    variance: torch.Tensor
    """Biased; float64 ``(channels,)``"""

    @classmethod
    def of(cls, values: torch.Tensor, comm: Communicator) -> _Total:
        """Collective; ``values`` are this rank's, ``(batch, channels, ...)``."""
        count, channels = values.numel() // values.shape[1], values.shape[1]
        mine = values.new_zeros(2 * channels + 1, dtype=torch.float64)
        if count > 0:
            # Twice over, because the mean is rounded. torch.var_mean takes ten times as long.
            wide, others = _wide(values), _others(values)
            mean = wide.mean(others)
            centered = wide - mean.view(_shape(values))
            rest = centered.mean(others).double()
            mine[0] = count
            mine[1 : channels + 1] = mean + rest
            mine[channels + 1 :] = centered.square_().sum(others) - count * rest**2
        parts = comm.all_gather(mine)
        counts = parts[:, :1]
        means, deviations = parts[:, 1 : channels + 1], parts[:, channels + 1 :]
        total = int(counts.sum().item())
        mean = (counts * means).sum(0) / max(total, 1)
        squares = deviations.sum(0) + (counts * (means - mean) ** 2).sum(0)
        return cls(total, mean, squares / max(total, 1))


def _keep(layer: _BatchNorm, total: _Total) -> None:
    """Update the running statistics, as `torch.nn.BatchNorm1d` does it."""
    if not layer.track_running_stats or layer.running_mean is None or layer.running_var is None:
        return
    share = layer.momentum
    if layer.num_batches_tracked is not None:
        layer.num_batches_tracked.add_(1)
        if share is None:
            share = 1.0 / float(layer.num_batches_tracked)
    unbiased = total.variance * (total.num_values / (total.num_values - 1))
    layer.running_mean.lerp_(total.mean.to(layer.running_mean.dtype), share or 0.0)
    layer.running_var.lerp_(unbiased.to(layer.running_var.dtype), share or 0.0)


class _Normalize(torch.autograd.Function):
    """Normalize by given statistics, of which the gradient knows that the values made them."""

    @staticmethod
    def forward(
        ctx: Any,
        values: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        total: _Total,
        eps: float,
        comm: Communicator,
    ) -> torch.Tensor:
        kind = _wide(values).dtype
        mean, variance = total.mean.to(kind), total.variance.to(kind)
        ctx.save_for_backward(values, weight, mean, torch.rsqrt(total.variance + eps).to(kind))
        ctx.num_values, ctx.comm = total.num_values, comm
        scale = None if weight is None else weight.to(kind)
        shift = None if bias is None else bias.to(kind)
        return F.batch_norm(values, mean, variance, scale, shift, training=False, eps=eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        values, weight, mean, inverse = ctx.saved_tensors
        shape = _shape(values)
        centered = _wide(values) - mean.view(shape)
        wide = _wide(slope)
        sums = torch.stack((wide.sum(_others(wide)), (wide * centered).sum(_others(wide))))
        sums = sums.double()
        bias_slope, weight_slope = sums[0].clone(), sums[1] * inverse
        ctx.comm.all_reduce(sums)
        scale = inverse if weight is None else inverse * weight
        of_mean, of_deviation = (sums / ctx.num_values).to(wide.dtype)
        centered.mul_((of_deviation * inverse**2).view(shape)).add_(of_mean.view(shape))
        values_slope = (wide - centered).mul_(scale.view(shape))
        needed = zip((values_slope, weight_slope, bias_slope), ctx.needs_input_grad, strict=False)
        return *(slope if is_needed else None for slope, is_needed in needed), None, None, None


def _wide(values: torch.Tensor) -> torch.Tensor:
    return values.float() if values.dtype in (torch.float16, torch.bfloat16) else values


def _others(values: torch.Tensor) -> list[int]:
    """All dimensions but that of the channels."""
    return [dimension for dimension in range(values.dim()) if dimension != 1]


def _shape(values: torch.Tensor) -> tuple[int, ...]:
    """That which lets one number per channel meet ``values``."""
    return (1, -1) + (1,) * (values.dim() - 2)
