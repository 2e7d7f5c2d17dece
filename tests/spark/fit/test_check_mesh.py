"""A mesh that does not fit is refused before any job, with what to do."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

from sparkdl.config import TrainConfig
from sparkdl.errors import ClusterError, ConfigError
from sparkdl.mesh import Mesh
from sparkdl.spark.fit.check_mesh import check_mesh, check_mesh_optimizer, check_worker_memory
from sparkdl.spark.run.run import FitRequest
from sparkdl.sync.averaging.local_sgd import LocalSGD
from sparkdl.sync.gradients.allreduce import AllReduce
from sparkdl.train.optimizers.large_batch import LAMB


def request(**changes: Any) -> FitRequest:
    config = {"sync_strategy": AllReduce(), "parallelism": Mesh(shard=2)}
    names = TrainConfig.__dataclass_fields__.keys()
    config |= {name: changes.pop(name) for name in list(changes) if name in names}
    values: dict[str, Any] = {
        "module": None, "config": TrainConfig(**config), "feature_cols": ("x",),
        "input_shapes": (None,), "label_col": "y", "weight_col": None, "validation_col": None,
        "num_workers": None, "max_restarts": 3, "verbose": 0, "cpus_per_worker": None,
        "gpus_per_worker": None,
    }  # fmt: skip
    return FitRequest(**{**values, **changes})


class Scaled(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 2)
        self.scale = nn.Parameter(torch.tensor(1.0))


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"parallelism": "shard=2"}, "a sparkdl.Mesh"),
    ({"num_workers": 3}, "made of 2 workers, and numWorkers is 3"),
    ({"sync_strategy": LocalSGD()}, "AllReduce"),
    ({"sync_strategy": AllReduce(double_buffering=True)}, "double_buffering"),
    ({"sync_strategy": AllReduce(num_backup_workers=1)}, "num_backup_workers"),
    ({"sync_strategy": AllReduce(topology="tree")}, "topology"),
    ({"min_workers": 1}, "minWorkers"),
    ({"elasticity": "bits"}, "elasticity"),
    ({"compile": True}, "compile"),
    ({"sync_batch_norm": True}, "syncBatchNorm"),
    ({"precision": "fp16"}, "precision"),
    ({"memory_format": "channels_last"}, "memoryFormat"),
    ({"keep_training_state": True}, "keepTrainingState"),
    ({"automatic": ("batchSize",)}, "set batchSize"),
    ({"parallelism": Mesh(shard=2, activation_checkpointing=True)}, "made of layers"),
    ({"parallelism": Mesh(tensor=2, layout={"head": "rows"})}, "no layer fits 'head'"),
]


@pytest.mark.parametrize(("changes", "remedy"), REFUSED, ids=[text for _, text in REFUSED])
def test_what_does_not_go_with_a_mesh_is_refused(changes: dict[str, Any], remedy: str) -> None:
    with pytest.raises(ConfigError, match=remedy):
        check_mesh(request(**changes), nn.Linear(4, 2), "gang", has_logs=False)


def test_the_rest_is_taken() -> None:
    for asked in (request(num_workers=2), request(parallelism=None, num_workers=3)):
        check_mesh(asked, nn.Linear(4, 2), "gang", has_logs=False)
    tensor = Mesh(tensor=2, layout={"0": "columns"})
    check_mesh(request(parallelism=tensor), nn.Sequential(Scaled()), "gang", has_logs=False)


def test_rounds_lightning_modules_and_single_numbers_are_refused() -> None:
    with pytest.raises(ConfigError, match="executionMode"):
        check_mesh(request(), nn.Linear(4, 2), "rounds", has_logs=False)
    with pytest.raises(ConfigError, match="LightningModule"):
        check_mesh(request(), nn.Linear(4, 2), "gang", has_logs=True)
    with pytest.raises(ConfigError, match="'scale' is a single number"):
        check_mesh(request(), Scaled(), "gang", has_logs=False)


def test_only_optimizers_that_need_no_whole_parameter_are_taken() -> None:
    class Own(torch.optim.Adam):
        """Like Adam, but nobody knows."""

    net, mesh = nn.Linear(4, 2), Mesh(shard=2)
    check_mesh_optimizer(mesh, torch.optim.AdamW(net.parameters()))
    for optimizer in (LAMB(net.parameters(), lr=0.1), Own(net.parameters())):
        check_mesh_optimizer(None, optimizer)
        with pytest.raises(ConfigError, match=f"{type(optimizer).__name__} may look"):
            check_mesh_optimizer(mesh, optimizer)


def test_what_sparks_limit_cannot_hold_is_refused_with_the_mesh_to_use() -> None:
    net = nn.Linear(1024, 1024, bias=False)  # 4 MiB, and 16 MiB with Adam
    config = TrainConfig(sync_strategy=AllReduce(), optimizer="adam", device="cpu")

    def check(granted: str | None, master: str = "spark://host:7077", **changes: Any) -> None:
        asked = dataclasses.replace(config, **changes)
        check_worker_memory(net, asked, master, lambda key: granted, most_workers=4)

    with pytest.raises(ClusterError, match=r"parallelism=Mesh\(data=1, shard=2, tensor=1\)"):
        check("15m")
    with pytest.raises(ClusterError, match="no mesh of as many workers"):
        check("7m")
    with pytest.raises(ClusterError, match=r"shard=4"):
        check("9m", parallelism=Mesh(data=2))
    check("17m")
    check("9m", parallelism=Mesh(shard=2))
    check(None)
    check("7m", master="local[4]")
    check("7m", device="auto")  # it may be a GPU
    check("7m", sync_strategy=LocalSGD())
