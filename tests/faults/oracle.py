"""What must hold after a fault: the bits, the number of restarts, the time, nothing left behind.

`fit_request` is the fit that all tests disturb. `trained` runs it and measures what faults cost.
`left_behind` lists what a fit has left on driver and hosts.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparkdl.report.live.progress import Progress
from sparkdl.report.recorder import Recorder
from tests.cluster.processes import descendants, parent_of, state_of
from tests.cluster.test_recovery import digest, request, training_rows
from tests.faults.faults import Faults
from tests.faults.hosts import Host

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from sparkdl.spark.run.run import FitRequest

MEASURED = Path(__file__).parent.parent.parent / "build" / "faults.jsonl"
"""What `trained` has measured, a line of JSON for each fit; `table` prints it."""


def training_data(spark: SparkSession) -> DataFrame:
    """1000 rows, of which a tenth is for validation."""
    from pyspark.sql import functions as F

    return training_rows(spark).withColumn("held_out", F.hash("features", "label") % 10 == 0)


def fit_request(*callbacks: Any, **changes: Any) -> FitRequest:
    """Three epochs with a checkpoint every five steps."""
    return request(*callbacks, validation_col="held_out", **changes)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of a fit. Times are seconds; None where there was no fault or no restart."""

    name: str
    digest: str
    restarts: int
    seconds: float
    reasons: tuple[str, ...] = ()
    """Why the gang started again."""
    losses: tuple[float, ...] = ()
    """Of each epoch."""
    sizes: tuple[tuple[int, int], ...] = ()
    """Of each gang its first step, and its workers."""
    steps_lost: int | None = None
    """Done before the first fault, and done again."""
    notice: float | None = None
    """From the first fault to the end of its attempt."""
    relaunch: float | None = None
    """From there to the first word of a new worker."""
    reload: float | None = None
    """From there to its first phase of training, with the checkpoint read."""
    replay: float | None = None
    """From there to the step that had been reached before."""


def trained(name: str, df: DataFrame, request: FitRequest, faults: Faults) -> Outcome:
    """Fit under faults; writes down what they have cost."""
    from sparkdl.spark.fit.fit import fit

    began = time.monotonic()
    with _watched() as said, faults:
        result = fit(df, request)
    seconds = time.monotonic() - began
    record = result.summary.record
    assert record is not None
    ends = [record.started + failure["at"] for failure in record.failures]
    outcome = Outcome(
        name=name,
        digest=digest(result),
        restarts=result.summary.restarts,
        seconds=seconds,
        reasons=tuple(failure["reason"] for failure in record.failures),
        losses=tuple(epoch["loss"] for epoch in result.summary.history),
        sizes=tuple((step, workers) for step, workers in result.summary.gang_sizes),
        **_costs(faults, ends, record.attempts, said),
    )
    MEASURED.parent.mkdir(exist_ok=True)
    with MEASURED.open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(outcome)) + "\n")
    return outcome


_Said = list[tuple[float, int, Progress]]
"""When a rank has said what, by the clock of `time.time`."""


@contextmanager
def _watched() -> Iterator[_Said]:
    """What the workers report in the block."""
    said: _Said = []
    original = Recorder.progress

    def progress(self: Recorder, rank: int, progress: Progress) -> None:
        said.append((time.time(), rank, progress))
        original(self, rank, progress)

    Recorder.progress = progress  # type: ignore[method-assign]
    try:
        yield said
    finally:
        Recorder.progress = original  # type: ignore[method-assign]


def _costs(
    faults: Faults, ends: Sequence[float], attempts: Sequence[dict[str, Any]], said: _Said
) -> dict[str, Any]:
    """What the first fault has cost; nothing if training did not start again."""
    if not faults.struck or not ends or len(attempts) < 2:
        return {}
    first, end = faults.struck[0], ends[0]
    later = [(at, progress) for at, rank, progress in said if at > end and rank == 0]
    heard = next((at for at, _ in later), None)
    training = next((at for at, one in later if one.phase == "train" or one.step), None)
    caught_up = next((at for at, one in later if one.step >= max(first.step, 1)), None)
    start = attempts[1]["start_step"]
    return {
        "steps_lost": None if start is None else max(first.step - start, 0),
        "notice": end - first.at,
        "relaunch": None if heard is None else heard - end,
        "reload": None if heard is None or training is None else training - heard,
        "replay": None if training is None or caught_up is None else caught_up - training,
    }


def left_behind(spark: SparkSession, hosts: Sequence[Host], ports: set[str]) -> list[str]:
    """What is there that should not be: files, threads, processes, ports, tables, jobs.

    Args:
        spark: the session of the fit.
        hosts: where executors run.
        ports: of the driver, before the fit (`listening`).
    """
    context: Any = spark.sparkContext
    found = [f"thread {t.name}" for t in threading.enumerate() if t.name.startswith("sparkdl-")]
    found += [f"table {number}" for number in dict(context._jsc.getPersistentRDDs())]
    found += [f"job {number}" for number in context.statusTracker().getActiveJobsIds()]
    found += [f"port {port} of the driver" for port in listening([os.getpid()]) - ports]
    mine = descendants(os.getpid())
    for host in hosts:
        pids = host.pids()
        found += [f"{host.name}: {path}" for path in host.files("*") if "sparkdl" in path]
        # The script that becomes Spark's java may leave a subshell to it, which it never asks for.
        still = [pid for pid in pids if state_of(pid) in "TtZ" and _name(pid) != "bash"]
        found += [
            f"{host.name}: {_name(pid)} ({state_of(pid)}), child of {_program(parent_of(pid))}"
            for pid in still
        ]
        python = [pid for pid in pids if "python" in _program(pid)]
        outside = [port for port in listening(python) if not port.startswith(_LOOPBACK)]
        found += [f"{host.name}: port {port}" for port in outside]  # Spark's daemons have the rest
        mine = [pid for pid in mine if pid not in pids]
    return found + [f"process {pid} of the driver" for pid in mine if state_of(pid) in "Tt"]


_LOOPBACK = ("0100007F:", f"{'0' * 24}01000000:")


def listening(pids: Sequence[int]) -> set[str]:
    """Local addresses at which these processes wait for connections, as /proc writes them."""
    found = set()
    for pid in pids:
        try:
            inodes = set()
            for link in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(FileNotFoundError):  # at least the one by which this is listed
                    inodes.add(link.readlink().name)
            for table in ("tcp", "tcp6"):
                for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
                    fields = line.split()
                    if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                        found.add(fields[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def _program(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().partition("\0")[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""
