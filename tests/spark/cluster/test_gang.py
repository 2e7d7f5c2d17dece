"""Workers start together, talk, and bring back results of any size."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from py4j.protocol import Py4JJavaError

from sparkdl.comm.channel import ChannelClient, ChannelServer, Hub
from sparkdl.comm.file_chunks import CHUNK_BYTES
from sparkdl.comm.worker_environment import WorkerEnvironment
from sparkdl.spark.cluster.gang import GangTask, Work, launch

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.gang]

Results = Iterator[tuple[str, bytes]]


@pytest.fixture(scope="module")
def table(spark: SparkSession) -> DataFrame:
    return spark.range(0, 2, 1, 2)


@pytest.fixture
def server() -> Iterator[ChannelServer]:
    server = ChannelServer(Hub(), bind="127.0.0.1", announce="127.0.0.1")
    yield server
    server.shutdown()


def run(table: DataFrame, work: Work, order: Any, **options: Any) -> list[tuple[int, str, bytes]]:
    return launch(table, GangTask(work=work, order=order, **options), None)


def results_of_any_size(environment: WorkerEnvironment, order: tuple[int, ...]) -> Results:
    for number, size in enumerate(order):
        yield f"{number}", bytes([environment.rank]) * size
    yield "pid", str(os.getpid()).encode()


def test_results_of_any_size_come_back_whole(table: DataFrame, server: ChannelServer) -> None:
    sizes = (0, 1, CHUNK_BYTES, CHUNK_BYTES + 1, 2 * CHUNK_BYTES + 5)
    rows = run(table, results_of_any_size, sizes, channel=server.address)
    assert [(rank, kind) for rank, kind, _ in rows] == [
        (rank, kind) for rank in (0, 1) for kind in ("0", "1", "2", "3", "4", "pid")
    ]
    for rank, kind, payload in rows:
        if kind != "pid":
            assert payload == bytes([rank]) * sizes[int(kind)]


def who_and_where(environment: WorkerEnvironment, order: None) -> Results:
    client = ChannelClient(environment.channel)
    client.set(f"here/{environment.rank}", b"")
    client.wait(["here/0", "here/1"], 20)  # only if they run at the same time
    client.close()
    shown = (
        environment.rank, environment.world_size, environment.address, environment.gpu_addresses,
    )  # fmt: skip
    yield "environment", repr(shown).encode()


def test_all_start_at_the_same_time_and_know_their_place(
    table: DataFrame, server: ChannelServer
) -> None:
    rows = run(table, who_and_where, None, channel=server.address)
    for rank, kind, payload in rows:
        assert kind == "environment"
        assert payload.decode() == repr((rank, 2, "127.0.0.1", ()))
    assert server._hub.get("0/here/1") == b""


def talk(environment: WorkerEnvironment, order: None) -> Results:
    rank = environment.rank
    client = ChannelClient(environment.channel)
    client.set(f"from/{rank}", str(rank).encode())
    client.wait(["from/0", "from/1"], 20)
    heard = client.get(f"from/{1 - rank}")
    client.add("store/left", 1)
    while rank == 0 and client.add("store/left", 0) < 2:  # the server goes with rank 0
        pass
    client.close()
    yield "heard", heard or b""
    yield "channel", f"{environment.channel.host}:{environment.channel.port}".encode()


def listening_ports() -> set[int]:
    """Ports on which some process of this machine listens."""
    ports = set()
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A":
                ports.add(int(fields[1].rsplit(":", 1)[1], 16))
    return ports


def test_without_a_channel_rank_0_hosts_one(table: DataFrame) -> None:
    rows = run(table, talk, None, channel=None)
    found = {(rank, kind): payload.decode() for rank, kind, payload in rows}
    assert found[0, "heard"] == "1"
    assert found[1, "heard"] == "0"
    assert found[0, "channel"] == found[1, "channel"]
    host, port = found[0, "channel"].split(":")
    assert host == "127.0.0.1"
    assert int(port) not in listening_ports()


def test_python_workers_are_kept_for_the_next_job(table: DataFrame, server: ChannelServer) -> None:
    rows = run(table, results_of_any_size, (), channel=server.address)
    pids = [int(payload) for _, _, payload in rows]
    rows = run(table, talk, None, channel=None)
    assert len(set(pids)) == 2
    for pid in pids:
        os.kill(pid, 0)  # they are still there, waiting for work


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_python_workers_end_if_they_shall_not_be_used_again(
    table: DataFrame, server: ChannelServer
) -> None:
    rows = run(table, results_of_any_size, (), channel=server.address, keeps_process=False)
    pids = [int(payload) for _, _, payload in rows]
    assert len(set(pids)) == 2
    deadline = time.monotonic() + 20
    while any(map(is_alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(is_alive, pids))


def fail(environment: WorkerEnvironment, order: Any) -> Results:
    if environment.rank == 1:
        raise ValueError("work must not raise")
    yield "fine", b""


def test_work_that_raises_is_an_error_of_spark(table: DataFrame, server: ChannelServer) -> None:
    # A barrier stage hides the type: the supervisor cannot tell it from a lost worker.
    with pytest.raises(Py4JJavaError, match="work must not raise"):
        run(table, fail, None, channel=server.address)
    own = [t.name for t in threading.enumerate() if t.name.startswith("sparkdl-")]
    assert own == ["sparkdl-channel"]  # the server's
