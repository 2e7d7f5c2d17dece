"""What the blocks of docs/large_data.md must reach."""

from __future__ import annotations

from typing import Any


def check(names: dict[str, Any]) -> None:
    assert names["model"].summary.validation_rows > 0
