"""Addresses as Spark writes them become addresses as sockets take them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sparkdl.spark.cluster.gang import _environment
from sparkdl.spark.session.compat import driver_address, shares_console


@pytest.mark.parametrize(
    ("written", "expected"),
    [("[fe80::1]", "fe80::1"), ("10.0.0.1", "10.0.0.1"), ("node-1", "node-1")],
)
def test_brackets_of_ipv6_addresses_are_spark_s_own(written: str, expected: str) -> None:
    entries = {"spark.driver.host": written}
    context = SimpleNamespace(getConf=lambda: entries)
    session: Any = SimpleNamespace(sparkContext=context)
    assert driver_address(session) == (expected, expected)
    task: Any = SimpleNamespace(
        getTaskInfos=lambda: [SimpleNamespace(address=f"{written}:7077")],
        partitionId=lambda: 0,
        resources=dict,
    )
    channel: Any = SimpleNamespace(of_rank=lambda rank: None)
    assert _environment(task, channel).address == expected


@pytest.mark.parametrize(
    ("master", "expected"),
    [("local", True), ("local[2]", True), ("local[*, 4]", True), ("local-cluster[2,1,1024]", False),
     ("yarn", False), ("spark://local:7077", False), (None, False)],
)  # fmt: skip
def test_workers_of_local_mode_print_where_the_driver_does(
    master: str | None, expected: bool
) -> None:
    session: Any = SimpleNamespace(conf=SimpleNamespace(get=lambda key, default: master))
    assert shares_console(session) is expected
