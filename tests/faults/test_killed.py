"""Whatever is killed, in whichever phase, training ends with the bits of the undisturbed run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.faults.cluster import PATIENCE, marks
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

pytestmark = marks(300)

GANG = ["setup", "train", "checkpoint", "evaluate", "finish"]
"""The phases in which the workers of a gang are."""
TASKS = ["preflight", "spool", "clean up"]
"""Those in which workers do what the driver asks of them, before and after."""
_SECONDS = 100 * PATIENCE


@pytest.mark.parametrize(
    ("what", "rank", "phase"),
    [*((kill_worker, 1, phase) for phase in GANG), (kill_executor, 0, "train")],
)
def test_a_loss_while_training(
    df: DataFrame, undisturbed: Outcome, faults: Faults, what: Fault, rank: int, phase: str
) -> None:
    faults.at(phase, rank, what)
    outcome = trained(f"{what.__name__} in {phase}", df, fit_request(), faults)
    assert outcome.digest == undisturbed.digest
    assert outcome.restarts == 1
    assert outcome.seconds < _SECONDS


@pytest.mark.parametrize(
    ("what", "rank", "phase"),
    [*((kill_worker, 1, phase) for phase in TASKS), (kill_executor, 0, "spool")],
)
def test_a_loss_before_and_after_training(
    df: DataFrame, undisturbed: Outcome, faults: Faults, what: Fault, rank: int, phase: str
) -> None:
    faults.at(phase, rank, what)
    outcome = trained(f"{what.__name__} in {phase}", df, fit_request(), faults)
    assert outcome.digest == undisturbed.digest
    assert outcome.restarts == 0  # of the gang: Spark, or the fit, has run the task again
    assert outcome.seconds < _SECONDS


def test_both_ranks_at_once(df: DataFrame, undisturbed: Outcome, faults: Faults) -> None:
    faults.at("evaluate", 0, kill_worker).at("evaluate", 1, kill_worker)
    outcome = trained("both ranks in evaluate", df, fit_request(), faults)
    assert outcome.digest == undisturbed.digest
    assert outcome.restarts == 1


def test_again_and_again(df: DataFrame, undisturbed: Outcome, faults: Faults) -> None:
    """While it restarts, and after it has read the checkpoint."""
    faults.at("checkpoint", 0, kill_worker).at("setup", 1, kill_executor, attempt=1)
    faults.at("train", 0, kill_worker, attempt=2)
    outcome = trained("three losses", df, fit_request(), faults)
    assert outcome.digest == undisturbed.digest
    assert outcome.restarts == 3


@pytest.mark.parametrize("what", [terminate_worker, terminate_executor])
def test_what_else_may_end(
    df: DataFrame, undisturbed: Outcome, faults: Faults, what: Fault
) -> None:
    faults.at("checkpoint", 1, what)
    outcome = trained(f"{what.__name__} in checkpoint", df, fit_request(), faults)
    assert outcome.digest == undisturbed.digest
    assert outcome.restarts == 1
    assert outcome.seconds < _SECONDS
