"""A mesh that does not fit is refused before any job, with what to do."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import nn

from sparkdl.config import TrainConfig
from sparkdl.errors import ClusterError, ConfigError
from sparkdl.estimator import TorchClassifier
from sparkdl.mesh import Mesh
from sparkdl.spark.cluster.cluster_info import ClusterInfo
from sparkdl.spark.fit.check_mesh import check_mesh, check_mesh_optimizer, check_worker_memory
from sparkdl.spark.run.run import FitRequest
from sparkdl.sync.asynchronous.async_sgd import AsyncSGD
from sparkdl.sync.asynchronous.hogwild import Hogwild
from sparkdl.sync.averaging.adasum import Adasum
from sparkdl.sync.averaging.block_momentum import BlockMomentum
from sparkdl.sync.averaging.diloco import DiLoCo
from sparkdl.sync.averaging.local_sgd import LocalSGD
from sparkdl.sync.averaging.parameter_averaging import ParameterAveraging
from sparkdl.sync.averaging.slowmo import SlowMo
from sparkdl.sync.gradients.allreduce import AllReduce
from sparkdl.sync.own_weights.elastic_averaging import ElasticAveraging
from sparkdl.sync.own_weights.gossip import Gossip
from sparkdl.train.optimizers.large_batch import LAMB

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


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
    ({"sync_strategy": Adasum()}, "norms of whole weights"),
    ({"sync_strategy": AsyncSGD()}, "of another time"),
    ({"sync_strategy": Hogwild()}, "of which each has a part"),
    ({"sync_strategy": ParameterAveraging(averaging_period="auto")}, "clock of each worker"),
    ({"sync_strategy": LocalSGD(averaging_period=(1, 2))}, "use one averaging_period"),
    ({"sync_strategy": LocalSGD(topology="tree")}, "topology"),
    (
        {
            "sync_strategy": LocalSGD(),
            "parallelism": Mesh(data=2, shard_optimizer=True),
        },
        r"use Mesh\(data=..., shard=...\)",
    ),
    (
        {"sync_strategy": DiLoCo(num_fragments=2), "parallelism": Mesh(pipeline=2)},
        "use num_fragments=1",
    ),
    ({"sync_strategy": AllReduce(work_shares={"a": 2})}, "leave work_shares out"),
    ({"sync_strategy": AllReduce(num_backup_workers=1)}, "num_backup_workers"),
    ({"sync_strategy": AllReduce(topology="tree")}, "topology"),
    ({"min_workers": 1}, "minWorkers"),
    ({"elasticity": "bits"}, "elasticity"),
    ({"compile": True, "parallelism": Mesh(pipeline=2)}, "compile"),
    (
        {"compile": True, "parallelism": Mesh(shard=2, tensor=2)},
        "divided along tensor",
    ),
    ({"sync_batch_norm": True}, "syncBatchNorm"),
    ({"precision": "fp16"}, "precision"),
    ({"memory_format": "channels_last"}, "memoryFormat"),
    ({"keep_training_state": True}, "keepTrainingState"),
    ({"automatic": ("batchSize",)}, "set batchSize"),
    ({"automatic": ("numWorkers",)}, "numWorkers cannot be 'auto'; leave it unset"),
    ({"parallelism": Mesh(shard=2, activation_checkpointing=True)}, "made of layers"),
    ({"parallelism": Mesh(tensor=2)}, "give the mesh a layout such as"),
    ({"parallelism": Mesh(tensor=2, layout={"head": "rows"})}, "no layer fits 'head'"),
]


@pytest.mark.parametrize(("changes", "remedy"), REFUSED, ids=[text for _, text in REFUSED])
def test_what_does_not_go_with_a_mesh_is_refused(changes: dict[str, Any], remedy: str) -> None:
    with pytest.raises(ConfigError, match=remedy):
        check_mesh(request(**changes), nn.Linear(4, 2), "gang", has_logs=False)


@pytest.mark.filterwarnings("ignore:`torch.jit.*` is deprecated:DeprecationWarning")
def test_scripted_layers_are_refused_where_weights_are_divided() -> None:
    net = nn.Sequential(torch.jit.script(nn.Linear(4, 4)), nn.Linear(4, 2))
    for mesh in (Mesh(shard=2), Mesh(data=2, shard_optimizer=True)):
        with pytest.raises(ConfigError, match="0 must not be scripted or traced"):
            check_mesh(request(parallelism=mesh), net, "gang", has_logs=False)
    check_mesh(request(parallelism=Mesh(data=2)), net, "gang", has_logs=False)


def test_numbers_of_numpy_are_numbers() -> None:
    mesh = Mesh(shard=np.int64(2))
    assert mesh == Mesh(shard=2) and type(mesh.shard) is int
    for wrong in (np.float64(2.0), True, 0):
        with pytest.raises(ConfigError, match="a whole number of at least 1"):
            Mesh(shard=wrong)


def test_the_rest_is_taken() -> None:
    kinds = (
        LocalSGD(), ParameterAveraging(), BlockMomentum(), SlowMo(), DiLoCo(), ElasticAveraging(),
        Gossip(), AllReduce(double_buffering=True),
    )  # fmt: skip
    all_kinds = [request(sync_strategy=one, parallelism=Mesh(data=2, shard=2)) for one in kinds]
    for asked in (*all_kinds, request(num_workers=2), request(parallelism=None, num_workers=3)):
        check_mesh(asked, nn.Linear(4, 2), "gang", has_logs=False)
    tensor = Mesh(tensor=2, layout={"0": "columns"})
    net = nn.Sequential(nn.Linear(4, 2), Scaled())
    check_mesh(request(parallelism=tensor), net, "gang", has_logs=False)


def test_rounds_lightning_modules_and_single_numbers_are_refused() -> None:
    with pytest.raises(ConfigError, match="executionMode"):
        check_mesh(request(), nn.Linear(4, 2), "rounds", has_logs=False)
    with pytest.raises(ConfigError, match="LightningModule"):
        check_mesh(request(), nn.Linear(4, 2), "gang", has_logs=True)
    with pytest.raises(ConfigError, match="'scale' is a single number"):
        check_mesh(request(), Scaled(), "gang", has_logs=False)


class ShowsBias(nn.Linear):
    def parameters(self, recurse: bool = True) -> Any:
        yield self.bias


def test_parameters_that_the_module_does_not_show_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"must not leave out \['weight'\]; use frozenLayers"):
        check_mesh(request(), ShowsBias(4, 2), "gang", has_logs=False)


def test_parameters_that_share_memory_or_have_hooks_are_refused() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    net[1].weight.data = net[0].weight.data.t()
    with pytest.raises(ConfigError, match=r"0\.weight and 1\.weight must not share memory"):
        check_mesh(request(), net, "gang", has_logs=False)
    net[1].weight = net[0].weight
    check_mesh(request(), net, "gang", has_logs=False)
    net[1].bias.register_hook(torch.zeros_like)
    with pytest.raises(ConfigError, match=r"1\.bias must have no hook"):
        check_mesh(request(), net, "gang", has_logs=False)


def test_only_optimizers_that_need_no_whole_parameter_are_taken() -> None:
    class Own(torch.optim.Adam):
        """Like Adam, but nobody knows."""

    net, mesh = nn.Linear(4, 2), Mesh(shard=2)
    check_mesh_optimizer(mesh, torch.optim.AdamW(net.parameters()))
    for optimizer in (LAMB(net.parameters(), lr=0.1), Own(net.parameters())):
        check_mesh_optimizer(None, optimizer)
        with pytest.raises(ConfigError, match=f"{type(optimizer).__name__} may look"):
            check_mesh_optimizer(mesh, optimizer)
    hooked = torch.optim.AdamW(net.parameters())
    hooked.register_step_pre_hook(lambda *_: None)
    check_mesh_optimizer(Mesh(data=2), hooked)
    for parts in (mesh, Mesh(tensor=2), Mesh(pipeline=2), Mesh(data=2, shard_optimizer=True)):
        with pytest.raises(ConfigError, match=r"hooks of AdamW.*; clip by gradientClipNorm"):
            check_mesh_optimizer(parts, hooked)


def test_what_sparks_limit_cannot_hold_is_refused_with_the_mesh_to_use() -> None:
    net = nn.Linear(1024, 1024, bias=False)  # 4 MiB, and 16 MiB with Adam
    config = TrainConfig(sync_strategy=AllReduce(), optimizer="adam")

    def check(
        mebibytes: int | None, master: str = "spark://host:7077", gpus: int = 0, **changes: Any
    ) -> None:
        """With so much beside what Python and torch take."""
        granted = None if mebibytes is None else f"{350 + mebibytes}m"
        asked = dataclasses.replace(config, **changes)
        cluster = ClusterInfo(
            master=master, num_executors=2, cores_per_executor=2, gpus_per_executor=gpus
        )
        check_worker_memory(net, asked, cluster, lambda key: granted, most_workers=4)

    with pytest.raises(ClusterError, match=r"parallelism=Mesh\(shard=2\), or raise that"):
        check(15)
    with pytest.raises(ClusterError, match="with the 4 slots there are, no mesh would fit: raise"):
        check(7)
    with pytest.raises(ClusterError, match=r"shard=4"):
        check(9, parallelism=Mesh(data=2))
    check(17)
    check(9, parallelism=Mesh(shard=2))
    check(None)
    check(7, master="local[4]")
    with pytest.raises(ClusterError, match="a worker, besides 350 MiB for Python"):
        check(7, master="local-cluster[2,1,1024]")
    with pytest.raises(ClusterError, match="a worker, besides"):
        check(7, device="cpu", gpus=1)
    check(7, gpus=1)
    check(7, device="cuda")
    check(7, sync_strategy=LocalSGD())


def make_chain() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Dropout(0.2), nn.Linear(6, 2))


@pytest.mark.spark
@pytest.mark.gang
@pytest.mark.slow
def test_a_layout_is_found_in_a_chain_which_learns_what_one_worker_learns(
    spark: SparkSession,
) -> None:
    rows = spark.range(0, 40, 1, 2).selectExpr(
        "array(float(id % 7 - 3), float(id % 5 - 2)) AS features", "id % 2 AS label"
    )
    losses = []
    for params in ({"numWorkers": 1}, {"parallelism": Mesh(tensor=2)}):
        model = TorchClassifier(
            module=make_chain, batchSize=8, epochs=2, seed=4, verbose=0,
            optimizer="adam", **params,
        ).fit(rows)  # fmt: skip
        losses.append([epoch["loss"] for epoch in model.summary.history])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert model.summary.mesh == "tensor=2"


def test_a_function_that_looks_at_the_numbers_of_parameters_is_refused() -> None:
    def by_numbers(parameters: Any) -> torch.optim.Optimizer:
        found = list(parameters)
        still = [p for p in found if p.abs().max() == 0]
        return torch.optim.SGD([p for p in found if all(p is not s for s in still)], lr=0.1)

    net = nn.Linear(4, 2)
    optimizer = by_numbers(net.parameters())
    check_mesh_optimizer(None, optimizer, by_numbers)
    with pytest.raises(ConfigError, match=r"looks at the numbers of parameters.*shapes or order"):
        check_mesh_optimizer(Mesh(shard=2), optimizer, by_numbers)


class Mixed(nn.Module):
    """Has layers of two dtypes."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x).to(self.b.weight.dtype))


