"""How fast do two processes of one machine sum? Shared memory against gloo's ring, and a tree.

The limit of shared memory is what the memory's bandwidth allows: each rank reads as many bytes as
the tensor has, and writes as many. It is measured by two processes that copy at the same time.
"""

from __future__ import annotations

import common
import torch
from common import Measurements
from pair import run_pairs, timed

from sparkdl.comm.communicator import ProcessGroupCommunicator
from sparkdl.comm.topology import arrange

SIZES = {"4 KB": 4 << 10, "64 KB": 64 << 10, "4 MB": 4 << 20, "100 MB": 100 << 20}
CONTENDERS = ("ring", "tree", "shared")
CPU = torch.device("cpu")


def main() -> None:
    """Measure, several times in turn."""
    options = common.arguments(7)
    found = Measurements()
    run_pairs(measure, options, found)
    for size in SIZES:
        for slow in ("ring", "tree"):
            found.ratio(f"{slow} / shared, {size}", f"{slow}, {size}, ms", f"shared, {size}, ms")
        found.ratio(f"limit / shared, {size}", f"limit, {size}, ms", f"shared, {size}, ms")
        found.ratio(f"staged / shared, {size}", f"staged, {size}, ms", f"shared, {size}, ms")
    found.report("allreduce", options)


def measure(comm: ProcessGroupCommunicator) -> dict[str, float]:
    """One process: the median seconds of each contender and size, by ``<contender>, <size>``."""
    medians: dict[str, float] = {}
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
    return medians


def limit(comm, num_bytes: int) -> float:
    """Seconds in which both processes copy ``num_bytes`` each, from memory of their own."""
    source, target = torch.ones(num_bytes // 4), torch.ones(num_bytes // 4)
    return timed(comm, lambda: target.copy_(source), num_bytes)


if __name__ == "__main__":
    main()
