from __future__ import annotations

import time
from collections.abc import Mapping

import pytest

from sparkdl.spark.rounds.round_driver import RoundDone, Totals


def report(rows: int, data: float, compute: float) -> dict[str, object]:
    return {
        "rows": rows, "seconds": data + compute, "loss_sum": 1.0, "weight": float(rows),
        "label_sums": [], "spent": {"data": data, "compute": compute, "waiting": 0.0},
    }  # fmt: skip


def test_what_a_shards_time_was_spent_on() -> None:
    reported: dict[int, Mapping[str, float]] = {}
    totals = Totals(2, [], reported.__setitem__)
    totals.began = time.perf_counter() - 10.0
    done = RoundDone(reports={0: report(4, 1.0, 2.0), 1: report(4, 1.0, 4.0)}, bytes_sent={})
    totals.add(done)
    totals.spend_round(done, overhead=0.5)
    totals.spend("evaluate", 0.25)
    totals.spend("checkpoint", 0.125)

    for shard, (compute, waiting) in enumerate([(2.0, 2.0), (4.0, 0.0)]):
        spent = reported[shard]
        assert (spent["data"], spent["compute"], spent["waiting"]) == (1.0, compute, waiting)
        assert (spent["communication"], spent["evaluate"], spent["checkpoint"]) == (
            0.5,
            0.25,
            0.125,
        )
        assert sum(spent.values()) == pytest.approx(10.0, abs=0.2)  # the rest is other
    assert list(totals.phases().values()) == [5.0, 0.5, 0.25, 0.125]
