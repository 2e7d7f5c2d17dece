"""The daemon of Spark's Python workers under test: its workers say which phase they enter, and wait
there if a test wants to strike at that moment.

A moment is (phase, rank, attempt), with the phases of the reporter: setup, train, evaluate,
checkpoint, finish; and those of the driver that are tasks elsewhere: preflight, spool, find (of
shards, after a loss), clean up. A test leaves a file of that name in a folder that all hosts see
(`FOLDER`).
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

FOLDER = "SPARKDL_TEST_FAULTS"
_SECONDS = 60.0


def enter(phase: str, rank: int, attempt: int, step: int = 0) -> None:
    """Wait until the test has struck, if it wants to strike at this moment."""
    moment = Path(os.environ[FOLDER]) / f"{phase}-{rank}-{attempt}"
    try:
        moment.rename(f"{moment}.taken")  # a moment comes once, also if a phase is entered again
    except FileNotFoundError:
        return
    here = {"pid": os.getpid(), "host": os.uname().nodename, "step": step}
    Path(f"{moment}.taken").write_text(json.dumps(here))
    Path(f"{moment}.taken").rename(f"{moment}.reached")
    deadline = time.monotonic() + _SECONDS
    while not Path(f"{moment}.struck").exists() and time.monotonic() < deadline:
        time.sleep(0.002)


def install() -> None:
    """Have reporters and tasks of this process say what they enter."""
    from sparkdl.spark.cluster.probe import ProbeTask
    from sparkdl.spark.frames.spool_task import CleanTask, FindTask, SpoolTask
    from sparkdl.worker.reporter import Reporter

    set_phase = Reporter.phase

    def phase(self: Reporter, name: str) -> None:
        set_phase(self, name)
        enter(name, self._rank, self._attempt, int(self._progress.get("step", 0)))

    Reporter.phase = phase  # type: ignore[method-assign]
    tasks = {ProbeTask: "preflight", SpoolTask: "spool", FindTask: "find", CleanTask: "clean up"}
    kind: Any
    for kind, name in tasks.items():
        kind.__call__ = _announced(kind.__call__, name)


def _announced(call: Callable[..., Iterator[Any]], phase: str) -> Callable[..., Iterator[Any]]:
    @functools.wraps(call)
    def announced(self: Any, batches: Iterator[Any]) -> Iterator[Any]:
        from pyspark import TaskContext

        context = TaskContext.get()
        assert context is not None
        rank = context.partitionId()
        enter(phase, rank, _count(phase, rank))
        yield from call(self, batches)

    return announced


def _count(phase: str, rank: int) -> int:
    """How often this task has begun before, in whichever process."""
    for number in itertools.count():
        try:
            (Path(os.environ[FOLDER]) / f"begun-{phase}-{rank}-{number}").touch(exist_ok=False)
        except FileExistsError:
            continue
        return number
    raise AssertionError


if __name__ == "__main__":
    from pyspark.daemon import manager

    from sparkdl.spark.daemon import preload

    preload()
    install()
    manager()
