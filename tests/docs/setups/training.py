"""What the blocks of docs/training.md must reach."""

from __future__ import annotations

from typing import Any


def check(names: dict[str, Any]) -> None:
    history = names["model"].summary.history
    assert history[-1]["val_f1"] > 0.7
    assert all(record["gradient_norm"] > 0 for record in history)
    curve = names["curve"]
    assert (curve["epoch"] % 1 > 0).any()
    assert list(curve["epoch"]) == sorted(curve["epoch"])
