from __future__ import annotations

import contextlib
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from sparkdl.comm.certificates import NAME, make_certificate, mutual_tls
from sparkdl.errors import ClusterError, CommunicationError
from sparkdl.sync.asynchronous import slice_link
from sparkdl.sync.asynchronous.parameter_server import Push, ServerRules, ServerSlice
from sparkdl.sync.asynchronous.slice_link import Messages, SliceLink, SliceServer, flats

CERTIFICATE = make_certificate()
OPTIONS = [{"lr": 1.0}]
SHAPES = ((3, 2), (4,), ())


def make_slice(**changes: Any) -> ServerSlice:
    options = {"world_size": 2, "is_bulk": False, "timeout_seconds": 20.0, **changes}
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
    parameters.append(nn.Parameter(torch.zeros(5, dtype=torch.bfloat16)))
    rules = ServerRules(**options)
    kind: Callable[[Any], torch.optim.Optimizer] = lambda p: torch.optim.SGD(p, lr=1, momentum=0.5)  # noqa: E731
    return ServerSlice(parameters, range(4), kind, rules)


class Served:
    """A slice with its server, and who has left."""

    def __init__(self, served: ServerSlice) -> None:
        self.slice = served
        self.left: list[int] = []
        self.server = SliceServer(
            served, host="127.0.0.1", certificate=CERTIFICATE, on_leave=self.left.append
        )

    def link(self, rank: int) -> SliceLink:
        return SliceLink(self.server.address, rank, CERTIFICATE)

    def open(self) -> socket.socket:
        """A connection of somebody who speaks no TLS."""
        return socket.create_connection(("127.0.0.1", self.server.address.port), 10)


@pytest.fixture
def served() -> Iterator[Served]:
    one = Served(make_slice())
    yield one
    one.server.stop()


def like(served: Served, value: float) -> list[torch.Tensor]:
    return [torch.full_like(flat, value) for flat in flats(served.slice.inbox(0))]


