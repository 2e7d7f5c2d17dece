"""SIGTERM and SIGHUP end a driver, which says so and removes its runs' temporary folders first.

Python would end without any cleaning up. If the program handles or ignores the signal itself, as
under nohup, nothing is changed here: its handler raises, and the runs clean up.
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

_SIGNALS = [
    getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)
]  # Windows has no SIGHUP
_folders: set[str] = set()
"""Folders that are to be removed; of fits in all threads."""
_names: list[str] = []
"""The user's names for what the process does; the innermost comes last."""
_TRIES = 5
"""A thread that writes may bring a folder back while it is removed."""


@contextlib.contextmanager
def removed_at_termination(folder: str) -> Iterator[None]:
    """Have the signals remove a folder during the block, before they end the process as ever.

    Signals belong to the main thread; a fit in another one is protected if the main thread is in
    such a block too, or has called `listen`.
    """
    with _listening():
        _folders.add(folder)
        try:
            yield
        finally:
            _folders.discard(folder)


@contextlib.contextmanager
def named_at_termination(what: str) -> Iterator[None]:
    """Have the signals say that they have ended ``what``, such as a command, during the block."""
    with _listening():
        _names.append(what)
        try:
            yield
        finally:
            _names.remove(what)


@contextlib.contextmanager
def _listening() -> Iterator[None]:
    handled = listen()
    try:
        yield
    finally:
        for number in handled:
            signal.signal(number, signal.SIG_DFL)


def listen() -> list[int]:
    """Handle the signals, in the main thread and where nobody else does; returns those."""
    if threading.current_thread() is not threading.main_thread():
        return []
    handled = [number for number in _SIGNALS if signal.getsignal(number) is signal.SIG_DFL]
    for number in handled:
        signal.signal(number, _on_signal)
    return handled


def _on_signal(number: int, frame: FrameType | None) -> None:
    folders = list(_folders)
    for folder in folders:
        for _ in range(_TRIES):
            shutil.rmtree(folder, ignore_errors=True)
            if not Path(folder).exists():
                break
    said = f"{signal.Signals(number).name} has ended {_names[-1] if _names else 'this process'}"
    said += "; its runs' temporary folders are gone" * bool(folders)
    # Not by print, in the middle of which the signal may have come.
    with contextlib.suppress(OSError):  # the terminal may be gone
        os.write(2, f"{said}\n".encode())
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
