"""Whatever dies, a training function goes on from its last checkpoint, with the same result."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.cluster.processes import threads_left

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.gang, pytest.mark.slow]

EPOCHS = 4


@pytest.fixture(scope="module")
def df(cluster: SparkSession) -> DataFrame:
    from pyspark.sql import functions as F

    x = F.array(*[((F.col("id") * k) % 7 - 3).cast("float") for k in (1, 2, 3)])
    return cluster.range(0, 200, 1, 3).select(x.alias("x"), (x[0] - x[2]).alias("y"))


@pytest.fixture(autouse=True)
def nothing_is_left(cluster: SparkSession, local_dir: Path) -> Iterator[None]:
    yield
    assert threads_left() == []
    assert list(local_dir.rglob("sparkdl-*")) == []
    assert dict(cluster.sparkContext._jsc.getPersistentRDDs()) == {}  # type: ignore[union-attr]


def train(strike: Callable[[], None] | None, marker: str) -> dict[str, Any]:
    """Trains; in epoch 2 rank 1 is struck, once."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    import sparkdl

    place = sparkdl.context()
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(3, 1))
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    first = 0
    if place.checkpoint is not None:
        model.load_state_dict(place.checkpoint["model"])
        optimizer.load_state_dict(place.checkpoint["optimizer"])
        first = place.checkpoint["epoch"]
    loader = place.loader(batch_size=10, columns=["x", "y"])
    for epoch in range(first, EPOCHS):
        loader.set_epoch(epoch)
        for step, (x, y) in enumerate(loader):
            if strike is not None and place.rank == 1 and epoch == 2 and step == 3:
                once(strike, marker)
            loss = torch.nn.functional.mse_loss(model(x).squeeze(1), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        state = {
            "model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch + 1
        }  # fmt: skip
        place.report({"loss": loss.item()}, checkpoint=state)
    return {"first": first, "restarts": place.num_restarts, "weight": model.module.weight.detach()}


def once(strike: Callable[[], None], marker: str) -> None:
    try:
        Path(marker).touch(exist_ok=False)
    except FileExistsError:
        return
    time.sleep(1)  # the last checkpoint is written meanwhile
    strike()


def kill_worker() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture(scope="module")
def undisturbed(df: DataFrame) -> list[list[float]]:
    import sparkdl

    found = sparkdl.TorchRunner(num_workers=2, data=df, verbose=0).run(train, None, "")
    assert (found["first"], found["restarts"]) == (0, 0)
    weight: list[list[float]] = found["weight"].tolist()
    return weight


@pytest.mark.timeout(240)
def test_a_lost_worker_changes_no_bit(
    df: DataFrame, undisturbed: list[list[float]], tmp_path: Path
) -> None:
    """Checkpoints are in a folder; along a mesh, below, the driver keeps them."""
    import sparkdl

    place = str(tmp_path / "checkpoints")
    runner = sparkdl.TorchRunner(num_workers=2, data=df, verbose=0, checkpoint_dir=place)
    found = runner.run(train, kill_worker, str(tmp_path / "struck"))
    assert (tmp_path / "struck").exists()
    assert found["restarts"] == 1
    assert found["first"] == 2
    assert found["weight"].tolist() == undisturbed
    assert [record["report"] for record in runner.history] == [1, 2, 3, 4]
    assert len(list(Path(place, "function").glob("*/step-*"))) == 2


def train_along_a_mesh(strike: Callable[[], None] | None, marker: str) -> dict[str, Any]:
    """As `train`, with layers along tensor and weights along shard."""
    import torch
    from torch.distributed.checkpoint.state_dict import (
        get_optimizer_state_dict,
        set_optimizer_state_dict,
    )
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    import sparkdl

    place = sparkdl.context()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    fully_shard(parallelize_module(model, place.mesh["tensor"], plan), mesh=place.mesh["shard"])
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    state = {
        "model": model.state_dict(),
        "optimizer": get_optimizer_state_dict(model, optimizer),
        "epoch": 0,
    }
    if place.checkpoint is not None:
        place.load_checkpoint(state)
        set_optimizer_state_dict(model, optimizer, state["optimizer"])
    first, rows = state["epoch"], set()
    loader = place.loader(batch_size=10, columns=["x", "y"])
    for epoch in range(first, EPOCHS):
        loader.set_epoch(epoch)
        for step, (x, y) in enumerate(loader):
            if strike is not None and place.rank == 1 and epoch == 2 and step == 3:
                once(strike, marker)
            rows.add(tuple(x.flatten().tolist()))
            losses = torch.nn.functional.mse_loss(model(x).squeeze(1), y, reduction="sum")
            optimizer.zero_grad()
            (losses * loader.num_readers / loader.rows_of_all(step)).backward()
            optimizer.step()
        state = {
            "model": model.state_dict(),
            "optimizer": get_optimizer_state_dict(model, optimizer),
            "epoch": epoch + 1,
        }
        place.report({"loss": losses.item()}, checkpoint=state)
    weights = {name: value.full_tensor() for name, value in model.state_dict().items()}
    return {
        "first": first, "restarts": place.num_restarts, "weights": weights, "rows": rows,
        "readers": loader.num_readers,
    }  # fmt: skip


@pytest.mark.timeout(400)
def test_a_loss_along_a_mesh_changes_no_bit(df: DataFrame, tmp_path: Path) -> None:
    """Along shard; `tests/worker/test_function_mesh` goes on along other axes."""
    import torch

    import sparkdl

    mesh = sparkdl.Mesh(shard=2)
    runner = sparkdl.TorchRunner(parallelism=mesh, data=df, verbose=0, results="all")
    first, second = runner.run(train_along_a_mesh, None, "")
    assert first["readers"] == 2 and first["rows"] != second["rows"]
    found, other = runner.run(train_along_a_mesh, kill_worker, str(tmp_path / "struck"))
    assert (tmp_path / "struck").exists()
    assert (found["first"], found["restarts"]) == (2, 1)
    for name, value in first["weights"].items():
        assert torch.equal(found["weights"][name], value)
        assert torch.equal(other["weights"][name], value)
    assert [record["report"] for record in runner.history] == [1, 2, 3, 4]


@pytest.mark.timeout(240)
def test_too_many_losses_end_the_run(df: DataFrame, tmp_path: Path) -> None:
    import sparkdl

    runner = sparkdl.TorchRunner(num_workers=2, data=df, verbose=0, max_restarts=0)
    with pytest.raises(sparkdl.TrainingFailed, match="failed once"):
        runner.run(train, kill_worker, str(tmp_path / "struck"))


def unequal() -> None:
    import torch
    import torch.distributed as dist

    dist.all_reduce(torch.ones(10 if dist.get_rank() else 2000))


@pytest.mark.timeout(240)
def test_sizes_that_differ_between_ranks_end_the_run_at_once(cluster: SparkSession) -> None:
    """Gloo aborts a rank, which looked like a lost worker: three restarts in vain."""
    from sparkdl import TorchRunner
    from sparkdl.errors import WorkerError

    with pytest.raises(WorkerError, match=r"gloo has aborted .* of different sizes") as caught:
        TorchRunner(num_workers=2, max_restarts=3, verbose=0).run(unequal)
    assert "in unequal" in caught.value.worker_traceback
