"""Whatever is killed, in whichever phase, training ends with the bits of the undisturbed run.

Time-outs are as long as by default, and are not waited for: who is killed closes its connections.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.faults.cluster import DEFAULT_PATIENCE, PATIENCE, marks
from tests.faults.faults import (
    Fault,
    Faults,
    kill_executor,
    kill_worker,
    terminate_executor,
    terminate_worker,
)
from tests.faults.oracle import Outcome, fit_request, trained

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

pytestmark = marks(600)
ENTRIES = DEFAULT_PATIENCE

GANG = ["setup", "train", "checkpoint", "evaluate", "finish"]
"""The phases in which the workers of a gang are."""
TASKS = ["preflight", "spool", "clean up"]
"""Those in which workers do what the driver asks of them, before and after."""
_SECONDS = 100 * PATIENCE
"""Longest time in which one loss is made good."""


def test_losses_before_and_after_training(
    df: DataFrame, undisturbed: Outcome, faults: Faults
) -> None:
    """A worker in each of the tasks, and an executor with the rows that it has spooled."""
    for phase in TASKS:
        faults.at(phase, 1, kill_worker)
    faults.at("spool", 0, kill_executor)
    outcome = trained("a worker in each task, an executor in spool", df, fit_request(), faults)
    assert {struck.moment for struck in faults.struck} == {
        *(f"{phase}-1-0" for phase in TASKS), "spool-0-0"
    }  # fmt: skip
    assert outcome.digest == undisturbed.digest
    assert outcome.restarts == 0  # of the gang: Spark, or the fit, has run the task again
    assert outcome.seconds < 2 * _SECONDS


AGAIN_AND_AGAIN: list[tuple[str, tuple[int, ...], Fault]] = [
    ("setup", (1,), kill_worker),  # there is no checkpoint yet
    ("train", (1,), kill_worker),
    ("checkpoint", (1,), terminate_worker),
    ("checkpoint", (1,), terminate_executor),
    ("evaluate", (0, 1), kill_worker),  # both at once
    ("setup", (1,), kill_worker),  # while it restarts
    ("train", (0,), kill_executor),  # after it has read the checkpoint
    ("finish", (1,), kill_worker),
]
"""What happens to one attempt after the other: the phase, who is struck, and how."""


def test_a_loss_in_each_phase_of_training(
    df: DataFrame, undisturbed: Outcome, faults: Faults
) -> None:
    assert {phase for phase, *_ in AGAIN_AND_AGAIN} == {*GANG}
    wanted = fit_request(max_restarts=len(AGAIN_AND_AGAIN))
    moments = []
    for attempt, (phase, ranks, fault) in enumerate(AGAIN_AND_AGAIN):
        for rank in ranks:
            faults.at(phase, rank, fault, attempt=attempt)
            moments.append(f"{phase}-{rank}-{attempt}")
    outcome = trained("a loss in each phase, one after the other", df, wanted, faults)
    assert sorted(struck.moment for struck in faults.struck) == sorted(moments), outcome.reasons
    assert outcome.digest == undisturbed.digest
    assert outcome.restarts == len(AGAIN_AND_AGAIN), outcome.reasons
    assert outcome.sizes[-1][0] > 0  # it has not begun anew
    assert outcome.seconds < len(AGAIN_AND_AGAIN) * _SECONDS
