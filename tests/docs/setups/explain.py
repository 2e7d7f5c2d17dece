"""What the blocks of docs/explain.md must reach."""

from __future__ import annotations

from typing import Any


def check(names: dict[str, Any]) -> None:
    found = names["explanation"].to_dict()
    assert (found["plan"]["num_workers"], found["plan"]["rows"]) == (2, 256)
    chosen = names["model"].summary.chosen
    assert set(chosen) == {"numWorkers", "syncStrategy", "batchSize", "learningRate"}
