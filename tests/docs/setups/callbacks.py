"""What the blocks of docs/callbacks.md must reach."""

from __future__ import annotations

from typing import Any


def check(names: dict[str, Any]) -> None:
    summary = names["model"].summary
    assert len(summary.history) < 30
    assert summary.history[-1]["learning_rate"] < 0.1
