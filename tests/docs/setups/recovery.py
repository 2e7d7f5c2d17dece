"""What the blocks of docs/recovery.md must reach."""

from __future__ import annotations

from typing import Any


def check(names: dict[str, Any]) -> None:
    longer = names["classifier"].copy().setEpochs(3).fit(names["df"]).summary
    assert longer.history[-1]["epoch"] == 3
    assert longer.steps == 3 * longer.history[0]["steps"]
