"""How do replicas train without waiting for each other? Through a sharded parameter server.

Every rank serves a slice of the parameters with its optimizer, and trains on all of them: after
each step it pushes its gradient to all slices and pulls what the pushes of all ranks have made of
the weights meanwhile (Dean et al., "Large Scale Distributed Deep Networks", NIPS 2012, "Downpour").
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from sparkdl.channel import Address
from sparkdl.checkpoint.tree import unpack
from sparkdl.comm import Communicator
from sparkdl.errors import CommunicationError, ConfigError
from sparkdl.sync.base import MakeOptimizer, Reduced, Synchronizer, SyncStrategy
from sparkdl.sync.gradients import Bucket, FlatGradients, make_buckets, zeros
from sparkdl.sync.parameter_server import Push, ServerRules, ServerSlice, merge_states
from sparkdl.sync.server_link import SliceLink, SliceServer, flats
from sparkdl.sync.share import BatchShare
from sparkdl.sync.slices import ServedOptimizer, check_learning_rates, cut

_GRACE_SECONDS = 10.0
"""How much longer than the servers a rank waits for an answer before it takes one for dead."""


@dataclass(frozen=True, kw_only=True)
class AsyncSGD(SyncStrategy):
    """Each rank's gradient is applied when it comes; nobody waits, or for the far behind only.

    A push is a step of the optimizer with the mean gradient of the rank's batch, at the learning
    rate times the rank's share of the global batch (1 / world size for equal shards). So the
    pushes of all ranks together go as far as one synchronous step, with weight decay and with
    optimizers like Adam too. The papers step at the full rate: multiply yours by the world size
    to do as they do, where it stays stable. Momentum decays with each push, not with each step of
    all: gradients that come late act like momentum by themselves, so less of it may be better.

    Gradients are clipped on each rank, before they are pushed. An optimizer sees a slice: what
    looks at all parameters at once, such as LAMB's ``clip_norm``, looks at the slice's.
    """

    staleness_bound: int | None = None
    """How many steps a rank may be ahead of the slowest before it waits: at step ``c`` it computes
    with weights that hold all gradients of the steps before ``c - staleness_bound``. None: it never
    waits. 0: synchronous; then the gradients of a step are summed in rank order and applied
    together, which equals all-reduce with any optimizer."""
    delay_compensation: float = 0.0
    """Strength lambda of DC-ASGD: ``g + lambda g g (w - w_old)`` is applied instead of ``g``, with
    ``w_old`` the weights that ``g`` was computed with. 0: plain. The paper takes 0.04, or 2 with
    ``compensation_decay=0.95``."""
    compensation_decay: float | None = None
    """Divides lambda by the root of a running mean of squared gradients, of which each gradient
    leaves so much (DC-ASGD-a); None: a constant lambda."""
    pull_period: int = 1
    """Steps between two pulls. Weights grow older by it, but never older than the bound."""

    def __post_init__(self) -> None:
        bound, period = self.staleness_bound, self.pull_period
        if bound is not None and (isinstance(bound, bool) or bound < 0):
            raise ConfigError(f"staleness_bound must be None or at least 0; received {bound!r}")
        if isinstance(period, bool) or period < 1:
            raise ConfigError(f"pull_period must be at least 1; received {period!r}")
        if bound is not None and period > bound + 1:
            raise ConfigError(
                f"with pull_period={period} weights grow older than staleness_bound={bound} "
                f"allows; use a pull_period of at most {bound + 1}"
            )
        if not 0 <= self.delay_compensation < float("inf"):
            raise ConfigError(
                f"delay_compensation must not be negative; received {self.delay_compensation}"
            )
        if bound == 0 and self.delay_compensation:
            raise ConfigError(
                "delay_compensation has no effect with staleness_bound=0, under which no gradient "
                "is late; leave one of them out"
            )
        decay = self.compensation_decay
        if decay is not None and not (0 <= decay < 1 and self.delay_compensation > 0):
            raise ConfigError(
                "compensation_decay must be in [0, 1) and needs a positive delay_compensation; "
                f"received {decay} with delay_compensation={self.delay_compensation}"
            )

    @property
    def deterministic(self) -> bool:
        """Whose gradient comes first is a matter of time, unless all are waited for."""
        return self.staleness_bound == 0

    @property
    def trains_apart(self) -> bool:
        """See `SyncStrategy.trains_apart`."""
        return self.staleness_bound != 0

    def bytes_per_step(
        self, shapes: Sequence[tuple[int, ...]], element_size: int, world_size: int
    ) -> float | None:
        """See `SyncStrategy.bytes_per_step`: gradients and weights, on the average over ranks.

        Without one more pull at the end of a round, unless the bound is 0, and without the
        optimizer's state, which all ranks get then.
        """
        num_bytes = element_size * sum(torch.Size(shape).numel() for shape in shapes)
        return (1 + 1 / self.pull_period) * (world_size - 1) * num_bytes / world_size

    def setup(
        self, model: nn.Module, make_optimizer: MakeOptimizer, comm: Communicator
    ) -> AsyncSynchronizer:
        """See `SyncStrategy.setup`."""
        return AsyncSynchronizer(model, make_optimizer, comm, self)


class _Part:
    """This rank's replica of what one rank serves."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        self.gradients = FlatGradients(parameters, 1 << 62, zeros)
        on_cpu = [nn.Parameter(torch.empty_like(p, device="cpu")) for p in parameters]
        self._received = make_buckets(on_cpu, 1 << 62, zeros)

    def outgoing(self) -> list[torch.Tensor]:
        """The gradients, on the CPU."""
        return [flat.cpu() for flat in flats(self.gradients.buckets)]

    def incoming(self) -> list[torch.Tensor]:
        """Where the weights are received."""
        return flats(self._received)

    def load(self, weights: Sequence[Bucket] | None = None) -> None:
        """Overwrite the replica's parameters by ``weights``, or by those received."""
        buckets = self._received if weights is None else weights
        with torch.no_grad():
            for bucket, own in zip(buckets, self.gradients.buckets, strict=True):
                torch._foreach_copy_(own.parameters, bucket.gradients)


