"""Connections between ranks and the slices that others serve: one TCP server per slice.

Each rank keeps one connection open to each server of another rank; its end, orderly or not, tells
the server at once that the rank has gone. Connections are TLS, both ends show the certificate of
the run's workers, and the first message has the server's secret. A message is a header and the
bytes of tensors behind it, which are sent from where they lie and received where they belong.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import logging
import secrets
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from sparkdl.comm.certificates import NAME, Certificate, mutual_tls
from sparkdl.errors import ClusterError, CommunicationError
from sparkdl.storage.checkpoint_format import decode, encode
from sparkdl.sync.asynchronous.parameter_server import Push, ServerSlice
from sparkdl.sync.gradient_buckets import Bucket

logger = logging.getLogger(__name__)

STOP_SECONDS = 3.0
"""Longest wait for the end of a server's threads; they last longer only if a peer hangs."""
_SECRET_SECONDS = 30.0
"""Whoever connects and does not show certificate and secret in this time is shut out."""
_MOST_STRANGERS = 512
"""Connections at a time that have not shown yet whose they are; each has a thread."""
_MAX_HEADER_BYTES = 1 << 20
"""Longer headers than this are none of ours, which have some numbers of the optimizer."""

_AGAIN_SECONDS = 0.5
"""Pause after a connection that could not be taken."""
_LENGTH = struct.Struct("!I")
"""In front of each header."""


@dataclass(frozen=True, kw_only=True)
class SliceAddress:
    """The address where a slice is served, and the secret that opens it."""

    host: str
    port: int
    secret: str = field(repr=False)


