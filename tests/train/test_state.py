from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from sparkdl.config import EarlyStopping, TrainConfig
from sparkdl.errors import ConfigError, TrainingDiverged
from sparkdl.sync.population.tournament import Tournament
from sparkdl.train.optimizers.optimizers import make_scheduler
from sparkdl.train.state import (
    EpochBook,
    Record,
    TrainState,
    check_monitored,
    record_of_weights,
)
from tests.train.runs import make_data, plan_for


def test_state_comes_back_as_a_copy() -> None:
    state = TrainState(epoch=1, step=7, step_in_epoch=2, rows_seen=70)
    state.add_record({"epoch": 1, "loss": 0.5})
    state.early_stopping = {"best": 0.5}
    saved = state.state_dict()
    assert TrainState.from_state_dict(json.loads(json.dumps(saved))) == state
    state.history[0]["loss"] = 9.0
    assert saved["history"][0]["loss"] == 0.5


def test_record_of_the_same_epoch_is_replaced() -> None:
    state = TrainState()
    for record in ({"epoch": 1, "loss": 3.0}, {"epoch": 2, "loss": 2.0}, {"epoch": 2, "loss": 1.0}):
        state.add_record(record)
    assert [record["loss"] for record in state.history] == [3.0, 1.0]


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        (TrainState(epoch=2, step=5), False),
        (TrainState(epoch=3, step=5), True),
        (TrainState(epoch=1, step=9), True),
        (TrainState(stopped_early=True), True),
    ],
)
def test_complete(state: TrainState, expected: bool) -> None:
    assert state.is_complete(epochs=3, max_steps=9) is expected


def test_no_limit_of_steps() -> None:
    assert not TrainState(step=10**9).is_complete(epochs=1, max_steps=-1)


def book(**changes: Any) -> EpochBook:
    config = TrainConfig(**{"epochs": 3, "batch_size": 5, **changes})
    data = make_data([10])
    return EpochBook(config, plan_for(data, config, validation=data))


def epoch_of(book: EpochBook, loss: float) -> Record:
    record = book.record([loss, 1.0], (), learning_rate=0.5, seconds=2.0)
    return {**record, "val_loss": loss}


def test_a_monitored_value_that_is_nan_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    config = TrainConfig(
        epochs=9,
        early_stopping=EarlyStopping(patience=8),
        scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau,
    )
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    for with_stopping, who in ((True, "early stopping"), (False, "ReduceLROnPlateau")):
        caplog.clear()
        chosen = config if with_stopping else replace(config, early_stopping=None)
        schedule, kept = make_scheduler(chosen, optimizer, lambda p: optimizer, 2), None
        assert schedule is not None
        for value in (1.0, math.nan, 0.5, math.nan):
            before, kept = kept, book(early_stopping=chosen.early_stopping)
            if before is not None:  # as after a restart
                kept.load_state_dict(before.state_dict())
            kept.count(2, 10, None)
            record = {**epoch_of(kept, 1.0), "val_loss": value}
            kept.enter(record, dict)
            schedule.evaluated(record)
        (line,) = caplog.messages
        assert line.startswith(f"{who} monitors 'val_loss', which is NaN at epoch 2: ")


def test_an_epoch_ends_at_its_last_step_or_at_that_of_the_run() -> None:
    whole, short = book(), book(max_steps=3)
    for count in (whole, short):
        count.count(1, 5, lambda step: step == 2)
        assert count.num_steps_left == 1 and not count.is_checkpoint_due
        count.count(1, 5, lambda step: step == 2)
        assert count.is_epoch_over and count.is_checkpoint_due
        assert count.enter(epoch_of(count, 1.0), dict)
        assert (count.state.epoch, count.state.step_in_epoch) == (1, 0)
    assert (whole.num_steps_left, short.num_steps_left) == (2, 1)
    short.count(1, 5, None)
    assert short.is_complete
    short.enter(epoch_of(short, 1.0), dict)
    assert (short.state.epoch, short.state.step_in_epoch) == (1, 1)  # cut short within the epoch
    assert [record["steps"] for record in short.state.history] == [2, 1]


def test_the_best_epoch_is_kept_and_patience_ends_the_run() -> None:
    stopping = EarlyStopping(patience=1, restore_best=True)
    kept = book(early_stopping=stopping)
    assert kept.enter(epoch_of(kept, 1.0), lambda: {"weights": 1})
    saved = kept.state_dict()
    assert not kept.enter(epoch_of(kept, 2.0), lambda: {"weights": 2})
    assert kept.is_complete and kept.best_model == {"weights": 1}
    resumed = book(early_stopping=stopping)
    resumed.load_state_dict(saved)
    assert not resumed.is_complete
    assert not resumed.enter(epoch_of(resumed, 2.0), lambda: {"weights": 2})
    assert resumed.is_complete and resumed.best_model == {"weights": 1}