class AsyncSynchronizer(Synchronizer):
    """See `AsyncSGD`.

    The server begins with the first step, when a resumed run's state is known. Rounds end when
    the loop wants them to: `close_round` waits for all ranks, and then all have equal weights and
    the whole optimizer's state, so that the number of ranks may change in between.
    """

    trains_apart = True

    def __init__(
        self, model: nn.Module, make_optimizer: MakeOptimizer, comm: Communicator, options: AsyncSGD
    ) -> None:
        self.model = model
        self.optimizer: ServedOptimizer
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = ServedOptimizer(make_optimizer(self._parameters))
        self._make_optimizer = make_optimizer
        self._comm = comm
        self._is_bulk = options.staleness_bound == 0 or comm.world_size == 1
        if not self._is_bulk:
            check_learning_rates(self.optimizer)
        self._pull_period = options.pull_period if comm.world_size > 1 else 1
        self._rules = _rules(options, comm, is_bulk=self._is_bulk)
        self._slices = cut([p.nbytes for p in self._parameters], comm.world_size)
        self._share = BatchShare(comm, self._parameters[0].device)
        self._present_share = 0.0
        self._steps_since_closed = 0
        self._mean_squares: dict[int, Any] = {}
        self._parts: dict[int, _Part] = {}
        self._served: ServerSlice | None = None
        self._server: SliceServer | None = None
        self._links: dict[int, SliceLink] = {}
        self._pool: ThreadPoolExecutor | None = None

    @property
    def bytes_sent(self) -> int:
        """See `Synchronizer.bytes_sent`: gradients, weights and states of optimizers."""
        served = 0 if self._server is None else self._server.bytes_sent
        return served + sum(link.bytes_sent for link in self._links.values())

    def zero_gradients(self) -> None:
        """See `Synchronizer.zero_gradients`; the first call is collective."""
        if self._served is None:
            self._start()
        for part in self._parts.values():
            part.gradients.zero()

    def no_sync(self) -> contextlib.nullcontext[None]:
        """See `Synchronizer.no_sync`; gradients travel after the step."""
        return contextlib.nullcontext()

    def reduce_gradients(self, sums: torch.Tensor, divisor: float) -> Reduced:
        """See `Synchronizer.reduce_gradients`; collective in the first step only."""
        weight = sums[1].item()
        share = weight / divisor if self._is_bulk else self._share.of(weight, divisor)
        self._present_share = share
        return Reduced(sums, divisor)

    def after_step(self, step: int) -> bool:
        """Push and pull. A round may end after any step."""
        noted = self.optimizer.take()
        push = None
        if noted is not None and (self._present_share > 0 or self._is_bulk):
            push = Push(self._present_share, noted)
        with self._own_failure_first():
            self._exchange(push, is_pulling=(step + 1) % self._pull_period == 0)
        self._steps_since_closed += 1
        return True

    def close_round(self) -> None:
        """See `Synchronizer.close_round`."""
        if self._steps_since_closed == 0:
            return
        with self._own_failure_first():
            state = self._agree()
        self.optimizer.served_state = state["optimizer"]
        self._mean_squares = state["mean_squares"]
        if not self._is_bulk:
            self._share.close_round()
        self._comm.barrier()  # nobody leaves while a peer still reads from its slice
        self._steps_since_closed = 0

    def state_dict(self) -> dict[str, Any]:
        """See `Synchronizer.state_dict`; weights and clocks are equal when a round is closed."""
        return {"mean_squares": self._mean_squares}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `Synchronizer.load_state_dict`."""
        self._mean_squares = state["mean_squares"]

    def rank_state_dict(self) -> dict[str, Any]:
        """See `Synchronizer.rank_state_dict`."""
        return {"share": self._share.state_dict()}

    def load_rank_state_dict(self, state: dict[str, Any]) -> None:
        """See `Synchronizer.load_rank_state_dict`."""
        self._share.load_state_dict(state["share"])

    def close(self) -> None:
        """See `Synchronizer.close`; peers that still need this rank fail at once."""
        if self._served is not None:
            self._served.leave(self._comm.rank)
        for link in self._links.values():
            link.close()
        if self._pool is not None:
            self._pool.shutdown()
        if self._server is not None:
            self._server.stop()
        for part in self._parts.values():
            part.gradients.release()

    def _start(self) -> None:
        """Serve this rank's slice, and find the others'. Collective."""
        comm = self._comm
        self._served = ServerSlice(
            self._parameters, self._slices[comm.rank], self._make_optimizer, self._rules
        )
        state = {"optimizer": self.optimizer.served_state, "mean_squares": self._mean_squares}
        self._served.load_state(state)
        for rank, places in enumerate(self._slices):
            if places:
                self._parts[rank] = _Part([self._parameters[place] for place in places])
        if comm.world_size == 1:
            return
        self._server = SliceServer(self._served, host=comm.address, on_leave=self._peer_has_left)
        self._pool = ThreadPoolExecutor(comm.world_size - 1, "push and pull")
        found = comm.all_gather_bytes(json.dumps(asdict(self._server.address)).encode())
        for rank, address in enumerate(found):
            if rank != comm.rank:
                self._links[rank] = SliceLink(Address(**json.loads(address)), comm.rank)

    def _exchange(self, push: Push | None, *, is_pulling: bool) -> None:
        """Push to all slices and pull from them, at the same time."""
        futures = [
            self._submit(self._exchange_with, link, self._parts[rank], push, is_pulling)
            for rank, link in self._links.items()
            if rank in self._parts
        ]
        own = self._parts.get(self._comm.rank)
        if own is not None:
            assert self._served is not None
            if push is not None:
                inbox = self._served.inbox(self._comm.rank)
                for box, bucket in zip(inbox, own.gradients.buckets, strict=True):
                    box.flat.copy_(bucket.flat)
            self._served.push(self._comm.rank, push)
            if is_pulling:
                own.load(self._served.pull(self._comm.rank))
        self._wait(futures)

    def _exchange_with(
        self, link: SliceLink, part: _Part, push: Push | None, is_pulling: bool
    ) -> None:
        gradients = part.outgoing() if push is not None else []
        link.step(push, gradients, part.incoming() if is_pulling else [])
        if is_pulling:
            part.load()

    def _agree(self) -> dict[str, Any]:
        """Close the round at all slices, and take their weights. The whole state."""
        futures = {
            rank: self._submit(self._close_with, link, self._parts[rank])
            for rank, link in self._links.items()
            if rank in self._parts
        }
        states = []
        own = self._parts.get(self._comm.rank)
        if own is not None:
            assert self._served is not None
            weights, state = self._served.close_round(self._comm.rank)
            own.load(weights)
            states.append(unpack(state.value, state.tensors))
        self._wait(list(futures.values()))
        return merge_states([*states, *(future.result() for future in futures.values())])

    def _close_with(self, link: SliceLink, part: _Part) -> Any:
        """In bulk the weights are here since the last step."""
        state = link.close_round([] if self._is_bulk else part.incoming())
        if not self._is_bulk:
            part.load()
        return state

    def _submit(self, work: Any, *arguments: Any) -> Future[Any]:
        assert self._pool is not None
        return self._pool.submit(work, *arguments)

    def _wait(self, futures: Sequence[Future[Any]]) -> None:
        seconds = self._comm.timeout_seconds + _GRACE_SECONDS
        if futures:
            done, open_ = wait(futures, seconds, FIRST_EXCEPTION)
            for future in done:
                future.result()
            if open_:
                raise CommunicationError(f"{len(open_)} slices gave no answer for {seconds:g} s")

    @contextlib.contextmanager
    def _own_failure_first(self) -> Iterator[None]:
        """Raise what the optimizer of this rank's slice raised, rather than what followed."""
        try:
            yield
        except CommunicationError as error:
            failure = None if self._served is None else self._served.failure
            if failure is None:
                raise
            raise failure from error

    def _peer_has_left(self, rank: int) -> None:
        """Let go of its slice too, in whatever this rank is occupied: its server waits for that."""
        link = self._links.get(rank)
        if link is not None:
            link.cancel()


def _rules(options: AsyncSGD, comm: Communicator, *, is_bulk: bool) -> ServerRules:
    lead = None
    if options.staleness_bound is not None:  # what is pulled must be fresh enough until the next
        lead = options.staleness_bound - (options.pull_period - 1)
    return ServerRules(
        world_size=comm.world_size,
        is_bulk=is_bulk,
        lead=lead,
        delay_compensation=0.0 if is_bulk else options.delay_compensation,
        compensation_decay=options.compensation_decay,
        timeout_seconds=comm.timeout_seconds,
    )