class Messages:
    """One end of a connection; OSError if the other has gone or does not follow the protocol."""

    def __init__(self, connection: ssl.SSLSocket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection = connection

    def send(self, header: Mapping[str, Any], tensors: Sequence[torch.Tensor] = ()) -> None:
        """Send a header and the bytes of contiguous CPU tensors."""
        data = json.dumps(header).encode()
        self._connection.sendall(_LENGTH.pack(len(data)) + data)
        for tensor in tensors:
            self._connection.sendall(_bytes(tensor))

    def receive(self) -> dict[str, Any]:
        """The next header."""
        (length,) = _LENGTH.unpack(self.read(_LENGTH.size))
        if length > _MAX_HEADER_BYTES:
            raise ConnectionAbortedError(f"the other end announced a header of {length} bytes")
        header: dict[str, Any] = json.loads(self.read(length))
        return header

    def fill(self, tensors: Sequence[torch.Tensor]) -> None:
        """Overwrite tensors like those that were sent by what came behind the header."""
        for tensor in tensors:
            self._read_into(_bytes(tensor))

    def read(self, num_bytes: int) -> bytes:
        """The next bytes."""
        data = bytearray(num_bytes)
        self._read_into(memoryview(data))
        return bytes(data)

    def _read_into(self, room: memoryview) -> None:
        while room:
            num_bytes = self._connection.recv_into(room)
            if num_bytes == 0:
                raise ConnectionResetError("the other end has closed the connection")
            room = room[num_bytes:]


class SliceServer:
    """Serves one slice, each other rank in a thread of its own.

    It listens at ``host``, which the peers can reach; ClusterError if that is not this host's
    address. All ranks show the certificate, and this server too. ``on_leave`` is told of each rank
    whose connection has ended.
    """

    def __init__(
        self,
        served: ServerSlice,
        *,
        host: str,
        certificate: Certificate,
        on_leave: Callable[[int], None],
    ) -> None:
        try:
            family, _, _, _, place = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
            self._listener = socket.create_server(
                place[:2], family=family, backlog=socket.SOMAXCONN
            )
        except OSError as error:
            raise ClusterError(
                f"cannot serve parameters at {host}, which Spark uses for this host ({error}); set "
                "SPARK_LOCAL_IP there to an address of its own that the others can reach"
            ) from error
        self._served = served
        self._on_leave = on_leave
        self._tls = mutual_tls(certificate, is_server=True)
        self._bytes_sent: dict[int, int] = {}
        """Rank -> bytes of tensors that were sent to it; each connects once."""
        self._connections: set[ssl.SSLSocket] = set()
        self._threads: list[threading.Thread] = []
        self._is_stopped = threading.Event()
        self._strangers = threading.Semaphore(_MOST_STRANGERS)
        self._is_told: set[str] = set()
        """What has been warned of. Whoever finds the port may connect often."""
        self._telling = threading.Lock()
        port, secret = self._listener.getsockname()[1], secrets.token_hex(32)
        self.address = SliceAddress(host=host, port=port, secret=secret)
        self._start(self._accept)

    @property
    def bytes_sent(self) -> int:
        """Bytes of tensors that were sent so far."""
        return sum(self._bytes_sent.values())

    def stop(self) -> None:
        """Stop listening, and answer no more requests than are under way."""
        self._is_stopped.set()
        _shut(self._listener, socket.SHUT_RDWR)
        self._listener.close()
        for connection in tuple(self._connections):
            _shut(connection, socket.SHUT_RD)
        # Python must not end while a thread is in torch.
        deadline = time.monotonic() + STOP_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _start(self, work: Callable[..., None], *arguments: Any) -> None:
        name = "sparkdl slice server"
        thread = threading.Thread(target=work, args=arguments, name=name, daemon=True)
        thread.start()
        self._threads = [*filter(threading.Thread.is_alive, self._threads), thread]

    def _accept(self) -> None:
        while not self._is_stopped.is_set():
            if not self._strangers.acquire(timeout=_AGAIN_SECONDS):
                continue
            try:
                connection, _ = self._listener.accept()
            except OSError as error:  # it was shut, or this process has no file descriptor left
                self._strangers.release()
                if not self._is_stopped.wait(_AGAIN_SECONDS):
                    self._warn_once("could not be taken", error)
                continue
            try:
                self._start(self._serve, connection)
            except RuntimeError as error:  # no thread is left for it
                self._warn_once("could not be taken", error)
                connection.close()
                self._strangers.release()
                self._is_stopped.wait(_AGAIN_SECONDS)

    def _serve(self, plain: socket.socket) -> None:
        """Answer the requests of one rank, one after the other, until it has gone."""
        unknown = contextlib.ExitStack()
        unknown.callback(self._strangers.release)
        try:
            plain.settimeout(_SECRET_SECONDS)
            tls = self._tls.wrap_socket(plain, server_side=True, do_handshake_on_connect=False)
            with plain, tls as connection:
                self._connections.add(connection)
                if self._is_stopped.is_set():
                    return
                connection.do_handshake()
                messages = Messages(connection)
                rank = self._admitted(messages)
                unknown.close()
                connection.settimeout(None)
                try:
                    while True:
                        self._answer(rank, messages)
                finally:
                    self._served.leave(rank)
                    self._on_leave(rank)
        except (ssl.SSLError, TimeoutError, ConnectionAbortedError) as error:
            self._warn_once("was refused", error)
        except OSError as error:
            logger.debug("a connection to this slice ended: %s", error)
        finally:
            unknown.close()
            ended = {c for c in tuple(self._connections) if c.fileno() < 0}  # others may add some
            self._connections.difference_update(ended)

    def _warn_once(self, what: str, error: Exception) -> None:
        with self._telling:
            level = logging.DEBUG if what in self._is_told else logging.WARNING
            self._is_told.add(what)
        logger.log(level, "a connection to this slice %s: %s", what, error)

    def _admitted(self, messages: Messages) -> int:
        """The rank that has connected; ConnectionAbortedError if it may not, or has before."""
        with _well_formed():
            hello = messages.receive()
            secret, rank = str(hello["secret"]).encode(), int(hello["rank"])
        if not hmac.compare_digest(secret, self.address.secret.encode()):
            raise ConnectionAbortedError("the secret is wrong")
        if rank in self._bytes_sent:
            raise ConnectionAbortedError(f"rank {rank} has connected before")
        self._bytes_sent[rank] = 0
        return rank

    def _answer(self, rank: int, messages: Messages) -> None:
        """Answer the next request; ConnectionAbortedError if it is none."""
        with _well_formed():
            header = messages.receive()
            is_close = {"step": False, "close": True}[header["kind"]]
            is_pulling = bool(header["pull"])
            push = None if is_close or header["push"] is None else Push(*header["push"])
        served, answer, rest = self._served, {}, None
        try:
            if is_close:
                weights, state = served.close_round(rank)
                rest = torch.frombuffer(bytearray(b"".join(encode(state))), dtype=torch.uint8)
                answer["state_bytes"] = len(rest)
                self._bytes_sent[rank] += sum(tensor.nbytes for tensor in state.tensors.values())
            else:
                if push is not None:
                    messages.fill(flats(served.inbox(rank)))
                served.push(rank, push)
                weights = served.pull(rank) if is_pulling else []
        except CommunicationError as error:
            messages.send({"error": str(error)})
            return
        pulled = flats(weights) if is_pulling else []
        self._bytes_sent[rank] += sum(tensor.nbytes for tensor in pulled)
        messages.send(answer, pulled if rest is None else [*pulled, rest])


class SliceLink:
    """A rank's way to the slice of another one. One request at a time.

    CommunicationError, from every method: the server has gone, or says why it cannot go on.
    """

    def __init__(self, address: SliceAddress, rank: int, certificate: Certificate) -> None:
        self._where = f"{address.host}:{address.port}"
        self.bytes_sent = 0
        with self._peer_errors():
            plain = socket.create_connection((address.host, address.port), _SECRET_SECONDS)
            tls = mutual_tls(certificate, is_server=False)
            self._connection = tls.wrap_socket(plain, server_hostname=NAME)
            self._connection.settimeout(None)
            self._messages = Messages(self._connection)
            self._messages.send({"secret": address.secret, "rank": rank})

    def step(
        self, push: Push | None, gradients: Sequence[torch.Tensor], weights: Sequence[torch.Tensor]
    ) -> None:
        """Push, and fill ``weights`` with the slice's; an empty sequence if none are wanted."""
        sent = gradients if push is not None else []
        self._ask({"kind": "step", "push": push, "pull": bool(weights)}, sent, weights)
        self.bytes_sent += sum(tensor.nbytes for tensor in sent)

    def close_round(self, weights: Sequence[torch.Tensor]) -> Any:
        """Close the round; fill ``weights`` as `step` does, and return the slice's state."""
        answer = self._ask({"kind": "close", "pull": bool(weights)}, [], weights)
        with self._peer_errors():
            encoded = self._messages.read(answer["state_bytes"])
        return decode(encoded, f"the state of the slice at {self._where}")

    def cancel(self) -> None:
        """End the connection at once, also while another thread waits for an answer."""
        _shut(self._connection, socket.SHUT_RDWR)

    def close(self) -> None:
        """End the connection."""
        self.cancel()
        self._connection.close()

    def _ask(
        self, header: dict[str, Any], sent: Sequence[torch.Tensor], received: Sequence[torch.Tensor]
    ) -> dict[str, Any]:
        with self._peer_errors():
            self._messages.send(header, sent)
            answer = self._messages.receive()
            if "error" in answer:
                raise CommunicationError(f"the slice at {self._where}: {answer['error']}")
            self._messages.fill(received)
        return answer

    @contextlib.contextmanager
    def _peer_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise CommunicationError(f"the slice at {self._where} is lost: {error}") from error


@contextlib.contextmanager
def _well_formed() -> Iterator[None]:
    """Raise `ConnectionAbortedError` if what is read in the block is not what a rank sends."""
    try:
        yield
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise ConnectionAbortedError(f"the other end sent no request: {error!r}") from error


def flats(buckets: Sequence[Bucket]) -> list[torch.Tensor]:
    """The memory of buckets, in order; what is sent."""
    return [bucket.values for bucket in buckets if bucket.values.numel()]


def _bytes(tensor: torch.Tensor) -> memoryview:
    memory: memoryview = tensor.detach().view(torch.uint8).numpy().data
    return memory


def _shut(connection: socket.socket, how: int) -> None:
    with contextlib.suppress(OSError):  # it has ended already
        # Not `SSLSocket.shutdown`: another thread may be in a call, and would go on in clear.
        socket.socket.shutdown(connection, how)
