"""What does plain PyTorch make of the same work? A DDP script, run by torchrun or TorchDistributor.

`ray_trainer.py` has Ray Train run the same loop.

Its loop is as lean as one can write it without further tools: the images in memory, batches by
``index_select``, no DataLoader, and no look at the loss.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import SmallCNN, read_images
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def train(work: dict[str, Any]) -> None:
    """Train in a process group that is there, and let rank 0 write the seconds of each epoch.

    Args:
        work: ``folder`` of the images, ``batch_size``, ``epochs``, ``output`` (a file), and perhaps
            ``memory_format``.
    """
    batch_size, epochs = work["batch_size"], work["epochs"]
    rank, world_size = dist.get_rank(), dist.get_world_size()
    images, labels = read_images(Path(work["folder"]), rank, world_size)
    torch.manual_seed(0)
    model = SmallCNN()
    if work.get("memory_format") == "channels_last":
        model = model.to(memory_format=torch.channels_last)
    model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    loss = nn.CrossEntropyLoss()
    steps = -(-len(labels) // batch_size)
    seconds = []
    for _ in range(epochs):
        dist.barrier()
        started = time.perf_counter()
        for positions in torch.randperm(len(labels)).split(batch_size):
            optimizer.zero_grad()
            loss(model(images.index_select(0, positions)), labels[positions]).backward()
            optimizer.step()
        dist.barrier()
        seconds.append(time.perf_counter() - started)
    if rank == 0:
        told = json.dumps({"steps": steps * epochs, "seconds": seconds})
        Path(work["output"]).write_text(told)


def main(
    folder: str, batch_size: int, epochs: int, output: str, memory_format: str = "contiguous"
) -> None:
    """Train as one of the processes that torchrun has started."""
    dist.init_process_group("gloo")
    train(
        {
            "folder": folder,
            "batch_size": batch_size,
            "epochs": epochs,
            "output": output,
            "memory_format": memory_format,
        }
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
