"""A parameter server: it applies the gradients that ranks push to the slice that it serves.

It steps the optimizer with each at once, or, where the staleness bound is 0, with the sum of all
ranks' gradients of a step. A rank's clock counts the steps whose gradients it has pushed; how far
clocks may be apart is the staleness bound (Ho et al., "More Effective Distributed ML via a Stale
Synchronous Parallel Parameter Server", NIPS 2013). How requests arrive makes no difference here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from sparkdl.errors import CommunicationError
from sparkdl.storage.tensor_tree import Snapshot, snapshot
from sparkdl.sync.asynchronous.parameter_slices import Options, SlicedOptimizer
from sparkdl.sync.gradient_buckets import Bucket, make_buckets, zeros
from sparkdl.sync.strategy import MakeOptimizer

_EPSILON = 1e-7
"""The paper's, under the root."""


class Compensation:
    """``g + lambda g g (w - w_old)``, element by element; see `AsyncSGD.delay_compensation`.

    ``strength`` is lambda, ``decay`` the paper's ``m``; ``make_buckets`` gives zeros in the layout
    of the gradients.
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

    def mean_squares(self) -> dict[int, torch.Tensor]:
        """The running mean of squared gradients, if one is kept, by ``id`` of the parameter."""
        return {
            id(parameter): square
            for bucket in self._squares
            for parameter, square in zip(bucket.parameters, bucket.gradients, strict=True)
        }


@dataclass(frozen=True, kw_only=True)
class ServerRules:
    """The rules by which a server treats the ranks; equal on all ranks."""

    world_size: int
    is_bulk: bool
    """True if the gradients of a step are applied together, when all ranks' are there."""
    lead: int | None = None
    """Number of steps that a rank may be ahead of the slowest when it pulls; None: any number."""
    delay_compensation: float = 0.0
    compensation_decay: float | None = None
    timeout_seconds: float
    """Longest wait for a rank."""


class Push(NamedTuple):
    """The data that come with a rank's gradient, which is that of the mean loss over its batch."""

    share: float
    """The rank's part of the global batch; in bulk, in any unit that the ranks have in common."""
    options: Options
    """The numbers of the optimizer's groups at the step of which the gradient is."""
    unused: Sequence[int] = ()
    """Places, in the slice, of parameters that the rank has not used in this step."""


