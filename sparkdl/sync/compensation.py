"""How is a gradient corrected that was computed with weights of some time ago?

Delay compensation (Zheng et al., "Asynchronous Stochastic Gradient Descent with Delay
Compensation", ICML 2017): the gradient ``g`` of the old weights is moved towards that of the
present ones by a first-order term, whose Hessian is replaced by the cheap ``lambda g g``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from sparkdl.sync.gradients import Bucket

_EPSILON = 1e-7
"""The paper's, under the root."""


class Compensation:
    """``g + lambda g g (w - w_old)``, element by element.

    Args:
        strength: lambda.
        decay: None holds lambda constant (DC-ASGD-c). Otherwise lambda is divided by the root of
            a running mean of squared gradients, which keeps so much of itself at each gradient
            (DC-ASGD-a, the paper's ``m``).
        make_buckets: zeros in the layout of the gradients.
    """

    def __init__(
        self, strength: float, decay: float | None, make_buckets: Callable[[], list[Bucket]]
    ) -> None:
        self._strength = strength
        self._decay = decay
        self._squares = [] if decay is None else make_buckets()

    def apply(
        self, gradients: Sequence[Bucket], weights: Sequence[Bucket], old: Sequence[Bucket]
    ) -> None:
        """Overwrite ``gradients``, which were computed with ``old``, by those for ``weights``."""
        for number, (bucket, now, before) in enumerate(zip(gradients, weights, old, strict=True)):
            gradient = bucket.flat
            squared = gradient * gradient
            drift = now.flat - before.flat
            if self._decay is not None:
                mean = self._squares[number].flat
                mean.mul_(self._decay).add_(squared, alpha=1 - self._decay)
                drift /= (mean + _EPSILON).sqrt_()
            gradient.addcmul_(squared, drift, value=self._strength)

    def state(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """The running mean of the squared gradients of ``parameter``, if one is kept."""
        return self._by_parameter().get(id(parameter))

    def load(self, means: Mapping[int, torch.Tensor | None]) -> None:
        """Restore what `state` gave, by ``id`` of the parameter."""
        for parameter, square in self._by_parameter().items():
            mean = means[parameter]
            if mean is not None:
                square.copy_(mean)

    def _by_parameter(self) -> dict[int, torch.Tensor]:
        return {
            id(parameter): square
            for bucket in self._squares
            for parameter, square in zip(bucket.parameters, bucket.gradients, strict=True)
        }
