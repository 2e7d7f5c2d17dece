"""What the blocks of docs/debugging.md must reach."""

from __future__ import annotations

from typing import Any


def check(names: dict[str, Any]) -> None:
    classifier = names["classifier"].setParams(numWorkers=1, verbose=0)
    assert classifier.fit(names["df"]).summary.steps == 1
