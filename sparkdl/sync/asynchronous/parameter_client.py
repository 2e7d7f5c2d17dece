"""One rank's side of the parameter server: it pushes to all slices and pulls from them at once."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from torch import nn

from sparkdl.comm.communicator import Communicator
from sparkdl.errors import CommunicationError
from sparkdl.storage.tensor_tree import unpack
from sparkdl.sync.asynchronous.parameter_server import Push, ServerRules, ServerSlice, merge_states
from sparkdl.sync.asynchronous.parameter_slices import cut, server_ranks
from sparkdl.sync.asynchronous.slice_link import SliceAddress, SliceLink, SliceServer, flats
from sparkdl.sync.gradient_buckets import Bucket, FlatGradients, make_buckets, zeros
from sparkdl.sync.strategy import MakeOptimizer

_GRACE_SECONDS = 10.0
"""Seconds that a rank waits longer than the servers for an answer before it takes one for dead."""


class _Part:
    """This rank's replica of what one rank serves."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.gradients = FlatGradients(parameters, 1 << 62, zeros)
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(partial(self._is_used, place))  # type: ignore[no-untyped-call]
            for place, parameter in enumerate(parameters)
        ]
        on_cpu = [nn.Parameter(torch.empty_like(p, device="cpu")) for p in parameters]
        self._received = make_buckets(on_cpu, 1 << 62, zeros)

    def _is_used(self, place: int, parameter: torch.Tensor) -> None:
        self.gradients.used[place] = 1

    def of(self, push: Push | None) -> Push | None:
        """``push`` with what no backward pass has used of this part."""
        if push is None:
            return None
        used = self.gradients.used
        return push._replace(unused=[place for place, one in enumerate(used) if not one])

    def release(self) -> None:
        """Let go of gradients and hooks."""
        for hook in self._hooks:
            hook.remove()
        self.gradients.release()

    def incoming(self) -> list[torch.Tensor]:
        """Return the tensors into which the weights are received."""
        return flats(self._received)

    def load(self, weights: Sequence[Bucket] | None = None) -> None:
        """Overwrite the replica's parameters by ``weights``, or by those received."""
        buckets = self._received if weights is None else weights
        with torch.no_grad():
            for bucket, own in zip(buckets, self.gradients.buckets, strict=True):
                torch._foreach_copy_(own.parameters, bucket.gradients)


