"""What does plain PyTorch make of a divided model? FSDP2, DTensor and pipelining, by torchrun.

What `mesh.py` compares with, and what both sides share: the network, the rows, the turns that they
take, and how memory is counted.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import common  # noqa: F401  # one thread per process, before torch is imported
import torch
import torch.distributed as dist
from networks_ddp import peak_memory, reset_peak_memory
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from sparkdl.models import LanguageModel

LENGTH = 64
LAYERS = 4
RATE = 1e-3
PATIENCE = 180
"""Seconds after which a side gives up waiting for the other."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is measured."""

    data: int = 1
    shard: int = 1
    tensor: int = 1
    pipeline: int = 1
    micro_batches: int = 8
    batch: int = 8
    """Rows of a step, of each worker that has rows of its own."""
    steps: int = 8
    """Of an epoch."""
    epochs: int = 6
    """The first one is not measured."""
    width: int = 256

    @property
    def axes(self) -> dict[str, int]:
        """Those that are used."""
        sizes = {name: getattr(self, name) for name in ("data", "shard", "tensor", "pipeline")}
        return {name: size for name, size in sizes.items() if size > 1}

    @property
    def name(self) -> str:
        """As the tables name it."""
        return ", ".join(f"{name}={size}" for name, size in self.axes.items())

    @property
    def workers(self) -> int:
        """Processes."""
        return self.data * self.shard * self.tensor * self.pipeline

    @property
    def readers(self) -> int:
        """Those that have rows of their own."""
        return self.data * self.shard

    def net(self) -> LanguageModel:
        """The network, with the same weights on all workers."""
        torch.manual_seed(0)
        return LanguageModel(
            width=self.width,
            num_heads=4,
            num_layers=LAYERS,
            feedforward=4 * self.width,
            max_length=LENGTH,
        )

    def rows(self, reader: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens ``(rows, length)`` of a reader, and those that follow."""
        generator = torch.Generator().manual_seed(reader)
        shape = (self.batch * self.steps, LENGTH + 1)
        tokens = torch.randint(0, 256, shape, generator=generator)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def to_json(self) -> str:
        """For the command line."""
        return json.dumps(asdict(self))


class Turns:
    """Lets two sides train an epoch each in turn, by files of a folder that both know."""

    def __init__(self, folder: str, own: str, other: str, rank: int) -> None:
        self._folder, self._own, self._other, self._rank = Path(folder), own, other, rank
        self._is_first = own < other

    def wait(self, epoch: int) -> None:
        """Return when the other side's epoch before this one is over."""
        before = epoch - 1 if self._is_first else epoch
        deadline = time.monotonic() + PATIENCE
        while before >= 0 and not self._file(self._other, before).exists():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self._other} did not end its epoch {before}")
            time.sleep(0.005)

    def end(self, epoch: int) -> None:
        """This side's epoch is over; all its ranks have ended it."""
        if self._rank == 0:
            self._file(self._own, epoch).touch()

    def _file(self, side: str, epoch: int) -> Path:
        return self._folder / f"{side}-{epoch}"


def live_bytes() -> int:
    """Of all tensors of this process, memory that several share counted once."""
    storages = {}
    for value in gc.get_objects():
        # asks the type alone: isinstance would wake up what torch imports lazily
        if issubclass(type(value), torch.Tensor) and value.device.type == "cpu":
            part = getattr(value, "_local_tensor", value)
            storage = part.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def write(
    folder: str, side: str, rank: int, seconds: list[float], cpu: list[float], live: int
) -> None:
    """Give `mesh.py` what this rank has measured: wall-clock and CPU seconds of each epoch."""
    found = {"seconds": seconds, "cpu": cpu, "live": live, "peak": peak_memory()}
    Path(folder, f"{side}-rank{rank}.json").write_text(json.dumps(found))


