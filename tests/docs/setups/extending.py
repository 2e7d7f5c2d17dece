"""What the blocks of docs/extending.md must reach."""

from __future__ import annotations

from typing import Any


def check(names: dict[str, Any]) -> None:
    assert len(names["model"].summary.history) == 2
