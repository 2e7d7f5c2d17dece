"""What the blocks of docs/training_functions.md must reach."""

from __future__ import annotations

from typing import Any


def check(names: dict[str, Any]) -> None:
    assert set(names["weights"]) == {"weight", "bias"}
    assert names["size"] in (1, 2)
    assert names["divided"]["0.weight"].shape == (64, 3)