class ServerSlice:
    """The parameters that one rank serves, with their optimizer. Thread-safe.

    A rank calls, per step, `push` after it has filled its `inbox` and then, if it wants, `pull`;
    and `close_round` when it is done with a round. Of the model's ``parameters``, those at
    ``places`` are served; copies of them are taken. CommunicationError, from these methods: a rank
    has gone or is too late, or the optimizer has failed; see `failure`.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        places: Sequence[int],
        make_optimizer: MakeOptimizer,
        rules: ServerRules,
    ) -> None:
        self._rules = rules
        self._served = {
            place: nn.Parameter(parameters[place].detach().cpu().clone()) for place in places
        }
        self._weights = self._buckets()
        for bucket in self._weights:
            for parameter, view in zip(bucket.parameters, bucket.gradients, strict=True):
                parameter.data = view.copy_(parameter.data)
        self._optimizer = (
            SlicedOptimizer(make_optimizer, parameters, self._served) if places else None
        )
        self._inboxes: dict[int, list[Bucket]] = {}
        self._outboxes: dict[int, list[Bucket]] = {}
        self._compensation: Compensation | None = None
        if rules.delay_compensation > 0:
            self._compensation = Compensation(
                rules.delay_compensation, rules.compensation_decay, self._buckets
            )
            for rank in range(rules.world_size):
                self._outbox(rank)  # what the gradients of the first step are computed with
        self._clocks = [0] * rules.world_size
        self._pending: dict[int, Push | None] = {}
        """In bulk: who has pushed for the present step, and what."""
        self._closing: set[int] = set()
        """Ranks that wait for the end of the round; nobody waits for them."""
        self._gone: set[int] = set()
        self._round = 0
        self._agreed: Snapshot | None = None
        self._changed = threading.Condition()
        self.failure: BaseException | None = None
        """The error of the optimizer, if it had one; that of the user's code, perhaps."""

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on with this slice's part of the state of all, as `merge_states` gives it."""
        if self._optimizer is not None and state["optimizer"]:
            self._optimizer.load_state(state["optimizer"])
        if self._compensation is not None and state["mean_squares"]:
            squares = self._compensation.mean_squares()
            for place, parameter in self._served.items():
                if id(parameter) in squares and state["mean_squares"][place] is not None:
                    squares[id(parameter)].copy_(state["mean_squares"][place])

    def inbox(self, rank: int) -> list[Bucket]:
        """Return where the gradient of ``rank`` belongs, in the layout of `make_buckets`."""
        with self._changed:
            if rank not in self._inboxes:
                self._inboxes[rank] = self._buckets()
            return self._inboxes[rank]

    def push(self, rank: int, push: Push | None) -> None:
        """Take the gradient in the inbox of ``rank`` for its present step; None: it has none."""
        with self._changed, torch.no_grad():
            self._raise_if_hopeless()
            self._clocks[rank] += 1
            if self._rules.is_bulk:
                self._pending[rank] = push
                self._apply_together_if_complete()
            elif push is not None:
                if self._compensation is not None:
                    old = self._outboxes[rank]
                    self._compensation.apply(self._inboxes[rank], self._weights, old)
                self._step(self._inboxes[rank], push)
            if self._sets_free(rank):
                self._changed.notify_all()

    def pull(self, rank: int) -> list[Bucket]:
        """The weights, as soon as they are as fresh as the rules want; valid until a push."""
        with self._changed, torch.no_grad():
            self._raise_if_hopeless()
            self._wait_until(lambda: self._is_fresh_for(rank))
            return self._outbox(rank)

    def close_round(self, rank: int) -> tuple[list[Bucket], Snapshot]:
        """Wait for all ranks to close the round; the weights and the state that it ended with."""
        with self._changed, torch.no_grad():
            self._raise_if_hopeless()
            self._closing.add(rank)
            number = self._round
            self._apply_together_if_complete()
            if len(self._closing) == self._rules.world_size:
                self._agree()
            self._changed.notify_all()
            self._wait_until(lambda: self._round > number)
            assert self._agreed is not None
            return self._weights if self._rules.is_bulk else self._outboxes[rank], self._agreed

    def leave(self, rank: int) -> None:
        """Note that ``rank`` has gone: nobody waits for it in vain."""
        with self._changed:
            self._gone.add(rank)
            self._changed.notify_all()

    def _buckets(self) -> list[Bucket]:
        return make_buckets(list(self._served.values()), 1 << 62, zeros)

    def _outbox(self, rank: int) -> list[Bucket]:
        """The weights for ``rank``; a copy of its own, unless nobody can step them meanwhile."""
        if self._rules.is_bulk:
            return self._weights
        if rank not in self._outboxes:
            self._outboxes[rank] = self._buckets()
        for box, weights in zip(self._outboxes[rank], self._weights, strict=True):
            box.flat.copy_(weights.flat)
        return self._outboxes[rank]

    def _apply_together_if_complete(self) -> None:
        pending = self._pending
        if not pending or len(pending.keys() | self._closing) < self._rules.world_size:
            return
        pushes = {rank: push for rank, push in sorted(pending.items()) if push is not None}
        pending.clear()
        if not pushes:
            return
        total = sum(push.share for push in pushes.values())
        first = min(pushes)
        for rank, push in pushes.items():
            share = push.share / total if total > 0 else 0.0
            for sums, summands in zip(self._inboxes[first], self._inboxes[rank], strict=True):
                if rank == first:
                    sums.flat.mul_(share)
                else:
                    sums.flat.add_(summands.flat, alpha=share)
        unused = set.intersection(*(set(push.unused) for push in pushes.values()))
        self._step(self._inboxes[first], Push(1.0, pushes[first].options, sorted(unused)))

    def _step(self, gradients: Sequence[Bucket], push: Push) -> None:
        assert self._optimizer is not None
        for weights, bucket in zip(self._weights, gradients, strict=True):
            for parameter, gradient in zip(weights.parameters, bucket.gradients, strict=True):
                parameter.grad = gradient
        if push.unused:
            served = list(self._served.values())
            for place in push.unused:  # as in a plain loop
                served[place].grad = None
        try:
            self._optimizer.step(push.options, push.share)
        except BaseException as error:
            self.failure = error
            self._changed.notify_all()
            raise CommunicationError(self._trouble()) from error

    def _is_fresh_for(self, rank: int) -> bool:
        if self._rules.is_bulk:
            return rank not in self._pending
        if self._rules.lead is None:
            return True
        return self._slowest >= self._clocks[rank] - self._rules.lead

    def _sets_free(self, rank: int) -> bool:
        """Return True if others may have waited for this one of the many pushes of ``rank``."""
        if self._rules.is_bulk:
            return not self._pending
        return self._rules.lead is not None and self._slowest == self._clocks[rank]

    @property
    def _slowest(self) -> int:
        """The clock of the slowest rank that others wait for."""
        return min(c for other, c in enumerate(self._clocks) if other not in self._closing)

    def _agree(self) -> None:
        """All ranks have closed the round and none can push before it has what it ended with."""
        self._round += 1
        self._closing.clear()
        self._clocks = [0] * self._rules.world_size
        for rank in range(self._rules.world_size):
            self._outbox(rank)
        self._agreed = snapshot(self._state(), reuse=self._agreed)

    def _state(self) -> dict[str, Any]:
        state = {} if self._optimizer is None else self._optimizer.state()
        squares = {}
        if self._compensation is not None:
            found = self._compensation.mean_squares()
            squares = {place: found.get(id(p)) for place, p in self._served.items()}
        return {"optimizer": state, "mean_squares": squares}

    def _wait_until(self, is_so: Callable[[], bool]) -> None:
        seconds = min(self._rules.timeout_seconds, threading.TIMEOUT_MAX)
        self._changed.wait_for(lambda: is_so() or self._trouble() is not None, seconds)
        if not is_so():  # asked first: a peer may leave as soon as nobody needs it any more
            waited = f"no answer from the slowest rank for {self._rules.timeout_seconds:g} s"
            raise CommunicationError(self._trouble() or waited)

    def _raise_if_hopeless(self) -> None:
        trouble = self._trouble()
        if trouble is not None:
            raise CommunicationError(trouble)

    def _trouble(self) -> str | None:
        if self.failure is not None:
            return f"the optimizer of a slice failed: {self.failure!r}"
        if self._gone:
            return f"ranks {sorted(self._gone)} have left"
        return None


def merge_states(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The state of all slices, by parameters' places, as if there were one."""
    merged: dict[str, dict[int, Any]] = {"optimizer": {}, "mean_squares": {}}
    for state in states:
        for name, entries in merged.items():
            entries.update(state[name])
    return {name: dict(sorted(entries.items())) for name, entries in merged.items()}