def test_an_evaluation_within_an_epoch_decides_as_one_at_its_end_does() -> None:
    stopping = EarlyStopping(patience=2)
    inside = book(early_stopping=stopping, validation_interval=1)
    dues = []
    for loss in (3.0, 1.0, 2.0, 2.0):
        inside.count(1, 5, None)
        dues.append((inside.is_evaluation_due, inside.is_epoch_over))
        is_kept = inside.enter(epoch_of(inside, loss), lambda loss=loss: {"of": loss})
        assert is_kept == (loss in (3.0, 1.0))
        assert not inside.is_evaluation_due
    assert dues == [(True, False), (True, True), (True, False), (True, True)]
    assert [record["epoch"] for record in inside.state.history] == [0.5, 1, 1.5, 2]
    assert [record["steps"] for record in inside.state.history] == [1, 2, 1, 2]
    assert inside.is_complete and inside.num_steps_left == 0
    assert inside.best_model == {"of": 1.0}


def test_an_evaluation_is_due_until_it_is_made() -> None:
    late = book(validation_interval=4, epochs=9)
    for steps in (1, 1, 1):
        late.count(steps, 5, None)
        assert not late.is_evaluation_due
    late.count(3, 15, None)  # a round that goes beyond the step at which it falls due
    assert late.is_evaluation_due
    late.enter(epoch_of(late, 1.0), dict)
    assert not late.is_evaluation_due
    late.count(1, 5, None)
    assert not late.is_evaluation_due


def test_what_the_end_of_a_run_cuts_short_is_replaced_unless_it_was_due() -> None:
    epochs = []
    for interval in (None, 3):
        cut = book(max_steps=3, validation_interval=interval)
        for steps in (2, 1):
            cut.count(steps, 5, None)
            cut.enter(epoch_of(cut, 1.0), dict)
        epochs.append([record["epoch"] for record in cut.state.history])
    assert epochs == [[1, 2], [1, 1.5]]


def test_a_record_replaces_what_a_longer_run_had_after_it() -> None:
    state = TrainState()
    for epoch in (1, 2, 1.5, 2):
        state.add_record({"epoch": epoch, "loss": epoch})
    assert [record["epoch"] for record in state.history] == [1, 1.5, 2]


def test_an_interval_needs_validation_rows() -> None:
    config = TrainConfig(validation_interval=5)
    with pytest.raises(ConfigError, match=r"validationInterval .* set validationFraction"):
        EpochBook(config, plan_for(make_data([10]), config))


def test_a_competition_sets_aside_what_is_measured() -> None:
    """Its metrics were refused for want of a validation column."""
    monitored = EarlyStopping(monitor="val_f1", mode="max")
    options: dict[str, Any] = {
        "metrics": {"f1": "f1"}, "early_stopping": monitored, "validation_interval": 5
    }  # fmt: skip
    config = TrainConfig(**options, sync_strategy=Tournament(monitor="val_f1", mode="max"))
    check_monitored(config, has_validation=False)
    with pytest.raises(ConfigError, match=r"metrics \['f1'\] are computed on validation rows"):
        check_monitored(TrainConfig(**options), has_validation=False)


def test_an_epoch_whose_loss_is_not_finite_ends_the_run() -> None:
    with pytest.raises(TrainingDiverged, match="in epoch 1"):
        epoch_of(book(), math.inf)
    empty = book().record([0.0, 0.0], (), learning_rate=0.5, seconds=2.0)
    assert math.isnan(empty["loss"])  # nothing was trained on


def decisions(options: EarlyStopping, values: list[float]) -> list[tuple[bool, bool]]:
    state = TrainState()
    return [(state.is_best({"val_loss": v}, options), state.stopped_early) for v in values]


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


def test_unknown_value() -> None:
    with pytest.raises(ConfigError, match=r"'val_f1'.*only loss, learning_rate, val_loss"):
        book(early_stopping=EarlyStopping(monitor="val_f1"))
    with pytest.raises(ConfigError, match=r"val_loss; did you mean 'val_loss'\?$"):
        book(early_stopping=EarlyStopping(monitor="val_los"))


HISTORY: list[Record] = [
    {"epoch": 1, "loss": 3.0, "val_loss": 2.0},
    {"epoch": 2, "loss": 2.0, "val_loss": 1.0},
    {"epoch": 2, "step": 15, "val_loss": 0.5},
    {"epoch": 3, "loss": 1.0},
    {"epoch": 4, "loss": 0.5, "val_loss": math.nan},
    {"epoch": 5, "loss": 0.4, "val_loss": 0.45},
]


@pytest.mark.parametrize(
    ("stopping", "expected"),
    [
        (None, (5, None)),
        (EarlyStopping(restore_best=False), (5, None)),
        (EarlyStopping(), (5, "val_loss")),
        (EarlyStopping(min_delta=0.1), (2, "val_loss")),
        (EarlyStopping(monitor="loss", mode="max"), (0, "loss")),
        (EarlyStopping(monitor="val_f1", mode="max"), (5, None)),  # never measured
    ],
)
def test_the_record_of_the_weights(
    stopping: EarlyStopping | None, expected: tuple[int, str | None]
) -> None:
    number, best = expected
    assert record_of_weights(HISTORY, stopping) == (HISTORY[number], best)
    assert record_of_weights([], stopping) is None