class SliceExchange:
    """One rank's replica, the slice that it serves, and its ways to those that others serve.

    Collective; every rank has the same parameters, with equal values, whose gradients become views
    of flat memory, and the same ``state``, with which the slices go on as `close_round` gave it.
    `step` and `close_round` raise `CommunicationError` if a rank has gone or is too late, and what
    the optimizer of this rank's slice has raised.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        make_optimizer: MakeOptimizer,
        comm: Communicator,
        rules: ServerRules,
        state: Mapping[str, Any],
    ) -> None:
        self._comm = comm
        self._is_bulk = rules.is_bulk
        servers = server_ranks(comm.nodes)
        slices = dict(zip(servers, cut([p.nbytes for p in parameters], len(servers)), strict=True))
        self._served = ServerSlice(parameters, slices.get(comm.rank, ()), make_optimizer, rules)
        self._served.load_state(state)
        self._parts = {
            rank: _Part([parameters[place] for place in places])
            for rank, places in slices.items()
            if places
        }
        self._links: dict[int, SliceLink] = {}
        self.server: SliceServer | None = None
        """This rank's; None in a gang of one, and if this rank serves nothing."""
        self._pool: ThreadPoolExecutor | None = None
        if comm.world_size > 1:
            try:
                self._connect()
            except BaseException:
                self.close()
                raise

    @property
    def bytes_sent(self) -> int:
        """Gradients, weights and states of optimizers that this rank has sent to others."""
        served = 0 if self.server is None else self.server.bytes_sent
        return served + sum(link.bytes_sent for link in self._links.values())

    def zero_gradients(self) -> None:
        """Set all gradients to zero."""
        for part in self._parts.values():
            part.gradients.zero()

    def step(self, push: Push | None, *, is_pulling: bool) -> None:
        """Push the gradients, unless there are none, and pull into the parameters, if wanted."""
        for part in self._parts.values():
            part.gradients.settle()
        with self._own_failure_first():
            step = partial(self._step_with, push=push, is_pulling=is_pulling)
            futures = self._ask_others(step)
            rank = self._comm.rank
            own = self._parts.get(rank)
            if own is not None:
                if push is not None:
                    inbox = self._served.inbox(rank)
                    for box, bucket in zip(inbox, own.gradients.buckets, strict=True):
                        box.flat.copy_(bucket.values)
                self._served.push(rank, own.of(push))
                if is_pulling:
                    own.load(self._served.pull(rank))
            self._wait(futures)

    def close_round(self) -> dict[str, Any]:
        """Wait for all ranks; take the weights and the whole state that the round ended with."""
        with self._own_failure_first():
            futures = self._ask_others(self._close_with)
            states = []
            own = self._parts.get(self._comm.rank)
            if own is not None:
                weights, state = self._served.close_round(self._comm.rank)
                own.load(weights)
                states.append(unpack(state.value, state.tensors))
            self._wait(futures)
        self._comm.barrier()  # nobody leaves while a peer still reads from its slice
        return merge_states([*states, *(future.result() for future in futures)])

    def close(self) -> None:
        """Leave; peers that still need this rank fail at once."""
        self._served.leave(self._comm.rank)
        for link in self._links.values():
            link.close()
        if self._pool is not None:
            self._pool.shutdown()
        if self.server is not None:
            self.server.stop()
        for part in self._parts.values():
            part.release()

    def _connect(self) -> None:
        comm = self._comm
        assert comm.certificate is not None, "this communicator has no certificate"
        own = b""
        if comm.rank in self._parts:
            self.server = SliceServer(
                self._served,
                host=comm.address,
                certificate=comm.certificate,
                on_leave=self._peer_has_left,
            )
            own = json.dumps(asdict(self.server.address)).encode()
        found = comm.all_gather_bytes(own)
        for rank in self._parts:
            if rank != comm.rank:
                where = SliceAddress(**json.loads(found[rank]))
                self._links[rank] = SliceLink(where, comm.rank, comm.certificate)
        if self._links:
            self._pool = ThreadPoolExecutor(len(self._links), "push and pull")

    def _step_with(self, link: SliceLink, part: _Part, push: Push | None, is_pulling: bool) -> None:
        buckets = part.gradients.buckets if push is not None else []
        gradients = [flat.cpu() for flat in flats(buckets)]
        link.step(part.of(push), gradients, part.incoming() if is_pulling else [])
        if is_pulling:
            part.load()

    def _close_with(self, link: SliceLink, part: _Part) -> Any:
        """In bulk the weights are here since the last step."""
        state = link.close_round([] if self._is_bulk else part.incoming())
        if not self._is_bulk:
            part.load()
        return state

    def _ask_others(self, ask: Callable[[SliceLink, _Part], Any]) -> list[Future[Any]]:
        """Start to ask all other ranks that serve something, each in a thread of its own."""
        if self._pool is None:
            return []
        parts = self._parts
        return [self._pool.submit(ask, link, parts[rank]) for rank, link in self._links.items()]

    def _wait(self, futures: Sequence[Future[Any]]) -> None:
        if not futures:
            return
        seconds = self._comm.timeout_seconds + _GRACE_SECONDS
        done, underway = wait(futures, seconds, FIRST_EXCEPTION)
        for future in done:
            future.result()
        if underway:
            raise CommunicationError(f"{len(underway)} slices gave no answer for {seconds:g} s")

    @contextlib.contextmanager
    def _own_failure_first(self) -> Iterator[None]:
        """Raise what the optimizer of this rank's slice raised, rather than what followed."""
        try:
            yield
        except CommunicationError as error:
            if self._served.failure is None:
                raise
            raise self._served.failure from error

    def _peer_has_left(self, rank: int) -> None:
        """Let go of its slice too, whatever this rank is at: the peer's server waits for that."""
        link = self._links.get(rank)
        if link is not None:
            link.cancel()