def test_parameters_that_are_gathered_together_have_one_dtype() -> None:
    def check(module: nn.Module, mesh: Mesh) -> None:
        check_mesh(request(parallelism=mesh), module, "gang", has_logs=False)

    for mesh in (Mesh(shard=2), Mesh(data=2, shard_optimizer=True)):
        with pytest.raises(ConfigError, match=r"'a.weight' is torch.float32 and 'b.weight' is"):
            check(Mixed(), mesh)
        with pytest.raises(ConfigError, match=r"'b.weight' is complex, which cannot be divided"):
            check(Mixed(torch.complex64), mesh)
    check(Mixed(), Mesh(shard=2, smallest_unit=1))
    check(Mixed(torch.complex64), Mesh(data=2))
    frozen = Mixed()
    frozen.b.requires_grad_(False)
    check(frozen, Mesh(shard=2))


def test_lazy_layers_are_divided_once_they_have_a_shape() -> None:
    net = nn.Sequential(nn.LazyLinear(4), nn.Tanh(), nn.Linear(4, 1))
    check_mesh(request(parallelism=Mesh(data=2)), net, "gang", has_logs=False)
    for mesh in (Mesh(shard=2), Mesh(tensor=2), Mesh(data=2, shard_optimizer=True)):
        with pytest.raises(ConfigError, match=r"0.weight is lazy.*run the module once"):
            check_mesh(request(parallelism=mesh), net, "gang", has_logs=False)
    net(torch.ones(2, 3))
    check_mesh(request(), net, "gang", has_logs=False)
