"""What does ``elasticity="bits"`` cost? Against the default, with two workers and four shards.

With "bits" a worker makes a pass for each of its two shards where the default joins their rows in
one batch, and sums travel as messages, without shared memory and after the backward pass.
"""

from __future__ import annotations

import itertools
import statistics

import common
import torch
from common import CLASSES, PIXELS, Measurements, SmallCNN
from pair import WORLD_SIZE, run_pairs
from torch import nn

from sparkdl.comm.communicator import ProcessGroupCommunicator
from sparkdl.config import ELASTICITIES, TrainConfig
from sparkdl.data.plan import Column, Shard, make_plan
from sparkdl.data.spool.mapped import MappedRows, ShardData
from sparkdl.inference.classification import CLASSIFICATION
from sparkdl.train.callbacks import NullObserver
from sparkdl.train.loop import train

SHARDS, BATCH, STEPS, REPEATS = 4, 32, 40, 3


def main() -> None:
    """Measure, several times in turn."""
    options = common.arguments(3)
    found = Measurements()
    run_pairs(measure, options, found)
    for name in NETS:
        found.ratio(f"{name}, bits / rounding", f"{name}, bits, ms", f"{name}, rounding, ms")
    found.report("elasticity", options)


def measure(comm: ProcessGroupCommunicator) -> dict[str, float]:
    """Seconds of a step by network and elasticity."""
    found: dict[str, list[float]] = {}
    for name, make in NETS.items():
        for repeat in range(REPEATS + 1):
            for elasticity in ELASTICITIES:
                torch.manual_seed(0)
                seconds = step_seconds(comm, make(), elasticity)
                if repeat:  # the first one warms up
                    found.setdefault(f"{name}, {elasticity}", []).append(seconds)
    return {name: statistics.median(values) for name, values in found.items()}


def step_seconds(comm: ProcessGroupCommunicator, module: nn.Module, elasticity: str) -> float:
    """The mean over one epoch."""
    generator = torch.Generator().manual_seed(1)
    data = [
        ShardData(
            str(number),
            {
                "feature image": torch.randint(
                    0, 256, (STEPS * BATCH, PIXELS), dtype=torch.uint8, generator=generator
                ),
                "label label": torch.randint(0, CLASSES, (STEPS * BATCH,), generator=generator),
            },
        )
        for number in range(SHARDS)
    ]
    config = TrainConfig(
        task=CLASSIFICATION,
        loss="cross_entropy",
        optimizer="sgd",
        optimizer_params={"momentum": 0.9},
        learning_rate=0.001,
        batch_size=BATCH,
        metrics={},
        elasticity=elasticity,
    )
    plan = make_plan(
        columns=[
            Column(name="image", role="feature", dtype="uint8", shape=(PIXELS,)),
            Column(name="label", role="label", dtype="int64", shape=()),
        ],
        shards=[
            Shard(
                shard_id=number,
                num_rows=shard.num_rows,
                num_validation_rows=0,
                fingerprint=shard.fingerprint,
            )
            for number, shard in enumerate(data)
        ],
        world_size=WORLD_SIZE,
        batch_size=BATCH,
        epochs=1,
    )
    outcome = train(
        module=module,
        config=config,
        plan=plan,
        shards=[MappedRows(data[shard.shard_id], plan) for shard in plan.shards_of(comm.rank)],
        validation=[],
        comm=comm,
        device=torch.device("cpu"),
        checkpoints=None,
        resume=None,
        observer=NullObserver(),
    )
    return outcome.history[-1]["seconds"] / outcome.steps


def dense(*sizes: int) -> nn.Module:
    """Linear layers between ``sizes``, of pixels that are floats from 0 to 1."""
    layers: list[nn.Module] = [Scaled()]
    for size, following in itertools.pairwise(sizes):
        layers += [nn.Linear(size, following), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class Scaled(nn.Module):
    """Bytes as floats."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """``(batch, pixels)``, from 0 to 1."""
        return images.float() / 255


NETS = {
    "small, 51 thousand parameters": lambda: dense(PIXELS, 64, CLASSES),
    "convolutions, 20 thousand": SmallCNN,
    "wide, 5.8 million": lambda: dense(PIXELS, 2048, 2048, CLASSES),
}


if __name__ == "__main__":
    main()
