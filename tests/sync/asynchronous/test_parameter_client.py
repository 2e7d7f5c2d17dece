from __future__ import annotations

import copy
import os
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from sparkdl.config import TrainConfig
from sparkdl.errors import CommunicationError
from sparkdl.sync.asynchronous.async_sgd import AsyncSGD, AsyncSynchronizer
from sparkdl.train.callbacks import Callback, CallbackState
from tests.gang import Gang, started_gang
from tests.sync.apart import SGD, make_net
from tests.train.runs import but, make_data, run

BULK = AsyncSGD(staleness_bound=0)


class Fails(Callback):
    """One rank's user code raises in the second epoch."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def on_step_end(self, state: CallbackState) -> None:
        if state.rank == self.rank and state.step == 5:
            raise ZeroDivisionError("the user's mistake")


@pytest.mark.gang
@pytest.mark.parametrize("strategy", [BULK, AsyncSGD(), AsyncSGD(staleness_bound=2)])
def test_the_failure_of_one_rank_ends_all(gang3: Gang, strategy: AsyncSGD) -> None:
    config = but(SGD, epochs=200, callbacks=(Fails(1),), sync_strategy=strategy)
    (first, seconds), (second, _), (third, _) = gang3.run(end_of_training, config, [16, 12, 9])
    assert (first, second, third) == (
        "CommunicationError",
        "ZeroDivisionError",
        "CommunicationError",
    )
    assert seconds < 15


def end_of_training(comm: Any, config: TrainConfig, rows: list[int]) -> tuple[str, float]:
    began = time.monotonic()
    try:
        run(make_net(), config, make_data(rows), comm=comm)
    except (CommunicationError, ZeroDivisionError) as error:
        return type(error).__name__, time.monotonic() - began
    return "nothing", 0.0


class FaultySGD(torch.optim.SGD):
    """The user's own, which fails where it steps the last layer."""

    def step(self, closure: Any = None) -> None:
        if any(p.shape == (1, 5) for group in self.param_groups for p in group["params"]):
            raise ZeroDivisionError("the user's mistake")
        super().step(closure)


@pytest.mark.gang
@pytest.mark.parametrize("rows", [[16, 12], [13, 0]], ids=["any push", "a push of the other rank"])
def test_an_error_of_the_optimizer_is_raised_where_it_happened(gang: Gang, rows: list[int]) -> None:
    config = but(SGD, optimizer=FaultySGD, sync_strategy=AsyncSGD())
    ends = [kind for kind, _ in gang.run(end_of_training, config, rows)]
    assert ends == ["CommunicationError", "ZeroDivisionError"]


class Sleeps(Callback):
    """One rank is slow."""

    def on_step_end(self, state: CallbackState) -> None:
        if state.rank == 1:
            time.sleep(3)


@pytest.mark.slow
@pytest.mark.gang
@pytest.mark.parametrize("bound", [0, 1])
def test_a_rank_that_is_too_slow_ends_the_wait(gang: Gang, bound: int) -> None:
    strategy = AsyncSGD(staleness_bound=bound)
    config = but(SGD, callbacks=(Sleeps(),), sync_strategy=strategy)
    ends = [kind for kind, _ in gang.run(wait_briefly, config, [16, 12])]
    assert ends == ["CommunicationError", "CommunicationError"]


def wait_briefly(comm: Any, config: TrainConfig, rows: list[int]) -> tuple[str, float]:
    impatient = copy.copy(comm)
    impatient.timeout_seconds = 0.5
    return end_of_training(impatient, config, rows)


@pytest.mark.slow
def test_a_killed_rank_ends_the_others(tmp_path: Path) -> None:
    """In a gang of its own, which dies with it."""
    found = tmp_path / "found"
    with started_gang(tmp_path) as gang:
        with pytest.raises(EOFError):
            gang.run(train_until_killed, [16, 12], found)
        deadline = time.monotonic() + 30
        while not found.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
    assert found.read_text() == "CommunicationError"


class Kills(Callback):
    """One rank dies as of kill -9."""

    def on_step_end(self, state: CallbackState) -> None:
        if state.rank == 1 and state.step == 5:
            os.kill(os.getpid(), signal.SIGKILL)


def train_until_killed(comm: Any, rows: list[int], found: Path) -> None:
    config = but(SGD, epochs=10_000, callbacks=(Kills(),), sync_strategy=AsyncSGD())
    kind, _ = end_of_training(comm, config, rows)
    (found.parent / "new").write_text(kind)
    (found.parent / "new").rename(found)


@pytest.mark.gang
def test_threads_and_ports_are_gone_afterwards(gang: Gang) -> None:
    for threads, is_listening in gang.run(train_and_look_around):
        assert threads == []
        assert not is_listening


def train_and_look_around(comm: Any) -> tuple[list[str], bool]:
    ports: list[int] = []

    class Watching(AsyncSGD):
        def setup(self, model: Any, make_optimizer: Any, comm: Any) -> Any:
            class Watched(AsyncSynchronizer):
                def close(self) -> None:
                    assert self._exchange is not None
                    assert self._exchange.server is not None
                    ports.append(self._exchange.server.address.port)
                    super().close()

            return Watched(model, make_optimizer, comm, strategy=self)

    before = set(threading.enumerate())
    run(make_net(), but(SGD, sync_strategy=Watching()), make_data([16, 12]), comm=comm)
    threads = [thread.name for thread in set(threading.enumerate()) - before]
    with socket.socket() as found:
        found.settimeout(5)
        is_listening = found.connect_ex(("127.0.0.1", ports[0])) == 0
    return threads, is_listening
