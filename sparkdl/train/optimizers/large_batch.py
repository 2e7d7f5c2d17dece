"""Optimizers that keep large batches trainable: LARS and LAMB, which torch lacks.

Both scale the step of each layer by the norm of its weights over the norm of its step, so that no
layer is thrown far from where it is by a learning rate that suits another. Vectors (biases, the
scales and shifts of norms, scalars) take plain steps, as both papers' authors do it.

They pay where SGD at the rate that the batch asks for diverges. On tasks where a rate can be found
at which SGD or Adam is stable, these reach the same quality (Nado et al., "A Large Batch Optimizer
Reality Check", arXiv 2102.06356); it was so on handwritten digits too.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any

import torch

from sparkdl.errors import ConfigError

_NARROW = (torch.float16, torch.bfloat16)
"""Too coarse for moments: in bfloat16 0.999 * v is v. These parameters' state is float32."""


class _LayerwiseOptimizer(torch.optim.Optimizer):
    """The base of both optimizers: which tensors are stepped, and in which precision."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Take one step; parameters without a gradient stay as they are.

        Args:
            closure: computes the loss and the gradients anew, and returns the loss.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            matrices = [p for p in parameters if p.ndim > 1]
            vectors = [p for p in parameters if p.ndim <= 1]
            for layers, is_adapted in ((matrices, True), (vectors, False)):
                if layers:
                    self._step(layers, group, is_adapted=is_adapted)
        return loss

    @abstractmethod
    def _step(
        self, parameters: list[torch.Tensor], group: dict[str, Any], *, is_adapted: bool
    ) -> None:
        """Step ``parameters`` of ``group``; with ``is_adapted`` each by its own ratio."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what ``state_dict`` gave; float32 state of narrow parameters stays float32."""
        super().load_state_dict(state_dict)  # which casts state to the parameter's dtype
        saved = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        ours = chain.from_iterable(group["params"] for group in self.param_groups)
        for key, parameter in zip(saved, ours, strict=True):
            for name, value in state_dict["state"].get(key, {}).items():
                if parameter.dtype in _NARROW and name != "step":
                    self.state[parameter][name] = value.to(parameter.device, torch.float32)

    def _gradients(self, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        gradients = [p.grad for p in parameters if p.grad is not None]
        if any(g.is_sparse or g.is_complex() for g in gradients):
            raise ConfigError(
                f"{type(self).__name__} needs dense real gradients; for sparse ones of an "
                "embedding make it with sparse=False"
            )
        return _wide(gradients)

    def _moments(self, parameters: Sequence[torch.Tensor], name: str) -> list[torch.Tensor]:
        """State tensors of the parameters' shapes, zero at first."""
        for parameter in parameters:
            state = self.state[parameter]
            if name not in state:
                dtype = torch.float32 if parameter.dtype in _NARROW else None
                state[name] = torch.zeros_like(
                    parameter, dtype=dtype, memory_format=torch.preserve_format
                )
        return [self.state[parameter][name] for parameter in parameters]


class LARS(_LayerwiseOptimizer):
    """Layer-wise adaptive rate scaling, for SGD with momentum on large batches.

    For each layer with weights ``w`` and gradient ``g``::

        ratio = trust_coefficient * |w| / (|g| + weight_decay * |w|)
        v <- momentum * v + lr * ratio * (g + weight_decay * w)
        w <- w - v

    Vectors have ratio 1. So has a layer whose weights are all zero, which would stay zero
    otherwise. A step moves a layer by about ``lr * trust_coefficient`` of its norm, before
    momentum, so rates are of the order of 5, to which `warmup` should lead: vectors feel them too.

    Source: You, Gitman, Ginsburg, "Large Batch Training of Convolutional Networks",
    arXiv 1708.03888, algorithm 1.

    Args:
        params: parameters, or parameter groups.
        lr: learning rate; there is no value that suits most tasks.
        momentum: share of the last step that goes on.
        weight_decay: coefficient of the penalty on the weights' squares.
        trust_coefficient: how far a step may move a layer, as a share of its norm.
        decay_vectors: whether weight decay acts on vectors too.

    Raises:
        ConfigError: an option is out of its range.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust_coefficient: float = 0.001,
        decay_vectors: bool = False,
    ) -> None:
        _check("be positive", trust_coefficient=trust_coefficient)
        _check("not be negative", lr=lr, weight_decay=weight_decay)
        _check("be at least 0 and below 1", momentum=momentum)
        defaults = {
            "lr": lr, "momentum": momentum, "weight_decay": weight_decay,
            "trust_coefficient": trust_coefficient, "decay_vectors": decay_vectors,
        }  # fmt: skip
        super().__init__(params, defaults)

    def _step(
        self, parameters: list[torch.Tensor], group: dict[str, Any], *, is_adapted: bool
    ) -> None:
        decay = _decay(group, is_adapted)
        weights, gradients = _wide(parameters), self._gradients(parameters)
        steps = torch._foreach_add(gradients, weights, alpha=decay)
        torch._foreach_mul_(steps, group["lr"])
        if is_adapted:
            norms = torch._foreach_norm(weights)
            below = torch._foreach_norm(gradients)
            torch._foreach_add_(below, norms, alpha=decay)
            trusted = [group["trust_coefficient"] * norm for norm in norms]
            torch._foreach_mul_(steps, _ratios(trusted, below))
        velocities = self._moments(parameters, "momentum_buffer")
        torch._foreach_mul_(velocities, group["momentum"])
        torch._foreach_add_(velocities, steps)
        torch._foreach_add_(parameters, velocities, alpha=-1)


class LAMB(_LayerwiseOptimizer):
    """Layer-wise adaptive moments, for Adam on large batches.

    For each layer with weights ``w``, with ``m`` and ``v`` Adam's moments of the gradient,
    corrected for their start at zero::

        r = m / (sqrt(v) + eps) + weight_decay * w
        w <- w - lr * clip(|w|, 0, clip_norm) / |r| * r

    Vectors take the step ``lr * r``. So does a layer whose weights, or whose ``r``, are all zero.

    Source: You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes",
    ICLR 2020, arXiv 1904.00962, algorithm 2.

    Args:
        params: parameters, or parameter groups.
        lr: learning rate.
        betas: decay of the two moments per step.
        eps: added to the root of the second moment.
        weight_decay: share of the weights that ``r`` holds.
        clip_norm: largest norm of weights that counts.
        decay_vectors: whether weight decay acts on vectors too.

    Raises:
        ConfigError: an option is out of its range.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        clip_norm: float = 10.0,
        decay_vectors: bool = False,
    ) -> None:
        _check("be positive", eps=eps, clip_norm=clip_norm)
        _check("not be negative", lr=lr, weight_decay=weight_decay)
        _check("be at least 0 and below 1", **{"betas[0]": betas[0], "betas[1]": betas[1]})
        defaults = {
            "lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay,
            "clip_norm": clip_norm, "decay_vectors": decay_vectors,
        }  # fmt: skip
        super().__init__(params, defaults)

    def _step(
        self, parameters: list[torch.Tensor], group: dict[str, Any], *, is_adapted: bool
    ) -> None:
        weights, gradients = _wide(parameters), self._gradients(parameters)
        betas, first = group["betas"], self._moments(parameters, "exp_avg")
        second = self._moments(parameters, "exp_avg_sq")
        torch._foreach_lerp_(first, gradients, 1 - betas[0])
        torch._foreach_mul_(second, betas[1])
        torch._foreach_addcmul_(second, gradients, gradients, 1 - betas[1])
        counts = [self._count(parameter) for parameter in parameters]
        below = torch._foreach_div(second, [1 - betas[1] ** count for count in counts])
        torch._foreach_sqrt_(below)
        torch._foreach_add_(below, group["eps"])
        directions = torch._foreach_div(first, [1 - betas[0] ** count for count in counts])
        torch._foreach_div_(directions, below)
        torch._foreach_add_(directions, weights, alpha=_decay(group, is_adapted))
        if is_adapted:
            norms = torch._foreach_norm(weights)
            torch._foreach_clamp_max_(norms, group["clip_norm"])
            torch._foreach_mul_(directions, _ratios(norms, torch._foreach_norm(directions)))
        torch._foreach_mul_(directions, group["lr"])
        torch._foreach_add_(parameters, directions, alpha=-1)

    def _count(self, parameter: torch.Tensor) -> float:
        """Steps of this parameter with the present one, kept as torch's Adam keeps them."""
        state = self.state[parameter]
        if "step" not in state:
            state["step"] = torch.zeros((), dtype=torch.float32)
        state["step"] += 1
        return float(state["step"].item())


def _wide(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [t.float() if t.dtype in _NARROW else t.detach() for t in tensors]


def _ratios(norms: Sequence[torch.Tensor], sizes: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Their quotients, on their device; 1 where one of the two is zero."""
    pairs = zip(norms, sizes, strict=True)
    return [torch.where((norm > 0) & (size > 0), norm / size, 1.0) for norm, size in pairs]


def _decay(group: dict[str, Any], is_adapted: bool) -> float:
    return float(group["weight_decay"]) if is_adapted or group["decay_vectors"] else 0.0


_RULES: dict[str, Callable[[float], bool]] = {
    "be positive": lambda value: value > 0,
    "not be negative": lambda value: value >= 0,
    "be at least 0 and below 1": lambda value: 0 <= value < 1,
}


def _check(rule: str, **options: float) -> None:
    for name, value in options.items():
        if not _RULES[rule](value):
            raise ConfigError(f"{name} must {rule}; received {value}")
