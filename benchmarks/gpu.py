"""What does training cost on a GPU, and is it right there? sparkdl's loop beside bare PyTorch.

It needs one CUDA device, and neither Java nor Spark: what a worker does after Spark has started it.
Each section is a process of its own with a limit of time, so one that fails costs only itself::

    python benchmarks/gpu.py --sections images,text --output /tmp/gpu
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import common
import numpy as np
import pyarrow as pa
import torch
import torch.multiprocessing as mp
from torch import nn

from sparkdl.comm.communicator import Communicator, LocalCommunicator, ProcessGroupCommunicator
from sparkdl.comm.process_group import process_group
from sparkdl.config import CheckpointConfig, TrainConfig
from sparkdl.data.batches import Batches
from sparkdl.data.plan import Column, Shard, TrainPlan, make_plan
from sparkdl.data.spool.mapped import MappedRows, ShardData
from sparkdl.data.spool.spool_source import open_spool
from sparkdl.data.spool.writer import column_path
from sparkdl.errors import SparkDLError
from sparkdl.inference.classification import CLASSIFICATION
from sparkdl.models import LanguageModel, ResNet50
from sparkdl.runtime.hardware import choose_device, hardware
from sparkdl.runtime.process import torch_threads, tuned_allocator
from sparkdl.train.callbacks import NullObserver
from sparkdl.train.loop import train

THREADS = 4
"""Of a worker: the cores that Spark gives to a task with a GPU."""
EPOCHS = 6
"""The first one warms up; medians are over the others."""
DEVICE = torch.device(os.environ.get("SPARKDL_BENCHMARK_DEVICE", "cuda"))
IS_TINY = DEVICE.type == "cpu"
"""Without a GPU everything runs at a small size, which shows only that it runs."""
LIMIT_SECONDS = 150


class ResNet50ForPhotographs(nn.Module):
    """ResNet-50 with the stem of the paper, for ``(batch, 3, 224, 224)`` of bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.net = ResNet50(num_classes=1000)
        self.net.stem = nn.Sequential(
            nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(),
            nn.MaxPool2d(3, 2, 1),
        )  # fmt: skip

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Logits ``(batch, 1000)``."""
        return self.net(images)


def text_model() -> LanguageModel:
    """About 370 million parameters."""
    if IS_TINY:
        return LanguageModel(num_tokens=100, max_length=32, width=32, num_layers=2)
    return LanguageModel(
        num_tokens=32_000, max_length=1024, width=1024, num_heads=16, num_layers=24,
        feedforward=4096,
    )  # fmt: skip


# --- rows ----------------------------------------------------------------------------------------


class Task:
    """A network, its loss, and rows of random numbers in a spool on disk."""

    def __init__(
        self, make: Callable[[], nn.Module], columns: tuple[Column, ...], values: tuple[int, ...],
        batch: int, steps: int, **config: Any,
    ) -> None:  # fmt: skip
        """Rows for ``steps`` batches; numbers of column i are below ``values[i]``."""
        self.make, self.columns, self.batch = make, columns, batch
        self.num_rows = batch * steps
        self.directory = Path(tempfile.mkdtemp(prefix="sparkdl-gpu-"))
        self.config = {"task": CLASSIFICATION, "loss": "cross_entropy", **config}
        generator = np.random.default_rng(0)
        for number, (column, high) in enumerate(zip(columns, values, strict=True)):
            with column_path(self.directory, "train", number).open("wb") as file:
                for _ in range(steps):
                    shape = (batch, *column.shape)
                    generator.integers(0, high, shape, dtype=column.dtype).tofile(file)

    def train_config(self, **changes: Any) -> TrainConfig:
        """The configuration of `train`."""
        return TrainConfig(
            **{"batch_size": self.batch, "epochs": EPOCHS, "learning_rate": 0.001}
            | self.config | changes
        )  # fmt: skip

    def plan(self, config: TrainConfig, world_size: int = 1) -> TrainPlan:
        """The plan of one shard for each rank."""
        return make_plan(
            columns=self.columns,
            shards=[
                Shard(
                    shard_id=rank, host="", path="", num_rows=self.num_rows,
                    num_validation_rows=0, fingerprint=f"rows of {rank}", num_bytes=0,
                )
                for rank in range(world_size)
            ],
            world_size=world_size, batch_size=config.batch_size, epochs=config.epochs,
        )  # fmt: skip

    def shard(self, rank: int = 0) -> ShardData:
        """The rows, mapped into memory."""
        return open_spool(
            self.directory, self.columns, num_rows=self.num_rows, split="train",
            fingerprint=f"rows of {rank}",
        )  # fmt: skip

    def in_memory(self, index: int) -> np.ndarray:
        """A column as a plain script maps it."""
        column, path = self.columns[index], column_path(self.directory, "train", index)
        return np.memmap(path, column.dtype, "r", shape=(self.num_rows, *column.shape))


def photographs(steps: int = 25, **config: Any) -> Task:
    """ResNet-50 on images as bytes, 150 KB each."""
    side, batch, steps = (32, 4, 3) if IS_TINY else (224, 256, steps)
    columns = (
        Column(name="image", role="feature", dtype="uint8", shape=(3, side, side)),
        Column(name="label", role="label", dtype="int64", shape=()),
    )
    options = {"optimizer": "sgd", "optimizer_params": {"momentum": 0.9}, "precision": "bf16",
               "memory_format": "channels_last"}  # fmt: skip
    return Task(ResNet50ForPhotographs, columns, (256, 1000), batch, steps, **options | config)


def texts(steps: int = 20, **config: Any) -> Task:
    """A language model on texts of 1,024 tokens."""
    length, batch, steps, tokens = (16, 2, 3, 100) if IS_TINY else (1024, 8, steps, 32_000)
    columns = (
        Column(name="tokens", role="feature", dtype="int64", shape=(length,)),
        Column(name="next", role="label", dtype="int64", shape=(length,)),
    )
    options = {"optimizer": "adamw", "learning_rate": 1e-4, "precision": "bf16"}
    return Task(text_model, columns, (tokens, tokens), batch, steps, **options | config)


def digits(**config: Any) -> Task:
    """The small network of the other benchmarks, on images of 28 x 28 bytes."""
    columns = (
        Column(name="image", role="feature", dtype="uint8", shape=(784,)),
        Column(name="label", role="label", dtype="int64", shape=()),
    )
    options = {"optimizer": "sgd", "optimizer_params": {"momentum": 0.9}}
    batch, steps = (16, 10) if IS_TINY else (256, 200)
    return Task(common.SmallCNN, columns, (256, 10), batch, steps, **options | config)


# --- the two loops -------------------------------------------------------------------------------


def trained(
    task: Task, config: TrainConfig, module: nn.Module | None = None, *,
    comm: Communicator | None = None, device: torch.device = DEVICE, **more: Any,
) -> Any:  # fmt: skip
    """Train as a worker does; the outcome."""
    comm = comm or LocalCommunicator()
    plan = task.plan(config, comm.world_size)
    options = {"checkpoints": None, "resume": None, "observer": NullObserver()} | more
    return train(
        module=module or seeded(task.make), config=config, plan=plan,
        shards=[MappedRows(task.shard(comm.rank), plan)], validation=[], comm=comm, device=device,
        **options,
    )  # fmt: skip


def seeded(make: Callable[[], nn.Module], device: torch.device = DEVICE) -> nn.Module:
    """A module whose weights are the same each time; made on ``device``."""
    torch.manual_seed(0)
    with device:
        return make()


def fit(task: Task, config: TrainConfig) -> dict[str, Any]:
    """The loop of sparkdl: rows per second in epochs after the first, and where its time went."""
    outcome = trained(task, config)
    speeds = [task.num_rows / record["seconds"] for record in outcome.history[1:]]
    spent = {name: seconds for name, seconds in outcome.seconds.items() if seconds > 1e-3}
    return {"rows/s": speeds, "seconds": spent, "loss": outcome.history[-1]["loss"]}


def bare(task: Task, config: TrainConfig, *, feeding: str) -> dict[str, Any]:
    """What a careful script does, on one batch on the device or on a DataLoader's."""
    module = seeded(task.make).to(DEVICE).train()
    if config.memory_format == "channels_last":
        module.to(memory_format=torch.channels_last)
    call = torch.compile(module) if config.compile else module
    if config.optimizer == "sgd":
        optimizer = torch.optim.SGD(
            module.parameters(), lr=config.learning_rate, momentum=0.9, fused=True
        )
    else:
        optimizer = torch.optim.AdamW(module.parameters(), lr=config.learning_rate, fused=True)
    dtype = torch.bfloat16 if config.precision == "bf16" else None
    batches = resident(task) if feeding == "resident" else loaded(task)
    speeds, total = [], torch.zeros((), device=DEVICE)
    for epoch in range(EPOCHS):
        synchronize()
        began, total = time.perf_counter(), total.zero_()
        for inputs, target in batches():
            with torch.autocast(DEVICE.type, dtype) if dtype else contextlib.nullcontext():
                output = call(inputs)
            loss = nn.functional.cross_entropy(output.float(), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach()
        synchronize()
        if epoch:
            speeds.append(task.num_rows / (time.perf_counter() - began))
    return {"rows/s": speeds, "loss": total.item() * task.batch / task.num_rows}


def resident(task: Task) -> Callable[[], Iterator[tuple[torch.Tensor, torch.Tensor]]]:
    """The same batch on the device again and again: training without any feeding."""
    both = tuple(torch.from_numpy(task.in_memory(i)[: task.batch].copy()) for i in range(2))
    inputs, target = both[0].to(DEVICE), both[1].to(DEVICE)
    return lambda: iter([(inputs, target)] * (task.num_rows // task.batch))


class WholeBatches(torch.utils.data.Dataset):
    """Rows by a list of their numbers, so that a DataLoader collates nothing."""

    def __init__(self, *columns: np.ndarray) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return len(self.columns[0])

    def __getitems__(self, rows: list[int]) -> tuple[torch.Tensor, ...]:
        """The rows of a batch."""
        return tuple(torch.from_numpy(column[rows]) for column in self.columns)


def itself(batch: Any) -> Any:
    """A batch that needs no collating."""
    return batch


def loaded(task: Task) -> Callable[[], Iterator[tuple[torch.Tensor, torch.Tensor]]]:
    """Shuffled rows from memory-mapped files by a DataLoader with workers and pinned memory."""
    loader = torch.utils.data.DataLoader(
        WholeBatches(task.in_memory(0), task.in_memory(1)), batch_size=task.batch, shuffle=True,
        num_workers=THREADS, pin_memory=DEVICE.type == "cuda", persistent_workers=True,
        collate_fn=itself,
    )  # fmt: skip

    def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for inputs, target in loader:
            yield inputs.to(DEVICE, non_blocking=True), target.to(DEVICE, non_blocking=True)

    return batches


def synchronize() -> None:
    """Wait for the device."""
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def compared(task: Task, *, is_compiled: bool = False) -> dict[str, Any]:
    """Both loops, eager or compiled."""
    found: dict[str, Any] = {"parameters": sum(p.numel() for p in seeded(task.make).parameters())}
    config = task.train_config(compile=is_compiled)
    runs: dict[str, Callable[[], dict[str, Any]]] = {
        "bare, batch on the device": lambda: bare(task, config, feeding="resident"),
        "bare, DataLoader": lambda: bare(task, config, feeding="DataLoader"),
        "sparkdl": lambda: fit(task, config),
    }
    for name, run in runs.items():
        began = time.perf_counter()
        found[name] = run()
        found[name]["whole seconds"] = time.perf_counter() - began
        found[name]["median"] = statistics.median(found[name]["rows/s"])
        print(f"{name}: {found[name]['median']:.5g} rows/s", flush=True)
        free()
    for other in ("batch on the device", "DataLoader"):
        found[f"sparkdl / bare, {other}"] = (
            found["sparkdl"]["median"] / found[f"bare, {other}"]["median"]
        )
    return found


def free() -> None:
    """Give back what the last run took of the device."""
    import gc

    gc.collect()
    torch._dynamo.reset()
    if DEVICE.type == "cuda":
        torch.cuda.empty_cache()


# --- sections ------------------------------------------------------------------------------------


def images() -> dict[str, Any]:
    """ResNet-50, bf16, channels last."""
    return compared(photographs())


def images_compiled() -> dict[str, Any]:
    """The same, compiled."""
    return compared(photographs(), is_compiled=True)


def text() -> dict[str, Any]:
    """A language model, bf16."""
    return compared(texts())


def text_compiled() -> dict[str, Any]:
    """The same, compiled."""
    return compared(texts(), is_compiled=True)


def small() -> dict[str, Any]:
    """The small network, float32: what the loop itself costs."""
    return compared(digits())


def small_compiled() -> dict[str, Any]:
    """The same, compiled."""
    return compared(digits(), is_compiled=True)


def feeding() -> dict[str, Any]:
    """From the page cache to the device, without training."""
    task, found = photographs(), {}
    config = task.train_config()
    plan = task.plan(config)
    size = sum(task.in_memory(i).nbytes for i in range(2))
    for is_pinned in (True, False):
        speeds = []
        for epoch in range(EPOCHS):
            began = time.perf_counter()
            batches = Batches(
                [MappedRows(task.shard(), plan)], plan, 0, seed=0, epoch=epoch,
                pin_memory=is_pinned and DEVICE.type == "cuda",
            )  # fmt: skip
            for batch in batches:
                batch.map(lambda value: value.to(DEVICE, non_blocking=True))
            synchronize()
            speeds.append(size / 1e9 / (time.perf_counter() - began))
        found["GB/s, pinned" if is_pinned else "GB/s, not pinned"] = statistics.median(speeds[1:])
    block = torch.empty(size // 8, dtype=torch.uint8, pin_memory=DEVICE.type == "cuda")
    there = torch.empty_like(block, device=DEVICE)
    synchronize()
    began = time.perf_counter()
    for _ in range(10):
        there.copy_(block, non_blocking=True)
    synchronize()
    found["GB/s, one pinned block again and again"] = (
        block.nbytes / 1e8 / (time.perf_counter() - began)
    )
    return found


def checkpoints() -> dict[str, Any]:
    """How long a checkpoint of the language model with AdamW holds up training."""
    from checkpoint import Keys

    from sparkdl.storage.checkpoint_format import Writer
    from sparkdl.storage.checkpoint_writer import CheckpointManager
    from sparkdl.storage.storage import open_storage

    task = texts()
    config = task.train_config(epochs=2)
    steps = task.num_rows // task.batch
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        manager = CheckpointManager(
            open_storage(folder), CheckpointConfig(interval=max(2, steps // 2)), rank=0,
            world_size=1, writer=Writer(run_key="benchmark", run_id="run", attempt=0),
            environment={}, signal=Keys(),
        )  # fmt: skip

        stalls = []
        save = manager.save

        def timed(*arguments: Any) -> None:
            manager.close()  # the one before is written, as where epochs take a minute
            synchronize()
            began = time.perf_counter()
            save(*arguments)
            stalls.append(time.perf_counter() - began)

        manager.save = timed  # type: ignore[method-assign]
        outcome = trained(task, config, checkpoints=manager)
        began = time.perf_counter()
        manager.close()
        found["seconds that the last write took after training"] = time.perf_counter() - began
        sizes = [path.stat().st_size for path in Path(folder).rglob("*") if path.is_file()]
        found["largest file GB"] = max(sizes) / 1e9
    found["stalls s"] = stalls
    found["epochs s"] = [record["seconds"] for record in outcome.history]
    return found


class Keeper:
    """Keeps the checkpoint of one step in memory."""

    def __init__(self, step: int) -> None:
        self.step, self.point = step, None

    def due(self, step: int) -> bool:
        """Whether this is the step."""
        return step == self.step

    def save(self, step: int, shared: dict[str, Any], rank_state: dict[str, Any]) -> None:
        """Keep a copy."""
        import copy

        from sparkdl.train.rank_state import ResumePoint

        point = ResumePoint(step=step, shared=shared, rank_state=rank_state)
        self.point = copy.deepcopy(point)


def resumed() -> dict[str, Any]:
    """Whether training that goes on from a checkpoint gives the same bits."""
    found = {}
    for name, task in (("ResNet-50", photographs(6)), ("text", texts(6))):
        for precision in ("bf16", "fp16", "fp32"):
            config = task.train_config(epochs=1, deterministic=True, precision=precision)
            whole, keeper = seeded(task.make), Keeper(2)
            trained(task, config, whole, checkpoints=keeper)
            again, other = seeded(task.make), seeded(task.make)
            trained(task, config, again, resume=keeper.point)
            trained(task, config, other)
            for what, module in (("resumed", again), ("a second run", other)):
                pairs = zip(whole.parameters(), module.parameters(), strict=True)
                found[f"{name}, {precision}, {what}: same bits"] = all(
                    torch.equal(a, b) for a, b in pairs
                )
            free()
    return found


class Line(nn.Module):
    """Two layers with a BatchNorm between, which a bias before it would not change.

    The gradient of such a bias is rounding alone, which Adam makes as large as any other.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(20, 64, bias=False), nn.BatchNorm1d(64), nn.Tanh(), nn.Linear(64, 5)
        )

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Logits of whole numbers below 256."""
        return self.layers(values.float() / 255 - 0.5)


class Words(Line):
    """A `Line` that looks its numbers up in a table of sparse gradients first."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(256, 1, sparse=True)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Logits of whole numbers below 256."""
        return super().forward(255 * self.table(values.long()).squeeze(-1))


class Frozen(Line):
    """A `Line` whose first layer is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[0].requires_grad_(False)


def lines(make: Callable[[], nn.Module] = Line, **config: Any) -> Task:
    """A small task, of which results can be compared."""
    columns = (
        Column(name="x", role="feature", dtype="uint8", shape=(20,)),
        Column(name="y", role="label", dtype="int64", shape=()),
    )
    return Task(make, columns, (256, 5), 32, 20, **config)


FORMS: dict[str, dict[str, Any]] = {
    "SGD": {"optimizer": "sgd", "optimizer_params": {"momentum": 0.9}, "learning_rate": 0.05},
    "Adam": {"optimizer": "adam"},
    "AdamW, clipped": {"optimizer": "adamw", "gradient_clip_norm": 0.1},
    "LARS": {"optimizer": "lars", "learning_rate": 0.5},
    "LAMB": {"optimizer": "lamb", "learning_rate": 0.01},
    "4 micro-batches": {"optimizer": "sgd", "gradient_accumulation_steps": 4},
    "bf16": {"optimizer": "sgd", "precision": "bf16", "learning_rate": 0.05},
    "fp16": {"optimizer": "sgd", "precision": "fp16", "learning_rate": 0.05},
    "fp16, clipped": {
        "optimizer": "sgd", "precision": "fp16", "learning_rate": 0.05, "gradient_clip_norm": 0.1,
    },
    "synchronized BatchNorm": {"optimizer": "sgd", "sync_batch_norm": True},
    "sparse gradients, SGD": {"make": Words, "optimizer": "sgd", "learning_rate": 0.05},
    "sparse gradients, Adagrad": {
        "make": Words, "optimizer": "adagrad", "learning_rate": 0.01,
    },
    "shards apart": {"optimizer": "sgd", "elasticity": "bits"},
    "compiled": {"optimizer": "sgd", "compile": True},
}  # fmt: skip


def formats() -> dict[str, Any]:
    """How far the weights after 40 steps lie from those of float32 on the CPU, relatively."""
    found = {}
    for name, form in FORMS.items():
        task = lines(**form)
        config = task.train_config(epochs=2)
        on_device, on_cpu = (seeded(task.make, torch.device("cpu")) for _ in range(2))
        trained(task, config, on_device)
        trained(
            task, task.train_config(epochs=2, precision="fp32", compile=False), on_cpu,
            device=torch.device("cpu"),
        )  # fmt: skip
        found[name] = distance(on_device, on_cpu)
    return found


def distance(one: nn.Module, other: nn.Module) -> float:
    """Norm of the difference of the weights over their norm."""
    return ((flattened(one) - flattened(other)).norm() / flattened(other).norm()).item()


def flattened(module: nn.Module) -> torch.Tensor:
    """All weights in a row, in float64 on the CPU."""
    return torch.cat([p.detach().cpu().double().flatten() for p in module.parameters()])


def gangs() -> dict[str, Any]:
    """One rank behind NCCL, and two that share the device behind gloo, against gangs on CPUs."""
    found: dict[str, Any] = {}
    cases = [("nccl", 1), ("gloo", 2)] if DEVICE.type == "cuda" else [("gloo", 2)]
    forms = {**FORMS, "int8": {"compression": "int8"}, "powersgd": {"compression": "powersgd"}}
    del forms["compiled"]
    for backend, world_size in cases:
        results = []
        for device, how in ((str(DEVICE), backend), ("cpu", "gloo")):
            with tempfile.TemporaryDirectory() as place:
                mp.spawn(gang_rank, (device, how, world_size, forms, place), nprocs=world_size)
                results.append(
                    [
                        [torch.load(Path(place, f"{number}-{i}")) for i in range(world_size)]
                        for number in range(len(forms))
                    ]
                )
        for name, ranks, (reference, *_) in zip(forms, *results, strict=True):
            title = f"{backend}, {world_size} ranks: {name}"
            if errors := [rank for rank in ranks if isinstance(rank, str)]:
                found[title] = errors[0]
                continue
            found[title] = {
                "distance": ((ranks[0] - reference).norm() / reference.norm()).item(),
                "ranks are equal": all(torch.equal(ranks[0], other) for other in ranks),
            }
    return found


def gang_rank(
    rank: int, device: str, backend: str, world_size: int, forms: dict[str, dict[str, Any]],
    place: str,
) -> None:  # fmt: skip
    """Train in a gang, form by form; the weights, or what went wrong, go to files."""
    from sparkdl.sync.gradients.allreduce import AllReduce

    store = torch.distributed.FileStore(f"{place}/store", world_size)
    with (
        torch_threads(1),
        process_group(
            backend=backend, store=store, rank=rank, world_size=world_size, timeout_seconds=30
        ),
    ):
        if device != "cpu":
            torch.cuda.set_device(0)
        for number, form in enumerate(forms.values()):
            options = dict(form)
            if "compression" in form:
                options["sync_strategy"] = AllReduce(compression=options.pop("compression"))
            comm = ProcessGroupCommunicator(device=device, timeout_seconds=30)
            result: torch.Tensor | str
            try:
                task = lines(**options)
                module = seeded(task.make, torch.device("cpu"))
                config = task.train_config(epochs=2)
                trained(task, config, module, comm=comm, device=torch.device(device))
                result = flattened(module)
            except Exception as error:  # the others shall be tried, too
                result = f"{type(error).__name__}: {error}"[:700]
            torch.save(result, Path(place, f"{number}-{rank}"))


def predictions() -> dict[str, Any]:
    """Rows per second of what a task of ``transform`` does with Arrow batches."""
    found: dict[str, Any] = {}
    rows = 2_000 if IS_TINY else 400_000
    values = np.random.default_rng(0).random((rows, 100), dtype=np.float32)
    flat = pa.array(values.reshape(-1))
    array = pa.FixedSizeListArray.from_arrays(flat, 100)
    column = Column(name="x", role="feature", dtype="float32", shape=(100,))
    found["linear"] = predicted(nn.Linear(100, 10), array, values, column, 4096)
    rows, side = (8, 32) if IS_TINY else (4096, 224)
    pixels = np.random.default_rng(0).integers(0, 256, (rows, 3, side, side), dtype=np.uint8)
    offsets = np.arange(rows + 1, dtype=np.int32) * np.int32(pixels[0].size)
    array = pa.BinaryArray.from_buffers(
        pa.binary(), rows, [None, pa.py_buffer(offsets), pa.py_buffer(pixels)]
    )
    column = Column(name="x", role="feature", dtype="uint8", shape=pixels.shape[1:])
    found["ResNet-50, float32"] = predicted(ResNet50ForPhotographs(), array, pixels, column, 256)
    return found


def predicted(
    module: nn.Module, array: pa.Array, values: np.ndarray, column: Column, batch: int
) -> dict[str, float]:
    """`predict` beside a plain loop that copies, computes and copies back."""
    from sparkdl.inference.outputs import Forward, Output
    from sparkdl.inference.predict import Leaf, PredictTask, predict
    from sparkdl.serialization.travel.packed_module import pack

    packed = pack(module)
    task = PredictTask(
        digest=packed.digest, fetch=lambda: packed, columns=(column,), batch_size=batch,
        device=DEVICE.type, forward=Forward(),
        leaves=(Leaf(name="x", output=Output(), make="class", arrow_type=pa.float64()),),
    )  # fmt: skip
    size = 10_000 if array.type != pa.binary() else 1000  # rows that Spark hands over at once
    parts = [[array.slice(start, size)] for start in range(0, len(array), size)]

    def ours() -> np.ndarray:
        pieces = list(predict(iter(parts), task))
        return np.concatenate([p.field(0).to_numpy(zero_copy_only=False) for p in pieces])

    there = module.eval().to(DEVICE)

    def plainly() -> np.ndarray:
        found = []
        with torch.inference_mode():
            for start in range(0, len(values), batch):
                inputs = torch.from_numpy(values[start : start + batch]).to(DEVICE)
                found.append(there(inputs).argmax(1).double().cpu())
        return torch.cat(found).numpy()

    speeds: dict[str, list[float]] = {"predict rows/s": [], "plain rows/s": []}
    with torch_threads(THREADS):
        for _ in range(4):
            for name, run in (("predict rows/s", ours), ("plain rows/s", plainly)):
                began = time.perf_counter()
                result = run()
                speeds[name].append(len(values) / (time.perf_counter() - began))
        agree = float((ours() == result).mean())
    medians = {name: statistics.median(found[1:]) for name, found in speeds.items()}
    ratio = medians["predict rows/s"] / medians["plain rows/s"]
    return {**medians, "predict / plain": ratio, "share of equal classes": agree}


def memory() -> dict[str, Any]:
    """What `explain` says that a worker keeps on the device, and what it does keep."""
    from sparkdl.explain.mesh_memory import mesh_memory, state_sizes
    from sparkdl.explain.trials import forget_peak, peak_bytes, used_bytes
    from sparkdl.train.callbacks import Callback, CallbackState

    found: dict[str, Any] = {}

    class Look(Callback):
        def on_step_end(self, state: CallbackState) -> None:
            found["kept GB after a step"] = used_bytes(DEVICE) / 1e9

    task = texts()
    config = task.train_config(epochs=1, callbacks=(Look(),))
    module = seeded(task.make)
    optimizer = torch.optim.AdamW(module.parameters())
    plan = mesh_memory(module, state_sizes(optimizer, module), None)
    del optimizer
    free()
    if DEVICE.type == "cuda":
        forget_peak(DEVICE)
    trained(task, config, module)
    found["kept GB by plan"] = plan.kept_bytes / 1e9
    found["peak GB"] = peak_bytes(DEVICE) / 1e9
    found["kept / plan"] = found["kept GB after a step"] / found["kept GB by plan"]
    return found


def meshes() -> dict[str, Any]:
    """Two ranks that share the device and divide a model, against one that has it whole."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as place:
        mp.spawn(mesh_rank, (place,), nprocs=2)
        for path in sorted(Path(place).glob("*.json")):
            found[path.stem] = json.loads(path.read_text())
    return found


def mesh_rank(rank: int, place: str) -> None:
    """Train along meshes of two workers."""
    from sparkdl import Mesh

    store = torch.distributed.FileStore(f"{place}/store", 2)
    with (
        torch_threads(1),
        process_group(backend="gloo", store=store, rank=rank, world_size=2, timeout_seconds=60),
    ):
        if DEVICE.type == "cuda":
            torch.cuda.set_device(0)
        cases = {
            "none": (Line, None), "shard": (Line, Mesh(shard=2)),
            "frozen, none": (Frozen, None), "frozen, shard": (Frozen, Mesh(shard=2)),
        }  # fmt: skip
        for name, (make, mesh) in cases.items():
            task = lines(make, optimizer="adamw")
            config = task.train_config(epochs=2, parallelism=mesh)
            comm = ProcessGroupCommunicator(device=str(DEVICE), timeout_seconds=60)
            outcome = trained(task, config, comm=comm)
            losses = [record["loss"] for record in outcome.history]
            (Path(place) / f"{name} {rank}.json").write_text(json.dumps(losses))


def mistakes() -> dict[str, Any]:
    """What is said where a device does not exist, has too little memory, or has no driver."""
    found = {}

    def said(name: str, work: Callable[[], object]) -> None:
        try:
            work()
            found[name] = "no error"
        except (SparkDLError, RuntimeError) as error:
            found[name] = f"{type(error).__name__}: {error}"

    said("a device that does not exist", lambda: choose_device("cuda", ["7"], 0, {}))
    task = texts()
    if DEVICE.type == "cuda":
        torch.cuda.set_per_process_memory_fraction(0.1)
    said("out of memory", lambda: trained(task, task.train_config(epochs=1)))
    code = "from sparkdl.runtime.hardware import choose_device; choose_device('cuda', ['0'], 0, {})"
    hidden = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-c", code], env=hidden, capture_output=True, text=True, check=False
    )
    found["no visible device"] = done.stderr.splitlines()[-1] if done.stderr else "no error"
    return found


def profile() -> dict[str, Any]:
    """For how much of the time the device computes, and what the host does meanwhile."""
    found: dict[str, Any] = {}
    import cProfile
    import pstats

    from torch.profiler import ProfilerActivity

    for name, task in (("ResNet-50", photographs()), ("small", digits())):
        config = task.train_config(epochs=1)
        trained(task, config)
        calls = cProfile.Profile()
        calls.runcall(trained, task, config)
        functions = sorted(pstats.Stats(calls).stats.items(), key=lambda item: -item[1][2])  # type: ignore[attr-defined]
        activities = [ProfilerActivity.CPU]
        if DEVICE.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        with torch.profiler.profile(activities=activities) as profiler:
            outcome = trained(task, config)
        events = profiler.key_averages()
        of_device = sum(event.self_device_time_total for event in events) / 1e6
        found[name] = {
            "epoch s": outcome.history[0]["seconds"],
            "device s": of_device,
            "by the clock": outcome.seconds,
            "calls and own seconds of functions": {
                f"{Path(file).name}:{line} {function}": (numbers[1], numbers[2])
                for (file, line, function), numbers in functions[:40]
            },
            "host": {
                event.key: event.self_cpu_time_total / 1e6
                for event in sorted(events, key=lambda e: -e.self_cpu_time_total)[:30]
            },
        }
    return found


SECTIONS = {
    section.__name__: section
    for section in (
        mistakes, formats, gangs, meshes, resumed, memory, small, images, text, feeding,
        checkpoints, predictions, profile, small_compiled, images_compiled, text_compiled,
    )
}  # fmt: skip


def main() -> None:
    """Run each section in a process of its own, and write one JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--sections", default=",".join(SECTIONS), help="which, with commas between")
    parser.add_argument("--output", type=Path, default=common.HERE / "results")
    parser.add_argument("--limit", type=int, default=LIMIT_SECONDS, help="seconds of a section")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        with tuned_allocator(), torch_threads(THREADS):
            print(json.dumps(SECTIONS[options.one]()))
        return
    options.output.mkdir(parents=True, exist_ok=True)
    path = options.output / "gpu.json"
    report: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    report |= {"device": hardware(DEVICE), **common.environment()}
    for name in options.sections.split(","):
        began = time.perf_counter()
        command = [sys.executable, "-W", "ignore", __file__, "--one", name]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=options.limit, check=False
            )
            lines_of = done.stdout.splitlines()
            report[name] = (
                json.loads(lines_of[-1]) if done.returncode == 0
                else {"failed": done.stderr[-3000:], "before": lines_of[-12:]}
            )  # fmt: skip
        except subprocess.TimeoutExpired as error:
            before = (error.stdout or b"").decode(errors="replace")
            told = (error.stderr or b"").decode(errors="replace")
            report[name] = {"failed": f"took over {options.limit} s", "before": before[-800:],
                            "errors": told[-1500:]}  # fmt: skip
        except json.JSONDecodeError:
            report[name] = {"failed": traceback.format_exc(), "before": done.stdout[-800:]}
        seconds = time.perf_counter() - began
        print(f"== {name}, {seconds:.0f} s\n{json.dumps(report[name], indent=1)}", flush=True)
        path.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
