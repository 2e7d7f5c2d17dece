"""The example "a Param" of docs/extending.md: one row, and everything that follows from it."""

from __future__ import annotations

from typing import Annotated

import pytest
from torch import nn

from sparkdl.cli.job_files.job_file import key_type
from sparkdl.config import at_least
from sparkdl.errors import ConfigError
from sparkdl.estimator import TorchRegressor
from sparkdl.inference.regression import REGRESSION
from sparkdl.spark.params.param_table import Option, RegressorArguments, options
from sparkdl.spark.params.params import training_values, with_params


class Arguments(RegressorArguments, total=False):
    """In the package the row stands in one of the classes of param_table.py itself."""

    checkpointsKept: Annotated[
        int,
        Option(
            "newest checkpoints kept (>= 1).",
            fills="checkpoint",
            field="keep",
            rule=at_least(1),
        ),
    ]


@with_params(Arguments)
class Regressor(TorchRegressor):
    """An estimator with the new Param."""


def test_a_row_is_a_param_with_setter_getter_default_and_documentation() -> None:
    estimator = Regressor(module=nn.Identity, checkpointsKept=5)  # type: ignore[call-arg]
    assert estimator.getCheckpointsKept() == 5
    assert estimator.setCheckpointsKept(3) is estimator
    text = "checkpointsKept: newest checkpoints kept (>= 1). (default: 2, current: 3)"
    assert text in estimator.explainParams()
    with pytest.raises(TypeError, match="checkpointsKept"):
        estimator.setCheckpointsKept("many")
    assert not TorchRegressor().hasParam("checkpointsKept")


def test_a_row_fills_its_field_and_keeps_its_rule() -> None:
    estimator = Regressor(module=nn.Identity)
    assert training_values(estimator, REGRESSION)[0].checkpoint.keep == 2
    estimator.setCheckpointsKept(7)
    assert training_values(estimator, REGRESSION)[0].checkpoint.keep == 7
    with pytest.raises(ConfigError, match="checkpointsKept must be at least 1; received 0"):
        estimator.setCheckpointsKept(0)


def test_a_row_is_a_key_of_job_files_and_says_how_it_is_saved() -> None:
    row = options(Arguments)["checkpointsKept"]
    assert (row.key, key_type(row.type), row.is_plain) == ("checkpoints_kept", int, True)
