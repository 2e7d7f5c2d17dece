"""What a lost host has on its disk is removed when it is back, by the next fit that meets it."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.cluster.processes import parent_of
from tests.cluster.test_recovery import digest
from tests.faults.cluster import PATIENCE, Cluster, marks
from tests.faults.faults import Faults, Victim, send
from tests.faults.hosts import Host, wait_until
from tests.faults.oracle import Outcome, fit_request

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

pytestmark = marks(300)
_SECONDS = 60 * PATIENCE


def executors(host: Host) -> list[int]:
    """Process ids of those that run there."""
    found = []
    for pid in host.pids():
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_text()
            if "CoarseGrainedExecutorBackend" in words:
                found.append(pid)
    return found


def spools(host: Host) -> list[str]:
    return [path for path in host.files("sparkdl-*") if "/blockmgr-" in path]


def test_the_next_fit_removes_the_spools_of_a_host_that_is_back(
    df: DataFrame, undisturbed: Outcome, cluster: Cluster, faults: Faults,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    from sparkdl.spark.fit.fit import fit

    lost: list[Host] = []

    @contextmanager
    def lose_host(victim: Victim) -> Iterator[None]:
        lost.append(victim.host)
        for pid in (parent_of(victim.executor), *victim.host.pids()):  # so none is started anew
            with contextlib.suppress(ProcessLookupError):
                send(pid, signal.SIGKILL)
        yield

    with faults.at("train", 1, lose_host):
        assert digest(fit(df, fit_request())) == undisturbed.digest
    (host,) = lost
    assert spools(host)
    assert "until a later fit of this session meets one" in caplog.text
    cluster.repair()
    # A place in the session becomes free, and the host that is back has most room.
    (other,) = [each for each in cluster.workers if each != host]
    send(executors(other)[0], signal.SIGKILL)
    wait_until(lambda: executors(host), "an executor on the host", _SECONDS)
    caplog.clear()
    assert digest(fit(df, fit_request())) == undisturbed.digest
    assert not spools(host)
