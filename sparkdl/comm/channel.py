"""The channel between driver and workers while a gang runs.

One server per run carries rendezvous keys, heartbeats, progress, log lines and the checkpoints that
the driver keeps. It speaks TLS with those only who show the certificate of this run's workers, and
does what `access` allows them. It lives on the driver; where executors cannot reach that, rank 0
hosts the keys. One thread serves all requests, however many wait for keys; files are read and
written by a few more.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import queue
import socket
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType
from typing import Any, ClassVar, NamedTuple, TypeVar

from sparkdl.comm.access import Access, Address, Caller, Unauthenticated, require_file, require_key
from sparkdl.comm.certificates import make_certificate, tls
from sparkdl.comm.file_chunks import CHUNK_BYTES, cut, gathered
from sparkdl.comm.wire import (
    Body,
    Connection,
    Deadline,
    MalformedMessage,
    answer,
    notice_absence,
    received,
)
from sparkdl.errors import CommunicationError, SparkDLError, StorageError
from sparkdl.storage.storage import Storage

_POLL_SECONDS = 10.0
"""A request waits so long for keys, then it is made again."""
_REQUESTS_PER_SECOND = 200.0
"""Requests of all ranks together, where there are many: their pauses grow with their number. That
is about a twentieth of a core, see benchmarks/rendezvous.py."""
_LEAST_PAUSE_SECONDS = 0.25
_MOST_PAUSE_SECONDS = 10.0
"""Between two reports of a rank."""
_OF_KEYS = {"set", "add", "missing", "gathered", "get", "delete"}
_OF_REPORTS = {"report", "seconds_since_report"}
_OF_FILES = {"list", "remove", "exists", "read"}
"""Methods of the hub and of the files that a request may name."""
_MOST_BYTES = 128 * 2**20
"""Most bytes of a request. The largest are reports: 2000 log lines of 10,000 characters, six bytes
for each character in the worst case. Files come in chunks (`CHUNK_BYTES`)."""
_MOST_EVENTS = 100_000
"""Events that may wait while the driver stands still; beyond that some are left out."""
_DISPENSABLE = ("heartbeat", "alive", "log")
_MOST_FILES = 64
"""Files that are read and written at a time; others wait."""
_BACKLOG = 4096
"""Connections that the kernel accepts before the server does: many workers begin at once."""
_LOOK_SECONDS = 1.0
"""Time after which a file that makes no progress checks that its worker still counts."""
_HANDSHAKE_SECONDS = 20
_MOST_HANDSHAKES = 512
"""Connections at a time that have not shown yet whose they are; others wait in the kernel, so that
strangers do not take the files and the memory of the driver."""
_AGAIN_SECONDS = 1.0
"""Pause after a connection that could not be accepted."""
_ABSENCE_SECONDS = 180
"""After which the server gives up a connection whose other end is gone."""
_MOST_IDLE = 4
"""Connections that a client keeps for its next requests."""

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something a worker said: who, when (driver's monotonic clock), and what."""

    attempt: int
    rank: int
    received: float
    body: Mapping[str, Any]


@dataclass(eq=False)
class _Waiter:
    """Somebody who is woken when ``left`` more keys have been set."""

    left: int
    wake: Callable[[], None]


class Answer(NamedTuple):
    """The driver's answer to a report."""

    shows_lines: bool
    pause: float
    """Seconds until the next report."""
    is_over: bool
    """True if nobody waits for the rank's work any more."""


