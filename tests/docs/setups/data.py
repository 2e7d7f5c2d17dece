"""What the blocks of docs/data.md must reach."""

from __future__ import annotations

from typing import Any


def check(names: dict[str, Any]) -> None:
    options = {"numWorkers": 1, "verbose": 0}
    assert names["classifier"].setParams(**options).fit(names["df"]).summary.history
    estimator = names["estimator"].setParams(**options, validationIndicatorCol="held_out")
    assert "loss_kind" in estimator.fit(names["df"]).summary.history[0]
