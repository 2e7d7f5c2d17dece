"""Spark's GPU scheduling decides number, place and device of the workers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from sparkdl.comm.channel import ChannelClient, ChannelServer, Hub
from sparkdl.comm.worker_environment import WorkerEnvironment, local_rank, numbered
from sparkdl.config import TrainConfig
from sparkdl.errors import ClusterError
from sparkdl.inference.classification import CLASSIFICATION
from sparkdl.spark.cluster.cluster_info import (
    choose_num_workers,
    inspect_cluster,
    slots_per_executor,
    wait_for_slots,
)
from sparkdl.spark.cluster.gang import GangTask, launch
from sparkdl.spark.cluster.slots import make_profile
from sparkdl.spark.fit.fit import fit
from sparkdl.spark.run.run import FitRequest
from sparkdl.spark.session.compat import conf
from sparkdl.spark.session.settings import Settings, read_settings

if TYPE_CHECKING:
    from pyspark.resource import ResourceProfile
    from pyspark.sql import DataFrame, SparkSession
    from torch import nn

pytestmark = [pytest.mark.spark, pytest.mark.gang, pytest.mark.slow]


def tell(environment: WorkerEnvironment, order: int) -> Iterator[tuple[str, bytes]]:
    """What a worker finds, in the executor whose parent process is told apart by its number."""
    import os

    from pyspark import TaskContext

    context = TaskContext.get()
    assert context is not None
    fields = Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()
    client = ChannelClient(environment.channel)
    executor = fields[1]
    client.set(f"{order}/{environment.rank}", executor.encode())
    keys = [f"{order}/{rank}" for rank in range(environment.world_size)]
    client.wait(keys, 30)
    hosts = [(client.get(key) or b"").decode() for key in keys]
    client.close()
    found = {
        "rank": environment.rank,
        "world_size": environment.world_size,
        "gpus": environment.gpu_addresses,
        "cpus": context.cpus(),
        "executor": executor,
        "local": local_rank(numbered(hosts), environment.rank),
    }
    yield "found", json.dumps(found).encode()


@pytest.fixture
def server() -> Iterator[ChannelServer]:
    server = ChannelServer(Hub(), bind="127.0.0.1", announce="127.0.0.1")
    yield server
    server.shutdown()


def gang(
    spark: SparkSession, server: ChannelServer, workers: int, profile: ResourceProfile | None
) -> list[dict[str, Any]]:
    table = spark.range(0, workers, 1, workers)
    rows = launch(table, GangTask(work=tell, order=workers, channel=server.address), profile)
    return [json.loads(payload) for _, _, payload in sorted(rows)]


def test_one_worker_per_gpu_each_with_its_own(
    gpu_cluster: SparkSession, server: ChannelServer
) -> None:
    wait_for_slots(gpu_cluster, 4, None, Settings())
    info = inspect_cluster(gpu_cluster)
    assert (info.num_executors, info.cores_per_executor) == (2, 2)
    assert (info.gpus_per_executor, info.gpus_per_task) == (2, 1.0)
    workers = choose_num_workers(info, None)
    assert workers == 4
    found = gang(gpu_cluster, server, workers, None)
    assert [one["rank"] for one in found] == [0, 1, 2, 3]
    assert {one["world_size"] for one in found} == {4}
    assert all(len(one["gpus"]) == 1 for one in found)
    by_executor: dict[str, list[dict[str, Any]]] = {}
    for one in found:
        by_executor.setdefault(one["executor"], []).append(one)
    assert len(by_executor) == 2
    for members in by_executor.values():
        assert sorted(one["gpus"][0] for one in members) == ["0", "1"]
        assert sorted(one["local"] for one in members) == [0, 1]


def test_a_worker_can_have_all_gpus_of_an_executor(
    gpu_cluster: SparkSession, server: ChannelServer
) -> None:
    info = inspect_cluster(gpu_cluster)
    profile = make_profile(info, 2, 2.0)
    assert profile is not None
    assert slots_per_executor(info, 2, 2.0) == 1
    assert choose_num_workers(info, None, cpus_per_worker=2, gpus_per_worker=2.0) == 2
    wait_for_slots(gpu_cluster, 2, profile, Settings(start_timeout_seconds=10))
    found = gang(gpu_cluster, server, 2, profile)
    assert len({one["executor"] for one in found}) == 2
    for one in found:
        assert sorted(one["gpus"]) == ["0", "1"]
        assert one["cpus"] == 2
        assert one["local"] == 0
    with pytest.raises(ClusterError, match=r"numWorkers=3 needs 3 free slots of 2 cpu and 2 gpu"):
        choose_num_workers(info, 3, cpus_per_worker=2, gpus_per_worker=2.0)
    with pytest.raises(ClusterError, match="only 2 of the 3 slots"):
        wait_for_slots(gpu_cluster, 3, profile, Settings(start_timeout_seconds=0.5))


def make_net() -> nn.Module:
    from torch import nn

    return nn.Linear(1, 2)


@pytest.fixture(scope="module")
def df(gpu_cluster: SparkSession) -> DataFrame:
    return gpu_cluster.range(0, 60, 1, 2).selectExpr("CAST(id AS float) AS x", "id % 2 AS label")


def request(device: str, **changes: Any) -> FitRequest:
    config = TrainConfig(task=CLASSIFICATION, loss="cross_entropy", batch_size=8, device=device)
    values: dict[str, Any] = {
        "module": make_net, "config": config, "feature_cols": ("x",), "input_shapes": ((1,),),
        "label_col": "label", "weight_col": None, "validation_col": None, "num_workers": None,
        "max_restarts": 2, "verbose": 0, "cpus_per_worker": None, "gpus_per_worker": None,
    }  # fmt: skip
    return FitRequest(**{**values, **changes})


def test_auto_stays_on_the_cpu_where_cuda_is_missing(df: DataFrame) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    result = fit(df, request("auto"))
    assert result.summary.world_size == 4
    assert result.summary.restarts == 0


def test_stage_level_scheduling_from_fit(df: DataFrame) -> None:
    result = fit(df, request("cpu", cpus_per_worker=2, gpus_per_worker=2.0))
    assert result.summary.world_size == 2


def test_cuda_is_refused_with_the_remedy_where_it_is_missing(df: DataFrame) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    with pytest.raises(ClusterError, match='device="cuda", but torch finds no CUDA device'):
        fit(df, request("cuda", num_workers=2))


def test_the_settings_come_from_the_session(gpu_cluster: SparkSession) -> None:
    assert read_settings(partial(conf, gpu_cluster)) == Settings()
