"""What a gang that failed leaves behind is mended before the next one starts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from sparkdl.spark.cluster.attempt import Attempt
from sparkdl.spark.run import resume
from sparkdl.spark.run.resume import Attempts, by_host


def failed(kind: str) -> Attempt:
    failures = [{"rank": 1, "type": "CommunicationError"}, {"rank": 0, "type": kind}]
    return Attempt(number=0, world_size=2, submitted=0, failures=failures)


@pytest.mark.parametrize(("kind", "rebuilt"), [("ShardLost", 1), ("CommunicationError", 0)])
def test_lost_shards_are_written_anew(kind: str, rebuilt: int) -> None:
    calls: list[int] = []
    run: Any = SimpleNamespace()
    Attempts(run, lambda _: calls.append(1)).heal(failed(kind))
    assert len(calls) == rebuilt


def test_speeds_of_hosts_are_those_of_their_workers() -> None:
    attempt = Attempt(
        number=0, world_size=4, submitted=0, hosts={0: "a", 1: "b", 2: "a", 3: "c"},
        speeds={0: 100.0, 1: 50.0, 2: 200.0},
    )  # fmt: skip
    assert by_host(attempt) == {"a": 150.0, "b": 50.0}


def test_what_a_submission_knows_of_those_before(monkeypatch: pytest.MonkeyPatch) -> None:
    there = 4
    monkeypatch.setattr(resume, "wait_again", lambda *_: there)
    run: Any = MagicMock()
    run.link.checkpoints = None
    attempts, told = Attempts(run, lambda _: None), list[tuple[int, dict[str, float]]]()
    measured = [{0: 100.0, 1: 50.0}, {0: 200.0}, {}, {}]
    for number, speeds in enumerate(measured):
        attempt = Attempt(
            number=number, world_size=3, submitted=0, hosts={0: "a", 1: "b"}, speeds=speeds
        )
        assert attempts.begin(attempt, lambda _: None, first_step=7) is None
        assert attempt.start == 7
        told.append((attempt.world_size, dict(attempts.speeds)))
        if number == 0:
            attempts.take_at_most(2)
        elif number == 2:
            attempts.take_at_most(9)
    before = {"a": 100.0, "b": 50.0}
    after = {**before, "a": 200.0}
    # The first has what was asked for; a limit is for the next one alone.
    assert told == [(3, {}), (2, before), (4, after), (4, after)]


def test_a_checkpoint_that_workers_cannot_read_is_passed_over() -> None:
    run: Any = SimpleNamespace()
    attempts = Attempts(run, lambda _: None, begun_from=["run/a-0/step-00000004"])
    attempts.heal(failed("CommunicationError"))
    assert attempts.passed_over == set()
    attempts.heal(failed("CheckpointLost"))
    assert attempts.passed_over == {"run/a-0/step-00000004"}