class Hub:
    """The state behind the server: secrets, keys that can be waited for, and events received."""

    def __init__(self, *, keeps_events: bool = True) -> None:
        """Make an empty hub; without ``keeps_events`` what workers report is thrown away."""
        self.access = Access()
        self.keeps_events = keeps_events
        self.shows_lines = False
        """True if what workers print is shown by the driver, on the console that they write to."""
        self.is_over = False
        """True if workers of the present attempt shall end."""
        self._newest = -1
        self._keys: dict[str, bytes] = {}
        self._counts: Counter[str] = Counter()
        """Keys by what stands before their last slash."""
        self._gathered: dict[str, bytes] = {}
        """Answers of `gathered`, which are the same for all who ask."""
        self._waiting: dict[Hashable, list[_Waiter]] = {}
        """Key, or what is counted with the number that is waited for -> those that wait."""
        self._last_reports: dict[int, tuple[int, float]] = {}
        self._batches: dict[int, tuple[int, int]] = {}
        """Attempt and number of the last events of each rank that were numbered."""
        self._lock = threading.Lock()
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()

    def begin(self, attempt: int) -> None:
        """Begin an attempt: processes of earlier ones are refused, and their keys forgotten.

        What is under way of an earlier one is told by its number, so no number comes twice.
        """
        assert attempt > self._newest, f"attempt {attempt} comes after {self._newest}"
        self._newest, self.is_over = attempt, False
        self.access.begin(attempt)
        with self._lock:
            self._keys.clear()
            self._counts.clear()
            self._gathered.clear()
            waiters = {waiter for some in self._waiting.values() for waiter in some}
            self._waiting.clear()
        for waiter in waiters:  # who asks again is refused
            waiter.wake()

    def set(self, key: str, value: bytes) -> None:
        """Set a key and wake those who wait for it."""
        what = key.rpartition("/")[0]
        with self._lock:
            self._counts[what] += key not in self._keys
            self._keys[key] = value
            self._gathered.pop(what, None)
            woken = self._woken(key, (what, self._counts[what]))
        for wake in woken:
            wake()

    def add(self, key: str, amount: int) -> int:
        """Add to a counter (a decimal number; 0 if absent) and return its new value."""
        with self._lock:
            self._counts[key.rpartition("/")[0]] += key not in self._keys
            value = int(self._keys.get(key, b"0")) + amount
            self._keys[key] = str(value).encode()
            woken = self._woken(key)
        for wake in woken:
            wake()
        return value

    def wait(self, keys: Sequence[str], timeout_seconds: float) -> None:
        """Return when all keys are set; TimeoutError if they are not in time."""
        are_there = threading.Event()
        take_back = self.when_set(keys, are_there.set)
        are_there.wait(timeout_seconds)
        take_back()
        if missing := self.missing(keys):
            raise TimeoutError(f"{len(missing)} keys not set after {timeout_seconds:g} s")

    def missing(self, keys: Sequence[str]) -> list[str]:
        """Return those of the keys that are not there."""
        with self._lock:
            return [key for key in keys if key not in self._keys]

    def gathered(self, key: str, count: int) -> bytes | None:
        """The values of ``key/0`` to ``key/<count - 1>``, which nobody removes, as a JSON list.

        None if not all are there.
        """
        with self._lock:
            if self._counts[key] < count:
                return None
            if key not in self._gathered:
                values = [self._keys[f"{key}/{rank}"].decode() for rank in range(count)]
                self._gathered[key] = json.dumps(values).encode()
            return self._gathered[key]

    def when_set(self, keys: Sequence[str], wake: Callable[[], None]) -> Callable[[], None]:
        """Call ``wake`` once all keys have been set, or now; returns what takes that back."""
        with self._lock:
            return self._when([key for key in keys if key not in self._keys], wake)

    def when_gathered(self, key: str, count: int, wake: Callable[[], None]) -> Callable[[], None]:
        """Call ``wake`` once `gathered` has an answer, like `when_set`."""
        with self._lock:
            return self._when([] if self._counts[key] >= count else [(key, count)], wake)

    def _when(self, absent: Sequence[Hashable], wake: Callable[[], None]) -> Callable[[], None]:
        waiter = _Waiter(len(absent), wake)
        for name in absent:
            self._waiting.setdefault(name, []).append(waiter)
        if not absent:
            wake()

        def take_back() -> None:
            with self._lock:
                for name in absent:
                    left = [one for one in self._waiting.pop(name, ()) if one is not waiter]
                    if left:
                        self._waiting[name] = left

        return take_back

    def _woken(self, *names: Hashable) -> list[Callable[[], None]]:
        """Return the callbacks of those who have waited for the last of these."""
        woken = []
        for name in names:
            for waiter in self._waiting.pop(name, ()):
                waiter.left -= 1
                if not waiter.left:
                    woken.append(waiter.wake)
        return woken

    def get(self, key: str) -> bytes | None:
        """The value of a key, or None."""
        with self._lock:
            return self._keys.get(key)

    def delete(self, key: str) -> bool:
        """Remove a key. Returns whether it was there."""
        with self._lock:
            if self._keys.pop(key, None) is None:
                return False
            what = key.rpartition("/")[0]
            self._gathered.pop(what, None)
            self._counts[what] -= 1
            if not self._counts[what]:
                del self._counts[what]
            return True

    def report(
        self,
        attempt: int,
        rank: int,
        events: Sequence[Mapping[str, Any]],
        queued: Sequence[Mapping[str, Any]] = (),
        number: int = 0,
    ) -> Answer:
        """Note that a worker has reported, and what.

        Who hears no answer sends the events ``queued`` again, with the same ``number``, which grows
        from one such list to the next: they count once.
        """
        now = time.monotonic()
        self._last_reports[rank] = (attempt, now)
        if number and (attempt, number) > self._batches.get(rank, (-1, 0)):
            self._batches[rank] = (attempt, number)
            events = [*events, *queued]
        if self.keeps_events:
            is_full = self.events.qsize() > _MOST_EVENTS
            for body in events:
                if not (is_full and body["kind"] in _DISPENSABLE):
                    self.events.put(Event(attempt=attempt, rank=rank, received=now, body=body))
        pause = len(self._last_reports) / _REQUESTS_PER_SECOND
        pause = min(max(pause, _LEAST_PAUSE_SECONDS), _MOST_PAUSE_SECONDS)
        return Answer(self.shows_lines, pause, self.is_over)

    def seconds_since_report(self, attempt: int, rank: int) -> float | None:
        """Seconds since a worker's last report; None if it has made none in this attempt."""
        last, moment = self._last_reports.get(rank, (-1, 0.0))
        return time.monotonic() - moment if last == attempt else None


