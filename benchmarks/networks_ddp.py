"""What does plain PyTorch make of the same networks? A DDP script, run by torchrun."""

from __future__ import annotations

import json
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import common  # noqa: F401  # one thread per process, before torch is imported
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from sparkdl.models import FCNR, AlexNetR, ResNet50, ResNet56

EPOCHS = 3
NETWORKS = {"ResNet-50": ResNet50, "ResNet-56": ResNet56, "AlexNet-R": AlexNetR, "FCN-R": FCNR}
SHAPES = {"FCN-R": (28, 28)}
"""Of an image; those of CIFAR-10 where nothing is said."""


@dataclass(frozen=True)
class Task:
    """What is measured."""

    network: str
    batch: int
    workers: int
    steps: int

    @property
    def name(self) -> str:
        """As the tables name it."""
        return f"{self.network}, {self.workers} worker(s), batch {self.batch}"

    def to_json(self) -> str:
        """For the command line."""
        return json.dumps(asdict(self))

    def dataset_of_all(self) -> TensorDataset:
        """The rows of all workers."""
        return dataset(self.network, self.workers * self.batch * self.steps)


def dataset(network: str, rows: int) -> TensorDataset:
    """Random images of bytes, and classes."""
    generator = torch.Generator().manual_seed(0)
    shape = (rows, *SHAPES.get(network, (3, 32, 32)))
    images = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    return TensorDataset(images, torch.randint(0, 10, (rows,), generator=generator))


def main(task: Task, output: str) -> None:
    """Train, then run forward alone; rank 0 writes the medians."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    images, labels = dataset(task.network, task.batch * task.steps).tensors
    torch.manual_seed(0)
    model = DistributedDataParallel(NETWORKS[task.network]())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)
    loss = nn.CrossEntropyLoss()

    def step(positions: torch.Tensor) -> None:
        optimizer.zero_grad()
        loss(model(images[positions]), labels[positions]).backward()
        optimizer.step()

    reset_peak_memory()
    trained = epochs(step, task)
    memory = peak_memory()
    with torch.inference_mode():
        forward = epochs(lambda positions: model.module(images[positions]), task)
    if dist.get_rank() == 0:
        found = {"s per batch": trained, "memory MB": memory / 1e6, "forward s per batch": forward}
        Path(output).write_text(json.dumps(found))
    dist.destroy_process_group()


def epochs(step, task: Task) -> float:
    """Median seconds per batch of the epochs after the first."""
    seconds = []
    for _ in range(EPOCHS):
        dist.barrier()
        started = time.perf_counter()
        for positions in torch.randperm(task.batch * task.steps).split(task.batch):
            step(positions)
        dist.barrier()
        seconds.append((time.perf_counter() - started) / task.steps)
    return statistics.median(seconds[1:])


def reset_peak_memory() -> None:
    """Let `peak_memory` begin anew (Linux)."""
    Path("/proc/self/clear_refs").write_text("5")


def peak_memory() -> int:
    """The most memory that the process had since then, bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))


if __name__ == "__main__":
    main(Task(**json.loads(sys.argv[1])), sys.argv[2])
