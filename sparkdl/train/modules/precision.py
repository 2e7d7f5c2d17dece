"""The number format in which the forward and backward passes are computed.

Weights, gradients, their sums over ranks and the loss stay in the module's own format.
"""

from __future__ import annotations

import contextlib
import sys
from contextlib import AbstractContextManager
from typing import Any

import torch

from sparkdl.config import Precision
from sparkdl.errors import TrainingDiverged

MIN_SCALE = 2.0**-16
"""Below this scale of fp16 gradients there is nothing left that scaling could heal."""

_CHECKS_SHAPES = "torch.fx.experimental.symbolic_shapes"
"""The module by which torch checks a gradient that it is given. To import it takes seconds, which a
process that takes one step alone can spare; who trains has it from torch's optimizers."""
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class NumberFormat:
    """Autocast, and for fp16 the scaling of the loss that keeps small gradients.

    A step whose fp16 gradients overflow is skipped. Gradients are unscaled after they have been
    summed over ranks, so all ranks skip the same steps.
    """

    def __init__(self, precision: Precision, device: torch.device) -> None:
        self._device = device
        self._dtype = _DTYPES.get(precision)
        self._scaler = torch.amp.GradScaler(device.type) if precision == "fp16" else None
        self._begin: torch.Tensor | None = None
        self._divisor = 1.0
        if self._scaler is not None:
            # torch makes the scale at the first loss, which a rank without samples never has.
            self._scaler.scale(torch.zeros(1, device=device))

    @property
    def may_skip_steps(self) -> bool:
        """True if an overflow skips the step instead of ending training."""
        return self._scaler is not None

    def autocast(self) -> AbstractContextManager[object]:
        """Context for the forward pass of the module."""
        if self._dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(self._device.type, dtype=self._dtype)

    def backward(self, loss: torch.Tensor, divisor: float | torch.Tensor = 1.0) -> None:
        """Run the backward pass of ``loss / divisor``, scaled."""
        if self._scaler is not None:
            scaled = self._scaler.scale(loss / divisor)
            scaled.backward()  # type: ignore[no-untyped-call]
            return
        if _CHECKS_SHAPES not in sys.modules and not isinstance(divisor, torch.Tensor):
            (loss / divisor).backward()  # type: ignore[no-untyped-call]
            return
        # The gradient with which the backward pass of that division would begin.
        if isinstance(divisor, torch.Tensor):  # on a device, for whose number nobody waits
            loss.backward((torch.ones_like(loss) / divisor).to(loss.dtype))  # type: ignore[no-untyped-call]
            return
        if self._begin is None or (divisor, loss.dtype) != (self._divisor, self._begin.dtype):
            self._begin, self._divisor = torch.ones_like(loss) / divisor, divisor
        loss.backward(self._begin)  # type: ignore[no-untyped-call]

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Give the gradients, summed over ranks, their true size."""
        if self._scaler is not None:
            self._scaler.unscale_(optimizer)

    def step(self, optimizer: torch.optim.Optimizer) -> bool:
        """Step the optimizer; False if the step was skipped because gradients overflowed.

        TrainingDiverged if they overflow at any scale.
        """
        parameters = (p for group in optimizer.param_groups for p in group["params"])
        if self._scaler is None or all(p.grad is None for p in parameters):
            optimizer.step()
            return True
        before = self._scaler.get_scale()
        self._scaler.step(optimizer)
        self._scaler.update()
        after = self._scaler.get_scale()
        if after < MIN_SCALE:
            raise TrainingDiverged(
                f"fp16 gradients are not finite at any loss scale (now {after}); lower the "
                "learning rate, set gradientClipNorm, or use precision 'bf16' or 'fp32'"
            )
        return after >= before

    def state_dict(self) -> dict[str, Any]:
        """The scaler's state; empty unless fp16."""
        return {} if self._scaler is None else self._scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` gave; nothing when the precision was another."""
        if self._scaler is not None and state:
            self._scaler.load_state_dict(state)
