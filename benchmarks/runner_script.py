"""A short training of a small network, for `runner.py`."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def train() -> None:
    """Ten steps."""
    model = DistributedDataParallel(nn.Linear(10, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(10):
        optimizer.zero_grad()
        model(torch.randn(32, 10)).square().mean().backward()
        optimizer.step()


if not dist.is_initialized():
    dist.init_process_group("gloo")
if dist.get_rank() == 0:
    Path(sys.argv[1], "began").write_text(str(time.time()))
train()
# With the model gone and all ranks here, the group can be destroyed: see docs/architecture.md for
# what torch does otherwise.
dist.barrier()
dist.destroy_process_group()
