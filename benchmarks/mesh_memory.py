"""Does a model train on two workers that no one of them could hold?

The weights are 1.5 GB, with gradients and Adam's state 6 GB, and each of two processes may have
4 GB, in a control group of its own (cgroup v1, needs root). One process does what the driver does
until workers have the module. Without a mesh the fit is refused, with the mesh that is used here.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import common
import torch
import torch.distributed as dist
from common import Measurements
from torch import nn

from sparkdl import AllReduce, ClusterError, Mesh
from sparkdl.comm.communicator import ProcessGroupCommunicator
from sparkdl.comm.process_group import process_group
from sparkdl.config import TrainConfig
from sparkdl.data.plan import Column, Shard, make_plan
from sparkdl.data.spool.mapped import MappedRows, ShardData
from sparkdl.inference.regression import REGRESSION
from sparkdl.runtime.process import tuned_allocator
from sparkdl.serialization.recorded.recording import recorded
from sparkdl.serialization.travel.packed_module import PackedModule, pack
from sparkdl.spark.fit.check_mesh import check_worker_memory
from sparkdl.train.callbacks import NullObserver
from sparkdl.train.loop import train
from sparkdl.worker.divided.sent_weights import MadeWeights

LAYER_WIDTH = 2048
"""So that a layer has 16 MB."""
RANKS, ROWS, FEATURES = 2, 8, 4
GROUPS = Path("/sys/fs/cgroup/memory")


class Large(nn.Module):
    """Layers of equal size, one after the other, each with a way around it."""

    def __init__(self, megabytes: int) -> None:
        super().__init__()
        depth = round(megabytes * 1e6 / (4 * LAYER_WIDTH * (LAYER_WIDTH + 1)))
        self.first = nn.Linear(FEATURES, LAYER_WIDTH)
        self.layers = nn.ModuleList(nn.Linear(LAYER_WIDTH, LAYER_WIDTH) for _ in range(depth))
        self.last = nn.Linear(LAYER_WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One number per row."""
        x = self.first(x)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.last(x)


def main() -> None:
    """Measure."""
    options = common.arguments(
        1,
        megabytes=(1500, "weights of the model"),
        limit=(4000, "MB that a worker may have"),
        steps=(2, "steps of the fit"),
    )
    measured, mesh = Measurements(), Mesh(shard=RANKS)
    with torch.device("meta"):
        blank = Large(options.megabytes)
    alone = config(options.steps, None)
    granted = f"{options.limit * 10**6 // 1024}k"
    try:
        check_worker_memory(blank, alone, "spark://host", {MEMORY: granted}.get, RANKS)
    except ClusterError as error:
        refusal = str(error)
    assert f"set parallelism=Mesh({mesh})" in refusal, refusal
    print(refusal)
    check_worker_memory(
        blank, config(options.steps, mesh), "spark://host", {MEMORY: granted}.get, RANKS
    )
    for _ in range(options.runs):
        with tempfile.TemporaryDirectory() as folder:
            driver = found_by([start("driver", folder, options)])[0]
            began = time.perf_counter()
            ranks = found_by([start(str(rank), folder, options) for rank in range(RANKS)])
            measured.add("seconds of the workers", time.perf_counter() - began)
        measured.add("driver: memory at most, GB", driver["most"] / 1e9)
        for rank, found in enumerate(ranks):
            measured.add(f"rank {rank}: its weights, GB", found["own"] / 1e9)
            measured.add(f"rank {rank}: memory at most, GB", found["most"] / 1e9)
    measured.report("mesh_memory", options)


MEMORY = "spark.executor.pyspark.memory"


def start(role: str, folder: str, options: Any) -> subprocess.Popen[str]:
    """A process of this program with a role."""
    values = [str(getattr(options, name)) for name in ("megabytes", "limit", "steps")]
    command = [sys.executable, __file__, "--as", role, folder, *values]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def found_by(processes: list[subprocess.Popen[str]]) -> list[dict[str, Any]]:
    """What the processes print last; all of them must succeed."""
    outputs = [process.communicate()[0] for process in processes]
    assert not any(process.returncode for process in processes), outputs
    return [json.loads(output.splitlines()[-1]) for output in outputs]


