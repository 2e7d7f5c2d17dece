"""One of the two workers of ``strategies.py``: trains with every strategy in turn."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import common  # noqa: F401  # sets the number of threads before torch is imported
import numpy as np
import torch
import torch.distributed as dist
import torchmetrics
from strategy_table import STRATEGIES, Contender
from torch import nn

from sparkdl.comm.certificates import Certificate
from sparkdl.comm.communicator import ProcessGroupCommunicator
from sparkdl.comm.process_group import process_group
from sparkdl.config import TrainConfig
from sparkdl.data.plan import Column, Shard, make_plan
from sparkdl.data.spool.mapped import MappedRows, ShardData
from sparkdl.inference.classification import CLASSIFICATION
from sparkdl.train.callbacks import NullObserver
from sparkdl.train.loop import train

BATCH = 32


class Reached(Exception):
    """The accuracy is reached; raised on both ranks at the end of the same epoch."""


class Watch(NullObserver):
    """Takes the time of training, without evaluation, until the accuracy is reached."""

    def __init__(self, accuracy: float) -> None:
        self.best = 0.0
        self.epochs = 0
        self.steps = 0
        self.seconds = 0.0
        self._accuracy = accuracy
        self._began = time.perf_counter()

    def step(self, *, epoch: int, step: int, loss: float, rows: int) -> None:
        """Note the number of steps."""
        self.steps = step

    def phase(self, name: str) -> None:
        """Stop the clock during evaluation."""
        now = time.perf_counter()
        if name == "train":
            self._began = now
        elif name == "evaluate":
            self.seconds += now - self._began

    def epoch(self, record: Mapping[str, float]) -> None:
        """Look at the accuracy, which is the same on both ranks."""
        self.epochs = int(record["epoch"])
        self.best = max(self.best, record["val_accuracy"])
        if self.best >= self._accuracy:
            raise Reached


def main(rank: int, address: str, device: str, place: str, options: dict) -> None:
    """Train with all strategies; rank 0 writes what was found."""
    found = []
    with process_group(
        backend="gloo",
        store=dist.FileStore(f"{place}/store", 2),
        rank=rank,
        world_size=2,
        timeout_seconds=600,
        address=address,
    ):
        for name, contender in STRATEGIES.items():
            if options["strategies"] and name not in options["strategies"]:
                continue
            comm = ProcessGroupCommunicator(
                nodes=(0, 1),
                address=address,
                certificate=Certificate(**options["certificate"]),
            )
            runs = [
                one_run(comm, contender, device, options, seed) for seed in range(options["runs"])
            ]
            found.append({"strategy": name, **middle(runs)})
    if rank == 0:
        Path(place, "found.json").write_text(json.dumps(found))


def middle(runs: list[dict]) -> dict:
    """Medians over the runs; the accuracy counts as reached if most runs reached it."""
    reached = [run for run in runs if run["seconds"] is not None]
    best = statistics.median(run["best"] for run in runs)
    if 2 * len(reached) <= len(runs):
        return {
            "seconds": None,
            "epochs": None,
            "bytes": None,
            "bytes_per_step": None,
            "best": best,
        }
    return {
        "best": best,
        **{
            key: statistics.median(run[key] for run in reached)
            for key in ("seconds", "epochs", "bytes", "bytes_per_step")
        },
    }


def one_run(comm, contender: Contender, device: str, options: dict, seed: int) -> dict:
    """Train once, until the accuracy is reached."""
    shards, validation = digits()
    torch.manual_seed(seed)
    width = options["width"]
    module = nn.Sequential(
        nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)
    )
    config = TrainConfig(
        task=CLASSIFICATION,
        loss="cross_entropy",
        batch_size=BATCH,
        epochs=options["epochs"],
        seed=seed,
        sync_strategy=contender.strategy,
        metrics={"accuracy": torchmetrics.classification.MulticlassAccuracy(10, average="micro")},
        **contender.optimizer,
    )
    plan = plan_of(shards, validation, config)
    watch = Watch(options["accuracy"])
    comm.barrier()
    sent = sent_by(device)
    try:
        train(
            module=module, config=config, plan=plan, shards=[MappedRows(shards[comm.rank], plan)],
            validation=[MappedRows(validation[comm.rank], plan)], comm=comm,
            device=torch.device("cpu"), checkpoints=None, resume=None, observer=watch,
        )  # fmt: skip
        seconds = None
    except Reached:
        seconds = watch.seconds
    comm.barrier()
    sent = sent_by(device) - sent
    return {
        "seconds": seconds,
        "epochs": watch.epochs,
        "bytes": sent,
        "bytes_per_step": sent / max(1, watch.steps),
        "best": watch.best,
    }


def sent_by(device: str) -> int:
    """Bytes that the interface has sent."""
    return int(Path(f"/sys/class/net/{device}/statistics/tx_bytes").read_text())


def digits() -> tuple[list[ShardData], list[ShardData]]:
    """Two halves of the digits for training, two for validation."""
    from sklearn.datasets import load_digits

    features, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    x = torch.from_numpy(features[order] / 16).float()
    y = torch.from_numpy(labels[order]).long()
    parts = {"train": range(0, 1440), "validation": range(1440, 1797)}
    halves = {
        name: [
            ShardData(f"{name} {half}", {"feature x": x[rows.start :][half : len(rows) : 2],
                                         "label y": y[rows.start :][half : len(rows) : 2]})
            for half in (0, 1)
        ]
        for name, rows in parts.items()
    }  # fmt: skip
    return halves["train"], halves["validation"]


def plan_of(shards, validation, config):
    """The plan of a run of two ranks."""
    table = [
        Shard(
            shard_id=i, host="", path="", num_rows=shard.num_rows,
            num_validation_rows=validation[i].num_rows, fingerprint=shard.fingerprint, num_bytes=0,
        )
        for i, shard in enumerate(shards)
    ]  # fmt: skip
    columns = [
        Column(name="x", role="feature", dtype="float32", shape=(64,)),
        Column(name="y", role="label", dtype="int64", shape=()),
    ]
    return make_plan(
        columns=columns, shards=table, world_size=2, batch_size=BATCH, epochs=config.epochs
    )


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4], json.loads(sys.argv[5]))
