"""A function goes on with the workers that are left, and with more when there are slots."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.cluster import faults
from tests.cluster.processes import threads_left

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.gang, pytest.mark.slow, pytest.mark.classic]

ROWS, EPOCHS, SHARDS = 120, 3, 4


@pytest.fixture
def hasty(cluster: SparkSession, local_dir: Path) -> Iterator[SparkSession]:
    """It does not wait for the executor that replaces a lost one."""
    cluster.conf.set("spark.sparkdl.elasticWait", "0.2")
    yield cluster
    cluster.conf.unset("spark.sparkdl.elasticWait")
    assert threads_left() == []
    assert list(local_dir.rglob("sparkdl-*")) == []
    assert dict(cluster.sparkContext._jsc.getPersistentRDDs()) == {}  # type: ignore[union-attr]


def train(marker: str | None) -> dict[str, Any]:
    """Trains on equal terms for all rows, counts them, and may lose an executor and its disk."""
    import torch
    import torch.distributed as dist

    import sparkdl

    place = sparkdl.context()
    state = place.checkpoint or {
        "epoch": 0, "step": 0, "sizes": [],
        "weight": torch.zeros(2, dtype=torch.float64), "seen": torch.zeros(EPOCHS, ROWS),
    }  # fmt: skip
    loader = place.loader(batch_size=5, columns=["id", "x"])
    others = [n for (ids,) in place.loader("test", batch_size=5, columns=["id"]) for n in ids]
    assert len(others) > 0
    while state["epoch"] < EPOCHS:
        loader.set_epoch(state["epoch"], state["step"])
        for step, (ids, x) in enumerate(loader, start=state["step"]):
            if marker and (state["epoch"], step, place.rank) == (1, 2, 1):
                lose_executor(marker)
            x = x.double()
            loss_of_x = x @ state["weight"] - x.sum(1) ** 2
            sums = torch.zeros(2 + ROWS, dtype=torch.float64)
            sums[:2] = loss_of_x @ x
            sums[2 + ids] += 1
            dist.all_reduce(sums)
            assert sums[2:].sum() == loader.rows_of_all(step)
            state["weight"] = state["weight"] - 0.01 * sums[:2] / loader.rows_of_all(step)
            state["seen"][state["epoch"]] += sums[2:]
            state["sizes"] = [*state["sizes"], place.world_size]
            state["step"] = step + 1
            place.report(checkpoint=state)
            while marker and Path(marker).exists() and step >= 4 and place.world_size == 1:
                time.sleep(0.2)
                place.report(checkpoint=state)
        state = {**state, "epoch": state["epoch"] + 1, "step": 0}
    return {**state, "restarts": place.num_restarts}


def lose_executor(marker: str) -> None:
    from sparkdl.data.spool.local_disk import local_dirs

    try:
        Path(marker).touch(exist_ok=False)
    except FileExistsError:
        return
    time.sleep(1)  # a checkpoint is written meanwhile
    for root in local_dirs():
        for folder in Path(root).glob("sparkdl-*"):
            shutil.rmtree(folder)
    os.kill(faults.executor_pid(), signal.SIGKILL)
    time.sleep(30)


@pytest.mark.timeout(600)
def test_it_loses_a_worker_and_its_shards_and_gets_another(
    hasty: SparkSession, tmp_path: Path
) -> None:
    import torch

    import sparkdl

    df = hasty.range(0, ROWS, 1, 3).selectExpr(
        "id", "array(cast(id % 7 as double) / 7, cast(id % 3 as double)) as x"
    )
    data = {"train": df, "test": df.where("id % 2 = 0").select("id")}
    options: dict[str, Any] = {"data": data, "num_shards": SHARDS, "verbose": 0}
    undisturbed = sparkdl.TorchRunner(num_workers=1, **options).run(train, None)
    marker = tmp_path / "struck"
    runner = sparkdl.TorchRunner(
        num_workers=(1, 2), grow_after_seconds=0, results="all", max_restarts=2, **options
    )
    found = runner.run(train, str(marker))
    assert len(found) == 2
    assert found[0]["restarts"] >= 2
    sizes = found[0]["sizes"]
    assert len(sizes) == len(undisturbed["sizes"])
    lost, grown = sizes.index(1), len(sizes) - sizes[::-1].index(1)
    assert sizes == [2] * lost + [1] * (grown - lost) + [2] * (len(sizes) - grown)
    assert 0 < lost < grown < len(sizes)
    assert torch.equal(found[0]["seen"], torch.ones(EPOCHS, ROWS))
    torch.testing.assert_close(found[0]["weight"], undisturbed["weight"], rtol=0, atol=1e-12)
