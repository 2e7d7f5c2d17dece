"""The process group of a gang: how its workers meet, and part.

Errors of their collectives have a type of their own, so that the supervisor can tell a dead peer
from a mistake in the user's code.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import re
import socket
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined] # torch does not export it

from sparkdl.errors import CommunicationError, ConfigError

if TYPE_CHECKING:
    from sparkdl.comm.channel import ChannelClient

_SETTLE_SECONDS = 0.02
"""Time in which the threads of a group forget the last collective."""


@contextlib.contextmanager
def process_group(
    *,
    backend: str,
    store: Any,
    rank: int,
    world_size: int,
    timeout_seconds: float,
    address: str | None = None,
) -> Iterator[None]:
    """Initialize torch's default process group, and destroy it at the end, also after a failure.

    ``timeout_seconds`` is the longest wait in one collective, ``address`` one of this host that the
    peers can reach. Gloo looks one up itself where that is None or no interface of this host has it
    (a network may translate addresses), or where the environment has ``GLOO_SOCKET_IFNAME``.
    CommunicationError if the peers did not meet in time; of gloo's, a first collective says so.
    """
    c10d = dist.distributed_c10d
    torchs = c10d.ProcessGroupGloo
    is_chosen = address is not None and "GLOO_SOCKET_IFNAME" not in os.environ and is_own(address)
    c10d.ProcessGroupGloo = gloo_at(address if is_chosen else None)  # type: ignore[misc]
    # torch names keys of the store by a number of the group, and counts groups that could not be
    # made: after a failure this process would wait for other keys than those that its peers set.
    c10d._world.group_count = 0
    group = None
    try:
        with peer_errors("rendezvous"):
            dist.init_process_group(
                backend,
                store=store,
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=timeout_seconds),
            )
        group = dist.group.WORLD
        yield
    finally:
        c10d.ProcessGroupGloo = torchs  # type: ignore[misc]
        if dist.is_initialized():  # the user's own code may have destroyed it
            dist.destroy_process_group()
        # Whoever drops the last reference of a gloo group (a DDP model has one) holds the GIL while
        # it joins the group's threads, and such a thread may need the GIL to forget a collective
        # that has just ended: torch 2.13 then hangs. Nobody else drops the last one, therefore,
        # and the threads get the time.
        time.sleep(_SETTLE_SECONDS)
        del group


_torchs: dict[str, Any] = {}
"""Torch's own functions by name, while `kept_group` has replaced what they do."""


@contextlib.contextmanager
def kept_group() -> Iterator[None]:
    """In the block, code that makes the default group, as for other launchers, gets the present.

    ``init_process_group`` passes if it asks for no other group than that, and
    ``destroy_process_group`` leaves it, for whoever made it destroys it. That holds also for the
    functions that others have imported by name, since it is their code that is replaced.
    """
    if _torchs:
        yield
        return
    functions = {
        name: inspect.unwrap(getattr(dist.distributed_c10d, name))
        for name in ("init_process_group", "destroy_process_group")
    }
    for name, function in functions.items():
        parts = (function.__globals__, name, function.__defaults__, function.__closure__)
        _torchs[name] = FunctionType(function.__code__, *parts)
    functions["init_process_group"].__code__ = _init_instead.__code__
    functions["destroy_process_group"].__code__ = _destroy_instead.__code__
    try:
        yield
    finally:
        for name, function in functions.items():
            function.__code__ = _torchs.pop(name).__code__


# These run with torch's module as their globals.
def _init_instead(*args, **kwargs):  # type: ignore[no-untyped-def]
    from sparkdl.comm.process_group import init_unless_there

    return init_unless_there(*args, **kwargs)


def _destroy_instead(group=None):  # type: ignore[no-untyped-def]
    from sparkdl.comm.process_group import destroy_unless_kept

    return destroy_unless_kept(group)


def init_unless_there(*args: Any, **kwargs: Any) -> Any:
    """Torch's ``init_process_group``; raises ConfigError if it asks for another than there is."""
    torchs = _torchs["init_process_group"]
    if not dist.is_initialized():
        return torchs(*args, **kwargs)
    asked = inspect.signature(torchs).bind(*args, **kwargs).arguments
    there = {"world_size": dist.get_world_size(), "rank": dist.get_rank()}
    wrong = [f"{k}={asked[k]}" for k, own in there.items() if asked.get(k, -1) not in (-1, own)]
    backend = str(asked.get("backend") or dist.get_backend())
    if dist.get_backend() not in re.split("[:,]", backend.lower()):
        wrong.append(f"backend={backend!r}")
    if wrong:
        raise ConfigError(
            f"init_process_group asks for {', '.join(wrong)}, and there is a process group of "
            f"{there['world_size']} by {dist.get_backend()!r} already, in which this is rank "
            f"{there['rank']}; drop the line, for TorchRunner has made the group"
        )
    return None