class FirstHalf(nn.Module):
    """The first of two stages."""

    def __init__(self, net: LanguageModel) -> None:
        super().__init__()
        self.embedding, self.positions = net.embedding, net.positions
        self.blocks = net.blocks[: LAYERS // 2]

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """States of the places."""
        states = self.embedding(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            states = block(states)
        return states


class SecondHalf(nn.Module):
    """The second of two stages."""

    def __init__(self, net: LanguageModel) -> None:
        super().__init__()
        self.blocks, self.norm, self.head = net.blocks[LAYERS // 2 :], net.norm, net.head

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Logits of the places."""
        for block in self.blocks:
            states = block(states)
        return self.head(self.norm(states)).transpose(1, 2)


def divided(task: Task) -> nn.Module:
    """The network, divided along ``shard``, ``tensor`` and ``data``."""
    net = task.net()
    names = {"data": "replicate"}
    axes = {names.get(name, name): size for name, size in task.axes.items()}
    mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    if task.tensor > 1:
        styles = {"columns": ColwiseParallel, "rows": RowwiseParallel}
        plan = {}
        for pattern, cut in net.tensor_layout(task.tensor).items():
            head, _, last = pattern.rpartition(".")
            for part in last.split("|"):
                plan[f"{head}.{part}"] = styles[cut]()
        parallelize_module(net, mesh["tensor"], plan)
    if task.shard > 1:
        along = mesh["replicate", "shard"] if task.data > 1 else mesh["shard"]
        for block in net.blocks:
            fully_shard(block, mesh=along)
        fully_shard(net, mesh=along)
    return net


def optimizer_of(module: nn.Module) -> torch.optim.Optimizer:
    """AdamW; its fused step takes tensors of one mesh at a time."""
    groups: dict[object, list[nn.Parameter]] = {}
    for parameter in module.parameters():
        groups.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    members = [{"params": group} for group in groups.values()]
    return torch.optim.AdamW(members, lr=RATE, fused=True)


def main(task: Task, folder: str) -> None:
    """Train in turn with the other side, and write what was measured."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rank = dist.get_rank()
    turns = Turns(folder, "plain", "sparkdl", rank)
    inputs, labels = task.rows(rank // task.tensor if task.pipeline == 1 else 0)
    loss = nn.CrossEntropyLoss()
    if task.pipeline > 1:
        half = FirstHalf if rank == 0 else SecondHalf
        model: nn.Module = half(task.net())
        stage = PipelineStage(model, rank, task.pipeline, torch.device("cpu"))
        schedule = Schedule1F1B(stage, task.micro_batches, loss_fn=loss)

        def backward(rows: torch.Tensor) -> None:
            if rank == 0:
                schedule.step(inputs[rows])
            else:
                schedule.step(target=labels[rows], return_outputs=False)
    else:
        model = divided(task)

        def backward(rows: torch.Tensor) -> None:
            loss(model(inputs[rows]), labels[rows]).backward()

    optimizer = optimizer_of(model)
    reset_peak_memory()
    seconds, cpu = [], []
    for epoch in range(task.epochs):
        turns.wait(epoch)
        before = time.process_time()
        seconds.append(timed_epoch(task, epoch, optimizer, backward))
        cpu.append(time.process_time() - before)
        if epoch == task.epochs - 1:
            live = live_bytes()
        turns.end(epoch)
    write(folder, "plain", rank, seconds, cpu, live)
    dist.destroy_process_group()


def timed_epoch(
    task: Task,
    epoch: int,
    optimizer: torch.optim.Optimizer,
    backward: Callable[[torch.Tensor], None],
) -> float:
    """Train for an epoch; its seconds."""
    dist.barrier()
    started = time.perf_counter()
    order = torch.randperm(task.batch * task.steps, generator=torch.Generator().manual_seed(epoch))
    for rows in order.split(task.batch):
        optimizer.zero_grad()
        backward(rows)
        optimizer.step()
    dist.barrier()
    return time.perf_counter() - started


if __name__ == "__main__":
    main(Task(**json.loads(sys.argv[1])), sys.argv[2])
