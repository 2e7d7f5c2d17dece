"""The channel: keys, events and files; and torch's rendezvous through it."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import multiprocessing
import resource
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sparkdl.comm import channel
from sparkdl.comm.access import Address
from sparkdl.comm.channel import ChannelClient, ChannelServer, ChannelStorage, Hub
from sparkdl.comm.wire import Deadline
from sparkdl.errors import CommunicationError, StorageError
from sparkdl.storage.storage import open_storage
from tests.storage.contract import StorageContract


@pytest.fixture
def hub() -> Hub:
    return Hub()


@pytest.fixture
def server(hub: Hub, tmp_path: Path) -> Iterator[ChannelServer]:
    files = open_storage(str(tmp_path / "files"))
    server = ChannelServer(hub, bind="127.0.0.1", announce="127.0.0.1", files=files)
    yield server
    server.shutdown()


@pytest.fixture
def client(server: ChannelServer) -> Iterator[ChannelClient]:
    client = ChannelClient(server.address.of_rank(2))
    yield client
    client.close()


def test_keys_are_those_of_the_attempt(hub: Hub, server: ChannelServer) -> None:
    client = ChannelClient(server.address.of_rank(2))
    client.set("a/2", b"\x00\n{")
    assert client.get("a/2") == b"\x00\n{"
    assert hub.get("0/a/2") == b"\x00\n{"
    assert client.get("b/2") is None
    assert client.add("store/n", 2) == 2
    assert client.add("store/n", 3) == 5
    assert client.delete("a/2")
    assert not client.delete("a/2")
    hub.begin(1)
    later = ChannelClient(server.address.of_rank(2))
    assert later.get("store/n") is None
    later.close()
    client.close()


def test_wait_returns_when_the_last_key_comes(client: ChannelClient) -> None:
    client.set("store/a", b"1")
    timer = threading.Timer(0.2, client.set, ("store/b", b"2"))
    timer.start()
    began = time.monotonic()
    client.wait(["store/a", "store/b"], 10)
    assert 0.1 < time.monotonic() - began < 5
    timer.join()


def test_wait_gives_up(client: ChannelClient) -> None:
    with pytest.raises(TimeoutError, match="1 keys not set"):
        client.wait(["never"], 0.2)


def test_events_reach_the_hub(hub: Hub, client: ChannelClient) -> None:
    client.report(attempt=0, rank=2, events=[{"kind": "done"}, {"kind": "log", "lines": ["ä"]}])
    first, second = hub.events.get(timeout=5), hub.events.get(timeout=5)
    assert (first.attempt, first.rank, first.body) == (0, 2, {"kind": "done"})
    assert second.body["lines"] == ["ä"]


def test_a_worker_hears_whether_its_lines_are_shown_and_whether_it_shall_end(
    hub: Hub, client: ChannelClient
) -> None:
    assert client.report(attempt=0, rank=2, events=[]) == (False, 0.25, False)
    hub.shows_lines = True
    assert client.report(attempt=0, rank=2, events=[]) == (True, 0.25, False)
    hub.is_over = True
    assert client.report(attempt=0, rank=2, events=[]) == (True, 0.25, True)
    hub.begin(1)
    assert not hub.report(1, 2, []).is_over


def test_events_that_come_twice_count_once(hub: Hub, client: ChannelClient) -> None:
    def kinds() -> list[str]:
        return [hub.events.get(timeout=5).body["kind"] for _ in range(hub.events.qsize())]

    now, epoch, done = [{"kind": "heartbeat"}], [{"kind": "epoch"}], [{"kind": "done"}]
    client.report(attempt=0, rank=2, events=now, queued=epoch, number=1)
    client.report(attempt=0, rank=2, events=now, queued=epoch, number=1)
    client.report(attempt=0, rank=2, events=now, queued=done, number=2)
    client.report(attempt=0, rank=2, events=now, queued=epoch, number=1)  # was on its way
    assert kinds() == ["heartbeat", "epoch", "heartbeat", "heartbeat", "done", "heartbeat"]
    hub.begin(1)
    hub.report(1, 2, now, epoch, 1)
    assert kinds() == ["heartbeat", "epoch"]


@pytest.mark.parametrize(("ranks", "pause"), [(1, 0.25), (100, 0.5), (1000, 5.0), (9000, 10.0)])
def test_many_ranks_report_less_often(hub: Hub, ranks: int, pause: float) -> None:
    """All of them together 200 times a second."""
    for rank in range(ranks):
        hub.report(0, rank, [])
    assert hub.report(0, 0, []).pause == pause


def test_ranks_hear_what_all_have_given(server: ChannelServer) -> None:
    found: dict[int, list[str]] = {}

    def give(rank: int) -> None:
        with contextlib.closing(ChannelClient(server.address.of_rank(rank))) as client:
            time.sleep(0.1 * rank)
            found[rank] = client.gather("hello", rank, 3, f"host ü{rank}", 20)

    threads = [threading.Thread(target=give, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert found == {rank: ["host ü0", "host ü1", "host ü2"] for rank in range(3)}


def test_who_waits_holds_no_thread(server: ChannelServer) -> None:
    with contextlib.ExitStack() as stack:
        clients = [ChannelClient(server.address.of_rank(rank)) for rank in range(40)]
        for client in clients:
            stack.enter_context(contextlib.closing(client))
        before = threading.active_count()
        waits = [threading.Thread(target=one.wait, args=(["store/a"], 30)) for one in clients]
        for wait in waits:
            wait.start()
        deadline = time.monotonic() + 20
        while len(server._hub._waiting.get("0/store/a", ())) < 40 and time.monotonic() < deadline:
            time.sleep(0.02)
        assert threading.active_count() == before + len(waits)  # these are the clients' own
        clients[0].set("store/a", b"")
        for wait in waits:
            wait.join(20)
        assert not any(wait.is_alive() for wait in waits)
        assert not server._hub._waiting


def test_who_waits_for_a_rank_that_does_not_come_is_told(hub: Hub, server: ChannelServer) -> None:
    with contextlib.closing(ChannelClient(server.address.of_rank(0))) as client:
        with pytest.raises(TimeoutError, match=r"not all 2 ranks are there after 0\.2 s"):
            client.gather("hello", 0, 2, "", 0.2)
        hub.begin(1)
        hub.set("1/hello/1", b"")  # what an earlier attempt has given does not count
        assert hub.gathered("1/hello", 2) is None
        hub.set("1/hello/1", b"again")
        assert hub.gathered("1/hello", 2) is None
        hub.set("1/hello/0", b"")
        assert hub.gathered("1/hello", 2) == b'["", "again"]'


def test_how_long_a_worker_has_been_silent(client: ChannelClient) -> None:
    assert client.seconds_since_report(attempt=0, rank=2) is None
    client.report(attempt=0, rank=2, events=[])
    time.sleep(0.05)
    silence = client.seconds_since_report(attempt=0, rank=2)
    assert silence is not None
    assert 0.05 <= silence < 5
    assert client.seconds_since_report(attempt=1, rank=2) is None


def test_an_absent_server_is_a_communication_error(server: ChannelServer) -> None:
    client = ChannelClient(replace(server.address, port=1), timeout_seconds=2)
    with pytest.raises(CommunicationError, match="'get' failed"):
        client.get("a")
    client.close()


def test_files_on_an_absent_driver_are_a_communication_error(server: ChannelServer) -> None:
    storage = ChannelStorage(replace(server.address, port=1))
    for call in (
        lambda: storage.exists("x"),
        lambda: storage.read("x"),
        lambda: storage.write("x", b"1"),
    ):
        with pytest.raises(CommunicationError):
            call()
    storage.close()


class SlowFiles:
    """Takes half a second to find a file."""

    def read(self, path: str) -> bytes:
        time.sleep(0.5)
        return b"late"

    def list(self, path: str) -> list[str]:
        time.sleep(0.5)
        return ["late"]


def test_every_request_of_files_waits_as_long_as_it_was_told(hub: Hub) -> None:
    files: Any = SlowFiles()
    with ChannelServer(hub, bind="127.0.0.1", announce="127.0.0.1", files=files) as server:
        with contextlib.closing(ChannelStorage(server.address, timeout_seconds=0.1)) as storage:
            with pytest.raises(CommunicationError, match="could not send x"):
                storage.read("x")
            with pytest.raises(CommunicationError, match="'list' failed"):
                storage.list("x")
        with contextlib.closing(ChannelStorage(server.address, timeout_seconds=20)) as storage:
            assert (storage.read("x"), storage.list("x")) == (b"late", ["late"])


class TestFiles(StorageContract):
    """What the driver keeps, seen from a worker."""

    @pytest.fixture
    def storage(self, server: ChannelServer) -> Iterator[ChannelStorage]:
        with contextlib.closing(ChannelStorage(server.address.of_rank(0))) as storage:
            yield storage


def test_files_of_any_size(server: ChannelServer) -> None:
    storage = ChannelStorage(server.address.of_rank(0))
    large = bytes(range(256)) * 100_000  # more than one chunk
    storage.write("a/large", large)
    storage.write("a/pieces", iter([b"ab", memoryview(b"cd")]))
    storage.write("a/empty", b"")
    assert storage.list("a") == ["empty", "large", "pieces"]
    assert storage.read("a/large") == large
    assert storage.read("a/pieces") == b"abcd"
    assert storage.read("a/empty") == b""
    storage.remove("a")
    assert not storage.exists("a/large")
    with pytest.raises(StorageError, match=r"could not send a/large: .*No such file") as caught:
        storage.read("a/large")
    assert "\n" not in str(caught.value)  # no stacks of the driver's
    storage.close()


class Stuck:
    """Files whose disk stands still after the first chunk."""

    def __init__(self) -> None:
        self.has_begun, self.goes_on = threading.Event(), threading.Event()

    def write(self, path: str, data: Iterator[bytes]) -> None:
        next(data)
        self.has_begun.set()
        assert self.goes_on.wait(60)
        list(data)


def test_a_channel_is_closed_while_a_file_is_under_way(hub: Hub) -> None:
    files: Any = Stuck()
    server = ChannelServer(hub, bind="127.0.0.1", announce="127.0.0.1", files=files)
    with contextlib.closing(ChannelStorage(server.address.of_rank(0))) as storage:
        failed: list[Exception] = []

        def write() -> None:
            try:
                storage.write("a", iter([b"first", b"second"]))
            except CommunicationError as error:
                failed.append(error)

        writer = threading.Thread(target=write)
        writer.start()
        assert files.has_begun.wait(20)
        server.shutdown()
        server.shutdown()
        writer.join(20)
        assert len(failed) == 1
    files.goes_on.set()
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and any(
        thread.name.startswith("sparkdl-channel") for thread in threading.enumerate()
    ):
        time.sleep(0.02)
    assert not [t.name for t in threading.enumerate() if t.name.startswith("sparkdl-channel")]


class AwayFiles:
    """A storage that loses its own connection."""

    def exists(self, path: str) -> bool:
        raise ConnectionResetError("the bucket is away")


def test_a_storage_that_loses_its_connection_is_not_the_channel(hub: Hub) -> None:
    files: Any = AwayFiles()
    with (
        ChannelServer(hub, bind="127.0.0.1", announce="127.0.0.1", files=files) as server,
        contextlib.closing(ChannelStorage(server.address)) as storage,
        pytest.raises(StorageError, match="the bucket is away"),
    ):
        storage.exists("x")


def test_files_stay_inside_the_folder(server: ChannelServer, tmp_path: Path) -> None:
    storage = ChannelStorage(server.address.of_rank(0))
    with pytest.raises(StorageError):
        storage.write("../outside", b"1")
    assert not (tmp_path / "outside").exists()
    storage.close()


def test_nobody_has_the_driver_keep_more_than_workers_send(
    hub: Hub, server: ChannelServer, client: ChannelClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel, "_MOST_BYTES", 1000)
    with pytest.raises(CommunicationError, match="has 1015 bytes; the driver takes 1000"):
        client.set("a/2", bytes(1000))
    body, deadline = b'{"key": "a/2"}\n' + bytes(1000), Deadline(10)
    with client._connection(deadline) as connection:
        connection.send({"call": "set", "shown": client._shown}, body, deadline)
        head, _ = connection.receive(deadline)
    assert head["error"] == "a message of 1015 bytes, of at most 1000"
    client.set("a/2", bytes(900))
    assert hub.get("0/a/2") == bytes(900)
    monkeypatch.setattr(channel, "CHUNK_BYTES", 1000)
    with contextlib.closing(ChannelStorage(server.address.of_rank(0))) as storage:
        with pytest.raises(StorageError, match="a message of 1001 bytes, of at most 1000"):
            storage.write("a", bytes(1001))
        assert storage.list("") == []


def test_files_of_an_earlier_attempt_hold_up_nobody(
    hub: Hub, server: ChannelServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel, "_LOOK_SECONDS", 0.05)
    monkeypatch.setattr(server, "_files_at_once", asyncio.Semaphore(1))
    go_on = threading.Event()

    def stalled() -> Iterator[bytes]:
        yield b"first"
        go_on.wait(30)

    lost = ChannelStorage(server.address.of_rank(0))

    def write() -> None:
        with contextlib.suppress(CommunicationError):
            lost.write("a", stalled())

    writer = threading.Thread(target=write)
    writer.start()
    time.sleep(0.2)
    hub.begin(1)
    with contextlib.closing(ChannelStorage(server.address.of_rank(0), timeout_seconds=20)) as now:
        assert now.list("") == []
    go_on.set()
    writer.join(20)
    lost.close()


def test_too_many_open_files_are_told_once(hub: Hub, caplog: pytest.LogCaptureFixture) -> None:
    with (
        ChannelServer(hub, bind="127.0.0.1", announce="127.0.0.1") as server,
        contextlib.closing(ChannelClient(server.address.of_rank(0))) as client,
    ):
        client.set("store/a", b"1")
        place = ("127.0.0.1", server.port)
        last = socket.socket()
        strangers: list[socket.socket] = [last]
        before = resource.getrlimit(resource.RLIMIT_NOFILE)
        most = max(int(file.name) for file in Path("/proc/self/fd").iterdir()) + 20
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, before[1]))
        try:
            with pytest.raises(OSError, match="Too many open files"):
                while True:
                    strangers.append(socket.create_connection(place, 10))
            last.connect(place)  # for which the server has no file, whoever took the last one
            time.sleep(0.5)
            client.set("store/b", b"1")  # who is connected has what it needs
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
            for stranger in strangers:
                stranger.close()
    assert caplog.text.count("workers cannot connect to the driver now") == 1
    assert "Traceback" not in caplog.text


def test_strangers_take_no_more_files_than_they_may(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver needs some itself, for checkpoints and to talk to Spark."""

    def num_files() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    monkeypatch.setattr(channel, "_MOST_HANDSHAKES", 20)
    with (
        ChannelServer(hub, bind="127.0.0.1", announce="127.0.0.1") as server,
        contextlib.closing(ChannelClient(server.address.of_rank(0))) as client,
        contextlib.ExitStack() as stack,
    ):
        client.set("store/a", b"1")
        before = num_files()
        for _ in range(100):
            address = ("127.0.0.1", server.port)
            stack.enter_context(socket.create_connection(address, 10))
        time.sleep(0.5)
        client.set("store/b", b"1")  # who is connected has what it needs
        assert num_files() - before <= 100 + 20
        stack.close()
        with contextlib.closing(ChannelClient(server.address.of_rank(1))) as other:
            other.set("store/c", b"1")


