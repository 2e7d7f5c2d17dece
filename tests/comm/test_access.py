"""Who gets in, and who may change what: the channel as its enemies see it."""

from __future__ import annotations

import contextlib
import itertools
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sparkdl.comm.access import (
    OF_DRIVER,
    Access,
    Address,
    Caller,
    Unauthenticated,
    Unauthorized,
    require_file,
    require_key,
)
from sparkdl.comm.certificates import NAME, Certificate, make_certificate
from sparkdl.comm.channel import ChannelClient, ChannelServer, ChannelStorage, Hub
from sparkdl.comm.wire import packed
from sparkdl.errors import CommunicationError, StorageError
from sparkdl.storage.storage import open_storage


@pytest.fixture
def hub() -> Hub:
    return Hub()


@pytest.fixture
def server(hub: Hub, tmp_path: Path) -> Iterator[ChannelServer]:
    files = open_storage(str(tmp_path / "files"))
    with ChannelServer(hub, bind="127.0.0.1", announce="127.0.0.1", files=files) as server:
        yield server


def must_get_in(address: Address) -> None:
    with contextlib.closing(ChannelClient(address)) as client:
        began = time.monotonic()
        assert client.get("x") is None
        assert time.monotonic() - began < 10


@pytest.mark.parametrize("secret", ["", "guess"])
def test_without_the_secret_nothing_is_answered(server: ChannelServer, secret: str) -> None:
    with contextlib.closing(ChannelStorage(replace(server.address, secret=secret))) as intruder:
        for call in (
            lambda: intruder.exists("x"),
            lambda: intruder.write("x", b"1"),
            lambda: intruder.read("x"),
            lambda: intruder.get("x"),
        ):
            with pytest.raises(CommunicationError):
                call()


def test_only_a_client_with_the_certificate_of_the_run_is_let_in(server: ChannelServer) -> None:
    address, other = server.address, make_certificate()
    strange = replace(address, worker=other)
    with (
        contextlib.closing(ChannelClient(strange, timeout_seconds=5)) as client,
        pytest.raises(CommunicationError),
    ):
        client.get("x")
    nameless = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    nameless.load_verify_locations(cadata=address.server_certificate)
    for context in (nameless, None):
        with contextlib.ExitStack() as stack:
            place = ("127.0.0.1", server.port)
            one = stack.enter_context(socket.create_connection(place, 5))
            if context is not None:
                one = stack.enter_context(context.wrap_socket(one, server_hostname=NAME))
            one.settimeout(5)
            with contextlib.suppress(OSError):  # the server has closed it
                one.sendall(packed({"call": "get", "shown": address.shown()}, 0))
                assert one.recv(100) == b""
    must_get_in(address)


def test_only_the_server_with_the_certificate_of_the_run_is_believed(hub: Hub) -> None:
    with (
        ChannelServer(hub, bind="127.0.0.1", announce="127.0.0.1") as real,
        ChannelServer(hub, bind="127.0.0.1", announce="127.0.0.1") as false,
    ):
        redirected = replace(real.address, port=false.port)
        with (
            contextlib.closing(ChannelClient(redirected, timeout_seconds=5)) as client,
            pytest.raises(CommunicationError),
        ):
            client.get("x")


def test_a_listener_reads_nothing(server: ChannelServer) -> None:
    """A relay between client and server writes down what passes, as a listener would."""
    passed = bytearray()
    with socket.create_server(("127.0.0.1", 0)) as relay:

        def carry(source: socket.socket, to: socket.socket) -> None:
            with contextlib.suppress(OSError):
                while data := source.recv(1 << 16):
                    passed.extend(data)
                    to.sendall(data)

        def serve() -> None:
            inner, _ = relay.accept()
            outer = socket.create_connection(("127.0.0.1", server.port))
            threads = [
                threading.Thread(target=carry, args=ends)
                for ends in ((inner, outer), (outer, inner))
            ]
            for thread in threads:
                thread.start()
            over.wait(30)
            for one in (inner, outer):
                with contextlib.suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)
            for thread in threads:
                thread.join(10)
            inner.close()
            outer.close()

        over = threading.Event()
        serving = threading.Thread(target=serve)
        serving.start()
        address = replace(server.address, port=relay.getsockname()[1]).of_rank(0)
        with contextlib.closing(ChannelStorage(address)) as storage:
            storage.write("final", b"weights that nobody shall read" * 100)
            assert storage.read("final").startswith(b"weights")
        over.set()
        serving.join(30)
    assert len(passed) > 6000
    assert b"nobody" not in passed
    for secret in (address.secret, address.rank_secret, "Bearer"):
        assert secret.encode() not in passed


