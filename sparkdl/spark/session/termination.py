"""SIGTERM ends a driver, and removes the temporary folders of its runs first.

That is how schedulers end a process. Python ends without any cleaning up then, unless the program
handles the signal itself; in that case nothing is changed here: its handler raises, and the runs
clean up as after any exception, or it lets them go on.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

_folders: set[str] = set()
"""What is to be removed; of fits in all threads."""
_TRIES = 5
"""A thread that writes may bring a folder back while it is removed."""


@contextlib.contextmanager
def removed_at_termination(folder: str) -> Iterator[None]:
    """Have SIGTERM remove a folder during the block, before it ends the process as ever.

    Signals belong to the main thread; a fit in another one is protected if the main thread is in
    such a block too, or has called `listen`.
    """
    before = listen()
    _folders.add(folder)
    try:
        yield
    finally:
        _folders.discard(folder)
        if before:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def listen() -> bool:
    """Handle the signal from now on, in the main thread and where nobody else does.

    Returns:
        True if this call has begun it.
    """
    if threading.current_thread() is not threading.main_thread():
        return False
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        return False
    signal.signal(signal.SIGTERM, _on_signal)
    return True


def _on_signal(number: int, frame: FrameType | None) -> None:
    for folder in list(_folders):
        for _ in range(_TRIES):
            shutil.rmtree(folder, ignore_errors=True)
            if not Path(folder).exists():
                break
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
