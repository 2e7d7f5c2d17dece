"""Warm-up: the first steps of a run with one synchronizer, all others with another."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

from sparkdl.sync.averaging.averaging import AveragingSynchronizer
from sparkdl.sync.strategy import Reduced, Synchronizer


class WarmUp(Synchronizer):
    """Trains with ``first`` for ``num_steps`` steps and from then on with ``then``.

    Args:
        first: has the model and the optimizer of ``then``.
        then: takes over from where the model is.
        num_steps: counted from the beginning of the run.
    """

    def __init__(self, first: Synchronizer, then: AveragingSynchronizer, num_steps: int) -> None:
        self.model, self.optimizer = then.model, then.optimizer
        self.keeps_optimizer = then.keeps_optimizer
        self._first, self._then, self._num_steps = first, then, num_steps
        self._present: Synchronizer = first

    @property
    def bytes_sent(self) -> int:
        return self._first.bytes_sent + self._then.bytes_sent

    def zero_gradients(self) -> None:
        self._present.zero_gradients()

    def no_sync(self) -> AbstractContextManager[None]:
        return self._present.no_sync()

    def start_sums(self, sums: torch.Tensor) -> None:
        self._present.start_sums(sums)

    def reduce_gradients(self, sums: torch.Tensor, divisor: float) -> Reduced:
        return self._present.reduce_gradients(sums, divisor)

    def after_step(self, step: int) -> bool:
        is_closed = self._present.after_step(step)
        if self._is_warming_up and step + 1 >= self._num_steps:
            self._take_over()
        self.buffers_agree = self._present.buffers_agree
        return is_closed

    def close_round(self) -> None:
        self._present.close_round()
        self.buffers_agree = self._present.buffers_agree

    def close(self) -> None:
        if self._is_warming_up:
            self._first.close()
        self._then.close()

    def state_dict(self) -> dict[str, Any]:
        first = self._first.state_dict() if self._is_warming_up else None
        return {**self._then.state_dict(), "warmup": first}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        first = state.get("warmup")
        if self._is_warming_up:
            if first is None:
                self._take_over()
            else:
                self._first.load_state_dict(first)
        self._then.load_state_dict(state)
        self.buffers_agree = self._present.buffers_agree

    def rank_state_dict(self) -> dict[str, Any]:
        first = self._first.rank_state_dict() if self._is_warming_up else None
        return {**self._then.rank_state_dict(), "warmup": first}

    def load_rank_state_dict(self, state: dict[str, Any]) -> None:
        self._then.load_rank_state_dict(state)
        if self._is_warming_up:
            self._first.load_rank_state_dict(state["warmup"])

    @property
    def _is_warming_up(self) -> bool:
        return self._present is self._first

    def _take_over(self) -> None:
        self._first.close()
        self._then.begin()
        self._present = self._then
        self.trains_apart = self._then.trains_apart
