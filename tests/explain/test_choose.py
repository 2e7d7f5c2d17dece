"""What is chosen for Params that are "auto", by predictions and measurements."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from sparkdl.errors import ConfigError
from sparkdl.explain.choose import (
    NUM_RATES,
    BatchSizes,
    BatchTrial,
    TriedBatch,
    batch_sizes,
    choose_rate,
    choose_strategy,
    choose_workers,
    rate_at,
)
from sparkdl.explain.comparison import Option, ladder, option
from sparkdl.sync.averaging.local_sgd import LocalSGD
from sparkdl.sync.averaging.parameter_averaging import ParameterAveraging
from sparkdl.sync.gradients.allreduce import AllReduce
from tests.explain.test_comparison import GIGABIT, SLOW, predictor


def workers(totals: dict[int, float]) -> Option:
    """Fits of all-reduce with so many workers that take so many seconds."""
    found = option(predictor(), AllReduce(), list(totals), in_rounds=False)
    predictions = [
        replace(one, total_seconds=total)
        for one, total in zip(found.predictions, totals.values(), strict=True)
    ]
    return replace(found, predictions=tuple(predictions))


def test_the_number_of_workers_with_its_neighbours() -> None:
    choice = choose_workers(workers({1: 30.0, 2: 17.0, 3: 12.0, 4: 14.0}))
    assert (choice.param, choice.value) == ("numWorkers", 3)
    assert choice.reason == "the fit takes about 12 s with 3 workers, 17 s with 2, 14 s with 4"


def test_more_workers_must_help_by_more_than_five_per_cent() -> None:
    choice = choose_workers(workers({1: 30.0, 2: 12.5, 3: 12.4, 4: 12.0}))
    assert choice.value == 2
    assert "12.5 s with 2 workers, 30 s with 1, 12 s with 4" in choice.reason  # with the shortest
    assert choose_workers(workers({1: 30.0, 2: 12.7, 4: 12.0})).value == 4


def test_one_number_is_taken() -> None:
    assert choose_workers(workers({1: 30.0})).reason.endswith("30 s with 1 worker")


def test_all_reduce_unless_agreeing_takes_too_long() -> None:
    quick, slow = (
        predictor(byte_seconds=GIGABIT / 10),
        predictor(byte_seconds=SLOW, parameters=5_000_000),
    )
    choice, chosen = choose_strategy(ladder(quick, [8]))
    assert choice.value == AllReduce()
    assert choice.reason.startswith("AllReduce() spends ")
    assert chosen.best.workers == 8
    choice, chosen = choose_strategy(ladder(slow, [1, 2, 4, 8]))
    assert isinstance(choice.value, LocalSGD)
    assert "AllReduce() would spend" in choice.reason
    assert choose_workers(chosen).value == 8
    alone = choose_strategy(ladder(slow, [1]))[0]
    assert (alone.value, alone.reason) == (
        AllReduce(),
        "1 worker has nobody to agree with",
    )
    assert isinstance(
        choose_strategy(ladder(predictor(can_gang=False), [8]))[0].value, ParameterAveraging
    )


def test_nothing_to_choose_from() -> None:
    none = option(predictor(can_gang=False), AllReduce(), [1, 2], in_rounds=False)
    with pytest.raises(ConfigError, match=r"AllReduce\(\) cannot be used with any number"):
        choose_workers(none)
    with pytest.raises(ConfigError, match="set numWorkers and syncStrategy"):
        choose_strategy([none])


@pytest.mark.parametrize(
    ("rows", "num_parts", "first", "least", "most"),
    [
        (1, 1, 1, 1, 1),
        (5, 1, 4, 4, 4),
        (60, 1, 8, 32, 32),
        (10_000, 1, 8, 32, 256),
        (10_000_000, 1, 8, 32, 4096),
        (10_000, 24, 32, 32, 256),
        (5, 64, 64, 64, 64),
    ],
)
def test_sizes_leave_an_epoch_its_steps(
    rows: int, num_parts: int, first: int, least: int, most: int
) -> None:
    assert batch_sizes(rows, num_parts) == BatchSizes(first=first, least=least, most=most)


def tried(rates: list[float], row_bytes: int = 1000, limit: int = 1 << 30) -> BatchTrial:
    """A trial that goes on as long as it wants to; the rows per second of each size."""
    trial = BatchTrial(sizes=BatchSizes(first=8, least=32, most=512), limit_bytes=limit)
    for rate in rates:
        rows = trial.next_rows
        if rows is None:
            break
        trial = trial.with_size(
            TriedBatch(rows=rows, rows_per_second=rate, num_bytes=rows * row_bytes)
        )
    return trial


def test_batches_grow_while_a_worker_becomes_faster() -> None:
    trial = tried([100.0, 101.0, 102.0, 180.0, 300.0, 320.0, 1000.0])
    assert [one.rows for one in trial.tried] == [8, 16, 32, 64, 128, 256]  # 8 and 16 do not count
    assert trial.best.rows == 128
    choice = trial.choice()
    assert (choice.param, choice.value) == ("batchSize", 128)
    assert "300 rows/s with 128 rows (180 with 64, 320 with 256)" in choice.reason
    assert "256 is faster by less than 10%" in choice.reason


def test_batches_end_where_an_epoch_would_have_few_steps() -> None:
    trial = tried([2.0**i for i in range(10)])
    assert trial.best.rows == 512
    assert "with 1024 an epoch would have fewer than 32 steps" in trial.choice().reason


def test_the_next_size_is_not_begun_if_it_would_take_more_than_it_may() -> None:
    trial = tried([2.0**i for i in range(10)], limit=100_000)
    assert trial.best.rows == 64
    assert trial.next_rows is None
    assert "128 would take about 125 KiB" in trial.choice().reason
    first = tried([1.0, 2.0], row_bytes=1 << 20, limit=8 << 20)
    assert [one.rows for one in first.tried] == [8]
    assert first.best.rows == 8  # smaller than is chosen for speed


def test_what_has_taken_too_much_is_not_chosen() -> None:
    trial = tried([1.0, 2.0])
    trial = trial.with_size(TriedBatch(rows=32, rows_per_second=4.0, num_bytes=2 << 30))
    assert trial.best.rows == 16
    refused = replace(tried([1.0, 2.0, 4.0, 8.0]), refused="CUDA out of memory")
    assert refused.next_rows is None
    assert (
        refused.best.rows,
        "128 did not fit: CUDA out of memory" in refused.choice().reason,
    ) == (
        64,
        True,
    )


def curve(lowest: float, noise: float) -> list[float]:
    """Losses that fall to the step of a rate, then rise."""
    generator = np.random.default_rng(0)
    place = min(range(NUM_RATES), key=lambda i: abs(math.log(rate_at(i) / lowest)))
    falls = 1 / (1 + np.exp((np.arange(NUM_RATES) - place + 12) / 3))
    rises = np.maximum(0, np.arange(NUM_RATES) - place) * 0.05
    return list(0.5 + falls + rises + noise * generator.standard_normal(NUM_RATES))


@pytest.mark.parametrize("lowest", [1e-3, 0.03, 0.5])
def test_the_rate_is_a_tenth_of_that_of_the_lowest_loss(lowest: float) -> None:
    choice = choose_rate(curve(lowest, noise=0.05))
    assert choice.param == "learningRate"
    assert lowest / 25 < choice.value < lowest / 4
    assert choice.value == float(f"{choice.value:.2g}")
    assert "the loss fell from 1.5" in choice.reason


def test_where_nothing_is_learnt_the_default_is_left() -> None:
    flat = list(1 + 0.1 * np.random.default_rng(1).standard_normal(NUM_RATES))
    for losses in (flat, [1.0] * 20, [1.0], []):
        choice = choose_rate(losses)
        assert choice.value is None
        assert "no rate from 1e-07 to 10 lowered the loss" in choice.reason


def test_rates_grow_exponentially() -> None:
    rates = [rate_at(number) for number in range(NUM_RATES)]
    assert (rates[0], rates[-1]) == (1e-7, pytest.approx(10.0))
    assert np.ptp(np.diff(np.log(rates))) < 1e-9
