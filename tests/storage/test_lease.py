"""A lease tells whether a run is alive, and never ends one."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import threading
import time
from functools import partial
from typing import Any

import pytest

from sparkdl.errors import CommunicationError, StorageError
from sparkdl.storage.lease import STALE_SECONDS, Lease, Note, process_identity, read_leases
from sparkdl.storage.retried import again
from sparkdl.storage.storage import Data
from tests.storage.memory import MemoryStorage


def leases(storage: MemoryStorage) -> dict[str, Note]:
    return read_leases(storage, "run", storage.list("run"))


def test_a_lease_is_renewed_and_gone_in_the_end() -> None:
    storage = MemoryStorage()
    with Lease(storage, "run", "a", renew_seconds=0.02) as lease:
        first = leases(storage)["a"]
        assert first.is_alive() and (first.attempt, first.begun_from) == (0, None)
        deadline = time.monotonic() + 10
        while leases(storage)["a"].renewed == first.renewed:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        lease.begin(2, "run/b-0/step-00000004")
        now = leases(storage)["a"]
        assert (now.attempt, now.begun_from) == (2, "run/b-0/step-00000004")
    assert storage.list("run") == []
    assert not any(thread.name == "sparkdl-lease" for thread in threading.enumerate())


@pytest.mark.parametrize("error", [StorageError("503"), CommunicationError("nobody there")])
def test_a_storage_that_fails_ends_nothing(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(MemoryStorage):
        def write(self, path: str, data: Data) -> None:
            raise error

        def remove(self, path: str) -> None:
            raise error

    with Lease(Broken(), "run", "a") as lease:
        lease.begin(1, None)
    assert caplog.text.count("could not be renewed") == 2
    assert f"the lease of this run is left: {error}" in caplog.text


def test_an_old_lease_counts_no_more() -> None:
    note = Note(run_id="a", host="h", process="", attempt=0, begun_from=None, renewed=time.time())
    assert note.is_alive()
    assert not dataclasses.replace(note, renewed=time.time() - STALE_SECONDS - 1).is_alive()
    for never in (1e18, float("inf"), float("nan"), -1e300):
        assert not dataclasses.replace(note, renewed=never).is_alive()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells processes apart")
def test_a_process_of_this_host_that_has_ended_holds_none() -> None:
    own = process_identity(os.getpid())
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        other = process_identity(process.pid)
        assert own and other and own != other
        note = Note(
            run_id="a", host="h", process=other, attempt=0, begun_from=None, renewed=time.time()
        )
        assert note.is_alive()
        process.kill()
        process.wait()
    assert not note.is_alive()
    # Another host, or another container, has numbers of its own.
    elsewhere = other.replace("/pid:[", "/pid:[9")
    assert dataclasses.replace(note, process=elsewhere).is_alive()
    number = other.rpartition("/")[2]
    again = f"{own.rpartition('/')[0]}/{number}9"  # a later process of the same number
    assert not dataclasses.replace(note, process=again).is_alive()


@pytest.mark.parametrize("text", ['{"run_', "{}", "[]", '{"run_id": 1}', "", "text", "[" * 99_999])
def test_one_that_is_just_being_written_counts(text: str) -> None:
    storage = MemoryStorage()
    storage.write("run/lease-a.json", text.encode())
    assert leases(storage)["a"].is_alive()


@pytest.mark.parametrize(
    "damage",
    [
        {"renewed": "now"},
        {"renewed": 10**400},
        {"process": 7},
        {"process": "/x/y"},
        {"attempt": "2"},
        {"begun_from": ["run/b-0/step-00000004"]},
    ],
)
def test_one_that_is_damaged_fails_nothing(damage: dict[str, Any]) -> None:
    storage = MemoryStorage()
    note = Note(run_id="a", host="h", process="", attempt=0, begun_from=None, renewed=time.time())
    text = json.dumps(dataclasses.asdict(note) | damage)
    storage.write("run/lease-a.json", text.encode())
    found = leases(storage)["a"]
    assert found.is_alive() and found.attempt == 0 and found.begun_from is None


def test_a_place_that_has_lost_the_lease_is_told_and_gets_no_other(
    caplog: pytest.LogCaptureFixture,
) -> None:
    storage = MemoryStorage()
    with Lease(storage, "run", "a") as lease:
        lease.require_place()
        content = storage.read("run/lease-a.json")
        storage.remove("run")
        for act in (lease.require_place, partial(patiently_once, lease)):
            with pytest.raises(StorageError, match=r"has lost run/lease-a.json, .* not mounted"):
                act()
        lease.begin(1, None)
        assert storage.list("run") == []
        assert "could not be renewed: memory has lost run/lease-a.json" in caplog.text
        storage.write("run/lease-a.json", content)
        lease.begin(2, None)
        assert leases(storage)["a"].attempt == 2


def patiently_once(lease: Lease) -> None:
    """The error is one that may pass: whoever tries again, does."""
    tries = []

    def act() -> None:
        tries.append(1)
        lease.require_place()

    try:
        again(act, (0.0,))
    finally:
        assert len(tries) == 2