def wait_for(is_so: Callable[[], bool], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_connections_are_taken_again_after_one_that_could_not_be(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = threading.Event()

    def accept(listener: socket.socket) -> tuple[socket.socket, Any]:
        if not failed.is_set():
            failed.set()
            raise OSError("no file descriptors left")
        return original(listener)

    original = socket.socket.accept
    monkeypatch.setattr(socket.socket, "accept", accept)
    links = [served.link(0), served.link(1)]  # the first is taken by the call that waits already
    assert failed.wait(20)
    for link in links:
        link.step(None, [], like(served, 7))
    for link in links:
        link.close()


def test_tensors_arrive_as_they_were_sent(served: Served) -> None:
    link = served.link(1)
    gradients, received = like(served, 0), like(served, 7)
    generator = torch.Generator().manual_seed(1)
    for gradient in gradients:
        gradient.copy_(torch.randn(gradient.shape, generator=generator))
    link.step(Push(1.0, OPTIONS), gradients, received)
    for weights, gradient in zip(received, gradients, strict=True):
        assert torch.equal(weights, -gradient)
    link.step(None, gradients, received)
    link.step(Push(1.0, OPTIONS), gradients, [])
    num_bytes = sum(gradient.nbytes for gradient in gradients)
    assert (link.bytes_sent, served.server.bytes_sent) == (2 * num_bytes, 2 * num_bytes)
    link.close()


def test_the_end_of_a_round_brings_weights_and_state(served: Served) -> None:
    first, second = served.link(0), served.link(1)
    first.step(Push(1.0, OPTIONS), like(served, 2), [])
    mine, theirs = like(served, 0), like(served, 0)
    with ThreadPoolExecutor(1) as pool:
        closing = pool.submit(first.close_round, mine)
        state = second.close_round(theirs)
        same = closing.result(20)
    for one, other in zip(mine, theirs, strict=True):
        assert one.tolist() == other.tolist() == [-2] * len(one)
    assert state["optimizer"][1]["momentum_buffer"].tolist() == [2] * 4
    torch.testing.assert_close(state, same)
    assert served.server.bytes_sent == 2 * 2 * sum(flat.nbytes for flat in mine)
    first.close()
    second.close()


def test_without_the_secret_nothing_is_served(served: Served) -> None:
    address = served.server.address
    for where, certificate in (
        (replace(address, secret="guess"), CERTIFICATE),
        (address, make_certificate()),
    ):
        with (
            pytest.raises(CommunicationError, match="is lost"),
            contextlib.closing(SliceLink(where, 1, certificate)) as link,
        ):
            link.step(Push(1.0, OPTIONS), like(served, 1), like(served, 0))
    assert served.left == []
    assert all(flat.eq(0).all() for flat in flats(served.slice.pull(0)))


def test_a_server_without_the_certificate_learns_no_secret(served: Served) -> None:
    """The client must refuse in the handshake, before it says anything."""
    tls = mutual_tls(make_certificate(), is_server=True)
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:

        def answer() -> bytes:
            plain, _ = listener.accept()
            with plain, contextlib.suppress(OSError), tls.wrap_socket(plain, server_side=True) as c:
                return c.recv(100)
            return b""

        heard = pool.submit(answer)
        where = replace(served.server.address, port=listener.getsockname()[1])
        with pytest.raises(CommunicationError, match="is lost"):
            SliceLink(where, 1, CERTIFICATE)
        assert heard.result(20) == b""


def test_each_rank_connects_once(served: Served) -> None:
    first = served.link(1)
    first.step(None, [], [])  # so that it comes before the other
    second = served.link(1)
    with pytest.raises(CommunicationError, match="is lost"):
        second.step(None, [], [])
    assert served.left == []
    first.step(None, [], [])
    first.close()
    second.close()


NO_REQUESTS: list[bytes] = [
    b"no JSON",
    b"[1]",
    b"{}",
    b'{"kind": "step", "pull": true}',
    b'{"kind": "step", "pull": true, "push": 3}',
    b'{"kind": "close"}',
    b'{"kind": "remove", "push": null, "pull": true}',
    b"\xff\xfe",
    b"[" * 100_000,
]


@pytest.mark.parametrize("message", [*NO_REQUESTS, None])
def test_a_peer_that_talks_nonsense_is_cut_off(
    served: Served, message: bytes | None, caplog: pytest.LogCaptureFixture
) -> None:
    """Warnings are errors here, and so is a thread that ends with a traceback."""
    link = served.link(1)
    link.step(None, [], [])
    sent = struct.pack("!I", (1 << 32) - 1 if message is None else len(message))
    link._connection.sendall(sent + (message or b""))
    wait_for(lambda: served.left == [1])
    link.close()
    wait_for(lambda: "a connection to this slice was refused" in caplog.text)


@pytest.mark.parametrize(
    "hello",
    [
        {"secret": "\ud800", "rank": 1},
        {"secret": "\xe9", "rank": 1},
        {"secret": ["x"], "rank": "one"},
        {"secret": "x"},
    ],
)
def test_a_wrong_greeting_is_cut_off(
    served: Served, hello: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    link = served.link(0)
    plain = served.open()
    with mutual_tls(CERTIFICATE, is_server=False).wrap_socket(plain, server_hostname=NAME) as wrong:
        Messages(wrong).send(hello)
        assert wrong.recv(1) == b""
    wait_for(lambda: "was refused" in caplog.text)
    link.step(None, [], [])
    link.close()


def test_refusals_are_told_once(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(5):
        with served.open() as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
            with contextlib.suppress(ConnectionResetError):
                while stranger.recv(100):
                    pass
    served.server.stop()  # its threads have ended; each closes its connection before it tells
    assert caplog.text.count("was refused") == 1


def test_strangers_take_no_more_threads_than_they_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slice_link, "_MOST_STRANGERS", 5)
    served = Served(make_slice())
    before = threading.active_count()
    with contextlib.ExitStack() as stack:
        for _ in range(20):
            stack.enter_context(served.open())
        time.sleep(0.5)
        assert threading.active_count() <= before + 5
    link = served.link(0)  # the strangers have made room
    link.step(None, [], [])
    link.close()
    served.server.stop()


def test_a_thread_that_cannot_be_had_ends_one_connection_only(
    served: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    begin = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        if "slice server" in thread.name:
            raise RuntimeError("can't start new thread")
        begin(thread)

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", start)
        for _ in range(2):
            with served.open() as stranger:
                assert stranger.recv(1) == b""
    assert caplog.text.count("could not be taken: can't start new thread") == 1
    link = served.link(0)
    link.step(None, [], [])
    link.close()


def test_strangers_hold_up_nobody(served: Served) -> None:
    with contextlib.ExitStack() as stack:
        for number in range(50):
            stranger = stack.enter_context(served.open())
            stranger.sendall(b"\x16\x03\x01"[: number % 4])
        began = time.monotonic()
        link = served.link(1)
        link.step(None, [], [])
        link.close()
        served.server.stop()
        assert time.monotonic() - began < 10


def test_an_address_of_another_host_is_refused() -> None:
    with pytest.raises(ClusterError, match=r"cannot serve parameters at 192\.0\.2\.1"):
        SliceServer(
            make_slice(), host="192.0.2.1", certificate=CERTIFICATE, on_leave=lambda rank: None
        )


def test_two_servers_have_different_secrets(served: Served) -> None:
    other = Served(make_slice())
    assert other.server.address.secret != served.server.address.secret
    assert len(other.server.address.secret) == 64
    assert served.server.address.secret not in repr(served.server.address)
    other.server.stop()


@pytest.mark.parametrize("end", ["close", "cancel"])
def test_a_rank_that_leaves_is_noticed_at_once(served: Served, end: str) -> None:
    leaving, staying = served.link(0), served.link(1)
    leaving.step(None, [], [])
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(staying.close_round, like(served, 0))
        time.sleep(0.1)
        getattr(leaving, end)()
        with pytest.raises(CommunicationError, match=r"ranks \[0\] have left"):
            waiting.result(10)
    assert served.left == [0]
    leaving.close()
    staying.close()


@pytest.mark.slow
def test_a_killed_rank_is_noticed(served: Served) -> None:
    program = (
        "import sys, time; from sparkdl.comm.certificates import Certificate;"
        "from sparkdl.sync.asynchronous.slice_link import SliceAddress, SliceLink;"
        "where, certificate = eval(sys.argv[1]);"
        "link = SliceLink(SliceAddress(**where), 0, Certificate(**certificate));"
        "link.step(None, [], []); print('pushed', flush=True); time.sleep(60)"
    )
    address = repr((asdict(served.server.address), asdict(CERTIFICATE)))
    command, root = [sys.executable, "-c", program, address], Path(__file__).parents[3]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=root) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"pushed\n"
        link = served.link(1)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(link.close_round, like(served, 0))
            process.kill()
            with pytest.raises(CommunicationError, match=r"ranks \[0\] have left"):
                waiting.result(20)
    link.close()


def test_cancel_ends_a_wait_for_an_answer(served: Served) -> None:
    link = served.link(1)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(link.close_round, like(served, 0))
        wait_for(lambda: bool(served.slice._closing))
        link.cancel()
        with pytest.raises(CommunicationError, match="is lost"):
            waiting.result(10)
    link.close()
    served.slice.leave(1)  # lets the server's own wait end


def test_a_server_that_has_gone_is_an_error() -> None:
    served = Served(make_slice())
    link = served.link(1)
    link.step(None, [], [])
    link.cancel()
    served.server.stop()
    with pytest.raises(CommunicationError):
        link.step(None, [], [])
    link.close()
    with (
        pytest.raises(CommunicationError),
        contextlib.closing(served.link(1)) as late,
    ):
        late.step(None, [], [])


def test_an_error_of_the_optimizer_is_told(served: Served) -> None:
    link = served.link(1)
    with pytest.raises(CommunicationError, match="the optimizer of a slice failed"):
        link.step(Push(1.0, [{"lr": 1.0}] * 2), like(served, 1), [])  # two groups, one is there
    assert isinstance(served.slice.failure, ValueError)
    with pytest.raises(CommunicationError, match="a slice failed: ValueError"):
        link.step(None, [], [])
    link.close()


def test_threads_and_port_are_gone_afterwards() -> None:
    before = set(threading.enumerate())
    served = Served(make_slice())
    link = served.link(1)
    link.step(None, [], [])
    link.close()
    served.server.stop()
    wait_for(lambda: set(threading.enumerate()) <= before)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", served.server.address.port), 5)


def test_a_peer_that_hangs_does_not_hold_up_the_end() -> None:
    served = Served(make_slice())
    hanging = served.link(1)
    hanging.step(None, [], [])
    served.server.stop()
    wait_for(lambda: not any("slice server" in t.name for t in threading.enumerate()))
    hanging.close()