@pytest.mark.filterwarnings("always:unclosed:ResourceWarning")
def test_a_server_that_stops_closes_connections_that_have_just_come(
    hub: Hub, caplog: pytest.LogCaptureFixture, recwarn: pytest.WarningsRecorder
) -> None:
    """Watchers report the end of their workers when the fit's server may stop."""
    server = ChannelServer(hub, bind="127.0.0.1", announce="127.0.0.1")
    place = ("127.0.0.1", server.port)
    is_over = threading.Event()
    numbers = []

    def dial() -> None:
        while not is_over.is_set():
            with contextlib.suppress(OSError), socket.create_connection(place, 1):
                numbers.append(1)

    threads = [threading.Thread(target=dial) for _ in range(4)]
    for thread in threads:
        thread.start()
    time.sleep(0.2)
    server.shutdown()
    is_over.set()
    for thread in threads:
        thread.join()
    del server
    gc.collect()
    assert not [text for warning in recwarn if f"laddr={place}" in (text := str(warning.message))]
    assert len(numbers) > 10
    assert not caplog.text


def test_strangers_leave_no_noise(
    server: ChannelServer,
    client: ChannelClient,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Whoever can reach the port could fill the driver's log."""
    hello = b"\x16\x03\x01\x00\x05\x01\x00\x00\x01\x00"
    for sent in (
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        hello,
        b"\0" * 4096,
    ):
        for _ in range(5):
            with socket.create_connection(("127.0.0.1", server.port), 10) as stranger:
                stranger.sendall(sent)
                stranger.shutdown(socket.SHUT_WR)
                with contextlib.suppress(ConnectionError):
                    stranger.recv(4096)
    client.set("store/a", b"1")
    assert capfd.readouterr().err == "" and not caplog.records


def test_a_notebook_has_a_loop_of_its_own(hub: Hub) -> None:
    async def cell() -> None:
        with ChannelServer(hub, bind="127.0.0.1", announce="127.0.0.1") as server:
            client = ChannelClient(server.address.of_rank(0))
            client.set("meet/0", b"1")
            client.close()

    asyncio.run(cell())
    assert hub.get("0/meet/0") == b"1"


def test_a_channel_without_files_says_so(hub: Hub) -> None:
    server = ChannelServer(hub, bind="127.0.0.1", announce="127.0.0.1")
    storage = ChannelStorage(server.address)
    with pytest.raises(StorageError, match="keeps no files"):
        storage.exists("x")
    storage.close()
    server.shutdown()


def _meet(rank: int, address: Address, results: multiprocessing.Queue[tuple[int, float]]) -> None:
    import torch

    from sparkdl.comm.communicator import ProcessGroupCommunicator
    from sparkdl.comm.process_group import ChannelStore, process_group

    client = ChannelClient(address.of_rank(rank))
    store = ChannelStore(client, timeout_seconds=30)
    with process_group(
        backend="gloo", store=store, rank=rank, world_size=2, timeout_seconds=30,
        address="127.0.0.1",
    ):  # fmt: skip
        comm = ProcessGroupCommunicator()
        tensor = torch.tensor([float(rank + 1)])
        comm.all_reduce(tensor)
        assert comm.all_gather_bytes(b"x" * rank) == [b"", b"x"]
        assert comm.broadcast_bytes(b"hello" if rank == 0 else None) == b"hello"
        comm.barrier()
        results.put((rank, tensor.item()))


def _fail_and_meet(rank: int, address: Address, results: Any) -> None:
    """As `_meet`; before, rank 0 has waited in vain for another peer."""
    import torch
    import torch.distributed as dist

    from sparkdl.comm.communicator import ProcessGroupCommunicator
    from sparkdl.comm.process_group import process_group

    if rank == 0:
        alone = process_group(
            backend="gloo", store=dist.HashStore(), rank=0, world_size=2, timeout_seconds=1,
            address="127.0.0.1",
        )  # fmt: skip
        with pytest.raises(CommunicationError), alone:
            ProcessGroupCommunicator().all_reduce(torch.ones(1))
    _meet(rank, address, results)


@pytest.mark.slow
@pytest.mark.gang
@pytest.mark.parametrize("meet", [_meet, _fail_and_meet])
def test_gloo_meets_through_the_channel(server: ChannelServer, meet: Any) -> None:
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    ranks = [
        context.Process(target=meet, args=(rank, server.address, results)) for rank in range(2)
    ]
    for process in ranks:
        process.start()
    got = sorted(results.get(timeout=60) for _ in ranks)
    for process in ranks:
        process.join(timeout=30)
    assert got == [(0, 3.0), (1, 3.0)]
    assert [process.exitcode for process in ranks] == [0, 0]


def test_a_hub_that_nobody_reads_keeps_no_events() -> None:
    hub = Hub(keeps_events=False)
    server = ChannelServer(hub, bind="127.0.0.1", announce="127.0.0.1")
    client = ChannelClient(server.address)
    client.report(attempt=0, rank=0, events=[{"kind": "done"}])
    assert hub.events.empty()
    client.close()
    server.shutdown()


def test_no_number_of_an_attempt_comes_twice(hub: Hub) -> None:
    """Else what a gang says late would be taken for a word of the rounds that explain runs next."""
    hub.begin(0)
    hub.begin(2)
    for number in (2, 1):
        with pytest.raises(AssertionError, match=f"attempt {number} comes after 2"):
            hub.begin(number)
    assert hub.access.attempt == 2
