"""What a whole fit takes, beyond its steps."""

from __future__ import annotations

import dataclasses

import pytest

from sparkdl.sync.averaging.parameter_averaging import ParameterAveraging
from sparkdl.sync.gradients.allreduce import AllReduce
from tests.explain.test_comparison import predictor


@pytest.mark.parametrize(("slots", "waves"), [(8, 1), (4, 2), (3, 3), (1, 8), (None, 1)])
def test_tasks_of_an_evaluation_follow_each_other_as_those_of_steps_do(
    slots: int | None, waves: int
) -> None:
    found = dataclasses.replace(predictor(), slots=slots)
    shards = [dataclasses.replace(one, num_validation_rows=1000) for one in found.plan.shards]
    plan = dataclasses.replace(found.plan, shards=tuple(shards))
    strategy = ParameterAveraging(averaging_period=16)
    without, with_it = (
        one.predict(strategy, 8, in_rounds=True)
        for one in (found, dataclasses.replace(found, plan=plan))
    )
    each = 0.4 * 8000 / 8 * 1e-3
    more = with_it.total_seconds - without.total_seconds
    assert more == pytest.approx(3 * waves * each)  # three epochs


def test_a_compiled_backward_pass_hides_no_exchange() -> None:
    size = dataclasses.replace(predictor().size, shapes=((500, 1000), (500, 1000)))
    found = dataclasses.replace(predictor(), size=size)
    compiled = dataclasses.replace(found, config=dataclasses.replace(found.config, compile=True))
    for strategy, hidden in (
        (AllReduce(bucket_bytes=1000), 0),
        (AllReduce(double_buffering=True), 1),
    ):
        assert found.pattern(strategy, 4, in_rounds=False).hidden_share > 0
        assert compiled.pattern(strategy, 4, in_rounds=False).hidden_share == hidden
