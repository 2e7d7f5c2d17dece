from __future__ import annotations

import math

import pytest

from sparkdl.errors import TrainingDiverged
from sparkdl.train.objective.divergence import WINDOW, LossWatch


def test_a_loss_that_is_not_finite_ends_training() -> None:
    for loss in (math.nan, math.inf):
        with pytest.raises(TrainingDiverged, match=r"at step 3; check .* NaN, .* lower the"):
            LossWatch(None).look(loss, 3)


def test_a_loss_that_runs_away_ends_training() -> None:
    watch = LossWatch(100.0)
    for step in range(WINDOW):
        watch.look(2.0, step + 1)
    with pytest.raises(TrainingDiverged, match="times that of the start"):
        for step in range(WINDOW, 5 * WINDOW):
            watch.look(10.0 ** (step - WINDOW), step + 1)


def test_one_bad_batch_is_no_divergence() -> None:
    watch = LossWatch(100.0)
    for step in range(4 * WINDOW):
        watch.look(900.0 if step == 2 * WINDOW else 1.0, step + 1)


def test_a_loss_that_leaps_away_from_the_first_is_told_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    watch = LossWatch(1e4)
    for step in range(2 * WINDOW):
        watch.look(2.3 if step == 0 else 1e6 * step, step + 1)
    (said,) = caplog.messages
    assert said.startswith("the loss is 9e+06 after 10 steps, and was 2.3 at the first: lower the")

    lucky = LossWatch(1e4)  # the first batch was an easy one, as some that follow are
    for step in range(WINDOW):
        lucky.look(1e-6 if step in (0, WINDOW - 1) else 0.5, step + 1)
    assert len(caplog.messages) == 1


def test_losses_below_zero_are_not_judged_by_a_factor() -> None:
    watch = LossWatch(2.0)
    for step in range(5 * WINDOW):
        watch.look(-1.0 if step < WINDOW else 1e9, step + 1)


def test_state_goes_on() -> None:
    first = LossWatch(10.0)
    for step in range(WINDOW + 5):
        first.look(1.0, step + 1)
    second = LossWatch(10.0)
    second.load_state_dict(first.state_dict())
    with pytest.raises(TrainingDiverged):
        for step in range(2 * WINDOW):
            second.look(50.0, step + 1)
