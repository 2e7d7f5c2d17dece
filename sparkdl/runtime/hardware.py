"""The hardware of a process: plain values for a run's record, and the choice of its device."""

from __future__ import annotations

import os
import platform
import socket
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sparkdl.errors import ClusterError
from sparkdl.runtime.process import cpu_model, memory_bytes

if TYPE_CHECKING:
    import torch


def hardware(device: torch.device | None = None, threads: int | None = None) -> dict[str, Any]:
    """Host, CPU, cores and memory that this process may use, and its GPU if ``device`` is one.

    Without a device it does not train; it computes with so many ``threads``.
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
            import torch

            properties = torch.cuda.get_device_properties(device)
            found |= {"gpu": properties.name, "gpu_memory_bytes": properties.total_memory}
    return found


def device_index(
    gpu_addresses: Sequence[str], visible: str | None, num_devices: int, local_rank: int
) -> int:
    """Index, as CUDA counts it in this process, of the GPU that this rank shall use.

    ``gpu_addresses`` is what Spark assigned to the task, if it schedules GPUs; ``visible`` is
    ``CUDA_VISIBLE_DEVICES``; ``num_devices`` is what CUDA shows; ``local_rank`` counts the workers
    of a host. ClusterError if Spark assigned a GPU that the process cannot see.
    """
    if not gpu_addresses:
        return local_rank % num_devices
    address = gpu_addresses[0]
    listed = [part.strip() for part in visible.split(",")] if visible else []
    if address in listed:
        return listed.index(address)
    if address.isdigit() and int(address) < num_devices:
        return int(address)
    raise ClusterError(
        f"Spark assigned GPU {address!r} to this worker, but CUDA shows {num_devices} device(s) "
        f"(CUDA_VISIBLE_DEVICES={visible!r}); make the GPU discovery script and "
        "CUDA_VISIBLE_DEVICES of the executors agree"
    )


def require_cuda() -> None:
    """Refuse to go on without a GPU; raises ClusterError."""
    import torch

    if not torch.cuda.is_available():
        raise ClusterError(
            'device="cuda", but torch finds no CUDA device on this worker; install a CUDA build of '
            'torch and a driver there, or set device="cpu"'
        )


def choose_device(
    wanted: str, gpu_addresses: Sequence[str], local_rank: int, environ: Mapping[str, str]
) -> torch.device:
    """The device for ``device="auto" | "cpu" | "cuda"``; auto is CUDA where there is one.

    The GPU is the one that Spark assigned to the task; where Spark schedules no GPUs, the workers
    of a host take its devices in turn. ClusterError if CUDA was asked for and this worker has none.
    """
    import torch

    if wanted == "cpu":
        return torch.device("cpu")
    if wanted == "cuda":
        require_cuda()
    elif not torch.cuda.is_available():
        return torch.device("cpu")
    index = device_index(
        gpu_addresses, environ.get("CUDA_VISIBLE_DEVICES"), torch.cuda.device_count(), local_rank
    )
    return torch.device("cuda", index)
