"""Numbers of workers and shards that cannot be had are refused before any job."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import sparkdl
from sparkdl.errors import ConfigError
from sparkdl.spark.fit.check_request import check_range, check_shards
from tests.cluster.test_recovery import request

EXACT = sparkdl.AllReduce()
COMPRESSED = sparkdl.AllReduce(compression="powersgd")
WISHED = sparkdl.AllReduce(work_shares={"gpu-*": 2})


@pytest.mark.parametrize(
    ("shards", "strategy", "workers", "message"),
    [
        (3, EXACT, 4, "numShards=3 is less than the 4 workers.*set numWorkers to at most 3"),
        (4, COMPRESSED, 2, "what AllReduce learns depends on which worker has which rows"),
        (4, sparkdl.LocalSGD(), 2, "what LocalSGD learns depends on which worker"),
        (4, sparkdl.ParameterAveraging(), 2, "what ParameterAveraging learns"),
        (2, WISHED, 2, "leave nothing to give; set numShards, for example to 8"),
        (None, WISHED, 3, r"3 shard\(s\) for 3 worker\(s\)"),
    ],
)
def test_shards_that_do_not_fit(
    shards: int | None, strategy: Any, workers: int, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_shards(shards, strategy, workers)


@pytest.mark.parametrize(
    ("shards", "strategy", "workers"),
    [(None, COMPRESSED, 3), (3, COMPRESSED, 3), (9, EXACT, 2), (5, WISHED, 4),
     (4, sparkdl.AllReduce(double_buffering=True, topology="ring"), 3)],
)  # fmt: skip
def test_shards_that_fit(shards: int | None, strategy: Any, workers: int) -> None:
    check_shards(shards, strategy, workers)


@pytest.mark.parametrize(
    ("changes", "strategy", "mode", "message"),
    [
        ({"min_workers": 3}, EXACT, "gang", "minWorkers=3 is more than numWorkers=2"),
        ({}, sparkdl.ParameterAveraging(), "rounds", "rounds train their shards with how"),
        ({}, COMPRESSED, "gang", "what this AllReduce learns depends on the number of workers"),
        ({}, sparkdl.AllReduce(num_backup_workers=1), "gang", "leave minWorkers unset"),
    ],
)
def test_ranges_that_cannot_be_had(changes: Any, strategy: Any, mode: str, message: str) -> None:
    wanted = replace(request(), **{"min_workers": 1, **changes})
    with pytest.raises(ConfigError, match=message):
        check_range(wanted, strategy, mode)


def test_a_range_that_can_be_had() -> None:
    check_range(replace(request(), min_workers=1), EXACT, "gang")
    check_range(replace(request(), min_workers=2), EXACT, "gang")
    check_range(request(), COMPRESSED, "rounds")
