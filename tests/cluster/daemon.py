"""The daemon of Spark's Python workers under test: a worker strikes itself at a moment.

A moment is what the worker does, its rank, and the steps that it has done: the phases of the
reporter (setup, train, evaluate, checkpoint, finish), each step, the exchange within it, and the
tasks around training: preflight, spool, find (of shards, after a loss), round, sum, clean up. A
file ``MOMENT.KIND`` in a folder (`FOLDER`) has it happen, once. Moments are noted while the folder
has the file ``record``.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from tests.cluster.processes import parent_of

FOLDER = "SPARKDL_TEST_MOMENTS"
MET = "met"
"""Folder of the moments that were noted."""
RECORD = "record"


def kill_worker() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def kill_executor() -> None:
    """The parent of the daemon that has forked this worker."""
    os.kill(parent_of(os.getppid()), signal.SIGKILL)
    time.sleep(30)  # until the daemon ends this process


def stop_worker() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


STRIKES = {"worker": kill_worker, "executor": kill_executor, "stop": stop_worker}


def meet(what: str, rank: int, step: int = 0) -> None:
    """Note the moment, or strike, if a file asks for it."""
    folder = Path(os.environ[FOLDER])
    moment = f"{what}, rank {rank}, after {step}"
    if (folder / RECORD).exists():
        (folder / MET / moment).touch()
    for kind, strike in STRIKES.items():
        with contextlib.suppress(FileNotFoundError):
            (folder / f"{moment}.{kind}").rename(folder / f"{moment}.struck")
            strike()


def install() -> None:
    """Have reporters, exchanges and tasks of this process meet their moments."""
    from sparkdl.comm.communicator import ProcessGroupCommunicator
    from sparkdl.spark.cluster.probe import ProbeTask
    from sparkdl.spark.frames.spool_task import CleanTask, FindTask, SpoolTask
    from sparkdl.spark.rounds.round_stages import MeanOfPieces, RoundTask
    from sparkdl.worker.reporter import Reporter

    now: list[tuple[str, int, int]] = [("", 0, 0)]
    set_phase, set_step = Reporter.phase, Reporter.step

    def phase(self: Reporter, name: str) -> None:
        set_phase(self, name)
        now[0] = (name, self._rank, int(self._progress.get("step", 0)))
        meet(*now[0])

    def step(self: Reporter, **values: Any) -> None:
        set_step(self, **values)
        now[0] = ("train", self._rank, values["step"])
        meet("step", *now[0][1:])

    Reporter.phase, Reporter.step = phase, step  # type: ignore[method-assign]

    def exchanged(start: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(start)
        def started(self: Any, *arguments: Any) -> Any:
            pending = start(self, *arguments)
            if now[0][0] == "train":
                meet("exchange", *now[0][1:])
            return pending

        return started

    kind: Any = ProcessGroupCommunicator
    for name in ("all_reduce_async", "all_gather_async", "all_to_all_async"):
        setattr(kind, name, exchanged(getattr(kind, name)))
    tasks = {
        ProbeTask: "preflight", SpoolTask: "spool", FindTask: "find", RoundTask: "round",
        MeanOfPieces: "sum", CleanTask: "clean up",
    }  # fmt: skip
    for kind, name in tasks.items():
        kind.__call__ = _announced(kind.__call__, name)


def _announced(call: Callable[..., Iterator[Any]], name: str) -> Callable[..., Iterator[Any]]:
    """The task meets its moment when it reads its first rows."""

    @functools.wraps(call)
    def announced(self: Any, batches: Iterable[Any]) -> Iterator[Any]:
        from pyspark import TaskContext

        context = TaskContext.get()
        place = 0 if context is None else context.partitionId()

        def met() -> Iterator[Any]:
            meet(name, place)
            yield from batches

        yield from call(self, met())

    return announced


if __name__ == "__main__":
    from pyspark.daemon import manager

    from sparkdl.spark.daemon import preload

    preload()
    if FOLDER in os.environ:
        install()
    manager()
