"""A gang on which tests run functions: processes, started once, with gloo between them.

A function of a test module, and its arguments, must be picklable; it gets the communicator first.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import secrets
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict
from multiprocessing.connection import Client, Connection, Listener, wait
from pathlib import Path
from typing import Any

TIMEOUT_SECONDS = 60


class Gang:
    """Ranks that wait for functions to run."""

    def __init__(self, connections: list[Connection]) -> None:
        self._connections = connections
        self._number = 0
        """Of the newest call."""

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """``function(comm, *arguments)`` on every rank; the results in rank order."""
        self._number += 1
        for connection in self._connections:
            connection.send_bytes(pickle.dumps((self._number, function, arguments)))
        results: dict[Connection, Any] = {}
        while len(results) < len(self._connections):
            waiting = [c for c in self._connections if c not in results]
            ready = wait(waiting, TIMEOUT_SECONDS)
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
        assert number == self._number
        assert not is_error, result
        return result


@contextlib.contextmanager
def started_gang(folder: Path, world_size: int = 2) -> Iterator[Gang]:
    """A gang whose processes end with the context."""
    from sparkdl.comm.certificates import make_certificate

    key, certificate = secrets.token_bytes(16), make_certificate()
    address = str(folder / "gang.sock")
    with Listener(address, family="AF_UNIX", authkey=key) as listener:
        processes = [
            subprocess.Popen(
                [
                    sys.executable,
                    __file__,
                    str(rank),
                    str(world_size),
                    address,
                    str(folder / "store"),
                ],
                env={
                    **os.environ,
                    "SPARKDL_TEST_KEY": key.hex(),
                    "SPARKDL_TEST_CERTIFICATE": json.dumps(asdict(certificate)),
                },
                cwd=Path(__file__).parent.parent,
            )
            for rank in range(world_size)
        ]
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
                try:
                    process.wait(5)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()


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


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent.parent))
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4])
