"""Rounds that the driver cannot hold are refused before any job."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from sparkdl.config import TrainConfig
from sparkdl.errors import ClusterError
from sparkdl.inference.regression import REGRESSION
from sparkdl.spark.rounds.driver_memory import check_driver_memory, round_state_bytes

MIB = 2**20


def check(
    state_mib: int, members: int = 1, *, heap_mib: int | None = 100_000, is_local: bool = False,
    limit: str | None = None,
) -> None:  # fmt: skip
    check_driver_memory(
        {"spark.driver.maxResultSize": limit}.get,
        state_bytes=state_mib * MIB,
        num_members=members,
        heap_bytes=None if heap_mib is None else heap_mib * MIB,
        is_local=is_local,
    )


@pytest.mark.parametrize(
    ("optimizer", "options", "kept"),
    [
        ("adam", {}, 2), ("sgd", {}, 0), ("sgd", {"momentum": 0.9}, 1),
        ("auto", {}, 2), ("muon", {}, 1), ("adafactor", {}, 0.25),
        (lambda parameters: None, {}, 0),
    ],
)  # fmt: skip
def test_what_a_replica_sends(optimizer: Any, options: dict[str, Any], kept: int) -> None:
    module = nn.Sequential(nn.Linear(10, 100), nn.BatchNorm1d(100))
    config = TrainConfig(
        task=REGRESSION, loss="mse", optimizer=optimizer, learning_rate=0.1,
        optimizer_params=options,
    )  # fmt: skip
    trained, buffers = 4 * (1000 + 100 + 200), 4 * 200 + 8
    found = round_state_bytes(module, config, keeps_optimizer=True)
    assert found == pytest.approx(trained * (1 + kept) + buffers, abs=8)
    reset = round_state_bytes(module, config, keeps_optimizer=False)
    assert reset == pytest.approx(trained + buffers, abs=8)
    module[0].requires_grad_(False)
    assert round_state_bytes(module, config, keeps_optimizer=True) < found
    assert round_state_bytes(nn.LazyLinear(3), config, keeps_optimizer=True) == 0


def test_a_state_larger_than_spark_allows() -> None:
    check(1024)
    with pytest.raises(ClusterError, match=r"a state of 1025 MiB .*more than spark\.driver\.max"):
        check(1025)
    check(1025, limit="2g")
    check(5000, limit="0")
    check(256, 4)
    with pytest.raises(ClusterError, match=r"5 members of 256 MiB each .*fewer members"):
        check(256, 5)


def test_a_driver_with_too_little_memory() -> None:
    check(344, heap_mib=2048, is_local=True)  # 30 M parameters with Adam
    check(600, heap_mib=2048)
    with pytest.raises(ClusterError, match=r"at least 2400 MiB; it may use 2048 MiB; raise s"):
        check(600, heap_mib=2048, is_local=True)
    with pytest.raises(ClusterError, match=r"frozenLayers, or another strategy"):
        check(700, heap_mib=2048)
    check(700, heap_mib=None)
