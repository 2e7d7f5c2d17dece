"""What does a `Mesh` cost? Its steps and memory, and those of plain scripts with the same calls.

Both sides train the same network on as many processes with the same division, each process with
one thread: `fully_shard`, `parallelize_module` and torch's pipeline schedules. They are started
together by torchrun, and train an epoch each in turn while the other sleeps, so that a slow moment
of the machine affects both. Run as a rank, this script is sparkdl's side.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import common
import torch
import torch.distributed as dist
from common import HERE, Measurements
from mesh_plain import LENGTH, RATE, Task, Turns, live_bytes, write
from networks_ddp import reset_peak_memory

from sparkdl.comm.communicator import ProcessGroupCommunicator
from sparkdl.config import CUSTOM, TrainConfig
from sparkdl.data.plan import Column, Shard, make_plan
from sparkdl.data.spool.mapped import MappedRows, ShardData
from sparkdl.mesh import Mesh
from sparkdl.runtime.process import torch_threads, tuned_allocator
from sparkdl.train.callbacks import Callback, CallbackState, NullObserver
from sparkdl.train.loop import train

MESHES: tuple[dict[str, int], ...] = (
    {"shard": 2},
    {"tensor": 2},
    {"pipeline": 2},
    {"shard": 4},
    {"data": 2, "shard": 2},
    {"shard": 2, "tensor": 2},
)
SIDES = {"plain": "mesh_plain.py", "sparkdl": "mesh.py"}


def main() -> None:
    """Measure each mesh, and print the table."""
    parser = common.parser(
        7,
        steps=(8, "steps of an epoch"),
        batch=(8, "rows of a step, of each worker that has rows of its own"),
        width=(256, "of the network's vectors"),
    )
    parser.add_argument("--only", default="", help="one mesh, such as shard=2,tensor=2")
    options = parser.parse_args()
    found = Measurements()
    lines = []
    only = dict(pair.split("=") for pair in options.only.split(",") if pair)
    chosen = [{name: int(size) for name, size in only.items()}] if only else MESHES
    for axes in chosen:
        task = Task(
            **axes,
            batch=options.batch * axes.get("tensor", 1) * axes.get("pipeline", 1),
            steps=options.steps,
            epochs=options.runs + 1,
            width=options.width,
        )
        common.wait_until_idle(options.patience)
        lines.append(compare(task, found))
        print(*lines[-1], sep="  ", flush=True)
    head = ["mesh", "plain, steps/s", "sparkdl / plain", "CPU time, sparkdl / plain"]
    head += [f"{what} MB, {side}" for what in ("peak", "tensors") for side in SIDES]
    print(common.table(head, lines))
    found.report("mesh", options)


def compare(task: Task, found: Measurements) -> list[str]:
    """Both sides of one mesh; a line of the table."""
    with tempfile.TemporaryDirectory() as folder:
        running = {
            side: subprocess.Popen(torchrun(task, script, folder)) for side, script in SIDES.items()
        }
        try:
            for side, process in running.items():
                if process.wait(600):
                    raise RuntimeError(f"{task.name}: {side} failed; see above")
        finally:
            for process in running.values():
                process.terminate()
        ranks = {side: read(folder, side, task.workers) for side in SIDES}
    for side, each in ranks.items():
        for seconds in each[0]["seconds"][1:]:
            found.add(f"{task.name}: {side} steps/s", task.steps / seconds)
        for cpu in zip(*(rank["cpu"][1:] for rank in each), strict=True):
            found.add(f"{task.name}: {side} CPU s per step", sum(cpu) / task.steps)
        for what in ("peak", "live"):
            most = max(rank[what] for rank in each)
            found.add(f"{task.name}: {side} {what} MB", most / 1e6)
    ratio = f"{task.name}: sparkdl / plain, speed"
    found.ratio(ratio, f"{task.name}: sparkdl steps/s", f"{task.name}: plain steps/s")
    cpu = f"{task.name}: sparkdl / plain, CPU time"
    found.ratio(cpu, f"{task.name}: sparkdl CPU s per step", f"{task.name}: plain CPU s per step")
    numbers = [found.median(name) for name in (f"{task.name}: plain steps/s", ratio, cpu)]
    numbers += [found.median(f"{task.name}: {side} {what} MB")
                for what in ("peak", "live") for side in SIDES]  # fmt: skip
    return [
        task.name,
        f"{numbers[0]:.2f}",
        *(f"{n:.3f}" for n in numbers[1:3]),
        *(f"{n:.1f}" for n in numbers[3:]),
    ]


def torchrun(task: Task, script: str, folder: str) -> list[str]:
    """The command of one side."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(task.workers), "--local-addr", "127.0.0.1"]
    return [*command, str(HERE / script), task.to_json(), folder]


