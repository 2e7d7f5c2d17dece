"""Signals between the ranks of a node, in whose waiting a dead peer is noticed.

Each rank has semaphores to each other rank in shared memory. POSIX semaphores order memory as well
(The Open Group Base Specifications, 4.12), also on CPUs such as ARM that reorder writes.

A waiting rank looks again and again for a millisecond, and lets others run between two looks; then
it sleeps. Measured with two ranks on two cores and with eight, this was at least as fast as every
other mix of looking and sleeping, and took the same CPU time as sleeping alone.

Every rank locks its own byte of the shared file, which the kernel frees when the process ends.
Whoever wakes after a tenth of a second in vain looks at the peer's.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import time
from collections.abc import Sequence

from sparkdl.comm.communicator import Communicator
from sparkdl.comm.topology.shared_memory import agree, map_together
from sparkdl.errors import CommunicationError

READY, DONE = range(2)
"""Signals: this rank's summands are there; its share of the sum is made."""

_AWAKE_SECONDS = 1e-3
_ASLEEP_SECONDS = 0.1
_SEMAPHORE_BYTES = 64
"""More than the size of a ``sem_t``: a cache line, which ranks do not take from each other."""


class Signals:
    """Signals between the ranks of one node, each of which may be sent many times."""

    def __init__(self, local: Communicator, everyone: Communicator, ranks: Sequence[int]) -> None:
        """Collective over ``everyone``; arguments and errors are those of `SharedSum`."""
        self._rank = local.rank
        self._ranks = ranks
        self._timeout_seconds = everyone.timeout_seconds
        self._failure: str | None = None
        size = local.world_size
        self._file = map_together(local, 2 * size * size * _SEMAPHORE_BYTES, everyone)
        self._libc = _Libc()
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._file.buffer))

        def address(kind: int, sender: int, receiver: int) -> int:
            return start + _SEMAPHORE_BYTES * ((kind * size + sender) * size + receiver)

        peers = [peer for peer in range(size) if peer != local.rank]
        self._outgoing = [[address(kind, local.rank, peer) for peer in peers] for kind in range(2)]
        self._incoming = [
            [(peer, address(kind, peer, local.rank)) for peer in peers] for kind in range(2)
        ]
        self._received = [[0] * size for _ in range(2)]
        for kind in range(2):
            for _, semaphore in self._incoming[kind]:
                self._libc.init(semaphore, 1, 0)
        try:
            agree(everyone, self._lock())  # nobody signals before all can receive
        except BaseException:
            self._file.discard()
            raise

    def send(self, kind: int) -> None:
        """Signal to all peers."""
        for semaphore in self._outgoing[kind]:
            self._libc.post(semaphore)

    def arrived(self, kind: int, number: int) -> bool:
        """Return True if all peers have sent ``kind`` at least ``number`` times."""
        received = self._received[kind]
        for peer, semaphore in self._incoming[kind]:
            while received[peer] < number:
                if self._libc.try_wait(semaphore):
                    return False
                received[peer] += 1
        return True

    def wait(self, kind: int, number: int) -> None:
        """Return when all peers have sent ``kind`` at least ``number`` times.

        CommunicationError, from then on: a peer is gone or did not signal in time.
        """
        received = self._received[kind]
        for peer, semaphore in self._incoming[kind]:
            while received[peer] < number:
                self._take(semaphore, peer)
                received[peer] += 1

    def close(self) -> None:
        """Let the peers know that this rank signals no more."""
        self._file.close()

    def _take(self, semaphore: int, peer: int) -> None:
        if self._failure is not None:
            raise CommunicationError(self._failure)
        now = time.monotonic()
        deadline, awake_until = now + self._timeout_seconds, now + _AWAKE_SECONDS
        while self._libc.try_wait(semaphore):
            now = time.monotonic()
            if now < awake_until:
                os.sched_yield()
            elif self._libc.sleep(semaphore, min(_ASLEEP_SECONDS, deadline - now)):
                return
            elif self._is_gone(peer):
                if not self._libc.try_wait(semaphore):  # it was its last
                    return
                self._fail(f"rank {self._ranks[peer]} is gone")
            elif time.monotonic() >= deadline:
                self._fail(
                    f"rank {self._ranks[peer]} did not answer within {self._timeout_seconds:g} s"
                )

    def _fail(self, reason: str) -> None:
        self._failure = f"all_reduce failed: {reason}"
        raise CommunicationError(self._failure)

    def _lock(self) -> str:
        """Lock this rank's byte; returns what is in the way, if anything."""
        try:
            # Not flock, whose locks live on in children that a process has forked.
            fcntl.lockf(self._file.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, self._rank)
        except OSError as error:
            return f"cannot lock shared memory: {error}"
        return ""

    def _is_gone(self, peer: int) -> bool:
        try:
            fcntl.lockf(self._file.descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB, 1, peer)
        except OSError:  # the peer holds it
            return False
        fcntl.lockf(self._file.descriptor, fcntl.LOCK_UN, 1, peer)
        return True


class _TimeSpec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _Libc:
    """POSIX semaphores; Python's own cannot be placed in shared memory."""

    def __init__(self) -> None:
        libc = ctypes.CDLL(None)
        pointer, unsigned = ctypes.c_void_p, ctypes.c_uint
        self.init = libc.sem_init
        self.init.argtypes = (pointer, ctypes.c_int, unsigned)
        self.post = libc.sem_post
        self.post.argtypes = (pointer,)
        self.try_wait = libc.sem_trywait
        self.try_wait.argtypes = (pointer,)
        self._timed_wait = libc.sem_timedwait
        self._timed_wait.argtypes = (pointer, ctypes.POINTER(_TimeSpec))
        # Since glibc 2.30; elsewhere a sleep grows or shrinks when somebody sets the clock.
        self._clock_wait = getattr(libc, "sem_clockwait", None)
        if self._clock_wait is not None:
            self._clock_wait.argtypes = (pointer, ctypes.c_int, ctypes.POINTER(_TimeSpec))

    def sleep(self, semaphore: int, seconds: float) -> bool:
        """Wait for the semaphore; return True if it was taken within ``seconds``."""
        clock = time.CLOCK_REALTIME if self._clock_wait is None else time.CLOCK_MONOTONIC
        until = time.clock_gettime(clock) + seconds
        whole = int(until)
        spec = ctypes.byref(_TimeSpec(whole, int((until - whole) * 1e9)))
        if self._clock_wait is None:
            return bool(self._timed_wait(semaphore, spec) == 0)
        return bool(self._clock_wait(semaphore, clock, spec) == 0)
