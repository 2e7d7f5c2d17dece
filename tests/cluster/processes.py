"""The processes that a test has started, as /proc tells of them, and the threads of its own."""

from __future__ import annotations

import threading
import time
from pathlib import Path


def threads_left(patience_seconds: float = 60.0) -> list[str]:
    """Threads of sparkdl that do not end: no result waits for slots in which to clean up."""
    deadline = time.monotonic() + patience_seconds
    while True:
        found = [t.name for t in threading.enumerate() if t.name.startswith("sparkdl-")]
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.1)


def _fields(pid: int) -> list[str]:
    """State, parent, ... as proc(5) lists them after the command."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def parent_of(pid: int) -> int:
    """Process id of the parent."""
    return int(_fields(pid)[1])


def state_of(pid: int) -> str:
    """One letter: R runs, S sleeps, T is stopped, Z is a zombie; X if it has ended meanwhile."""
    try:
        return _fields(pid)[0]
    except (FileNotFoundError, ProcessLookupError):
        return "X"


def descendants(pid: int) -> list[int]:
    """Children, their children, and so on."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                children.setdefault(parent_of(int(entry.name)), []).append(int(entry.name))
            except (FileNotFoundError, ProcessLookupError):
                continue
    found, waiting = [], [pid]
    while waiting:
        more = children.get(waiting.pop(), [])
        found += more
        waiting += more
    return found