def read(folder: str, side: str, workers: int) -> list[Mapping]:
    """What the ranks of a side have written."""
    files = [Path(folder, f"{side}-rank{rank}.json") for rank in range(workers)]
    return [json.loads(file.read_text()) for file in files]


@dataclass
class InTurn(Callback):
    """Waits for the other side between epochs, and counts memory at the end."""

    turns: Turns
    epochs: int
    live: int = 0
    cpu: list[float] = field(default_factory=list)
    """Seconds of each epoch."""

    def on_train_begin(self, state: CallbackState) -> None:
        """Begin to measure."""
        reset_peak_memory()
        self.turns.wait(0)
        self._before = time.process_time()

    def on_epoch_end(self, state: CallbackState, record: Mapping[str, float]) -> None:
        """The epoch's seconds are in the record already."""
        epoch = int(record["epoch"])
        self.cpu.append(time.process_time() - self._before)
        if epoch == self.epochs:
            self.live = live_bytes()
        self.turns.end(epoch - 1)
        if epoch < self.epochs:
            self.turns.wait(epoch)
        self._before = time.process_time()


def train_as_rank(task: Task, folder: str) -> None:
    """One worker of sparkdl's side."""
    with contextlib.ExitStack() as stack:
        dist.init_process_group("gloo")
        comm = ProcessGroupCommunicator()
        stack.callback(dist.destroy_process_group)
        stack.enter_context(tuned_allocator())
        stack.enter_context(torch_threads(1))
        pipeline = {"micro_batches": task.micro_batches} if task.pipeline > 1 else {}
        mesh = Mesh(**task.axes, **pipeline)
        turns = InTurn(Turns(folder, "sparkdl", "plain", comm.rank), task.epochs)
        config = TrainConfig(
            task=CUSTOM,
            loss="cross_entropy",
            optimizer="adamw",
            optimizer_params={"fused": True},
            learning_rate=RATE,
            batch_size=task.batch,
            epochs=task.epochs,
            parallelism=mesh,
            callbacks=(turns,),
        )
        held = []
        for reader in range(task.readers):
            inputs, labels = task.rows(reader)
            held.append(ShardData(str(reader), {"feature x": inputs, "label y": labels}))
        plan = make_plan(
            columns=[
                Column(name="x", role="feature", dtype="int64", shape=(LENGTH,)),
                Column(name="y", role="label", dtype="int64", shape=(LENGTH,)),
            ],
            shards=[table_row(number, data) for number, data in enumerate(held)],
            world_size=mesh.num_readers,
            batch_size=task.batch,
            epochs=task.epochs,
        )
        own = plan.shards_of(mesh.reader(comm.rank))
        outcome = train(
            module=task.net(),
            config=config,
            plan=plan,
            shards=[MappedRows(held[shard.shard_id], plan) for shard in own],
            validation=[],
            comm=comm,
            device=torch.device("cpu"),
            checkpoints=None,
            resume=None,
            observer=NullObserver(),
        )
        assert outcome.steps == task.steps * task.epochs
        seconds = [record["seconds"] for record in outcome.history]
        write(folder, "sparkdl", comm.rank, seconds, turns.cpu, turns.live)


def table_row(number: int, data: ShardData) -> Shard:
    """What the shard table says of a reader's rows."""
    return Shard(
        shard_id=number,
        host="",
        path="",
        num_rows=data.num_rows,
        num_validation_rows=0,
        fingerprint=data.fingerprint,
        num_bytes=0,
    )


if __name__ == "__main__":
    if len(sys.argv) == 3 and sys.argv[1].startswith("{"):
        train_as_rank(Task(**json.loads(sys.argv[1])), sys.argv[2])
    else:
        main()
