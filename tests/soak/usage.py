"""What a process holds: memory, open files, threads, ports; and how much of it may come to more.

The first rounds of whatever is repeated fill caches and pools, so growth counts from a warm state.
"""

from __future__ import annotations

import ctypes
import gc
import os
import threading
from dataclasses import dataclass
from pathlib import Path

from tests.faults.oracle import listening

SHARE = float(os.environ.get("SOAK", "0.1"))
"""How much is repeated: 1 in `make soak`, less where other tests wait."""


@dataclass(frozen=True)
class Usage:
    """Of this process."""

    memory_mib: float
    """Resident, after what is unused was given back."""
    files: int
    threads: int
    """Of Python, and of libraries in C."""
    ports: int

    def grown(self, before: Usage, *, memory_mib: float, others: int = 2) -> list[str]:
        """What has grown by more than the tolerance, in words."""
        limits = {"memory_mib": memory_mib, "files": others, "threads": others, "ports": 0}
        return [
            f"{name}: {getattr(before, name)} -> {getattr(self, name)} (tolerance {limit:g})"
            for name, limit in limits.items()
            if getattr(self, name) - getattr(before, name) > limit
        ]


def usage() -> Usage:
    """As it is now."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return Usage(
        memory_mib=round(pages * os.sysconf("SC_PAGE_SIZE") / 2**20, 1),
        files=len(list(Path("/proc/self/fd").iterdir())),
        threads=len(list(Path("/proc/self/task").iterdir())),
        ports=len(listening([os.getpid()])),
    )


def own_threads() -> list[str]:
    """Names of the threads that sparkdl has started."""
    return sorted(t.name for t in threading.enumerate() if t.name.startswith("sparkdl"))
