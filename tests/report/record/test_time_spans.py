from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from sparkdl.report.record.time_spans import Spans


def test_spans_follow_each_other_and_add_up() -> None:
    spans, found = Spans(1), list[Any]()
    for tick in range(1, 41):  # begun at 3.0, reported every quarter of a second, a little late
        now = 3.0 + tick / 4
        totals = {"data": 0.1 * tick / 4, "compute": 0.9 * tick / 4}
        found += spans.take(0, totals, now + 0.01 * (tick % 3))
    found += spans.rest()

    assert found[0]["begin"] == pytest.approx(3.0, abs=0.03)
    assert found[-1]["end"] == pytest.approx(13.0, abs=0.03)
    assert len(found) == 10  # of a second each
    assert all(after["begin"] == before["end"] for before, after in pairwise(found))
    assert sum(span["seconds"]["data"] for span in found) == pytest.approx(1.0, abs=1e-3)


def test_a_long_silence_is_one_span_of_what_it_was_spent_on() -> None:
    spans = Spans(2)
    list(spans.take(1, {"compute": 1.0}, 11.0))
    (span,) = spans.take(1, {"compute": 1.0, "waiting": 30.0}, 41.0)
    assert span == {
        "rank": 1, "begin": pytest.approx(11.0), "end": pytest.approx(41.0),
        "seconds": {"waiting": 30.0},
    }  # fmt: skip


def test_a_run_of_days_leaves_few_spans() -> None:
    spans, number = Spans(4), 0
    for now in range(10, 3 * 24 * 3600, 10):
        number += sum(1 for _ in spans.take(0, {"compute": float(now)}, float(now)))
    assert 100 < number < 2000


def test_many_ranks_have_fewer_spans_each() -> None:
    def number_of(world_size: int) -> int:
        spans = Spans(world_size)
        return sum(
            1 for now in range(1, 2000) for _ in spans.take(0, {"c": float(now)}, float(now))
        )

    assert number_of(1000) < number_of(4) / 3
    assert number_of(1000) < 40  # of 130 bytes each: 5 MB of a thousand ranks


def test_nothing_new_is_no_span() -> None:
    spans = Spans(1)
    list(spans.take(0, {"compute": 5.0}, 5.0))
    assert list(spans.rest()) == []
    assert list(spans.take(0, {"compute": 5.0}, 9.0)) == []
