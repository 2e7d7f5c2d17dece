"""A small process beside each worker tells one that computes from one that hangs.

It is `watch_program`, fed by a pipe. Where the kernel does not say what a process does (no
``/proc``), there is none, and the time-out alone counts.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import inspect
import logging
import marshal
import os
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import sparkdl
from sparkdl.comm.access import Address
from sparkdl.worker import watch_program

logger = logging.getLogger(__name__)

_END_SECONDS = 5.0


class Watcher:
    """Looks after this process from outside. Use it as a context manager, and call `feed`."""

    def __init__(
        self,
        timeout_seconds: float,
        *,
        address: Address | None = None,
        attempt: int = 0,
        rank: int = 0,
    ) -> None:
        """Prepare it; it starts with the block.

        After ``timeout_seconds`` of silence a worker counts as hung. While it computes and says
        nothing, the watcher reports in its place to ``address``; None: it ends what hangs.
        """
        self._order: dict[str, Any] = {
            "pid": os.getpid(),
            "timeout_seconds": float(timeout_seconds),
            "address": None if address is None else pickle.dumps(address),
            "attempt": attempt,
            "rank": rank,
            # An editable install is not on the path: its finder is part of site-packages.
            "path": [*sys.path, str(Path(sparkdl.__file__).parent.parent)],
            "crash_file": None,
        }
        self._resources = contextlib.ExitStack()
        self._pause = timeout_seconds / watch_program.LOOKS / 3
        self._next = 0.0
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Watcher:
        if not sys.executable or not Path("/proc/self/stat").exists():
            return self
        place = Path(watch_program.__file__)
        program: list[str] = [str(place)]
        if not place.is_file():  # sparkdl came as a zip file
            program = ["-c", inspect.getsource(watch_program)]
        kept_open: tuple[int, ...] = ()
        try:
            if self._order["address"] is not None and not faulthandler.is_enabled():
                self._order["crash_file"] = self._crash_file()
                kept_open = (self._order["crash_file"],)
            order = marshal.dumps(self._order)
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", *program],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                pass_fds=kept_open,
                start_new_session=True,  # a signal to the worker's group must not reach it
                bufsize=0,
            )
        except OSError as error:
            logger.info("no process looks after this worker: %s", error)
            return self
        assert self._process.stdin is not None
        os.set_blocking(self._process.stdin.fileno(), False)
        self._write(b"%d\n" % len(order) + order)
        return self

    def _crash_file(self) -> int:
        """A file in memory into which this process writes where it crashes, if it does."""
        file = os.memfd_create("sparkdl-crash")
        self._resources.callback(os.close, file)
        faulthandler.enable(file)
        self._resources.callback(faulthandler.disable)
        return file

    def __exit__(self, *_: object) -> None:
        self._resources.close()
        if self._process is None:
            return
        assert self._process.stdin is not None
        self._write(watch_program.BYE)
        with contextlib.suppress(OSError):
            self._process.stdin.close()  # it ends by this
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    @property
    def pid(self) -> int | None:
        """The number of its process, if there is one."""
        return None if self._process is None else self._process.pid

    def serves(self, timeout_seconds: float) -> bool:
        """True if it can look after a task with this time-out; its process may have been killed."""
        is_there = self._process is None or self._process.poll() is None
        return is_there and self._order["timeout_seconds"] == timeout_seconds

    def rest(self) -> None:
        """Say that nothing is to be watched until `feed` is called again."""
        self._next = 0.0
        if self._process is not None:
            self._write(watch_program.REST)

    def feed(self) -> None:
        """Say that this process runs Python; costs next to nothing, however often it is called."""
        now = time.monotonic()
        if self._process is not None and now >= self._next:
            self._next = now + self._pause
            self._write(b".")

    def _write(self, data: bytes) -> None:
        """Write into the pipe, which has room for many hours; a watcher that is gone is no error.

        The order is some kilobytes, which fit into a new pipe.
        """
        assert self._process is not None and self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.write(data)


_resting: dict[int, Watcher] = {}
"""The watcher that waits for this process's next task, by the process: one that was forked has a
copy of its parent's, and must not speak to it."""


@contextlib.contextmanager
def ended_when_hung(timeout_seconds: float) -> Iterator[None]:
    """End this process if it hangs in the block, so that Spark runs its task again.

    For tasks whose rank nobody listens to. A process counts as hung when it neither runs Python
    nor uses the CPU for so long: it was stopped, or waits in C with the global lock. The watcher
    stays for the process's next task, since to start one takes 15 ms of CPU time.
    """
    watcher = _resting.pop(os.getpid(), None)
    if watcher is not None and not watcher.serves(timeout_seconds):
        watcher.__exit__()
        watcher = None
    if watcher is None:
        watcher = Watcher(timeout_seconds).__enter__()
    watcher.feed()
    is_over = threading.Event()

    def keep_feeding() -> None:
        while not is_over.wait(timeout_seconds / watch_program.LOOKS / 2):
            watcher.feed()

    feeding = threading.Thread(target=keep_feeding, name="sparkdl-alive", daemon=True)
    feeding.start()
    try:
        yield
    finally:
        is_over.set()
        feeding.join()
        watcher.rest()
        if _resting.setdefault(os.getpid(), watcher) is not watcher:  # that of a block in between
            watcher.__exit__()


@atexit.register
def _dismiss() -> None:
    """Let the resting watcher end with the program; a worker of Spark's just closes the pipe."""
    watcher = _resting.pop(os.getpid(), None)
    if watcher is not None:
        watcher.__exit__()