def test_nothing_secret_is_printed(server: ChannelServer) -> None:
    address = server.address.of_rank(1)
    for secret in (address.secret, address.rank_secret, address.worker.key):
        assert secret not in repr(address) + repr(address.worker)


STRANGER = """
import socket, ssl, sys
port, certificate = sys.argv[1:]
connection = socket.create_connection(("127.0.0.1", int(port)), 5)
if certificate:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(cadata=certificate)
    connection = context.wrap_socket(connection, server_hostname="sparkdl")
try:
    for _ in range(200):
        connection.sendall(bytes(1 << 20))
except OSError:
    print("refused")
"""


@pytest.mark.parametrize("is_clear", [True, False])
def test_a_stranger_cannot_fill_the_memory(server: ChannelServer, is_clear: bool) -> None:
    """200 MiB in one message, in clear or without a certificate of its own."""
    must_get_in(server.address)
    certificate = "" if is_clear else server.address.server_certificate
    command = [sys.executable, "-c", STRANGER, str(server.port), certificate]
    Path("/proc/self/clear_refs").write_text("5")  # the largest size is counted anew
    before = largest_size()
    answer = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    assert answer.stdout == "refused\n"
    assert largest_size() - before < 50 << 20
    must_get_in(server.address)


def largest_size() -> int:
    """Most bytes that this process has had in memory."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])


def test_connections_that_say_nothing_hold_up_nobody(server: ChannelServer) -> None:
    with contextlib.ExitStack() as stack:
        for number in range(100):
            connection = stack.enter_context(
                socket.create_connection(("127.0.0.1", server.port), 5)
            )
            connection.sendall(b"\x16\x03\x01"[: number % 4])  # nothing, or the first bytes of TLS
        must_get_in(server.address)


@pytest.mark.parametrize("call", ["set", "report", "write", "remove", "get", "read"])
def test_a_process_of_an_earlier_attempt_is_refused(
    hub: Hub, server: ChannelServer, call: str
) -> None:
    with contextlib.closing(ChannelStorage(server.address.of_rank(0))) as old:
        old.write("run/step-1/manifest.json", b"whole")
        old.set("hello/0", b"old")
        hub.begin(1)
        hub.set("1/hello/0", b"new")
        late: dict[str, Any] = {
            "set": lambda: old.set("hello/0", b"late"),
            "report": lambda: old.report(attempt=1, rank=0, events=[{"kind": "done"}]),
            "write": lambda: old.write("run/step-1/manifest.json", b"late"),
            "remove": lambda: old.remove("run"),
            "get": lambda: old.get("hello/0"),
            "read": lambda: old.read("run/step-1/manifest.json"),
        }
        with pytest.raises(CommunicationError, match="attempt that is over"):
            late[call]()
    assert hub.get("1/hello/0") == b"new"
    assert hub.events.empty()
    with contextlib.closing(ChannelStorage(server.address.of_rank(0))) as new:
        assert new.read("run/step-1/manifest.json") == b"whole"


class Slow:
    """Files that say when the first bytes of one have arrived, and when all have."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.whole: list[str] = []

    def write(self, path: str, data: Iterator[Any]) -> None:
        for _ in data:
            self.begun.set()
        self.whole.append(path)


def test_a_file_that_an_earlier_attempt_has_begun_is_never_whole(hub: Hub) -> None:
    files: Any = Slow()

    def pieces() -> Iterator[bytes]:
        yield b"first"
        assert files.begun.wait(60)
        hub.begin(1)
        yield b"second"

    with (
        ChannelServer(hub, bind="127.0.0.1", announce="127.0.0.1", files=files) as server,
        contextlib.closing(ChannelStorage(server.address.of_rank(0))) as old,
        pytest.raises(CommunicationError, match="attempt 0 is over"),
    ):
        old.write("final.safetensors", pieces())
    assert files.whole == []


