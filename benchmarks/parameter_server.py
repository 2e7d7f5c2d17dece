"""How fast do gradients go to a parameter server, and weights come back? Against gloo's ring.

Two processes of one machine, over the loopback device: one alone, which pushes and pulls so many
bytes while the other only serves; and both at once, as `AsyncSGD` does with a model of so many
bytes, of which half is at the other rank.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import common
import torch
from common import Measurements
from pair import WORLD_SIZE, run_pairs, timed
from torch import nn

from sparkdl.comm.communicator import ProcessGroupCommunicator
from sparkdl.sync.asynchronous.async_sgd import AsyncSGD, AsyncSynchronizer

SIZES = {"4 KB": 4 << 10, "4 MB": 4 << 20, "100 MB": 100 << 20}
STRATEGIES = {"asynchronous": AsyncSGD(), "bound 0": AsyncSGD(staleness_bound=0)}


def main() -> None:
    """Measure, several times in turn."""
    options = common.arguments(5)
    found = Measurements()
    run_pairs(measure, options, found)
    for size in SIZES:
        for name in STRATEGIES:
            found.ratio(f"{name} / ring, {size}", f"{name}, {size}, ms", f"ring, {size}, ms")
    report(found, options)


def report(found: Measurements, options: argparse.Namespace) -> None:
    """Say in GB/s what the large sizes reach: what a rank pushes and pulls, by the time."""
    for size in ("4 MB", "100 MB"):
        for name in ("alone", *STRATEGIES):
            halves = 4 if name == "alone" else 2  # of the size: pushed and pulled
            seconds = found.median(f"{name}, {size}, ms") / 1e3
            found.add(f"{name}, {size}, GB/s", halves * SIZES[size] / 2 / seconds / 1e9)
    found.report("parameter_server", options)


def measure(comm: ProcessGroupCommunicator) -> dict[str, float]:
    """One process: the median seconds of each contender and size, by ``<contender>, <size>``."""
    medians: dict[str, float] = {}
    for size, num_bytes in SIZES.items():
        tensor = torch.zeros(num_bytes // 4)
        medians[f"ring, {size}"] = timed(comm, lambda: comm.all_reduce(tensor), num_bytes)  # noqa: B023
        for name, strategy in STRATEGIES.items():
            medians[f"{name}, {size}"] = steps(comm, strategy, num_bytes, range(WORLD_SIZE))
        # Of a model of twice the size, whose other half is this rank's, the size is pushed.
        medians[f"alone, {size}"] = steps(comm, AsyncSGD(), 2 * num_bytes, [0])
    return medians


def steps(
    comm: ProcessGroupCommunicator, strategy: AsyncSGD, num_bytes: int, active: Sequence[int]
) -> float:
    """Median seconds of a step's push and pull; only ``active`` ranks take any."""
    halves = nn.ParameterList([nn.Parameter(torch.zeros(num_bytes // 8)) for _ in range(2)])
    synchronizer = strategy.setup(halves, lambda p: torch.optim.SGD(p, lr=0.1), comm)
    synchronizer.zero_gradients()
    step(synchronizer)  # in which ranks ask each other for the weights of samples
    try:
        call = (lambda: step(synchronizer)) if comm.rank in active else (lambda: None)
        return timed(comm, call, num_bytes)
    finally:
        comm.barrier()
        synchronizer.close()


def step(synchronizer: AsyncSynchronizer) -> None:
    """What follows a backward pass."""
    synchronizer.optimizer.step()
    synchronizer.reduce_gradients(torch.ones(2), 2.0)
    synchronizer.after_step(0)


if __name__ == "__main__":
    main()
