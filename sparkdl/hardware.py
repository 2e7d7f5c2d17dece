"""What does a process compute on? As plain values, for a run's record."""

from __future__ import annotations

import os
import platform
import socket
from typing import TYPE_CHECKING, Any

from sparkdl.process import cpu_model, memory_bytes

if TYPE_CHECKING:
    import torch


def hardware(device: torch.device | None = None, threads: int | None = None) -> dict[str, Any]:
    """Host, CPU, cores and memory that this process may use, and its GPU if ``device`` is one.

    Args:
        device: where the process computes; None: it does not train.
        threads: with how many threads it computes.
    """
    found: dict[str, Any] = {
        "host": socket.gethostname(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "memory_bytes": memory_bytes(),
        "process": os.getpid(),
    }
    if threads is not None:
        found["threads"] = threads
    if device is not None:
        found["device"] = str(device)
        if device.type == "cuda":
            found |= _gpu(device)
    return found


def _gpu(device: torch.device) -> dict[str, Any]:
    import torch

    properties = torch.cuda.get_device_properties(device)
    return {"gpu": properties.name, "gpu_memory_bytes": properties.total_memory}
