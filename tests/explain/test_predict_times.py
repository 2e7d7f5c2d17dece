"""What a whole fit takes, beyond its steps."""

from __future__ import annotations

import dataclasses

import pytest

from sparkdl.sync.averaging.parameter_averaging import ParameterAveraging
from tests.explain.test_recommend import predictor


@pytest.mark.parametrize(("slots", "waves"), [(8, 1), (4, 2), (3, 3), (1, 8), (None, 1)])
def test_tasks_of_an_evaluation_follow_each_other_as_those_of_steps_do(
    slots: int | None, waves: int
) -> None:
    found = predictor()
    found = dataclasses.replace(found, places=dataclasses.replace(found.places, slots=slots))
    validated = dataclasses.replace(
        found, workload=dataclasses.replace(found.workload, num_validation_rows=8000)
    )
    strategy = ParameterAveraging(averaging_period=16)
    without, with_it = (one.prediction(strategy, 8, in_rounds=True) for one in (found, validated))
    spooled = with_it.spool_seconds - without.spool_seconds
    each = 0.4 * 8000 / 8 * 1e-3
    more = with_it.total_seconds - without.total_seconds - spooled
    assert more == pytest.approx(3 * waves * each)  # three epochs
