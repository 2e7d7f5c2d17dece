"""The process group of a gang: how its workers meet, and part.

Errors of their collectives have a type of their own, so that the supervisor can tell a dead peer
from a mistake in the user's code.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from sparkdl.errors import CommunicationError

_SETTLE_SECONDS = 0.02
"""By then the threads of a group have forgotten the last collective."""


@contextlib.contextmanager
def process_group(
    *,
    backend: str,
    store: Any,
    rank: int,
    world_size: int,
    timeout_seconds: float,
    address: str | None = None,
) -> Iterator[Any]:
    """Initialize torch's default process group, and destroy it at the end, also after a failure.

    Yields the backend's options, which groups of fewer ranks need too, or None.

    Args:
        backend: ``gloo`` or ``nccl``.
        store: a ``torch.distributed.Store`` shared by all ranks.
        rank: this worker's rank.
        world_size: number of ranks.
        timeout_seconds: longest wait in one collective.
        address: address of this host that the peers can reach; None lets gloo look it up.

    Raises:
        CommunicationError: the peers did not meet in time.
    """
    options: Any = None
    if backend == "gloo" and address is not None:
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
        options._timeout = timedelta(seconds=timeout_seconds)
    # torch names keys of the store by a number of the group, and counts groups that could not be
    # made: after a failure this process would wait for other keys than those that its peers set.
    dist.distributed_c10d._world.group_count = 0
    with peer_errors("rendezvous"):
        dist.init_process_group(
            backend,
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout_seconds),
            pg_options=options,
        )
    group = dist.group.WORLD
    try:
        yield options
    finally:
        if dist.is_initialized():  # the user's own code may have destroyed it
            dist.destroy_process_group()
        # Whoever drops the last reference of a gloo group (a DDP model has one) holds the GIL while
        # it joins the group's threads, and such a thread may need the GIL to forget a collective
        # that has just ended: torch 2.13 then hangs. Nobody else drops the last one, therefore,
        # and the threads get the time.
        time.sleep(_SETTLE_SECONDS)
        del group


@contextlib.contextmanager
def peer_errors(what: str) -> Iterator[None]:
    """Turn what torch raises within into a `CommunicationError`."""
    try:
        yield
    except (RuntimeError, OSError) as error:  # gloo and NCCL raise plain RuntimeErrors
        raise CommunicationError(f"{what} failed: {error}") from error
