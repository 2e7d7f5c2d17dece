"""What the blocks of docs/migrating.md must reach."""

from __future__ import annotations

from typing import Any


def check(names: dict[str, Any]) -> None:
    assert names["weights"] >= 5
    fitted = names["classifier"].setParams(verbose=0, epochs=1).fit(names["df"])
    assert fitted.summary.world_size == 2
    assert names["model"].summary.rows == 8