class ChannelServer:
    """Serves a hub, and files if given. Use as a context manager; it stops with the block."""

    def __init__(
        self, hub: Hub, *, bind: str, announce: str, port: int = 0, files: Storage | None = None
    ) -> None:
        """Listen; OSError if that cannot be done at ``bind`` and ``port``, of which 0 is any."""
        own, workers = make_certificate(), make_certificate()
        context = tls(own, workers.public, is_server=True)
        listener = _listener(bind, port)
        self.port: int = listener.getsockname()[1]
        self._hub, self._files = hub, files
        self._address = Address(
            host=announce, port=self.port, server_certificate=own.public, worker=workers, secret=""
        )
        self._connections: dict[asyncio.Task[None], asyncio.StreamWriter] = {}
        self._greeted: set[asyncio.Task[None]] = set()
        self._accepted: weakref.WeakSet[socket.socket] = weakref.WeakSet()
        self._listener = listener
        self._context = context
        self._is_closing = False
        self._is_crowded = False
        """True once connections could not be accepted, which is told once."""
        self._loop = asyncio.new_event_loop()
        self._files_at_once = asyncio.Semaphore(_MOST_FILES)
        self._thread = threading.Thread(target=self._run, name="sparkdl-channel", daemon=True)
        try:
            self._thread.start()
            self._loop.call_soon_threadsafe(self._listen)
        except BaseException:  # also if the user interrupts
            self.shutdown()
            listener.close()
            raise

    def __enter__(self) -> ChannelServer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        found: TracebackType | None,
    ) -> None:
        self.shutdown()

    def shutdown(self) -> None:
        """Close all connections and stop; may be called again, and after an interrupt must be."""
        if not self._is_closing:
            self._is_closing = True
            self._loop.call_soon_threadsafe(self._loop.stop)
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        """Serve until told to stop: in this thread, since a notebook's has a loop of its own."""
        self._listener.setblocking(False)
        self._listener.listen(_BACKLOG)
        self._loop.run_forever()
        self._loop.run_until_complete(self._close())
        self._loop.close()

    def _listen(self) -> None:
        """Accept connections from now on, unless as many are greeted as may be."""
        if not self._is_closing and len(self._greeted) < _MOST_HANDSHAKES:
            self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        """Accept a connection, which is greeted in a task of its own.

        No coroutine waits for it: one that is cancelled when a connection has just come loses it.
        """
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:
            self._loop.remove_reader(self._listener)
            self._loop.call_later(_AGAIN_SECONDS, self._listen)
            self._warn_crowded(error)
            return
        connection.setblocking(False)
        self._accepted.add(connection)
        task = self._loop.create_task(self._greet(connection))
        self._greeted.add(task)
        task.add_done_callback(self._leave)
        if len(self._greeted) >= _MOST_HANDSHAKES:
            self._loop.remove_reader(self._listener)

    def _leave(self, greeted: asyncio.Task[None]) -> None:
        """Make room for another connection once one was greeted."""
        was_full = len(self._greeted) >= _MOST_HANDSHAKES
        self._greeted.discard(greeted)
        if was_full:
            self._listen()

    async def _greet(self, connection: socket.socket) -> None:
        """Serve whoever shows the right certificate in time."""
        reader = asyncio.StreamReader(limit=2**20)
        with contextlib.suppress(OSError):
            await self._loop.connect_accepted_socket(
                lambda: asyncio.StreamReaderProtocol(reader, self._admit),
                connection,
                ssl=self._context,
                ssl_handshake_timeout=_HANDSHAKE_SECONDS,
            )

    async def _close(self) -> None:
        """Accept nobody, end all tasks, and wait until each connection is closed."""
        self._loop.remove_reader(self._listener)
        self._listener.close()
        while (others := asyncio.all_tasks() - {asyncio.current_task()}) or any(
            connection.fileno() >= 0 for connection in self._accepted
        ):
            for writer in self._connections.values():
                writer.transport.abort()
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)
            await asyncio.sleep(0)  # what threads have asked for finds its connection closed

    def _warn_crowded(self, error: OSError) -> None:
        """Say once that connections cannot be accepted."""
        if not self._is_crowded:
            self._is_crowded = True
            logger.warning(
                "workers cannot connect to the driver now: %s; they try again, but raise the limit "
                "of open files of the driver's process (ulimit -n)",
                error,
            )

    @property
    def address(self) -> Address:
        """The address of the server, with the secret that opens it in the present attempt."""
        return replace(self._address, secret=self._hub.access.secret)

    def _admit(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve a connection in a task of its own."""
        task = self._loop.create_task(self._serve(reader, writer))
        self._connections[task] = writer
        task.add_done_callback(self._connections.pop)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the requests of a connection, one after the other."""
        try:
            connection = writer.get_extra_info("socket")
            notice_absence(connection, _ABSENCE_SECONDS)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while True:
                head, body = await received(reader)
                error: dict[str, Any] | None = None
                try:
                    found = await self._answer(head, body)
                except asyncio.IncompleteReadError:
                    raise
                except Exception as failure:  # whatever a request or a storage brings about
                    is_refused = isinstance(failure, Unauthenticated)
                    text = str(failure) or type(failure).__name__
                    error, found = {"error": text, "refused": is_refused}, b""
                is_bytes = isinstance(found, bytes)
                data: bytes = found if is_bytes else json.dumps(found).encode()
                await answer(writer, error or {"bytes": is_bytes}, data)
                await body.throw_away()
        except (
            OSError,
            asyncio.IncompleteReadError,
            MalformedMessage,
            asyncio.CancelledError,
        ) as gone:  # the other end is, or none of ours, or the server stops
            gone.__traceback__ = None  # the reader keeps the error, and that the answer's bytes
        finally:
            writer.transport.abort()

    async def _answer(self, head: dict[str, Any], body: Body) -> Any:
        caller = self._hub.access.caller(head["shown"])
        what = head["call"]
        if what == "write":
            await self._write(caller, head["path"], body)
            return None
        arguments, _, value = (await body.whole(_MOST_BYTES)).partition(b"\n")
        named: dict[str, Any] = json.loads(arguments)
        if what in _OF_KEYS:
            # A call that began in an earlier attempt must not change what the present one reads.
            scope = f"{caller.attempt}/"
            if what == "missing":
                return await self._missing([scope + key for key in named["keys"]], named["seconds"])
            key = scope + named["key"]
            if what == "gathered":
                return await self._gathered(key, named["count"], named["seconds"])
            if what != "get":
                require_key(caller, named["key"], removes=what == "delete")
            more = {"value": value} if what == "set" else {}
            return getattr(self._hub, what)(**{**named, **more, "key": key})
        if what in _OF_REPORTS:
            if what == "report":
                self._hub.access.require_report(caller, named["attempt"], named["rank"])
            return getattr(self._hub, what)(**named)
        if what in _OF_FILES:
            if what == "remove":
                require_file(caller, named["path"])
            return await self._in_thread(partial(getattr(self._storage(), what), **named))
        raise MalformedMessage(f"unknown request {what!r}")

    async def _missing(self, keys: Sequence[str], seconds: float) -> int:
        """Wait until all keys are there; how many are not when time is up."""
        await self._woken(partial(self._hub.when_set, keys), seconds)
        return len(self._hub.missing(keys))

    async def _gathered(self, key: str, count: int, seconds: float) -> bytes | None:
        await self._woken(partial(self._hub.when_gathered, key, count), seconds)
        return self._hub.gathered(key, count)

    async def _woken(
        self, when: Callable[[Callable[[], None]], Callable[[], None]], seconds: float
    ) -> None:
        """Wait for a call of what ``when`` is given, at most so long."""
        loop, future = self._loop, self._loop.create_future()

        def end_wait() -> None:
            if not future.done():
                future.set_result(None)

        def wake() -> None:
            with contextlib.suppress(RuntimeError):  # the server has stopped
                loop.call_soon_threadsafe(end_wait)

        take_back = when(wake)
        try:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(future, seconds)
        finally:
            take_back()

    async def _write(self, caller: Caller, path: str, body: Body) -> None:
        """Store a file that arrives in chunks."""
        require_file(caller, path)

        def chunks() -> Iterator[bytes]:
            while True:
                wanted = body.chunk(CHUNK_BYTES)
                try:
                    under_way = asyncio.run_coroutine_threadsafe(wanted, self._loop)
                except RuntimeError as error:
                    wanted.close()
                    raise ConnectionError("the channel is closed") from error
                while not wait([under_way], _LOOK_SECONDS).done:
                    if self._is_closing:
                        raise ConnectionError("the channel is closed")
                    try:
                        self._hub.access.require_present(caller)
                    except Unauthenticated:
                        under_way.cancel()
                        raise
                chunk = under_way.result()
                if chunk is None:
                    break
                yield chunk
            self._hub.access.require_present(caller)  # a file counts once it is whole

        storage = self._storage()
        await self._in_thread(lambda: storage.write(path, chunks()))

    async def _in_thread(self, action: Callable[[], T]) -> T:
        """Do something slow in a thread, for which the process does not wait when it ends."""
        loop, done = self._loop, Future[T]()

        def act() -> None:
            done.set_running_or_notify_cancel()
            try:
                done.set_result(action())
            except BaseException as error:
                done.set_exception(error)

        async with self._files_at_once:
            threading.Thread(target=act, name="sparkdl-channel-files", daemon=True).start()
            return await asyncio.wrap_future(done, loop=loop)

    def _storage(self) -> Storage:
        if self._files is None:
            raise StorageError("this channel keeps no files")
        return self._files


def _listener(bind: str, port: int) -> socket.socket:
    """A socket at the first address that ``bind`` means, for many connections at once."""
    (family, *_, where), *_ = socket.getaddrinfo(bind, port, type=socket.SOCK_STREAM)
    is_any = bind == "::" and socket.has_dualstack_ipv6()  # of both families
    return socket.create_server(where[:2], family=family, dualstack_ipv6=is_any)


class MessageTooLarge(CommunicationError):
    """A request is larger than the server takes."""


def _close(idle: list[Connection]) -> None:
    while idle:
        idle.pop().close()


class _Refusal(Exception):
    """The error that the server has answered."""


class ChannelClient:
    """A worker's end of the channel. Thread-safe; keys are those of the worker's attempt.

    CommunicationError, from every method: the server cannot be reached or refuses.
    """

    _silence_seconds: int = 20
    """A connection through which nothing comes for so long is given up."""

    def __init__(self, address: Address, *, timeout_seconds: float = 30.0) -> None:
        self.address = address
        """Address that this client calls, and the rank as which it calls."""
        self._timeout = timeout_seconds
        self._shown = address.shown()
        self._tls = tls(address.worker, address.server_certificate, is_server=False)
        self._idle: list[Connection] = []
        self._lock = threading.Lock()
        self._is_closed = False
        self._close_all = weakref.finalize(self, _close, self._idle)

    def close(self) -> None:
        """Close the connections."""
        with self._lock:
            self._is_closed = True
            self._close_all()

    def set(self, key: str, value: bytes) -> None:
        """Set a key."""
        self._ask("set", value, key=key)

    def add(self, key: str, amount: int) -> int:
        """Add to a counter and return its new value."""
        return int(self._ask("add", key=key, amount=amount))

    def wait(self, keys: Sequence[str], timeout_seconds: float) -> None:
        """Return when all keys are set; TimeoutError if they are not in time."""
        wanted, deadline = list(keys), time.monotonic() + timeout_seconds
        while True:
            seconds = min(max(deadline - time.monotonic(), 0.0), _POLL_SECONDS)
            count = self._ask("missing", keys=wanted, seconds=seconds)
            if not count:
                return
            if time.monotonic() >= deadline:
                raise TimeoutError(f"{count} keys not set after {timeout_seconds} s")

    def gather(
        self, what: str, rank: int, count: int, value: str, timeout_seconds: float
    ) -> list[str]:
        """Give this rank's value and wait for those of all; returns them by rank.

        TimeoutError if not all are there in time.
        """
        self.set(f"{what}/{rank}", value.encode())
        deadline = time.monotonic() + timeout_seconds
        while True:
            seconds = min(max(deadline - time.monotonic(), 0.0), _POLL_SECONDS)
            found = self._ask("gathered", key=what, count=count, seconds=seconds)
            if found is not None:
                values: list[str] = json.loads(found)
                return values
            if time.monotonic() >= deadline:
                raise TimeoutError(f"not all {count} ranks are there after {timeout_seconds:g} s")

    def get(self, key: str) -> bytes | None:
        """The value of a key, or None."""
        value: bytes | None = self._ask("get", key=key)
        return value

    def delete(self, key: str) -> bool:
        """Remove a key. Returns whether it was there."""
        return bool(self._ask("delete", key=key))

    def report(
        self,
        *,
        attempt: int,
        rank: int,
        events: Sequence[Mapping[str, Any]],
        queued: Sequence[Mapping[str, Any]] = (),
        number: int = 0,
    ) -> Answer:
        """See `Hub.report`; values that are not JSON go as their text."""
        return Answer(
            *self._ask(
                "report", attempt=attempt, rank=rank, events=events, queued=queued, number=number
            )
        )

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
        deadline = Deadline(self._timeout + arguments.get("seconds", 0.0))
        try:
            with self._connection(deadline) as connection:
                connection.send({"call": what, "shown": self._shown}, body, deadline)
                head, pieces = connection.receive(deadline)
                data = gathered(pieces)
        except OSError as error:
            raise self._lost(f"channel request {what!r} failed", error) from error
        self._check(head, f"channel request {what!r} failed")
        return data if head["bytes"] else json.loads(data)

    @contextlib.contextmanager
    def _connection(self, deadline: Deadline) -> Iterator[Connection]:
        """A connection for one request, which is kept for others if that ends well."""
        connection = None
        while connection is None:
            with self._lock:
                if self._is_closed:
                    raise ConnectionError("this client is closed")
                kept = self._idle.pop() if self._idle else None
            if kept is None or kept.is_usable():
                connection = kept or Connection(
                    self.address.host, self.address.port, self._tls, deadline,
                    self._silence_seconds,
                )  # fmt: skip
            else:
                kept.close()
        try:
            yield connection
        except BaseException:
            connection.close()
            raise
        with self._lock:
            is_kept = not self._is_closed and len(self._idle) < _MOST_IDLE
            if is_kept:
                self._idle.append(connection)
        if not is_kept:
            connection.close()

    def _lost(self, what: str, error: OSError) -> CommunicationError:
        """Return the error for a failure of the connection to the server."""
        return CommunicationError(f"{what}: {error or type(error).__name__}")

    def _check(self, head: Mapping[str, Any], what: str) -> None:
        """Raise what an answer says; only who is not let in has a CommunicationError."""
        if "error" in head:
            refusal = _Refusal(head["error"])
            kind = CommunicationError if head["refused"] else self._kind
            raise kind(f"{what}: {refusal}") from refusal

    _kind: ClassVar[type[SparkDLError]] = CommunicationError
    """Error raised where the server answers that it does not do what was asked."""


class ChannelStorage(ChannelClient):
    """Files that the driver keeps, seen from a worker: a `storage.Storage`, which may be slow.

    Raises, from every method:
        StorageError: the driver cannot store or find the file.
        CommunicationError: the driver cannot be reached, or does not answer in time.
    """

    _kind = StorageError

    def __init__(self, address: Address, *, timeout_seconds: float = 600.0) -> None:
        super().__init__(address, timeout_seconds=timeout_seconds)
        # A driver whose storage is slow takes nothing meanwhile, which looks like silence.
        self._silence_seconds = math.ceil(timeout_seconds)

    def write(self, path: str, data: Any) -> None:
        parts = data if not isinstance(data, (bytes, bytearray, memoryview)) else [data]
        chunks = (chunk for part in parts for chunk in cut(memoryview(part).cast("B")))
        head, what = (
            {"call": "write", "shown": self._shown, "path": path},
            f"the driver could not store {path}",
        )
        deadline = Deadline(self._timeout)
        try:
            with self._connection(deadline) as connection:
                connection.send_in_chunks(head, chunks, deadline)
                found, pieces = connection.receive(deadline)
                gathered(pieces)
                self._check(found, what)  # else the rest of the file is still under way
        except OSError as error:
            raise self._lost(what, error) from error

    def read(self, path: str) -> bytes:
        return gathered(self.read_pieces(path))

    def read_pieces(self, path: str) -> Iterator[memoryview]:
        """The bytes of a file, as they come."""
        deadline, what = Deadline(self._timeout), f"the driver could not send {path}"
        body = json.dumps({"path": path}).encode()
        try:
            with self._connection(deadline) as connection:
                connection.send({"call": "read", "shown": self._shown}, body, deadline)
                head, pieces = connection.receive(deadline)
                self._check(head, what)
                yield from pieces
        except OSError as error:
            raise self._lost(what, error) from error

    def list(self, path: str) -> list[str]:
        return list(self._ask("list", path=path))

    def remove(self, path: str) -> None:
        self._ask("remove", path=path)

    def exists(self, path: str) -> bool:
        return bool(self._ask("exists", path=path))
