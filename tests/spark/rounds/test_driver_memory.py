"""Rounds that the driver cannot hold are refused before any job."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from sparkdl.config import TrainConfig
from sparkdl.errors import ClusterError
from sparkdl.spark.rounds.driver_memory import check_driver_memory, round_state_bytes
from sparkdl.sync.averaging.parameter_averaging import ParameterAveraging

MIB = 2**20


def check(
    state_mib: int, shards: int, *, heap_mib: int | None = 100_000, depth: int = 1,
    is_local: bool = False, limit: str | None = None,
) -> None:  # fmt: skip
    check_driver_memory(
        {"spark.driver.maxResultSize": limit}.get,
        state_bytes=state_mib * MIB,
        num_shards=shards,
        strategy=ParameterAveraging(aggregation_depth=depth),
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
        task="regression", loss="mse", optimizer=optimizer, learning_rate=0.1,
        optimizer_params=options,
    )  # fmt: skip
    trained, buffers = 4 * (1000 + 100 + 200), 4 * 200 + 8
    found = round_state_bytes(module, config, ParameterAveraging())
    assert found == pytest.approx(trained * (1 + kept) + buffers, abs=8)
    reset = ParameterAveraging(average_optimizer_state=False)
    assert round_state_bytes(module, config, reset) == pytest.approx(trained + buffers, abs=8)
    module[0].requires_grad_(False)
    assert round_state_bytes(module, config, ParameterAveraging()) < found
    assert round_state_bytes(nn.LazyLinear(3), config, ParameterAveraging()) == 0


def test_results_larger_than_spark_allows() -> None:
    check(256, 4)
    with pytest.raises(ClusterError, match=r"5 states of 256 MiB .*more than spark\.driver\.max"):
        check(256, 5)
    check(256, 5, limit="2g")
    check(256, 50, limit="0")
    check(64, 64, depth=2)  # merged on executors


def test_a_driver_with_too_little_memory() -> None:
    """30 M parameters with Adam, two shards, 2 GB: the JVM has died, told as a refused call."""
    check(344, 2, heap_mib=2048)
    with pytest.raises(ClusterError, match=r"at least 2064 MiB; it may use 2048 MiB; raise s"):
        check(344, 2, heap_mib=2048, is_local=True)
    with pytest.raises(ClusterError, match=r"aggregation_depth=2.*executionMode='gang'"):
        check(600, 3, heap_mib=2048, limit="4g")
    check(600, 3, heap_mib=None, limit="4g")
