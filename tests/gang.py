"""A gang on which tests run functions: processes, started once, with gloo between them.

A function of a test module, and its arguments, must be picklable; it gets the communicator first.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import multiprocessing
import os
import pickle
import secrets
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from multiprocessing.connection import Client, Connection, Listener, wait
from pathlib import Path
from typing import Any

TIMEOUT_SECONDS = 60
# Imported once, by the process from which all ranks are forked; it has no threads then.
_START = multiprocessing.get_context("forkserver")
_START.set_forkserver_preload(
    [
        "torch._dynamo",
        "torch.distributed.fsdp",
        "torch.distributed.tensor",
        "tests.train.runs",
        "torchmetrics",
    ]
)
_M_MMAP_THRESHOLD = -3


class Gang:
    """Ranks that wait for functions to run."""

    def __init__(self, connections: list[Connection]) -> None:
        self._connections = connections
        self.timeout_seconds = TIMEOUT_SECONDS
        """For an answer."""
        self._number = 0
        """Of the newest call."""
        self.is_broken = False
        """Whether a call has failed: ranks may still be in it, and gloo's pairs close then."""

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """``function(comm, *arguments)`` on every rank; the results in rank order."""
        self.is_broken = True
        results = self._answers(function, arguments)
        self.is_broken = False
        return results

    def _answers(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> list[Any]:
        self._number += 1
        for connection in self._connections:
            connection.send_bytes(pickle.dumps((self._number, function, arguments)))
        results: dict[Connection, Any] = {}
        while len(results) < len(self._connections):
            waiting = [c for c in self._connections if c not in results]
            ready = wait(waiting, self.timeout_seconds)
            if not ready:
                raise TimeoutError("a rank did not answer")
            for connection in ready:
                number, is_error, result = pickle.loads(connection.recv_bytes())
                if number != self._number:
                    continue  # a late answer to a test that has failed
                if is_error:  # the other rank may wait for this one until its time-out
                    raise AssertionError(f"a rank failed:\n{result}")
                results[connection] = result
        return [results[connection] for connection in self._connections]

    def answer_of(self, rank: int) -> Any:
        """What one rank answers to a call in which another has died."""
        number, is_error, result = pickle.loads(self._connections[rank].recv_bytes())
        self.is_broken = True  # by the death of the other
        assert number == self._number
        assert not is_error, result
        return result


class Gangs:
    """A gang for all tests, until one breaks it: then the next test gets a new one."""

    def __init__(self, make_folder: Callable[[], Path], world_size: int) -> None:
        self._make_folder, self._world_size = make_folder, world_size
        self._gang: Gang | None = None
        self._resources = contextlib.ExitStack()

    def get(self) -> Gang:
        """A gang in which no call has failed."""
        if self._gang is None or self._gang.is_broken:
            self.close()
            started = started_gang(self._make_folder(), self._world_size)
            self._gang = self._resources.enter_context(started)
        return self._gang

    def close(self) -> None:
        """End the ranks."""
        self._gang = None
        self._resources.close()


@contextlib.contextmanager
def started_gang(folder: Path, world_size: int = 2) -> Iterator[Gang]:
    """A gang whose processes end with the context."""
    from sparkdl.comm.certificates import make_certificate

    key, certificate = secrets.token_bytes(16), make_certificate()
    address = str(folder / "gang.sock")
    with Listener(address, family="AF_UNIX", authkey=key) as listener:
        environment = {
            **os.environ,
            "SPARKDL_TEST_KEY": key.hex(),
            "SPARKDL_TEST_CERTIFICATE": json.dumps(asdict(certificate)),
        }
        processes = [
            _START.Process(
                target=live,
                args=(environment, rank, world_size, address, str(folder / "store")),
            )
            for rank in range(world_size)
        ]
        for process in processes:
            process.start()
        connections: list[Connection | None] = [None] * world_size
        try:
            for _ in processes:
                connection = listener.accept()
                connections[connection.recv()] = connection
            yield Gang([connection for connection in connections if connection is not None])
        finally:
            for connection in connections:
                if connection is not None:
                    connection.close()
            for process in processes:
                process.join(5)
                if process.is_alive():
                    process.kill()
                    process.join()


def main(rank: int, world_size: int, address: str, store_path: str) -> None:
    """One rank's life: run what comes until the connection closes."""
    import torch.distributed as dist

    from sparkdl.comm.certificates import Certificate
    from sparkdl.comm.communicator import ProcessGroupCommunicator
    from sparkdl.comm.process_group import process_group

    connection = Client(address, "AF_UNIX", authkey=bytes.fromhex(os.environ["SPARKDL_TEST_KEY"]))
    connection.send(rank)
    with process_group(
        backend="gloo",
        store=dist.FileStore(store_path, world_size),
        rank=rank,
        world_size=world_size,
        timeout_seconds=TIMEOUT_SECONDS,
        address="127.0.0.1",
    ):
        # On nodes of their own, so that sums are sent; what is tested on one node says so.
        comm = ProcessGroupCommunicator(
            nodes=range(world_size),
            timeout_seconds=TIMEOUT_SECONDS,
            certificate=Certificate(**json.loads(os.environ["SPARKDL_TEST_CERTIFICATE"])),
        )
        while True:
            try:
                number, function, arguments = pickle.loads(connection.recv_bytes())
            except (EOFError, ConnectionResetError):  # a test ends while an answer is unread
                return
            try:
                answer = (number, False, function(comm, *arguments))
            except Exception:
                answer = (number, True, traceback.format_exc())
            connection.send_bytes(pickle.dumps(answer))


def live(environment: Mapping[str, str], *arguments: Any) -> None:
    """`main` with the environment that the test's process has now, as if it were started anew."""
    os.environ.clear()
    os.environ.update(environment)
    threshold = environment.get("MALLOC_MMAP_THRESHOLD_")
    if threshold is not None:  # glibc has read its variables long ago
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, int(threshold))
    main(*arguments)
