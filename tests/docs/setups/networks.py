"""What the blocks of docs/networks.md must reach."""

from __future__ import annotations

from typing import Any


def check(names: dict[str, Any]) -> None:
    assert names["pieces"].count() == 4  # of 264 bytes; the other text is too short
    assert names["story"].startswith("Once")
    assert len(names["classifier"].fit(names["df"]).module.encoder) == 3