def test_a_rank_is_the_process_that_called_first(hub: Hub, server: ChannelServer) -> None:
    address = server.address
    with contextlib.ExitStack() as stack:
        mine, impostor, task = (
            stack.enter_context(contextlib.closing(ChannelStorage(one)))
            for one in (address.of_rank(1), address.of_rank(1), address)
        )
        mine.set("hello/1", b"mine")
        mine.report(attempt=0, rank=1, events=[])
        with pytest.raises(CommunicationError, match="another process is rank 1"):
            impostor.set("hello/1", b"false")
        with pytest.raises(StorageError, match="a task may not report as rank 1"):
            task.report(attempt=0, rank=1, events=[{"kind": "done"}])
        task.report(attempt=0, rank=2, events=[])  # a task of a round, which has no rank
        assert task.get("hello/1") == b"mine"
        assert hub.events.empty()


def test_ranks_write_their_own_files_only(server: ChannelServer) -> None:
    server._storage().write(f"{OF_DRIVER}/function.pkl", b"code")
    with contextlib.closing(ChannelStorage(server.address.of_rank(1))) as rank:
        rank.write("run/step-00000004/rank-00001.safetensors", b"mine")
        rank.write("value-1.pkl", b"mine")
        assert rank.read(f"{OF_DRIVER}/function.pkl") == b"code"
        for path in ("value-0.pkl", "final.safetensors", "run/step-00000004/manifest.json"):
            with pytest.raises(StorageError, match=f"rank 1 may not change the file '{path}'"):
                rank.write(path, b"false")
            assert not rank.exists(path)
    assert server._storage().read("value-1.pkl") == b"mine"


OWNERS = {
    "final.safetensors": 0, "run": 0, "run/step-00000120": 0, "relayed/run/step-00000120-final": 0,
    "run/step-00000120/manifest.json": 0, "run/step-00000120/shared.safetensors": 0,
    "run/step-00000120/rank-00000.safetensors": 0, "value-0.pkl": 0, "value-12.pkl": 12,
    "relayed/run/step-00000120/rank-00003.safetensors": 3, "./value-2.pkl": 2,
    "run/lease-123456789012.json": 0, "run/123456789012-3/step-00000120": 0,
    "driver": None, "driver/function.pkl": None, "./driver/initial.safetensors": None,
    "driver/members-run-0/1": None, "driver/x-1.pkl": None, "": None, ".": None,
}  # fmt: skip


def may(check: Any, *arguments: Any) -> bool:
    try:
        check(*arguments)
    except Unauthorized:
        return False
    return True


def test_each_file_belongs_to_one() -> None:
    for (path, owner), rank in itertools.product(OWNERS.items(), [None, 0, 1, 2, 3, 12]):
        is_owner = owner is not None and rank == owner
        assert may(require_file, Caller(0, rank), path) == is_owner, (path, rank)
    with pytest.raises(StorageError, match="leads out"):
        require_file(Caller(0, 0), "run/../driver/function.pkl")


def test_each_key_belongs_to_one_but_for_those_of_torch() -> None:
    first, one, task = Caller(0, 0), Caller(0, 1), Caller(0, None)
    told = "checkpoint/step-00000004/1"  # to rank 0, which removes it, but does not change it
    require_key(first, told, removes=True)
    assert not may(require_key, first, told)
    with pytest.raises(Unauthorized):
        require_key(one, "checkpoint/step-00000004/2", removes=True)
    for key in ("hello/1", "checkpoint/step-00000004/1", "store/anything", "store/rank/0"):
        assert may(require_key, one, key) and not may(require_key, task, key)
    for key in ("hello/0", "hello/11", "hello", "checkpoint/1/0", "None", "hello/None"):
        assert not may(require_key, one, key) and not may(require_key, task, key)


def test_what_is_shown_is_read_again() -> None:
    access, certificate = Access(), Certificate("public", "key")
    access.begin(3)
    address = Address(
        host="h", port=1, server_certificate="s", worker=certificate,
        secret=access.secret,
    )  # fmt: skip
    assert access.caller(address.shown()) == Caller(3, None)
    assert access.caller(address.of_rank(7).shown()) == Caller(3, 7)
    for shown in ("", "Bearer", f"Basic {access.secret}", f"Bearer {access.secret[:-1]}"):
        with pytest.raises(Unauthenticated):
            access.caller(shown)
