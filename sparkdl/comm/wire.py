"""Messages on the connections of a channel: a head of JSON, then a body of bytes.

A body of known size follows its head at once. One that is made piece by piece follows in chunks,
each behind its size, and a size of 0 ends it: half a body is never taken for the whole.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import socket
import ssl
import struct
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from sparkdl.comm.certificates import NAME

_SIZES = struct.Struct("!IQ")
"""Bytes of the head, and of the body."""
_CHUNK = struct.Struct("!Q")
_IN_CHUNKS = 2**64 - 1
"""In place of the size of a body that comes in chunks."""
_MOST_HEAD_BYTES = 2**16
_PIECE_BYTES = 2**20
"""Most bytes that are handed to TLS, or taken from it, at a time."""

Head = dict[str, Any]


class MalformedMessage(Exception):
    """The message received is none of ours, or larger than one may be."""


class Deadline:
    """A moment after which nobody waits any more."""

    def __init__(self, seconds: float) -> None:
        self._at, self._seconds = time.monotonic() + seconds, seconds

    def left(self) -> float:
        """Seconds, more than none; TimeoutError when it has passed."""
        left = self._at - time.monotonic()
        if left <= 0:
            raise TimeoutError(f"no answer within {self._seconds:g} s")
        return left


class Connection:
    """A client's connection, for one request at a time.

    OSError, from every method: the connection is of no use any more. That is TimeoutError after the
    deadline, and ssl.SSLError where an end does not show the certificate that the other expects.
    """

    def __init__(
        self, host: str, port: int, tls: ssl.SSLContext, deadline: Deadline, silence_seconds: int
    ) -> None:
        """Connect; when nothing comes through for ``silence_seconds`` the connection is given up.

        TCP alone would wait, after a cut, for up to as long again as the cut was.
        """
        plain = socket.create_connection((host, port), deadline.left())
        try:
            _notice_silence(plain, silence_seconds)
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            plain.settimeout(deadline.left())
            self._socket = tls.wrap_socket(plain, server_hostname=NAME)
        except BaseException:
            plain.close()
            raise
        self._process = os.getpid()

    def close(self) -> None:
        """Close it; a process that was forked off closes its own end only."""
        self._socket.close()

    def is_usable(self) -> bool:
        """True if it can take a request: it is this process's, and the other end is silent."""
        return self._process == os.getpid() and not self.has_come()

    def has_come(self) -> bool:
        """Return True if something can be read, be it the connection's end."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(0))

    def send(self, head: Mapping[str, Any], body: bytes, deadline: Deadline) -> None:
        """Send a message whose body is known."""
        self._send(packed(head, len(body)) + body, deadline)

    def send_in_chunks(
        self, head: Mapping[str, Any], chunks: Iterable[memoryview], deadline: Deadline
    ) -> None:
        """Send a message whose body comes in chunks, until the answer is there already."""
        self._send(packed(head, None), deadline)
        for chunk in chunks:
            if self.has_come():
                return
            if chunk.nbytes:
                self._send(_CHUNK.pack(chunk.nbytes), deadline)
                self._send(chunk, deadline)
        self._send(_CHUNK.pack(0), deadline)

    def receive(self, deadline: Deadline) -> tuple[Head, Iterator[memoryview]]:
        """A message: its head, and the pieces of its body as they come."""
        head_size, body_size = _SIZES.unpack(self._receive(_SIZES.size, deadline))
        head: Head = json.loads(bytes(self._receive(head_size, deadline)))
        return head, self._pieces(body_size, deadline)

    def _send(self, data: bytes | memoryview, deadline: Deadline) -> None:
        view = memoryview(data)
        for begin in range(0, len(view), _PIECE_BYTES):
            self._socket.settimeout(deadline.left())
            self._socket.sendall(view[begin : begin + _PIECE_BYTES])

    def _pieces(self, size: int, deadline: Deadline) -> Iterator[memoryview]:
        while size:
            piece = self._receive(min(size, _PIECE_BYTES), deadline)
            size -= len(piece)
            yield piece

    def _receive(self, size: int, deadline: Deadline) -> memoryview:
        view = memoryview(bytearray(size))
        filled = 0
        while filled < size:
            self._socket.settimeout(deadline.left())
            count = self._socket.recv_into(view[filled:])
            if not count:
                raise ConnectionError("the other end has closed the connection")
            filled += count
        return view


def packed(head: Mapping[str, Any], body_size: int | None) -> bytes:
    """Sizes and head of a message; without a size its body comes in chunks."""
    text = json.dumps(head).encode()
    return _SIZES.pack(len(text), _IN_CHUNKS if body_size is None else body_size) + text


class Body:
    """A body that a server reads from a connection, if it wants it."""

    def __init__(self, reader: asyncio.StreamReader, size: int) -> None:
        self._reader = reader
        self._left = 0 if size == _IN_CHUNKS else size
        self.is_in_chunks = size == _IN_CHUNKS
        self.is_over = not size

    async def whole(self, most: int) -> bytes:
        """A body of known size; MalformedMessage if it has more than ``most`` bytes."""
        if self.is_in_chunks or self._left > most:
            what = "chunks" if self.is_in_chunks else f"{self._left} bytes"
            raise MalformedMessage(f"a message of {what}, of at most {most}")
        data = await self._reader.readexactly(self._left)
        self._left, self.is_over = 0, True
        return data

    async def chunk(self, most: int) -> bytes | None:
        """The next chunk; None: there is no more. MalformedMessage: it is too large."""
        if self.is_over or not self.is_in_chunks:
            return None
        (size,) = _CHUNK.unpack(await self._reader.readexactly(_CHUNK.size))
        if size > most:
            raise MalformedMessage(f"a message of {size} bytes, of at most {most}")
        self.is_over = not size
        return await self._reader.readexactly(size) if size else None

    async def throw_away(self) -> None:
        """Read what is left, and forget it: then the sender sees the answer."""
        while self._left:
            self._left -= len(await self._reader.readexactly(min(self._left, _PIECE_BYTES)))
        while self.is_in_chunks and not self.is_over:
            (size,) = _CHUNK.unpack(await self._reader.readexactly(_CHUNK.size))
            self.is_over = not size
            while size:
                size -= len(await self._reader.readexactly(min(size, _PIECE_BYTES)))
        self.is_over = True


async def received(reader: asyncio.StreamReader) -> tuple[Head, Body]:
    """The next message's head, and its body.

    Raises:
        MalformedMessage: what has come is none.
        IncompleteReadError: the connection has ended.
    """
    head_size, body_size = _SIZES.unpack(await reader.readexactly(_SIZES.size))
    if head_size > _MOST_HEAD_BYTES:
        raise MalformedMessage(f"a head of {head_size} bytes")
    try:
        head = json.loads(await reader.readexactly(head_size))
    except (ValueError, RecursionError) as error:
        raise MalformedMessage("a head that is no JSON") from error
    if not isinstance(head, dict):
        raise MalformedMessage("a head that is no object")
    return head, Body(reader, body_size)


async def answer(writer: asyncio.StreamWriter, head: Mapping[str, Any], body: bytes) -> None:
    """Send a message from the server."""
    if len(body) <= _PIECE_BYTES:
        writer.write(packed(head, len(body)) + body)
        await writer.drain()
        return
    writer.write(packed(head, len(body)))
    view = memoryview(body)
    for begin in range(0, len(view), _PIECE_BYTES):
        writer.write(view[begin : begin + _PIECE_BYTES])
        await writer.drain()
        await asyncio.sleep(0)  # others have their turn, and a connection that is lost is noticed
        if writer.is_closing():
            raise ConnectionError("the other end has closed the connection")


def notice_absence(connection: socket.socket, seconds: int) -> None:
    """Have the kernel find out that the other end is gone though nothing is sent."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in {
        "TCP_KEEPIDLE": seconds // 2, "TCP_KEEPINTVL": max(1, seconds // 4), "TCP_KEEPCNT": 2,
    }.items():  # fmt: skip
        with contextlib.suppress(AttributeError, OSError):  # not everywhere
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _notice_silence(connection: socket.socket, seconds: int) -> None:
    notice_absence(connection, seconds)
    with contextlib.suppress(AttributeError, OSError):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * seconds)
