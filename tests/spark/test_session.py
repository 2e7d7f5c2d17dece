"""Addresses as Spark writes them become addresses as sockets take them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sparkdl.spark.gang import _environment
from sparkdl.spark.session import driver_address


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
    channel: Any = None
    assert _environment(task, channel).address == expected