def destroy_unless_kept(group: Any) -> Any:
    """Torch's ``destroy_process_group``, but for the default group."""
    if group is not None and group is not dist.group.WORLD:
        return _torchs["destroy_process_group"](group)
    return None


def speaks_for_all() -> bool:
    """True on rank 0 and where there is no group: it says what all ranks find alike."""
    return not dist.is_initialized() or dist.get_rank() == 0


def is_own(address: str) -> bool:
    """Return True if this host can listen at ``address``."""
    try:
        (family, *_, where), *_ = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)
        with socket.socket(family, socket.SOCK_STREAM) as listener:
            listener.bind(where)
    except OSError:
        return False
    return True


def gloo_at(address: str | None) -> Any:
    """Torch's groups of gloo, at ``address``; torch drops options and looks up the host's name.

    None: where ``GLOO_SOCKET_IFNAME`` says, or gloo chooses. Two ranks connect when they first
    talk: to connect each with every other takes 3W + 1 requests of each of W ranks, and most pairs
    never talk.
    """
    torchs: Any = dist.ProcessGroupGloo

    def devices() -> list[Any]:
        if address is not None:
            return [torchs.create_device(hostname=address, lazy_init=True)]
        if names := os.environ.get("GLOO_SOCKET_IFNAME"):
            return [torchs.create_device(interface=n, lazy_init=True) for n in names.split(",")]
        return [torchs.create_default_device(lazy_init=True)]

    class GlooAt(torchs):  # type: ignore[misc]
        def __init__(
            self, store: Store, rank: int, size: int, timeout: timedelta, **others: Any
        ) -> None:
            options = torchs._Options()
            options._devices = devices()  # of its own: groups that share one hang
            options._threads = 2 * len(options._devices)
            options._timeout = timeout
            if all(hasattr(options, name) for name in others):
                for name, value in others.items():  # torch 2.14 has enable_reconfigure
                    setattr(options, name, value)
                super().__init__(store, rank, size, options)
            else:  # of a later torch: it makes the group as it does without us
                super().__init__(store, rank, size, timeout, **others)

    return GlooAt


@contextlib.contextmanager
def peer_errors(what: str) -> Iterator[None]:
    """Turn what torch raises within into a `CommunicationError`."""
    try:
        yield
    except (RuntimeError, OSError) as error:  # gloo and NCCL raise plain RuntimeErrors
        raise CommunicationError(f"{what} failed: {error}") from error


_LOST_PEER = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Socket closed",
    "Timed out waiting",
    "remote process exited",
    "communicator was aborted",
)
"""Messages of gloo and NCCL in plain RuntimeErrors when a peer does not answer any more."""


@contextlib.contextmanager
def lost_peers(kind: type[CommunicationError], what: str) -> Iterator[None]:
    """Raise ``kind`` for the loss of a peer in code that calls torch's collectives by itself.

    Args:
        kind: of the error.
        what: whose collectives these are.
    """
    try:
        yield
    except RuntimeError as error:
        if not any(sign in str(error) for sign in _LOST_PEER):
            raise
        raise kind(f"a collective of {what} failed: {error}") from error


class ChannelStore(Store):
    """The keys of torch's rendezvous in one attempt, kept by the channel's server.

    So no further port is opened, and nothing but the run's secret lets a process join. Keep a
    strong reference while the process group lives: torch holds only a weak one.
    """

    def __init__(self, client: ChannelClient, *, timeout_seconds: float) -> None:
        super().__init__()
        self._client = client
        self._seconds = timeout_seconds

    def set(self, key: str, value: bytes | str) -> None:
        """Set a key."""
        self._client.set(f"store/{key}", value.encode() if isinstance(value, str) else bytes(value))

    def get(self, key: str) -> bytes:
        """Wait for a key and return its value."""
        value = self._client.get(f"store/{key}")
        if value is None:
            self.wait([key])
            value = self._client.get(f"store/{key}")
        if value is None:
            raise CommunicationError(f"rendezvous key {key} vanished")
        return value

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Return when all keys are set; raises torch's error type after the time-out."""
        seconds = self._seconds if timeout is None else timeout.total_seconds()
        try:
            self._client.wait([f"store/{key}" for key in keys], seconds)
        except TimeoutError as error:
            raise dist.DistStoreError(str(error)) from error

    def add(self, key: str, amount: int) -> int:
        """Add to a counter and return its new value."""
        return self._client.add(f"store/{key}", amount)

    def check(self, keys: Sequence[str]) -> bool:
        """Return True if all keys are set."""
        return all(self._client.get(f"store/{key}") is not None for key in keys)

    def delete_key(self, key: str) -> bool:
        """Remove a key."""
        return self._client.delete(f"store/{key}")

    def set_timeout(self, timeout: timedelta) -> None:
        """Change the longest wait."""
        self._seconds = timeout.total_seconds()
