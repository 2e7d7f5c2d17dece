"""A divided model comes back after a lost worker, along the same mesh or another one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from sparkdl.config import CheckpointConfig
from sparkdl.mesh import Mesh
from tests.cluster import faults
from tests.cluster.test_recovery import digest, request, training_rows

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from sparkdl.spark.run.run import FitRequest

pytestmark = [pytest.mark.spark, pytest.mark.gang, pytest.mark.slow]

SHARD = Mesh(shard=2, smallest_unit=1)
TENSOR = Mesh(tensor=2, layout={"0": "columns", "3": "rows"})
PIPELINE = Mesh(pipeline=2, stages=["0-2", "3"], micro_batches=3)


@pytest.fixture(scope="module")
def df(cluster: SparkSession) -> DataFrame:
    return training_rows(cluster)


def divided(mesh: Mesh, *callbacks: Any, **changes: Any) -> FitRequest:
    asked = request(*callbacks)
    return replace(asked, config=replace(asked.config, parallelism=mesh, **changes))


def test_a_killed_worker_changes_no_bit(df: DataFrame, tmp_path: Path) -> None:
    """Along a pipeline, in which ranks wait for each other in most ways."""
    from sparkdl.spark.fit.fit import fit

    undisturbed = digest(fit(df, divided(PIPELINE)))
    fault = faults.KillWorker(marker=str(tmp_path / "struck"), rank=1, step=13)
    result = fit(df, divided(PIPELINE, fault))
    assert result.summary.restarts == 1
    assert digest(result) == undisturbed


def test_a_fit_goes_on_along_another_mesh(df: DataFrame, tmp_path: Path) -> None:
    import torch

    from sparkdl.spark.fit.fit import fit

    folder = CheckpointConfig(directory=str(tmp_path), interval=5)
    plain = {"seed": 7, "checkpoint": folder}
    asked = replace(divided(SHARD, max_steps=20, **plain), module=without_dropout, num_shards=2)
    whole = fit(df, replace(asked, config=replace(asked.config, max_steps=-1,
                                                  checkpoint=CheckpointConfig())))  # fmt: skip
    fit(df, asked)
    for mesh, last in ((TENSOR, 25), (PIPELINE, 30), (None, -1)):
        config = replace(asked.config, parallelism=mesh, max_steps=last)
        result = fit(df, replace(asked, config=config))
    assert result.summary.steps == whole.summary.steps
    for name, value in whole.module.state_dict().items():
        assert torch.allclose(result.module.state_dict()[name], value, rtol=1e-4, atol=1e-6)


def without_dropout() -> Any:
    from torch import nn

    return nn.Sequential(nn.Linear(3, 32), nn.ReLU(), nn.Identity(), nn.Linear(32, 3))
