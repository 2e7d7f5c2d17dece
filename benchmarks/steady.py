"""At what rate do batches come, is it steady, and how much memory does the process take?

Imported by `larger.py` and, with Pythons that have other packages, by `feeding_peers.py`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np


def watched(counts: Iterable[int], order: dict) -> dict:
    """Read an epoch, or as much of it as ``order["seconds"]`` allows; the report of how that went.

    Args:
        counts: Rows of each batch.
        order: ``group``, a control group's folder or None, ``seconds`` and ``row_bytes``.
    """
    if order["group"] is not None:
        (Path(order["group"]) / "cgroup.procs").write_text(str(os.getpid()))
    began, marks, rows = time.perf_counter(), [(0.0, 0)], 0
    anonymous = resident = 0
    for count in counts:
        rows += count
        now = time.perf_counter() - began
        if now - marks[-1][0] > 0.2:
            marks.append((now, rows))
            anonymous = max(anonymous, status("RssAnon"))
            resident = max(resident, status("VmRSS"))
        if now > order["seconds"]:
            break
    seconds = time.perf_counter() - began
    return {
        "bytes": rows * order["row_bytes"],
        "seconds": seconds,
        "slowest": slowest_tenth(marks, rows / seconds, seconds),
        "anonymous": anonymous,
        "resident": resident,
    }


def slowest_tenth(marks: list[tuple[float, int]], mean: float, seconds: float) -> float:
    """Rate of the slowest tenth of the time, over the mean: near 1 where the rate is steady."""
    times, counts = np.array(marks, dtype=np.float64).T
    edges = np.linspace(0, seconds, 11)
    rates = np.diff(np.interp(edges, times, counts)) / np.diff(edges)
    return float(rates[:-1].min() / mean)  # the last one ends between two marks


def status(name: str) -> int:
    """A line of this process's status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))
