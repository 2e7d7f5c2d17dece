"""A trial: workers are started together, sum a few numbers, and say what they see."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from sparkdl.cli.doctor.finding import Finding, note, ok, wrong
from sparkdl.cli.doctor.machine_checks import NO_BYTECODE, UNSET_REMEDY

NUM_FLOATS = 1_000_000
"""Floats of each all-reduce of the trial: 4 MB."""
_REPEATS = 3
_LITTLE_BYTES = 1 << 30
"""Free space on a local disk below which the doctor says something."""


def look_around() -> dict[str, Any]:
    """Report a rank's device, disk and all-reduce. All workers run it at once, by `TorchRunner`."""
    import torch
    import torch.distributed as dist

    from sparkdl import context
    from sparkdl.data.spool.local_disk import free_bytes, roomiest
    from sparkdl.runtime.hardware import hardware

    place = context()
    values = torch.full((NUM_FLOATS,), float(place.rank), device=place.device)
    times = []
    for _ in range(_REPEATS):
        total = values.clone()
        began = time.perf_counter()
        dist.all_reduce(total)
        summed = float(total[-1])  # waits for a GPU
        times.append(time.perf_counter() - began)
    # Spark tells Python its own folders in its local directories.
    own = [Path(name) for name in os.environ.get("SPARK_LOCAL_DIRS", "").split(",") if name]
    local = [path.parent if path.name.startswith("blockmgr-") else path for path in own]
    folder = roomiest([str(path) for path in local])
    return {
        "gpu": None,
        **hardware(place.device),
        "has_cuda_build": torch.version.cuda is not None,
        "seconds": min(times),
        "is_right": summed == sum(range(place.world_size)),
        "folder": str(folder),
        "free_bytes": free_bytes(folder),
        "keeps_bytecode": not sys.dont_write_bytecode,
    }


def workers_finding(seen: Sequence[Mapping[str, Any]], seconds: float) -> Finding:
    """The gang as a whole."""
    hosts = sorted({str(rank["host"]) for rank in seen})
    if not all(rank["is_right"] for rank in seen):
        return wrong(
            "workers", "an all-reduce gave a wrong sum; please report this with the lines above"
        )
    slowest = max(float(rank["seconds"]) for rank in seen)
    return ok(
        "workers",
        f"{len(seen)} on {len(hosts)} host{'s' * (len(hosts) > 1)} ({', '.join(hosts[:4])}"
        f"{', ...' if len(hosts) > 4 else ''}), together after {seconds:.1f} s; an all-reduce of "
        f"{NUM_FLOATS * 4 / 1e6:.0f} MB takes {slowest * 1e3:.0f} ms",
    )


def gpus_finding(seen: Sequence[Mapping[str, Any]], gpus_per_executor: int) -> Finding:
    """Report what the workers compute on, and whether Spark schedules the same."""
    names = [str(rank["gpu"]) for rank in seen if rank["gpu"] is not None]
    if names and len(names) < len(seen):
        return wrong(
            "GPUs",
            f"{len(names)} of {len(seen)} workers have one; give all executors GPUs, or choose "
            'device="cpu"',
        )
    if names:
        used = {(rank["host"], rank["device"]) for rank in seen}
        if len(used) < len(seen):
            return note(
                "GPUs",
                f"{len(seen)} workers share {len(used)} of {_counted(names)}; start one worker per "
                "GPU (spark.task.resource.gpu.amount=1, or num_workers)",
            )
        return ok("GPUs", f"one for each worker: {_counted(names)}")
    if gpus_per_executor:
        has_build = all(rank["has_cuda_build"] for rank in seen)
        cause = "finds no CUDA device" if has_build else "is a build without CUDA"
        return wrong(
            "GPUs",
            f"Spark schedules {gpus_per_executor} per executor, but torch there {cause}; install a "
            "CUDA build of torch and a driver on the executors",
        )
    return ok("GPUs", "none: workers compute on CPUs")


def disk_finding(seen: Sequence[Mapping[str, Any]]) -> Finding:
    """Room for the spools: each worker keeps its rows on a local disk while it trains."""
    least = min(seen, key=lambda rank: int(rank["free_bytes"]))
    text = (
        f"{int(least['free_bytes']) / 1e9:.1f} GB free for spools in {least['folder']} on "
        f"{least['host']}"
    )
    if int(least["free_bytes"]) < _LITTLE_BYTES:
        from sparkdl.data.spool.local_disk import DISK_REMEDY

        return note("disk", f"only {text}; {DISK_REMEDY}")
    return ok("disk", text)


def bytecode_findings(seen: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    """Workers that compile what they import anew each time."""
    hosts = sorted({str(rank["host"]) for rank in seen if not rank["keeps_bytecode"]})
    if hosts:
        yield note(NO_BYTECODE, f"is set for the workers on {', '.join(hosts)}; {UNSET_REMEDY}")


def _counted(names: Sequence[str]) -> str:
    return ", ".join(f"{names.count(name)} x {name}" for name in sorted(set(names)))
