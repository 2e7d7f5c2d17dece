"""Whoever connects to the port of the channel disturbs no worker, and keeps nothing open."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sparkdl.comm.channel import Address, ChannelClient, ChannelServer, Hub

NUM_PEERS = 40
HELLOS = {
    "half-open": b"",
    "garbage": os.urandom(4096),
    "http": b"GET / HTTP/1.1\r\nHost: a\r\n\r\n",
    "a cut hello": bytes.fromhex("160301000a") + bytes(3),
    "a wrong hello": bytes.fromhex("160301000a") + bytes(10),
    "an endless record": bytes.fromhex("160301ffff") + bytes(2**16),
}


@pytest.fixture
def address() -> Iterator[Address]:
    server = ChannelServer(Hub(), bind="127.0.0.1", announce="127.0.0.1")
    yield server.address
    server.shutdown()


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.parametrize("kind", HELLOS)
def test_a_worker_is_served_all_the_while(address: Address, kind: str) -> None:
    with contextlib.closing(ChannelClient(address.of_rank(0), timeout_seconds=10)) as worker:
        worker.set("before/0", b"1")
        files = open_files()
        with contextlib.ExitStack() as stack:
            for _ in range(NUM_PEERS):
                peer = socket.create_connection((address.host, address.port), timeout=5)
                stack.enter_context(peer)
                peer.sendall(HELLOS[kind])
            worker.set("during/0", b"2")
            with contextlib.closing(ChannelClient(address, timeout_seconds=10)) as late:
                assert late.get("during/0") == b"2"
        deadline = time.monotonic() + 10
        while open_files() > files and time.monotonic() < deadline:
            time.sleep(0.05)
        assert open_files() <= files
        assert worker.get("before/0") == b"1"
