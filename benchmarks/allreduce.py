"""How fast do two processes of one machine sum? Shared memory against gloo's ring, and a tree.

The limit of shared memory is what the memory's bandwidth allows: each rank reads as many bytes as
the tensor has, and writes as many. It is measured by two processes that copy at the same time.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import common
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from common import Measurements

from sparkdl.comm import ProcessGroupCommunicator, process_group
from sparkdl.topology import arrange

SIZES = {"4 KB": 4 << 10, "64 KB": 64 << 10, "4 MB": 4 << 20, "100 MB": 100 << 20}
CONTENDERS = ("ring", "tree", "shared")
CPU = torch.device("cpu")
WORLD_SIZE = 2


def main() -> None:
    """Measure, several times in turn."""
    options = common.arguments(7)
    found = Measurements()
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(options.runs):
            common.wait_until_idle(options.patience)
            run(Path(tempfile.mkdtemp(dir=folder)), found)
    for size in SIZES:
        for slow in ("ring", "tree"):
            found.ratio(f"{slow} / shared, {size}", f"{slow}, {size}, ms", f"shared, {size}, ms")
        found.ratio(f"limit / shared, {size}", f"limit, {size}, ms", f"shared, {size}, ms")
        found.ratio(f"staged / shared, {size}", f"staged, {size}, ms", f"shared, {size}, ms")
    found.report("allreduce", options)


def run(folder: Path, found: Measurements) -> None:
    """One pair of processes; all sizes and contenders in turn."""
    result = folder / "seconds.pt"
    mp.spawn(measure, (str(folder / "store"), str(result)), nprocs=WORLD_SIZE)
    for name, seconds in torch.load(result).items():
        found.add(f"{name}, ms", seconds * 1e3)


def measure(rank: int, store: str, result: str) -> None:
    """One process: the median seconds of each contender and size, by ``<contender>, <size>``."""
    torch.set_num_threads(1)
    medians: dict[str, float] = {}
    with process_group(
        backend="gloo",
        store=dist.FileStore(store, WORLD_SIZE),
        rank=rank,
        world_size=WORLD_SIZE,
        timeout_seconds=60,
        address="127.0.0.1",
    ) as options:
        comm = ProcessGroupCommunicator(options=options)
        for size, num_bytes in SIZES.items():
            for name in CONTENDERS:
                topology = arrange(comm, name, device=CPU)
                tensor = topology.allocate(num_bytes // 4, torch.float32, CPU)
                call = timed(topology, lambda: topology.all_reduce(tensor), num_bytes)  # noqa: B023
                medians[f"{name}, {size}"] = call
                if name == "shared":
                    plain = torch.zeros(num_bytes // 4)
                    call = timed(topology, lambda: topology.all_reduce(plain), num_bytes)  # noqa: B023
                    medians[f"staged, {size}"] = call
                topology.close()
            medians[f"limit, {size}"] = limit(comm, num_bytes)
    if rank == 0:
        torch.save(medians, result)


def timed(comm, call: Callable[[], object], num_bytes: int) -> float:
    """Median seconds of ``call``, which both processes begin together."""
    seconds = []
    for _ in range(20 if num_bytes > 1 << 24 else 200):
        comm.all_reduce(torch.zeros(1))
        started = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def limit(comm, num_bytes: int) -> float:
    """Seconds in which both processes copy ``num_bytes`` each, from memory of their own."""
    source, target = torch.ones(num_bytes // 4), torch.ones(num_bytes // 4)
    return timed(comm, lambda: target.copy_(source), num_bytes)


if __name__ == "__main__":
    main()