def config(steps: int, mesh: Mesh | None) -> TrainConfig:
    """How to train."""
    return TrainConfig(
        task=REGRESSION, loss="mse", optimizer="adam", learning_rate=1e-4, batch_size=4,
        epochs=steps, device="cpu", parallelism=mesh, sync_strategy=AllReduce(), seed=1,
    )  # fmt: skip


def as_role(role: str, folder: Path, megabytes: int, limit: int, steps: int) -> None:
    """Do what the driver or a rank does, in a control group, and print what it took."""
    group = GROUPS / f"sparkdl-{os.getpid()}"
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(str(limit * 10**6))
        (group / "cgroup.procs").write_text(str(os.getpid()))
        if role == "driver":
            torch.manual_seed(1)
            packed = pack(*recorded(lambda: Large(megabytes)))
            (folder / "packed").write_bytes(
                pickle.dumps((packed.skeleton, packed.tensors, packed.recipe))
            )
            own = 0
        else:
            skeleton, tensors, recipe = pickle.loads((folder / "packed").read_bytes())
            packed = PackedModule(digest="", skeleton=skeleton, tensors=tensors, recipe=recipe)
            with tuned_allocator(spares_memory=True):  # as workers of a mesh have it
                own = trained_on_rank(int(role), folder, packed, steps)
        text = Path("/proc/self/status").read_text()
        most = re.search(r"^VmHWM:\s+(\d+) kB$", text, re.MULTILINE)
        assert most is not None
        print(json.dumps({"most": int(most[1]) * 1024, "own": own}))
    finally:
        (GROUPS / "cgroup.procs").write_text(str(os.getpid()))  # all its threads
        group.rmdir()


def trained_on_rank(rank: int, folder: Path, packed: PackedModule, steps: int) -> int:
    """Train a rank's part of the module; returns the bytes of its weights."""
    mesh = Mesh(shard=RANKS)
    with process_group(
        backend="gloo", store=dist.FileStore(str(folder / "store"), RANKS), rank=rank,
        world_size=RANKS, timeout_seconds=600, address="127.0.0.1",
    ):  # fmt: skip
        comm = ProcessGroupCommunicator(nodes=range(RANKS), timeout_seconds=600)
        unfilled = MadeWeights(packed.skeleton, packed.tensors, packed.recipe, comm)
        module: Any = unfilled.module
        shards = [
            Shard(shard_id=n, num_rows=ROWS, num_validation_rows=0, fingerprint=str(n))
            for n in range(RANKS)
        ]
        columns = (
            Column(name="x", role="feature", dtype="float32", shape=(FEATURES,)),
            Column(name="y", role="label", dtype="float32", shape=(1,)),
        )
        options = config(steps, mesh)
        plan = make_plan(
            columns=columns, shards=shards, world_size=RANKS, batch_size=ROWS, epochs=steps,
            max_steps=-1,
        )  # fmt: skip
        data = ShardData(
            str(rank), {"feature x": torch.rand(ROWS, FEATURES), "label y": torch.rand(ROWS, 1)}
        )
        none = {key: values[:0] for key, values in data.columns.items()}
        cpu = torch.device("cpu")
        outcome = train(
            module=module, config=options, plan=plan, shards=[MappedRows(data, plan)],
            validation=[MappedRows(ShardData("none", none), plan)],
            comm=comm, device=cpu, checkpoints=None, resume=None, observer=NullObserver(),
            fill=lambda divided, regions: unfilled.fill(divided, regions, cpu),
        )  # fmt: skip
        assert outcome.steps == steps, outcome.steps
        return sum(parameter.to_local().nbytes for parameter in module.parameters())


if __name__ == "__main__":
    if sys.argv[1:2] == ["--as"]:
        place, *numbers = sys.argv[3:]
        as_role(sys.argv[2], Path(place), *map(int, numbers))
    else:
        main()
