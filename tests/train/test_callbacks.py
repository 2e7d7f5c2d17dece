from __future__ import annotations

import math

import pytest

from sparkdl.config import EarlyStopping
from sparkdl.errors import ConfigError
from sparkdl.train.callbacks import EarlyStopper


def decisions(options: EarlyStopping, values: list[float]) -> list[tuple[bool, bool]]:
    stopper = EarlyStopper(options, ["loss", "val_loss"])
    return [(stopper.is_best({"val_loss": value}), stopper.should_stop) for value in values]


BEST, WORSE, STOP = (True, False), (False, False), (False, True)


def test_patience_counts_from_the_last_improvement() -> None:
    options = EarlyStopping(patience=2)
    assert decisions(options, [3, 2, 2, 1, 1, 1]) == [BEST, BEST, WORSE, BEST, WORSE, STOP]


def test_mode_and_margin() -> None:
    options = EarlyStopping(patience=3, mode="max", min_delta=0.5)
    assert decisions(options, [1, 1.5, 1.6, 0.9]) == [BEST, WORSE, BEST, WORSE]


def test_nan_is_no_improvement() -> None:
    assert decisions(EarlyStopping(patience=2), [math.nan, 1.0, math.nan, math.inf]) == [
        *(WORSE, BEST, WORSE, STOP)
    ]


def test_state_comes_back() -> None:
    first = EarlyStopper(EarlyStopping(patience=2), ["val_loss"])
    first.is_best({"val_loss": 1.0})
    first.is_best({"val_loss": 2.0})
    second = EarlyStopper(EarlyStopping(patience=2), ["val_loss"])
    second.load_state_dict(first.state_dict())
    assert not second.is_best({"val_loss": 1.5})
    assert second.should_stop
    second.load_state_dict({})
    assert second.is_best({"val_loss": 9.0})


def test_unknown_value() -> None:
    with pytest.raises(ConfigError, match=r"'val_f1'.*only loss, val_loss"):
        EarlyStopper(EarlyStopping(monitor="val_f1"), ["loss", "val_loss"])
