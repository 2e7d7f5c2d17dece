"""What do the training tests share? Small data, plans, and one call that trains on them."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from sparkdl.comm.communicator import Communicator, LocalCommunicator
from sparkdl.config import Looks, Task, TrainConfig
from sparkdl.data.plan import Column, Shard, TrainPlan, make_plan
from sparkdl.data.spool.mapped import MappedRows, ShardData
from sparkdl.inference.regression import REGRESSION
from sparkdl.serialization.travel.attributes import Attributes
from sparkdl.serialization.travel.shared_values import SharedValue
from sparkdl.train.callbacks import NullObserver
from sparkdl.train.loop import TrainOutcome, train
from sparkdl.train.objective.part import Part
from sparkdl.train.rank_state import ResumePoint

NUM_FEATURES = 4


def make_data(
    rows: Sequence[int], *, task: Task = REGRESSION, dtype: torch.dtype = torch.float64
) -> list[ShardData]:
    """One shard per entry of ``rows``, with columns x, y and w; equal in every process."""
    generator = torch.Generator().manual_seed(17)
    shards = []
    for shard_id, num_rows in enumerate(rows):
        x = torch.randn(num_rows, NUM_FEATURES, generator=generator, dtype=dtype)
        noise = torch.randn(num_rows, generator=generator, dtype=dtype)
        y = x.sum(1) + noise if task == REGRESSION else (x[:, :3].argmax(1))
        w = torch.rand(num_rows, generator=generator, dtype=dtype) + 0.25
        shards.append(ShardData(f"shard {shard_id}", {"feature x": x, "label y": y, "weight w": w}))
    return shards


def plan_for(
    shards: Sequence[ShardData],
    config: TrainConfig,
    *,
    validation: Sequence[ShardData] = (),
    world_size: int = 1,
    weighted: bool = False,
) -> TrainPlan:
    """The plan of a run on ``shards``."""
    first = shards[0].columns
    columns = [
        Column(
            name=name,
            role=role,  # type: ignore[arg-type]
            dtype=str(first[f"{role} {name}"].dtype).removeprefix("torch."),
            shape=tuple(first[f"{role} {name}"].shape[1:]),
        )
        for name, role in (("x", "feature"), ("y", "label"), ("w", "weight"))
        if f"{role} {name}" in first and (role != "weight" or weighted)
    ]
    table = [
        Shard(
            shard_id=i,
            host="",
            path="",
            num_rows=shard.num_rows,
            num_validation_rows=validation[i].num_rows if validation else 0,
            fingerprint=shard.fingerprint,
            num_bytes=0,
        )
        for i, shard in enumerate(shards)
    ]
    return make_plan(
        columns=columns,
        shards=table,
        world_size=world_size,
        batch_size=config.batch_size,
        epochs=config.epochs,
        max_steps=config.max_steps,
    )


@dataclass
class Keeper:
    """A checkpoint sink that keeps copies in memory."""

    steps: tuple[int, ...] = ()
    points: dict[int, ResumePoint] = field(default_factory=dict)

    def due(self, step: int) -> bool:
        return step in self.steps

    def save(self, step: int, shared: dict[str, Any], rank_state: dict[str, Any]) -> None:
        point = ResumePoint(step=step, shared=shared, rank_state=rank_state)
        self.points[step] = copy.deepcopy(point)


def run(
    module: nn.Module,
    config: TrainConfig,
    shards: Sequence[ShardData],
    *,
    validation: Sequence[ShardData] = (),
    comm: Communicator | None = None,
    weighted: bool = False,
    sink: Keeper | None = None,
    resume: ResumePoint | None = None,
    plan: TrainPlan | None = None,
    observer: Any = None,
    device: str = "cpu",
    looks: Looks | None = None,
    shared: Sequence[SharedValue] = (),
    parts: Sequence[Part] = (),
) -> TrainOutcome:
    """Train ``module`` in place on this rank's part of ``shards``."""
    comm = comm or LocalCommunicator()
    plan = plan or plan_for(
        shards, config, validation=validation, world_size=comm.world_size, weighted=weighted
    )
    mine = [shard.shard_id for shard in plan.shards_of(comm.rank)]
    return train(
        module=module,
        config=config,
        plan=plan,
        shards=[MappedRows(shards[i], plan) for i in mine],
        validation=[MappedRows(validation[i], plan) for i in mine] if validation else [],
        comm=comm,
        device=torch.device(device),
        checkpoints=sink,
        resume=copy.deepcopy(resume),
        observer=observer or NullObserver(),
        looks=looks,
        held=Attributes(module, shared=shared),
        parts=parts,
    )


def seeded(make: Callable[[], nn.Module], seed: int = 3) -> nn.Module:
    """A module with the same initial weights every time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make()


def weights(module: nn.Module) -> torch.Tensor:
    """All parameters as one vector."""
    return torch.cat([p.detach().flatten() for p in module.parameters()]).clone()


def but(config: TrainConfig, **changes: Any) -> TrainConfig:
    """The configuration with some fields changed."""
    return dataclasses.replace(config, **changes)
