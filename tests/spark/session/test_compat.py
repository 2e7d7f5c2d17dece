"""What classic Spark and Spark Connect do differently: addresses, and the workers' Python."""

from __future__ import annotations

import socket
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sparkdl.errors import ClusterError
from sparkdl.spark.cluster.gang import _address_towards, _host
from sparkdl.spark.session.compat import driver_address, run_workers_here, shares_console


@pytest.mark.parametrize(
    ("written", "expected"),
    [("[fe80::1]", "fe80::1"), ("10.0.0.1", "10.0.0.1"), ("node-1", "node-1")],
)
def test_brackets_of_ipv6_addresses_are_spark_s_own(written: str, expected: str) -> None:
    entries = {"spark.driver.host": written}
    context = SimpleNamespace(getConf=lambda: entries)
    session: Any = SimpleNamespace(sparkContext=context)
    assert driver_address(session) == (expected, expected)
    assert _host(f"{written}:7077") == expected


def test_a_worker_of_a_plain_stage_has_the_address_on_its_way_to_the_channel() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as there:
        there.bind(("127.0.0.1", 0))
        channel: Any = SimpleNamespace(host="127.0.0.1", port=there.getsockname()[1])
        assert _address_towards(channel) == "127.0.0.1"


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


@pytest.mark.parametrize(
    ("prints", "told"),
    [(f"{sys.version_info[0]}.{sys.version_info[1]} torch pyarrow", "has no torch, pyarrow"),
     ("2.7", "is Python 2.7, while this program runs 3"), (None, "cannot be started")],
)  # fmt: skip
def test_the_python_of_local_workers_is_looked_at_before_spark_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prints: str | None, told: str
) -> None:
    """Spark's own words about it are two stacks of Java's for each task."""
    program = tmp_path / "python"
    if prints is not None:
        program.write_text(f"#!/bin/sh\necho {prints}\n", encoding="utf-8")
        program.chmod(0o755)
    monkeypatch.setenv("PYSPARK_PYTHON", str(program))
    context = SimpleNamespace(pythonExec=str(program))
    master = SimpleNamespace(get=lambda key, default: "local[2]")
    session: Any = SimpleNamespace(conf=master, sparkContext=context)
    for _ in range(2):  # a mistake that was told once is told again
        with pytest.raises(ClusterError) as caught:
            run_workers_here(session)
        assert f"PYSPARK_PYTHON names {program} for Spark's workers, which {told}" in str(
            caught.value
        )
        assert str(caught.value).endswith(
            f"or set PYSPARK_PYTHON={sys.executable} before the session starts"
        )
    monkeypatch.delenv("PYSPARK_PYTHON")  # the remedy
    run_workers_here(session)
    assert context.pythonExec == sys.executable
