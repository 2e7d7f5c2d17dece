"""A gang that a test has broken is replaced for the next one."""

from __future__ import annotations

import contextlib
import pickle
import threading
from collections.abc import Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from tests import gang
from tests.gang import Gang, Gangs


def serve(connection: Connection[Any, Any]) -> None:
    """One rank's life, in a thread."""
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            number, function, arguments = pickle.loads(connection.recv_bytes())
            answer: Any = (number, False, arguments)
            if function is broken:
                answer = (number, True, "a pair is closed")
            connection.send_bytes(pickle.dumps(answer))


def whole(comm: Any, text: str) -> None:
    pass


def broken(comm: Any) -> None:
    pass


def test_a_broken_gang_is_replaced_and_another_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[Gang] = []

    @contextlib.contextmanager
    def started(folder: Path, world_size: int) -> Iterator[Gang]:
        pairs = [Pipe() for _ in range(world_size)]
        for _, theirs in pairs:
            threading.Thread(target=serve, args=(theirs,), daemon=True).start()
        made = Gang([ours for ours, _ in pairs])
        yield made
        for ours, _ in pairs:
            ours.close()
        ended.append(made)

    monkeypatch.setattr(gang, "started_gang", started)
    gangs = Gangs(lambda: tmp_path, 2)
    first = gangs.get()
    assert first.run(whole, "yes") == [("yes",), ("yes",)]
    assert gangs.get() is first
    with pytest.raises(AssertionError, match="a pair is closed"):
        first.run(broken)
    assert gangs.get() is not first
    assert ended == [first]
    assert gangs.get().run(whole, "again") == [("again",), ("again",)]
    gangs.close()
    assert len(ended) == 2
