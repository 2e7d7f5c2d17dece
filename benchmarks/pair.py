"""How are two processes of one machine timed, which do something together over gloo?"""

from __future__ import annotations

import argparse
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

from sparkdl.comm.communicator import ProcessGroupCommunicator
from sparkdl.comm.process_group import process_group

WORLD_SIZE = 2
Measure = Callable[[ProcessGroupCommunicator], dict[str, float]]


def run_pairs(measure: Measure, options: argparse.Namespace, found: Measurements) -> None:
    """Start a pair of processes ``options.runs`` times; note rank 0's seconds as milliseconds."""
    with tempfile.TemporaryDirectory() as place:
        for run in range(options.runs):
            common.wait_until_idle(options.patience)
            folder = Path(place, str(run))
            folder.mkdir()
            mp.spawn(_process, (measure, str(folder)), nprocs=WORLD_SIZE)
            for name, seconds in torch.load(folder / "seconds.pt").items():
                found.add(f"{name}, ms", seconds * 1e3)


def _process(rank: int, measure: Measure, folder: str) -> None:
    torch.set_num_threads(1)
    with process_group(
        backend="gloo",
        store=dist.FileStore(f"{folder}/store", WORLD_SIZE),
        rank=rank,
        world_size=WORLD_SIZE,
        timeout_seconds=60,
        address="127.0.0.1",
    ):
        medians = measure(ProcessGroupCommunicator())
    if rank == 0:
        torch.save(medians, Path(folder, "seconds.pt"))


def timed(comm: ProcessGroupCommunicator, call: Callable[[], object], num_bytes: int) -> float:
    """Median seconds of ``call``, which both processes begin together."""
    seconds = []
    for _ in range(20 if num_bytes > 1 << 24 else 200):
        comm.all_reduce(torch.zeros(1))
        started = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)
