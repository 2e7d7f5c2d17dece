"""The channel between driver and workers while a gang runs.

One Arrow Flight server per run carries rendezvous keys, heartbeats, progress, log lines and the
checkpoints that the driver keeps. It speaks TLS with those only who show the certificate of this
run's workers, and does what `access` allows them. It lives on the driver; where executors cannot
reach that, rank 0 hosts the keys. A process with a client must not fork: gRPC does not survive it.
"""

from __future__ import annotations

import contextlib
import json
import queue
import re
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pyarrow as pa
import pyarrow.flight as flight

from sparkdl.comm.access import Access, Address, Caller, require_file, require_key
from sparkdl.comm.certificates import NAME, make_certificate
from sparkdl.comm.file_chunks import CHUNK_BYTES, SCHEMA, gathered, received, sent
from sparkdl.errors import CommunicationError, SparkDLError, StorageError
from sparkdl.storage.storage import Storage

_HEADER = "authorization"
_POLL_SECONDS = 5.0
_OF_KEYS = {"set", "add", "missing", "get", "delete"}
_OF_REPORTS = {"report", "seconds_since_report"}
_OF_FILES = {"list", "remove", "exists"}
"""Methods of the hub and of the files that a request may name."""
_MOST_BYTES = 128 * 2**20
"""Of a request. The largest are reports: 2000 log lines of 10,000 characters, six bytes for each
character in the worst case. Files come in chunks (`CHUNK_BYTES`)."""
_MOST_EVENTS = 100_000
"""Events that may wait while the driver stands still; beyond that some are left out."""
_DISPENSABLE = ("heartbeat", "alive", "log")
_RECONNECT = (("grpc.max_reconnect_backoff_ms", 1000), ("grpc.min_reconnect_backoff_ms", 5000))
"""Options of a connection: after an absence of the server gRPC would wait up to two minutes, and
try each new connection for 20 s."""
_KEEPALIVE = (("grpc.keepalive_time_ms", 10_000), ("grpc.keepalive_timeout_ms", 10_000))
"""Options of a connection whose requests are short: it is given up and made anew when nothing comes
through for 10 s. TCP would wait, after a cut, for up to as long again as the cut was."""
_TRANSPORT = (
    flight.FlightUnavailableError,
    flight.FlightTimedOutError,
    flight.FlightCancelledError,
    flight.FlightUnauthenticatedError,
    OSError,
)
"""Errors of the way to the server; all others are its own answer to who may ask."""
_STACKS = re.compile(r"\. (?:Detail: Python exception|gRPC client debug context): ")
"""Where the stacks begin that Flight and gRPC add to a message."""


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something a worker said: who, when (driver's monotonic clock), and what."""

    attempt: int
    rank: int
    received: float
    body: Mapping[str, Any]


class Hub:
    """What stands behind the server: secrets, keys that can be waited for, and events received."""

    def __init__(self, *, keeps_events: bool = True) -> None:
        """Make an empty hub; without ``keeps_events`` what workers report is thrown away."""
        self.access = Access()
        self.keeps_events = keeps_events
        self.shows_lines = False
        """Whether what workers print is shown by the driver, on the console that they write to."""
        self._newest = -1
        self._keys: dict[str, bytes] = {}
        self._last_reports: dict[int, tuple[int, float]] = {}
        self._changed = threading.Condition()
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()

    def begin(self, attempt: int) -> None:
        """Begin an attempt: processes of earlier ones are refused, and their keys forgotten.

        What is under way of an earlier one is told by its number, so no number comes twice.
        """
        assert attempt > self._newest, f"attempt {attempt} comes after {self._newest}"
        self._newest = attempt
        self.access.begin(attempt)
        with self._changed:
            self._keys.clear()

    def set(self, key: str, value: bytes) -> None:
        """Set a key and wake those who wait for it."""
        with self._changed:
            self._keys[key] = value
            self._changed.notify_all()

    def add(self, key: str, amount: int) -> int:
        """Add to a counter (a decimal number; 0 if absent) and return its new value."""
        with self._changed:
            value = int(self._keys.get(key, b"0")) + amount
            self._keys[key] = str(value).encode()
            self._changed.notify_all()
            return value

    def wait(self, keys: Sequence[str], timeout_seconds: float) -> None:
        """Return when all keys are set; TimeoutError if they are not in time."""
        if missing := self.missing(keys, timeout_seconds):
            raise TimeoutError(f"{len(missing)} keys not set after {timeout_seconds:g} s")

    def missing(self, keys: Sequence[str], timeout_seconds: float) -> list[str]:
        """Wait until all keys are there; returns those that are not when time is up."""
        with self._changed:
            self._changed.wait_for(lambda: all(k in self._keys for k in keys), timeout_seconds)
            return [key for key in keys if key not in self._keys]

    def get(self, key: str) -> bytes | None:
        """The value of a key, or None."""
        with self._changed:
            return self._keys.get(key)

    def delete(self, key: str) -> bool:
        """Remove a key. Returns whether it was there."""
        with self._changed:
            return self._keys.pop(key, None) is not None

    def report(self, attempt: int, rank: int, events: Sequence[Mapping[str, Any]]) -> bool:
        """Note that a worker has reported, and what; returns `shows_lines`."""
        now = time.monotonic()
        self._last_reports[rank] = (attempt, now)
        if self.keeps_events:
            is_full = self.events.qsize() > _MOST_EVENTS
            for body in events:
                if not (is_full and body["kind"] in _DISPENSABLE):
                    self.events.put(Event(attempt=attempt, rank=rank, received=now, body=body))
        return self.shows_lines

    def seconds_since_report(self, attempt: int, rank: int) -> float | None:
        """Seconds since a worker's last report; None if it has made none in this attempt."""
        last, moment = self._last_reports.get(rank, (-1, 0.0))
        return time.monotonic() - moment if last == attempt else None


class ChannelServer(flight.FlightServerBase):  # type: ignore[misc] # pyarrow has no stubs
    """Serves a hub, and files if given. Use as a context manager; it stops with the block."""

    def __init__(
        self, hub: Hub, *, bind: str, announce: str, port: int = 0, files: Storage | None = None
    ) -> None:
        own, workers = make_certificate(), make_certificate()
        super().__init__(
            location(bind, port),
            tls_certificates=[(own.public, own.key)],
            verify_client=True,
            root_certificates=workers.public,
            middleware={"caller": _Callers(hub.access)},
        )
        self._hub = hub
        self._files = files
        self._address = Address(
            host=announce, port=self.port, server_certificate=own.public, worker=workers, secret=""
        )

    @property
    def address(self) -> Address:
        """Where the server is, with what opens it in the present attempt."""
        return replace(self._address, secret=self._hub.access.secret)

    def do_action(self, context: Any, action: flight.Action) -> Iterator[flight.Result]:
        """Call the method of the hub or of the files that the action's type names."""
        caller: Caller = context.get_middleware("caller").caller
        _require_size(action.body.size, _MOST_BYTES)
        header, _, value = action.body.to_pybytes().partition(b"\n")
        arguments = json.loads(header)
        if action.type == "set":
            arguments["value"] = value
        answer = self._answer(caller, action.type, arguments)
        is_bytes = isinstance(answer, bytes)
        yield flight.Result(b"+" + answer if is_bytes else b"-" + json.dumps(answer).encode())

    def do_put(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
        """Store a file that arrives in chunks."""
        caller: Caller = context.get_middleware("caller").caller
        path = descriptor.path[0].decode()
        require_file(caller, path)

        def chunks() -> Iterator[Any]:
            for chunk in received(chunk.data for chunk in reader):
                _require_size(len(chunk), CHUNK_BYTES)
                yield chunk
            self._hub.access.require_present(caller)  # a file counts once it is whole

        self._storage().write(path, chunks())

    def do_get(self, context: Any, ticket: flight.Ticket) -> flight.GeneratorStream:
        """Send a file in chunks."""
        data = self._storage().read(ticket.ticket.decode())
        return flight.GeneratorStream(SCHEMA, sent([data]))

    def _answer(self, caller: Caller, what: str, arguments: dict[str, Any]) -> Any:
        if what in _OF_KEYS:
            # A call that began in an earlier attempt must not change what the present one reads.
            scope = f"{caller.attempt}/"
            if what == "missing":
                arguments["keys"] = [scope + key for key in arguments["keys"]]
            else:
                if what != "get":
                    require_key(caller, arguments["key"], removes=what == "delete")
                arguments["key"] = scope + arguments["key"]
            return getattr(self._hub, what)(**arguments)
        if what in _OF_REPORTS:
            if what == "report":
                self._hub.access.require_report(caller, arguments["attempt"], arguments["rank"])
            return getattr(self._hub, what)(**arguments)
        if what in _OF_FILES:
            if what == "remove":
                require_file(caller, arguments["path"])
            return getattr(self._storage(), what)(**arguments)
        raise flight.FlightServerError(f"unknown request {what!r}")

    def _storage(self) -> Storage:
        if self._files is None:
            raise flight.FlightServerError("this channel keeps no files")
        return self._files


class MessageTooLarge(CommunicationError):
    """A request is larger than the server takes."""


class ChannelClient:
    """A worker's end of the channel. Thread-safe; keys are those of the worker's attempt.

    CommunicationError, from every method: the server cannot be reached or refuses.
    """

    _connection: ClassVar[tuple[tuple[str, int], ...]] = (*_RECONNECT, *_KEEPALIVE)

    def __init__(self, address: Address, *, timeout_seconds: float = 30.0) -> None:
        self.address = address
        """What this client calls, and as whom."""
        self._timeout = timeout_seconds
        self._shown = address.shown()
        self._client = flight.connect(
            location(address.host, address.port),
            tls_root_certs=address.server_certificate,
            cert_chain=address.worker.public,
            private_key=address.worker.key,
            override_hostname=NAME,
            generic_options=list(self._connection),
        )

    def close(self) -> None:
        """Close the connection."""
        self._client.close()

    def set(self, key: str, value: bytes) -> None:
        """Set a key."""
        self._ask("set", value, key=key)

    def add(self, key: str, amount: int) -> int:
        """Add to a counter and return its new value."""
        return int(self._ask("add", key=key, amount=amount))

    def wait(self, keys: Sequence[str], timeout_seconds: float) -> None:
        """Return when all keys are set; TimeoutError if they are not in time."""
        deadline = time.monotonic() + timeout_seconds
        while True:
            seconds = min(max(deadline - time.monotonic(), 0.0), _POLL_SECONDS)
            missing = self._ask("missing", keys=list(keys), timeout_seconds=seconds)
            if not missing:
                return
            if time.monotonic() >= deadline:
                raise TimeoutError(f"{len(missing)} keys not set after {timeout_seconds} s")

    def get(self, key: str) -> bytes | None:
        """The value of a key, or None."""
        value: bytes | None = self._ask("get", key=key)
        return value

    def delete(self, key: str) -> bool:
        """Remove a key. Returns whether it was there."""
        return bool(self._ask("delete", key=key))

    def report(self, *, attempt: int, rank: int, events: Sequence[Mapping[str, Any]]) -> bool:
        """See `Hub.report`; values that are not JSON go as their text."""
        return bool(self._ask("report", attempt=attempt, rank=rank, events=events))

    def seconds_since_report(self, *, attempt: int, rank: int) -> float | None:
        """Seconds since a worker's last report; None if it has made none in this attempt."""
        seconds: float | None = self._ask("seconds_since_report", attempt=attempt, rank=rank)
        return seconds

    def _ask(self, what: str, value: bytes = b"", **arguments: Any) -> Any:
        body = json.dumps(arguments, default=str).encode() + b"\n" + value
        if len(body) > _MOST_BYTES:
            raise MessageTooLarge(
                f"channel request {what!r} has {len(body)} bytes; the driver takes {_MOST_BYTES}"
            )
        action = flight.Action(what, body)
        try:
            results = list(self._client.do_action(action, self._options()))
        except (pa.ArrowException, OSError) as error:
            raise self._failure(f"channel request {what!r} failed", error) from error
        answer = results[0].body.to_pybytes()
        return answer[1:] if answer.startswith(b"+") else json.loads(answer[1:])

    def _failure(self, what: str, error: Exception) -> SparkDLError:
        return CommunicationError(f"{what}: {_STACKS.split(str(error))[0]}")

    def _options(self) -> flight.FlightCallOptions:
        headers = [(_HEADER.encode(), self._shown.encode())]
        return flight.FlightCallOptions(timeout=self._timeout, headers=headers)


class ChannelStorage(ChannelClient):
    """Files that the driver keeps, seen from a worker: a `storage.Storage`, which may be slow.

    Raises, from every method:
        StorageError: the driver cannot store or find the file.
        CommunicationError: the driver cannot be reached, or does not answer in time.
    """

    # The driver would take the questions of a request that waits long for an attack.
    _connection = _RECONNECT

    def __init__(self, address: Address, *, timeout_seconds: float = 600.0) -> None:
        super().__init__(address, timeout_seconds=timeout_seconds)

    def write(self, path: str, data: Any) -> None:
        parts = data if not isinstance(data, (bytes, bytearray, memoryview)) else [data]
        descriptor = flight.FlightDescriptor.for_path(path)
        try:
            writer, reader = self._client.do_put(descriptor, SCHEMA, self._options())
            try:
                for batch in sent(parts):
                    writer.write_batch(batch)
                writer.done_writing()
                reader.read()
            except BaseException:
                with contextlib.suppress(pa.ArrowException, OSError):
                    writer.close()  # the driver sees that it has not all, and says so too
                raise
            writer.close()
        except (pa.ArrowException, OSError) as error:
            raise self._failure(f"the driver could not store {path}", error) from error

    def read(self, path: str) -> bytes:
        return gathered(self.read_pieces(path))

    def read_pieces(self, path: str) -> Iterator[pa.Buffer]:
        """The bytes of a file, as they come."""
        try:
            reader = self._client.do_get(flight.Ticket(path.encode()), self._options())
            yield from received(chunk.data for chunk in reader)
        except (pa.ArrowException, OSError) as error:
            raise self._failure(f"the driver could not send {path}", error) from error

    def list(self, path: str) -> list[str]:
        return list(self._ask("list", path=path))

    def remove(self, path: str) -> None:
        self._ask("remove", path=path)

    def exists(self, path: str) -> bool:
        return bool(self._ask("exists", path=path))

    def _failure(self, what: str, error: Exception) -> SparkDLError:
        """What a failed call means: only what got lost on the way may be tried again."""
        kind = CommunicationError if isinstance(error, _TRANSPORT) else StorageError
        return kind(f"{what}: {_STACKS.split(str(error))[0]}")


class _Callers(flight.ServerMiddlewareFactory):  # type: ignore[misc]
    """Finds out who makes a call before it is served, and refuses those that are nobody."""

    def __init__(self, access: Access) -> None:
        self._access = access

    def start_call(self, info: Any, headers: Mapping[str, list[str]]) -> flight.ServerMiddleware:
        call = _Call()
        call.caller = self._access.caller(str(headers.get(_HEADER, [""])[0]))
        return call


class _Call(flight.ServerMiddleware):  # type: ignore[misc]
    """Says who makes a call, to those who serve it."""

    caller: Caller


def _require_size(num_bytes: int, most: int) -> None:
    """Refuse what no worker of ours sends."""
    if num_bytes > most:
        raise flight.FlightServerError(f"a message of {num_bytes} bytes, of at most {most}")


def location(host: str, port: int) -> str:
    """Where a Flight server listens, as Flight writes it."""
    return f"grpc+tls://[{host}]:{port}" if ":" in host else f"grpc+tls://{host}:{port}"
